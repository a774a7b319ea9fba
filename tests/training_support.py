"""What the tests of training share: an interpreter fed by hand, the process's own begun anew, exporters, a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from places import PROJECT
from waiting import PATIENCE

from exporter import training
from exporter.one_logger.exporters import BaseExporter
from exporter.one_logger.provider import forget
from exporter.one_logger.records import current
from exporter.recording.recorder import RECORDER
from exporter.recording.values import StatReading, TrainingReading
from exporter.training import metrics
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


class KeepingExporter(BaseExporter):
    """Keeps what it is given; refuses what `refuses` says, a method and a name, waits while `gate` is closed.

    Attributes:
        records: Method, name and span or event of what was kept.
    """

    def __init__(
        self,
        refuses: Callable[[str, str], bool] = lambda method, name: False,
        error: BaseException | None = None,
    ) -> None:
        self.refuses = refuses
        self.error = error or ConnectionError()
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.records: list[tuple[str, str, Any]] = []
        self.threads: set[str] = set()

    def _take(self, method: str, name: str = "", subject: Any = None) -> None:
        self.calls.append(method)
        self.threads.add(threading.current_thread().name)
        self.gate.wait()
        if self.refuses(method, name):
            raise self.error
        self.records.append((method, name, subject))

    def initialize(self) -> None:
        self._take("initialize")

    def export_start(self, span: Any) -> None:
        self._take("start", span.name_str, span)

    def export_stop(self, span: Any) -> None:
        self._take("stop", span.name_str, span)

    def export_event(self, event: Any, span: Any) -> None:
        self._take("event", event.name_str, event)

    def export_error(self, event: Any, span: Any) -> None:
        self._take("error", event.error_message, event)

    def export_telemetry_data_error(self, error: Any) -> None:
        self._take("telemetry_data_error", error.error_message, error)

    def close(self) -> None:
        self._take("close")

    @property
    def kept(self) -> list[tuple[str, str]]:
        return [record[:2] for record in self.records]

    def all_of(self, method: str) -> list[Any]:
        return [subject for each, _, subject in self.records if each == method]

    def names(self, method: str = "start") -> list[str]:
        return [name for each, name, _ in self.records if each == method]

    def attributes(self, event: str) -> list[dict[str, Any]]:
        """Of all events of a name."""
        return [each.attributes.to_json() for each in self.all_of("event") if each.name_str == event]


class _Held(deque[tuple[str, str, str]]):
    def __bool__(self) -> bool:
        return False  # so that the recording thread leaves them here


@contextmanager
def reported() -> Iterator[deque[tuple[str, str, str]]]:
    """Collect what is reported inside: call, rule and what was expected."""
    before, metrics.REPORTED = metrics.REPORTED, _Held()
    try:
        yield metrics.REPORTED
    finally:
        metrics.REPORTED = before


def run_python(
    code: str, directory: Path, *, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own, in a directory, with a feed of its own."""
    feed = directory / "feed"
    feed.mkdir(mode=0o700, exist_ok=True)
    script = directory / "job.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    inherited = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    ours = {"EXPORTER_FEED_DIR": str(feed), "PYTHONPATH": str(PROJECT), "EXPORTER_FLUSH_SECONDS": "0.2"}
    return subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=directory,
        env=inherited | ours | environment,
        capture_output=True,
        text=True,
        timeout=timeout * PATIENCE,
        check=False,
    )


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
    RECORDER.process.after_fork()  # it has no rank until it trains


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
