"""Support for tests of the training API: a simulated training, access to this process's recorder, scripts in child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fork_server import Program, run_forked
from places import PROJECT, TESTS
from waiting import PATIENCE

from exporter import training
from exporter.recording.recorder import RECORDER
from exporter.recording.values import StatReading, TrainingReading
from exporter.training import kinds, misuse
from exporter.training.clock import PhaseClock, StackEntry
from exporter.training.kinds import BlockKind
from exporter.training.numbers import Numbers
from exporter.training.recorder import TRAINING
from exporter.training.records import LoopBegan, Record
from exporter.training.state import TrainingState

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]


class _OpenBlock(NamedTuple):
    kind: BlockKind
    entry: StackEntry
    start_seconds: float
    work_seconds: float  # of the whole training before the block
    wait_seconds: float


class SimulatedTraining:
    """Phase clock and training state of a process, driven by explicit times."""

    def __init__(self, start_seconds: float = 0.0) -> None:
        self.clock = PhaseClock(start_seconds)
        self.numbers = Numbers()
        self.state = TrainingState(self.clock, self.numbers)
        self._open: list[_OpenBlock] = []
        self._latest: TrainingReading | None = None

    def enter(self, kind: BlockKind, at_seconds: float) -> None:
        """Enter a block. A block may stay open until the end of the test."""
        entry = StackEntry()
        if kind in kinds.LOOPS:
            self.clock.begin_training(at_seconds)
            self.apply(LoopBegan(0, None, at_seconds, is_inferred=False))
        if kind in kinds.ITERATIONS:
            self.clock.begin_training(at_seconds)
            self.clock.iteration = entry
        self.clock.enter(entry, kind.phase, at_seconds)
        work_seconds, wait_seconds = self.clock.work_seconds(), self.clock.wait_seconds()
        if kind in kinds.ITERATIONS:
            self.clock.iteration_start_work_seconds = work_seconds
        self._open.append(_OpenBlock(kind, entry, at_seconds, work_seconds, wait_seconds))

    def leave(self, at_seconds: float, *, is_failed: bool = False) -> None:
        """Leave the innermost block."""
        block = self._open.pop()
        self.clock.leave(block.entry, at_seconds)
        if block.kind in kinds.ITERATIONS:
            self.clock.iteration = None
            work_seconds = self.clock.work_seconds() - block.work_seconds
            wait_seconds = self.clock.wait_seconds() - block.wait_seconds
            self.apply((block.start_seconds, at_seconds, work_seconds, wait_seconds, is_failed, None))

    def run_block(self, kind: BlockKind, start_seconds: float, end_seconds: float) -> None:
        """Enter and leave a block."""
        self.enter(kind, start_seconds)
        self.leave(end_seconds)

    def apply(self, record: Record) -> None:
        """Apply a record."""
        self.state.apply([record])

    def publish(self, end_seconds: float) -> list[StatReading]:
        """Publish all series at a given time."""
        self._latest = self.state.publish(end_seconds)
        return self.state.families.readings()

    def values(self, end_seconds: float, *, gauges: bool = True) -> dict[SeriesKey, Any]:
        """Return all series published at a given time, with or without gauges."""
        readings = self.publish(end_seconds)
        return {
            key_of(reading): full_content(reading)
            for reading in readings
            if gauges or reading.definition.kind != "gauge"
        }

    def last_published(self) -> TrainingReading:
        """Return the `TrainingReading` of the last `publish`."""
        assert self._latest is not None
        return self._latest


def key_of(reading: StatReading) -> SeriesKey:
    """Return the name and labels of a series."""
    return reading.definition.name, reading.definition.labels


def full_content(reading: StatReading) -> Any:
    """Return a gauge's value, a counter's total, or a histogram's count, sum and buckets."""
    if reading.definition.kind == "gauge":
        return reading.value
    if reading.definition.kind == "counter":
        return reading.sum
    return (reading.count, reading.sum, *reading.bucket_counts)


def summary_values() -> dict[SeriesKey, Any]:
    """Return a number for each published series of this process.

    The number is the total of a counter, the value of a gauge, or the count of a histogram.
    """
    TRAINING.drain()
    readings = TRAINING.stat_readings()
    return {
        key_of(reading): {"gauge": reading.value, "counter": reading.sum}.get(
            reading.definition.kind, reading.count
        )
        for reading in readings
    }


def published_value(name: str, **labels: str) -> Any:
    """Return a published value, or None if the series is absent."""
    return summary_values().get((name, tuple(sorted(labels.items()))))


def values_by_label(name: str) -> dict[Any, Any]:
    """Return the nonzero values of a family.

    The keys are the label values. With several labels, a key is the tuple of the values in order of label name; without labels,
    it is the empty tuple.
    """
    values = {
        labels: value for (family, labels), value in summary_values().items() if family == name and value
    }
    return {
        labels[0][1] if len(labels) == 1 else tuple(text for _, text in labels): value
        for labels, value in values.items()
    }


def misuse_counts() -> dict[tuple[str, str], float]:
    """Return the number of misuses in this process, by call and rule."""
    return values_by_label("training.misuse")


def train(steps: int = 1, seconds: float = 0.0) -> None:
    """Run `steps` training iterations that last `seconds` each."""
    for _ in range(steps):
        with training.training_iteration():
            if seconds:
                time.sleep(seconds)


def publish_and_read() -> TrainingReading:
    """Publish the series of this process and return its current reading."""
    TRAINING.drain()
    TRAINING.stat_readings()
    reading = TRAINING.training_reading()
    assert reading is not None
    return reading


class _UndrainedDeque(deque[misuse.Misuse]):
    """Deque that is always false, so that the recording thread does not drain it."""

    def __bool__(self) -> bool:
        return False


@contextmanager
def collect_misuse() -> Iterator[deque[misuse.Misuse]]:
    """Yield a deque that collects the misuse reported in the block."""
    previous, misuse.PENDING_REPORTS = misuse.PENDING_REPORTS, _UndrainedDeque()
    try:
        yield misuse.PENDING_REPORTS
    finally:
        misuse.PENDING_REPORTS = previous


def run_python(
    code: str, directory: Path, *, timeout: float = 60, library: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script. The script and its feed are in *directory*. Warnings are errors.

    With *library*, the script runs in a process that has imported this library, see `fork_server.MODULES`; otherwise in a new
    interpreter.
    """
    feed = directory / "feed"
    feed.mkdir(mode=0o700, exist_ok=True)
    script = directory / "job.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    inherited_variables = {
        key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}
    }
    exporter_variables = {
        "EXPORTER_FEED_DIR": str(feed),
        "PYTHONPATH": f"{PROJECT}{os.pathsep}{TESTS}",
        "EXPORTER_FLUSH_SECONDS": "0.2",
    }
    variables = inherited_variables | exporter_variables | environment
    if library is not None:
        program = Program([str(script)], str(directory), variables, warning_action="error")
        return run_forked(library, program, timeout * PATIENCE)
    return subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=directory,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout * PATIENCE,
        check=False,
    )


@contextmanager
def fresh_recorder() -> Iterator[None]:
    """Reset the training recorder and the rank claims of this process before and after a block."""
    _reset()
    try:
        yield
    finally:
        _reset()


def _reset() -> None:
    RECORDER.thread.run_exclusively(TRAINING.after_fork)  # the recording thread must not read meanwhile
    RECORDER.process.after_fork()  # drops the rank claimed by the test
