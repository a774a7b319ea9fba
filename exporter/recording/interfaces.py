"""Interfaces of the recorder's parts: periodic tasks, training source and feed sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from exporter.recording.definition import StatRule
from exporter.recording.values import ProcessIdentity, Recording, StatReading, TrainingReading


class PeriodicTask(Protocol):
    """Task that the recording thread triggers at least twice a second, and at each flush."""

    def tick(self) -> None:
        """Do or start the work that is due, without waiting."""

    def finish(self) -> Callable[[float, str], object] | None:
        """Do the final work and return None, or start it and return a function that waits for its end.

        The arguments of the function are a limit in seconds and a reason. If the work has not ended within the limit, the items that are
        left are counted as lost for the reason. The result of the function is ignored.
        """

    def after_fork(self) -> None:
        """Reset the state in a forked child."""


class TrainingSource(Protocol):
    """Source of the training state, implemented by the training recorder."""

    def in_use(self) -> bool:
        """Return True once the job has used the training API, even if all its calls were invalid."""

    def trains(self) -> bool:
        """Return True if this process trains and therefore claims its rank."""

    def tick(self) -> None:
        """Do the work that is due between flushes. Called at most 0.5 s after the last call or flush."""

    def update_totals(self, *, is_identity_ending: bool) -> None:
        """Update all totals before a recording.

        *is_identity_ending* is True before the last recording of an identity, which is at the end of the process or before a change of
        the identity.
        """

    def stat_readings(self) -> Iterable[StatReading]:
        """Return the readings of all training series."""

    def training_reading(self) -> TrainingReading | None:
        """Return the training reading of the latest call of `stat_readings`, or None if the job had reported no training."""

    def current_span_id(self) -> str | None:
        """Return the id of the calling thread's innermost open span, or None."""

    def collect_tensors(self) -> None:
        """Record the calling thread's tensors whose values are available, without waiting for a device."""

    def refuse_unread_tensors(self, *, is_process_ending: bool) -> None:
        """Drop the tensors of ended threads whose values have not been read, and count each as misuse.

        At the end of the process, do so for all threads.
        """

    def flush_span_exporters(self, timeout_seconds: float) -> bool:
        """Flush the span exporters within a timeout. Return False if an exporter did not finish."""

    def close_span_exporters(self, timeout_seconds: float) -> None:
        """Close the span exporters within a timeout."""

    def reset(self) -> None:
        """Restart all counts at zero, for a new identity."""

    def after_fork(self) -> None:
        """Discard the parent's values in a forked child."""


class Sink(Protocol):
    """Destination of the recordings, and source of the Stat rules of the sidecar's configuration.

    Implemented by `exporter.recorder.FeedSink`.
    """

    def publish(self, recording: Recording, identity: ProcessIdentity, *, is_child: bool) -> bool:
        """Write a recording and return True, or return False on a failure. The last recording of an identity closes the file.

        *identity* is the same object until the identity in the file changes; the sink adds id and version. *is_child* is True in a forked
        child and in a child of multiprocessing. Without values, such a child gets no file, which is no failure.
        """

    def is_open(self) -> bool:
        """Return True while a file is open."""

    def close(self) -> None:
        """Close the file. The next recording opens a new file."""

    def changed_rules(self) -> Iterable[StatRule] | None:
        """Return the Stat rules of the sidecar's configuration if they have changed since the last call, otherwise None."""

    def after_fork(self) -> None:
        """Detach from the parent's file in a forked child."""
