"""A plug-in of pytest that runs one-logger's own tests with its names taken from `exporter.training`.

`pytest -p one_logger_suite_plugin`, in a process of its own. What those tests take for granted and no user can see is
adapted here, and nothing else: how they reset the providers, a clock that they stop (`patch("time.time")`), exporters that
are asked on the calling thread with the span itself and not a copy of it, and private attributes that have an equal here.
Any other private name is there, so that the rest of its file runs, and fails whatever uses it.
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


# What `exporter.training` binds are the clocks that a test has put in force.
time.time, time.monotonic = _wall, _monotonic

import exporter.training  # noqa: E402  # under these clocks
from exporter.one_logger import provider  # noqa: E402
from exporter.one_logger.delivery import Delivery  # noqa: E402
from exporter.one_logger.exporters import FileExporter  # noqa: E402
from exporter.one_logger.recorder import DefaultRecorder, TrainingRecorder  # noqa: E402
from exporter.recording.handlers import LinesFile  # noqa: E402
from exporter.training import buffers  # noqa: E402
from exporter.training.buffers import Hooks  # noqa: E402
from exporter.training.recording import TRAINING, TrainingRecording  # noqa: E402
from exporter.training.spans import Span, TelemetryDataError  # noqa: E402

PEER = "nv_one_logger"
PACKAGES = {PEER, "api", "core", "exporter", "internal", "recorder", "training_telemetry"}
ADAPTED = ("exporter.training.", "exporter.one_logger.")


class Private(type):
    """A private name of one-logger's: any use of it fails."""

    def __call__(cls, *_given: object, **_named: object) -> Any:
        raise NotImplementedError(f"{cls.__name__} is private to one-logger")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"{cls.__name__} is private to one-logger")


class Instances:
    """The providers of this process, as those tests forget them."""

    def pop(self, *_given: object) -> None:
        provider.forget()
        TRAINING.after_fork()
        buffers.limit = -1


class SingletonMeta(type):
    """Stands for the private class by which those tests begin anew."""

    _lock = threading.Lock()
    _instances = Instances()


class Swapped(ModuleType):
    """Any module of one-logger's: the names of `exporter.training`."""

    __path__: list[str] = []  # noqa: RUF012  # every package has it

    @property
    def entry_points(self) -> Any:
        """The standard library's, which a test may replace."""
        return metadata.entry_points

    @entry_points.setter
    def entry_points(self, replaced: Any) -> None:
        def asked(group: str) -> Any:
            found = replaced()
            return found.get(group, []) if hasattr(found, "get") else found

        metadata.entry_points = asked  # type: ignore[assignment]  # as a test would

    @entry_points.deleter
    def entry_points(self) -> None:
        metadata.entry_points = _ENTRY_POINTS

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "SingletonMeta":
            return SingletonMeta
        found = getattr(exporter.training, name, None)
        if found is None and self.__name__.rpartition(".")[2] in PACKAGES:
            raise AttributeError(name)  # a module, to be imported
        return Private(name, (), {}) if found is None else found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives such a module for every one of one-logger's."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        if fullname.partition(".")[0] != PEER or fullname.rpartition(".")[2][:1].isupper():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return Swapped(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is."""


def leave_the_clocks_of_others() -> None:
    """Give real clocks back to all modules but those that note times."""
    time.monotonic = _MONOTONIC
    for name, module in list(sys.modules.items()):
        if name.startswith("exporter.") and not name.startswith(ADAPTED):
            for each, swapped, real in (("time", _wall, _WALL), ("monotonic", _monotonic, _MONOTONIC)):
                if vars(module).get(each) is swapped:
                    setattr(module, each, real)


def ask_exporters_at_once() -> None:
    """Ask exporters on the calling thread, with the span itself."""

    def itself(span: Span, _exported_parent: Span | None) -> Span:
        return span

    def begin(self: Delivery) -> None:
        for outlet in self.outlets:
            outlet.exporter.initialize()

    def put(self: Delivery, method: str, *given: Any) -> None:
        for outlet in self.outlets:
            arguments = list(given)
            if method == "export_telemetry_data_error":
                kinds = TelemetryDataError.ErrorType
                kind = kinds.INCOMPLETE_TELEMETRY_DATA if outlet._arrived else kinds.NO_TELEMETRY_DATA
                arguments = [TelemetryDataError(given[2], kind, *given[:2])]
            getattr(outlet.exporter, method)(*arguments)
            outlet._arrived = True

    def close(self: Delivery, timeout_seconds: float = 0.0) -> None:
        for outlet in self.outlets:
            outlet.exporter.close()

    Span.as_started = Span.as_it_is = itself  # type: ignore[method-assign,assignment]
    Delivery.begin, Delivery._put, Delivery.close = begin, put, close  # type: ignore[method-assign]
    Delivery.flush = lambda self, timeout_seconds=0.0: True  # type: ignore[method-assign]


def interpret_at_once() -> None:
    """Interpret each call before it returns; raise misuse only where the job asked for that."""
    strict = TrainingRecording._strict

    def at_once(self: TrainingRecording, *, failing: bool) -> None:
        strict(self, failing=failing or not Hooks.telemetry.propagates)

    TrainingRecording._strict = at_once  # type: ignore[method-assign]
    buffers.raise_misuse = lambda *, on: setattr(buffers, "limit", -1)


def show_private_attributes() -> None:
    """Give what is known here too by the private names that those tests ask for."""
    shown: dict[type, dict[str, Any]] = {
        DefaultRecorder: {"_exporters": lambda self: [each.exporter for each in self.delivery.outlets]},
        TrainingRecorder: {"_spans": lambda self: {span.id: span for span in self._active()}},
        FileExporter: {"_filepath": lambda self: self._path},
    }
    for kind, attributes in shown.items():
        for name, get in attributes.items():
            setattr(kind, name, property(get, lambda _self, _value: None))
    find = lambda self, name: self.get_active_spans_by_name(name)[0]  # noqa: E731
    TrainingRecorder._get_active_span = find  # type: ignore[attr-defined]
    LinesFile.close = lambda self: None  # type: ignore[attr-defined]


def swap_pydantics_error() -> None:
    """Have configurations refused with our error where pydantic's is expected."""
    for name in ("pydantic_core", "pydantic_core._pydantic_core"):
        module = sys.modules[name] = ModuleType(name)
        module.ValidationError = exporter.training.OneLoggerError  # type: ignore[attr-defined]


FAILED: set[str] = set()
PASSED: set[str] = set()


def pytest_runtest_setup() -> None:
    Instances().pop()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        FAILED.add(report.nodeid)
    elif report.when == "call" and report.passed:
        PASSED.add(report.nodeid)


def pytest_sessionfinish() -> None:
    found = {"failed": sorted(FAILED), "passed": sorted(PASSED - FAILED)}
    Path(os.environ["SUITE_OUTCOME"]).write_text(json.dumps(found), encoding="utf-8")


sys.meta_path.insert(0, Finder())
assert exporter.training.__all__  # every module is loaded
leave_the_clocks_of_others()
ask_exporters_at_once()
interpret_at_once()
show_private_attributes()
swap_pydantics_error()
