"""Interfaces of the recorder's parts: periodic tasks, training source and feed sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from exporter.recording.definition import Rule
from exporter.recording.values import ProcessIdentity, Recording, StatReading, TrainingReading


class PeriodicTask(Protocol):
    """Task that the recording thread triggers at least twice a second, and at each flush."""

    def tick(self) -> None:
        """Do or start the work that is due, without waiting."""

    def finish(self) -> Callable[[float, str], object] | None:
        """Do the final work; or start it, and return a function `wait(seconds, reason)` that waits for its end.

        If the time is over before the work has ended, the items that are left are counted as lost for *reason*.
        """

    def after_fork(self) -> None:
        """Reset the state in a forked child."""


class TrainingSource(Protocol):
    """Source of the training state, implemented by the training recorder."""

    def in_use(self) -> bool:
        """Return True once the job has reported training data."""

    def trains(self) -> bool:
        """Return True if this process trains and therefore claims its rank."""

    def tick(self) -> None:
        """Do the work that is due between flushes. Called at most 0.5 s after the last call or flush."""

    def collect(self, *, is_identity_ending: bool) -> None:
        """Update all totals before a recording.

        *is_identity_ending* is True before the last recording of an identity: at the end of the process, and before a change of the
        identity.
        """

    def series(self) -> Iterable[StatReading]:
        """Return the readings of all training series."""

    def reading(self) -> TrainingReading | None:
        """Return the training state, or None before the job reports training."""

    def current_span_id(self) -> str | None:
        """Return the id of the calling thread's innermost open span, or None."""

    def collect_tensors(self) -> None:
        """Record the tensors of the calling thread that have arrived."""

    def refuse_unread_tensors(self, *, is_process_ending: bool) -> None:
        """Report the tensors in flight of ended threads as misuse. At the end of the process, report those of all threads."""

    def flush(self, timeout_seconds: float) -> bool:
        """Flush the span exporters within a timeout. Return False if an exporter did not finish."""

    def close(self, timeout_seconds: float) -> None:
        """Close the span exporters within a timeout."""

    def reset(self) -> None:
        """Restart all counts at zero, for a new identity."""

    def after_fork(self) -> None:
        """Discard the parent's values in a forked child."""


class Sink(Protocol):
    """Destination of the recordings and source of the recording rules, implemented by `exporter.recorder.FeedSink`."""

    def publish(
        self, recording: Recording, identify: Callable[[], ProcessIdentity], *, is_child: bool
    ) -> bool:
        """Write a recording and return True, or return False on a failure.

        *identify* is called when a file is opened. A forked child (*is_child*) without values gets no file, which is no failure.
        """

    def update_identity(self, identity: ProcessIdentity) -> None:
        """Replace the identity in the open file; the id stays the same."""

    def is_open(self) -> bool:
        """Return True while a file is open."""

    def close(self) -> None:
        """Close the file. The next recording opens a new file."""

    def changed_rules(self) -> Iterable[Rule] | None:
        """Return the recording rules if they have changed since the last call, otherwise None."""

    def after_fork(self) -> None:
        """Detach from the parent's file in a forked child."""
