"""What the tests of the training's recording share: an interpreter fed by hand, and the process's own, begun anew."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from one_logger_support import KeepingExporter

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

    def take(self, items: Sequence[Any]) -> None:
        """Interpret them."""
        self.interpreter.take(self.buffer, items)

    def values(self, until: float, *, gauges: bool = True) -> dict[Key, Any]:
        """Everything that is published at a time, with or without gauges."""
        self.job.publish(until)
        readings = [each for each in self.families.readings() if gauges or each.definition.kind != "gauge"]
        return {key_of(each): what(each) for each in readings}

    def reading(self) -> TrainingReading:
        """What goes beside the families."""
        return self.job.reading()


def entered(kind: Kind, at: float) -> list[Any]:
    return [kind.code + ENTER, at]


def left(kind: Kind, at: float, *, failed: bool = False) -> list[Any]:
    return [kind.code + (FAIL if failed else EXIT), at]


def stretch(kind: Kind, began: float, ended: float) -> list[Any]:
    return entered(kind, began) + left(kind, ended)


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
    readings = TRAINING.series()
    return {
        key_of(each): {"gauge": each.value, "counter": each.sum}.get(each.definition.kind, each.count)
        for each in readings
    }


def of(name: str, **labels: str) -> Any:
    """One published value; None where there is none."""
    return published().get((name, tuple(sorted(labels.items()))))


def labelled(name: str) -> dict[Any, Any]:
    """What the series of a family have, but for zeros, by the value of its label, or those of its labels, sorted by name."""
    found = {labels: value for (each, labels), value in published().items() if each == name and value}
    return {
        labels[0][1] if len(labels) == 1 else tuple(text for _, text in labels): value
        for labels, value in found.items()
    }


def misuses() -> dict[tuple[str, str], float]:
    """Misuse so far, by call and rule."""
    return labelled("training.misuse")


def train(steps: int = 1, seconds: float = 0.0) -> None:
    """Do some iterations that take so long."""
    for _ in range(steps):
        with training.training_iteration():
            if seconds:
                time.sleep(seconds)


def told() -> TrainingReading:
    """The reading of this process, which tells something."""
    TRAINING.drain()
    TRAINING.series()
    reading = TRAINING.reading()
    assert reading is not None
    return reading


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


def configured(
    *, telemetry: dict[str, Any] | None = None, export: tuple[Any, ...] = (), **base: Any
) -> KeepingExporter:
    """Configure the provider with an exporter in memory; `export` says which spans it is given."""
    settings: dict[str, Any] = {
        "application_name": "test",
        "session_tag_or_fn": "session",
        "world_size_or_fn": 1,
        **base,
    }
    if telemetry is not None:
        usual = {"perf_tag_or_fn": "perf", "global_batch_size_or_fn": 4, "log_every_n_train_iterations": 2}
        settings["telemetry_config"] = training.TrainingTelemetryConfig(**usual | telemetry)
    memory = KeepingExporter()
    builder = training.TrainingTelemetryProvider.instance()
    builder.with_base_config(training.OneLoggerConfig(**settings)).with_exporter(memory)
    if export:
        builder.with_export_customization(*export)
    builder.configure_provider()
    return memory


def exported(memory: KeepingExporter) -> KeepingExporter:
    """After everything told so far has arrived in it."""
    TRAINING.drain()
    assert TRAINING.flush(5)
    return memory
