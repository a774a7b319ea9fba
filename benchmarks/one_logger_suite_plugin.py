"""Pytest plug-in that runs one-logger's own tests with `exporter.one_logger` in place of `nv_one_logger`.

Use: `pytest -p one_logger_suite_plugin`, in a separate process. The plug-in adapts internals that the tests depend on: the reset of
the providers, clocks that a test patches (`patch("time.time")`), exporters that are called on the calling thread with the span
itself instead of a copy, and private attributes that have an equivalent. The other private names exist, and fail when used.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_WALL, _MONOTONIC, _COUNTER = time.time, time.monotonic, time.perf_counter
_ENTRY_POINTS = metadata.entry_points


def _wall() -> float:
    return _WALL() if time.time is _wall else time.time()


def _monotonic() -> float:
    return _MONOTONIC() if time.perf_counter is _COUNTER else time.perf_counter()


# The modules of the training bind these clocks, which follow the patches of a test.
time.time, time.monotonic = _wall, _monotonic

from exporter import one_logger  # noqa: E402  # with these clocks
from exporter.one_logger import provider  # noqa: E402
from exporter.one_logger.delivery import Delivery, ExportCall  # noqa: E402
from exporter.one_logger.exporters import FileExporter  # noqa: E402
from exporter.one_logger.recorders import DefaultRecorder  # noqa: E402
from exporter.one_logger.training_recorder import TrainingRecorder  # noqa: E402
from exporter.recording.handlers import LinesFile  # noqa: E402
from exporter.training.recorder import TRAINING  # noqa: E402
from exporter.training.spans import Span, TelemetryDataError  # noqa: E402

PEER = "nv_one_logger"
PACKAGES = {PEER, "api", "core", "exporter", "internal", "recorder", "training_telemetry"}
PATCHED_CLOCK_PREFIXES = ("exporter.training.", "exporter.one_logger.")


class Private(type):
    """Class of the stand-ins for private names of one-logger. A call and an attribute raise NotImplementedError."""

    def __call__(cls, *_arguments: object, **_keywords: object) -> Any:
        raise NotImplementedError(f"{cls.__name__} is private to one-logger")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"{cls.__name__} is private to one-logger")


class Instances:
    """Providers of this process, with the method by which the tests reset them."""

    def pop(self, *_arguments: object) -> None:
        provider.forget()
        TRAINING.after_fork()


class SingletonMeta(type):
    """Private class by which the tests reset the providers."""

    _lock = threading.Lock()
    _instances = Instances()


class ReplacementModule(ModuleType):
    """Stand-in for a module of one-logger, with the names of `exporter.one_logger`."""

    __path__: list[str] = []  # noqa: RUF012  # makes each module a package

    @property
    def entry_points(self) -> Any:
        """Function of the standard library, which a test can replace."""
        return metadata.entry_points

    @entry_points.setter
    def entry_points(self, replacement: Any) -> None:
        def entry_points_of_group(group: str) -> Any:
            entries = replacement()
            return entries.get(group, []) if hasattr(entries, "get") else entries

        metadata.entry_points = entry_points_of_group  # type: ignore[assignment]  # as a test would

    @entry_points.deleter
    def entry_points(self) -> None:
        metadata.entry_points = _ENTRY_POINTS

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "SingletonMeta":
            return SingletonMeta
        attribute = getattr(one_logger, name, None) if name in one_logger.__all__ else None
        if attribute is None and self.__name__.rpartition(".")[2] in PACKAGES:
            raise AttributeError(name)  # a module
        return Private(name, (), {}) if attribute is None else attribute


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of a `ReplacementModule` for each module of one-logger."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        if fullname.partition(".")[0] != PEER or fullname.rpartition(".")[2][:1].isupper():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return ReplacementModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def restore_clocks() -> None:
    """Restore the real clocks in the modules of the exporter that do not measure the training."""
    time.monotonic = _MONOTONIC
    for name, module in list(sys.modules.items()):
        if name.startswith("exporter.") and not name.startswith(PATCHED_CLOCK_PREFIXES):
            for clock_name, patched_clock, real_clock in (
                ("time", _wall, _WALL),
                ("monotonic", _monotonic, _MONOTONIC),
            ):
                if vars(module).get(clock_name) is patched_clock:
                    setattr(module, clock_name, real_clock)


def call_exporters_directly() -> None:
    """Call exporters on the calling thread, with the span itself."""

    def return_original(span: Span, _exported_parent: Span | None) -> Span:
        return span

    def start_exporters(self: Delivery) -> None:
        for queue in self.queues:
            queue.exporter.initialize()

    def export(self: Delivery, method: str, *arguments: Any) -> None:
        for queue in self.queues:
            call = ExportCall(method, arguments)
            if method == "export_telemetry_data_error" and not queue._has_delivered:
                (error,) = arguments
                error_type = TelemetryDataError.ErrorType.NO_TELEMETRY_DATA
                error = TelemetryDataError(error.timestamp, error_type, error.error_message, error.attributes)
                call = ExportCall(method, (error,))
            getattr(queue.exporter, method)(*call.arguments)
            queue._has_delivered = True

    def close(self: Delivery, timeout_seconds: float = 0.0) -> None:
        for queue in self.queues:
            queue.exporter.close()

    Span.copy_at_start = Span.snapshot_copy = return_original  # type: ignore[method-assign,assignment]
    Delivery.start_exporters, Delivery._queue_call = start_exporters, export  # type: ignore[method-assign]
    Delivery.close = Delivery.close_exporters = close  # type: ignore[method-assign]
    Delivery.flush = lambda self, timeout_seconds=0.0: True  # type: ignore[method-assign]


def show_private_attributes() -> None:
    """Add the private names that the tests use and that have an equivalent here."""
    properties: dict[type, dict[str, Any]] = {
        DefaultRecorder: {"_exporters": lambda self: [queue.exporter for queue in self.delivery.queues]},
        TrainingRecorder: {"_spans": lambda self: {span.id: span for span in self._active_spans()}},
        FileExporter: {"_filepath": lambda self: self._path},
    }
    for class_, attributes in properties.items():
        for name, get in attributes.items():
            setattr(class_, name, property(get, lambda _self, _value: None))
    find = lambda self, name: self.get_active_spans_by_name(name)[0]  # noqa: E731
    TrainingRecorder._get_active_span = find  # type: ignore[attr-defined]
    LinesFile.close = lambda self: None  # type: ignore[attr-defined]


def replace_pydantic_error() -> None:
    """Raise OneLoggerError where a test expects the error of pydantic."""
    for name in ("pydantic_core", "pydantic_core._pydantic_core"):
        module = sys.modules[name] = ModuleType(name)
        module.ValidationError = one_logger.OneLoggerError  # type: ignore[attr-defined]


FAILED_TESTS: set[str] = set()
PASSED_TESTS: set[str] = set()


def pytest_runtest_setup() -> None:
    Instances().pop()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        FAILED_TESTS.add(report.nodeid)
    elif report.when == "call" and report.passed:
        PASSED_TESTS.add(report.nodeid)


def pytest_sessionfinish() -> None:
    outcome = {"failed": sorted(FAILED_TESTS), "passed": sorted(PASSED_TESTS - FAILED_TESTS)}
    Path(os.environ["SUITE_OUTCOME"]).write_text(json.dumps(outcome), encoding="utf-8")


sys.meta_path.insert(0, Finder())
restore_clocks()
call_exporters_directly()
show_private_attributes()
replace_pydantic_error()
