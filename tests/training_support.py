"""What the tests of the training's recording share: an interpreter fed by hand, and the process's own, begun anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from exporter import training
from exporter.one_logger.provider import forget
from exporter.one_logger.records import current
from exporter.recording.identity import PROCESS
from exporter.recording.values import StatReading, TrainingReading
from exporter.training.buffers import Anchor, SpanBuffer
from exporter.training.interpreter import Interpreter
from exporter.training.job import Job
from exporter.training.metrics import Families, Misuse
from exporter.training.recording import TRAINING
from exporter.training.span_kinds import ENTER, EXIT, FAIL, Kind

Key = tuple[str, tuple[tuple[str, str], ...]]


class ByHand:
    """An interpreter of its own, whose clock begins at a time of choice; `items` are codes and values in turn."""

    def __init__(self, began: float = 0.0) -> None:
        self.families = Families()
        self.job = Job(self.families, Misuse(self.families), began)
        self.interpreter = Interpreter(self.job)
        self._anchor = Anchor()
        self.buffer = SpanBuffer(self._anchor)

    def take(self, items: Sequence[Any], pieces: int = 1 << 30) -> None:
        """Interpret, so many marks at once."""
        for start in range(0, len(items), 2 * pieces):
            self.interpreter.take(self.buffer, items[start : start + 2 * pieces])

    def values(self, until: float) -> dict[Key, Any]:
        """Everything that is published at a time."""
        self.job.publish(until)
        return {key_of(reading): what(reading) for reading in self.families.readings()}

    def totals(self, until: float) -> dict[Key, Any]:
        """The counters and histograms alone."""
        self.values(until)
        readings = self.families.readings()
        return {key_of(each): what(each) for each in readings if each.definition.kind != "gauge"}

    def reading(self) -> TrainingReading:
        """What goes beside the families."""
        return self.job.reading()


def entered(kind: Kind, at: float) -> list[Any]:
    return [kind.code + ENTER, at]


def left(kind: Kind, at: float, *, failed: bool = False) -> list[Any]:
    return [kind.code + (FAIL if failed else EXIT), at]


def key_of(reading: StatReading) -> Key:
    return reading.definition.name, reading.definition.labels


def what(reading: StatReading) -> Any:
    if reading.definition.kind == "gauge":
        return reading.value
    if reading.definition.kind == "counter":
        return reading.sum
    return (reading.count, reading.sum, *reading.bucket_counts)


def published() -> dict[Key, Any]:
    """What this process's recording has by now: a counter's sum, a gauge's value, a histogram's count."""
    TRAINING.drain()
    found: dict[Key, Any] = {}
    for reading in TRAINING.series():
        kind = reading.definition.kind
        found[key_of(reading)] = {"gauge": reading.value, "counter": reading.sum}.get(kind, reading.count)
    return found


def of(name: str, **labels: str) -> Any:
    """One published value; None where there is none."""
    return published().get((name, tuple(sorted(labels.items()))))


def misuses() -> dict[tuple[str, str], float]:
    """Misuse so far, by call and rule."""
    return {
        (dict(labels)["call"], dict(labels)["rule"]): value
        for (name, labels), value in published().items()
        if name == "training.misuse"
    }


def told() -> TrainingReading:
    """The reading of this process, which tells something."""
    TRAINING.drain()
    TRAINING.series()
    reading = TRAINING.reading()
    assert reading is not None
    return reading


class Memory:
    """An exporter that keeps (what, name of the span, event or attributes)."""

    def __init__(self) -> None:
        self.records: list[tuple[str, str, Any]] = []

    def initialize(self) -> None: ...

    def export_start(self, span: Any) -> None:
        self.records.append(("start", span.name_str, span))

    def export_stop(self, span: Any) -> None:
        self.records.append(("stop", span.name_str, span))

    def export_event(self, event: Any, span: Any) -> None:
        self.records.append((event.name_str, span.name_str, event))

    export_error = export_event

    def export_telemetry_data_error(self, error: Any) -> None:
        self.records.append((error.name_str, "", error))

    def close(self) -> None: ...

    def names(self) -> list[tuple[str, str]]:
        return [(what_, name) for what_, name, _ in self.records]

    def attributes(self, event: str) -> list[dict[str, Any]]:
        """Of all events of a name."""
        return [each.attributes.to_json() for name, _, each in self.records if name == event]


@contextmanager
def begun_anew() -> Iterator[None]:
    """The recording of this process as after a fork: nothing told, nothing configured."""
    _begin_anew()
    try:
        yield
    finally:
        known = current()
        if known is not None:
            known.delivery.close()
        _begin_anew()


def _begin_anew() -> None:
    forget()
    TRAINING.after_fork()
    PROCESS.after_fork()  # it has no rank until it trains


def configured(*, telemetry: dict[str, Any] | None = None, export_all: bool = False, **base: Any) -> Memory:
    """Configure the provider with an exporter in memory."""
    settings: dict[str, Any] = {
        "application_name": "test",
        "session_tag_or_fn": "session",
        "world_size_or_fn": 1,
        **base,
    }
    if telemetry is not None:
        usual = {"perf_tag_or_fn": "perf", "global_batch_size_or_fn": 4, "log_every_n_train_iterations": 2}
        settings["telemetry_config"] = training.TrainingTelemetryConfig(**usual | telemetry)
    memory = Memory()
    builder = training.TrainingTelemetryProvider.instance()
    builder.with_base_config(training.OneLoggerConfig(**settings)).with_exporter(memory)  # type: ignore[arg-type]  # it has the methods
    if export_all:
        builder.with_export_customization(training.ExportCustomizationMode.EXPORT_ALL_SPANS)
    builder.configure_provider()
    return memory


def exported(memory: Memory) -> Memory:
    """After everything told so far has arrived in it."""
    TRAINING.drain()
    assert TRAINING.flush(5)
    return memory
