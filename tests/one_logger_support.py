"""Exporters in memory and configured providers for the tests of one-logger."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from waiting import WAIT_LIMIT_SECONDS

from exporter import one_logger
from exporter.one_logger.current_observer import current_observer
from exporter.one_logger.exporters import BaseExporter
from exporter.one_logger.provider import forget
from exporter.recording.recorder import RECORDER
from exporter.training.recorder import TRAINING

APPLICATION: dict[str, Any] = {
    "application_name": "app",
    "world_size_or_fn": 8,
    "session_tag_or_fn": "session",
}
"""Required fields of OneLoggerConfig."""
TELEMETRY: dict[str, Any] = {"perf_tag_or_fn": "perf", "global_batch_size_or_fn": 32}
"""Required fields of TrainingTelemetryConfig."""


class InMemoryExporter(BaseExporter):
    """Exporter that keeps every record in memory.

    Args:
        refuses: Function of the method and name of a call. If the function returns True, the call raises *error* and keeps no
            record.
        error: Exception of refused calls, by default a ConnectionError.

    Attributes:
        gate: Calls wait until the gate is set. The gate is set at the start.
        calls: Method of each call, also of refused calls.
        records: Method, name, and span or event of each record.
        threads: Names of the threads that called the exporter.
    """

    def __init__(
        self,
        refuses: Callable[[str, str], bool] = lambda _method, _name: False,
        error: BaseException | None = None,
    ) -> None:
        self.refuses = refuses
        self.error = error or ConnectionError()
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.records: list[tuple[str, str, Any]] = []
        self.threads: set[str] = set()

    def _record(self, method: str, name: str = "", subject: Any = None) -> None:
        self.calls.append(method)
        self.threads.add(threading.current_thread().name)
        self.gate.wait()
        if self.refuses(method, name):
            raise self.error
        self.records.append((method, name, subject))

    def initialize(self) -> None:
        self._record("initialize")

    def export_start(self, span: Any) -> None:
        self._record("start", span.name_str, span)

    def export_stop(self, span: Any) -> None:
        self._record("stop", span.name_str, span)

    def export_event(self, event: Any, span: Any) -> None:
        del span
        self._record("event", event.name_str, event)

    def export_error(self, event: Any, span: Any) -> None:
        del span
        self._record("error", event.error_message, event)

    def export_telemetry_data_error(self, error: Any) -> None:
        self._record("telemetry_data_error", error.error_message, error)

    def close(self) -> None:
        self._record("close")

    @property
    def named_records(self) -> list[tuple[str, str]]:
        """Method and name of each record."""
        return [record[:2] for record in self.records]

    def records_of(self, method: str) -> list[Any]:
        """Return the spans or events of a method."""
        return [subject for record_method, _, subject in self.records if record_method == method]

    def names(self, method: str = "start") -> list[str]:
        """Return the names of the records of a method."""
        return [name for record_method, name, _ in self.records if record_method == method]

    def attributes(self, event: str) -> list[dict[str, Any]]:
        """Return the attributes of all records of an event."""
        return [
            record.attributes.to_json() for record in self.records_of("event") if record.name_str == event
        ]


@contextmanager
def unconfigured() -> Iterator[None]:
    """Run a block in a process without recorded or configured training."""
    _restart()
    try:
        yield
    finally:
        observer = current_observer()
        if observer is not None:
            observer.delivery.close()
        _restart()


def _restart() -> None:
    forget()
    TRAINING.after_fork()
    RECORDER.process.after_fork()  # drops the rank that a test claimed


def configure(
    *, telemetry: dict[str, Any] | None = None, export: tuple[Any, ...] = (), **base: Any
) -> InMemoryExporter:
    """Configure the provider and return its exporter, which keeps its records in memory.

    *export* has the arguments of `with_export_customization`, which selects the exported spans.
    """
    settings: dict[str, Any] = {
        "application_name": "test",
        "session_tag_or_fn": "session",
        "world_size_or_fn": 1,
        **base,
    }
    if telemetry is not None:
        defaults = {"perf_tag_or_fn": "perf", "global_batch_size_or_fn": 4, "log_every_n_train_iterations": 2}
        settings["telemetry_config"] = one_logger.TrainingTelemetryConfig(**defaults | telemetry)
    memory = InMemoryExporter()
    builder = one_logger.TrainingTelemetryProvider.instance()
    builder.with_base_config(one_logger.OneLoggerConfig(**settings)).with_exporter(memory)
    if export:
        builder.with_export_customization(*export)
    builder.configure_provider()
    return memory


def wait_for_delivery(memory: InMemoryExporter) -> InMemoryExporter:
    """Wait until all records have been delivered, and return the exporter."""
    assert TRAINING.flush_span_exporters(WAIT_LIMIT_SECONDS)
    return memory
