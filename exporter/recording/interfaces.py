"""Interfaces of the parts that the recorder is composed of: periodic tasks, the training, the feed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from exporter.recording.definition import Rule
from exporter.recording.values import ProcessIdentity, Recording, StatReading, TrainingReading


class PeriodicTask(Protocol):
    """Work that the recording thread triggers four times a second."""

    def tick(self) -> None:
        """Start what is due; returns at once."""

    def finish(self) -> Callable[[float, str], object] | None:
        """Do the last work, or start it and return the function that waits for it: `wait(seconds, reason)`."""

    def after_fork(self) -> None:
        """Forget what the parent did."""


class TrainingSource(Protocol):
    """The training recorder, as the recording thread sees it."""

    def in_use(self) -> bool:
        """Return True once the job has reported anything."""

    def trains(self) -> bool:
        """Return True if this process trains, so that it claims its rank."""

    def tick(self) -> None:
        """Do what is due between flushes; four times a second."""

    def collect(self, *, final: bool) -> None:
        """Bring all totals up to date before a snapshot."""

    def series(self) -> Iterable[StatReading]:
        """Return the families."""

    def reading(self) -> TrainingReading | None:
        """Return the state beside the families; None before anything was reported."""

    def current_span_id(self) -> str | None:
        """Return the id of the calling thread's innermost span."""

    def collect_tensors(self) -> None:
        """Read the tensors in flight of the calling thread that have arrived."""

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until the exporters of spans have taken all records."""

    def close(self, timeout_seconds: float) -> None:
        """Close the exporters of spans within the time."""

    def reset(self) -> None:
        """Count from zero under another identity."""

    def after_fork(self) -> None:
        """Forget what the parent recorded."""


class Sink(Protocol):
    """Receiver of recordings: the feed."""

    def publish(
        self, recording: Recording, identify: Callable[[], ProcessIdentity], *, is_child: bool
    ) -> bool:
        """Write a recording, the first one under the present identity; returns False if it was not written."""

    def rename(self, identity: ProcessIdentity) -> None:
        """Continue the file under a changed rank."""

    def is_open(self) -> bool:
        """Return True once a recording was written."""

    def close(self) -> None:
        """Close the file; the next recording starts another."""

    def changed_rules(self) -> Iterable[Rule] | None:
        """Return the recording rules if they changed."""

    def after_fork(self) -> None:
        """Forget the parent's file."""
