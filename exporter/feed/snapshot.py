"""Snapshot: the contract between a training process and the readers of a feed file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from exporter.recording.value_class import Value, value_class
from exporter.recording.values import Ending, ProcessIdentity, Recording

__all__ = ["ProcessIdentity", "Snapshot"]


@value_class
class Snapshot(Value):
    """State of a process's recording. Counts are cumulative: the next snapshot contains the counts of a lost snapshot."""

    process: ProcessIdentity  # the writer
    sequence: int  # 1 for the first snapshot of a process, incremented with each write
    written: float  # Unix time, seconds
    flush_seconds: float  # interval between writes
    recording: Recording
    # losses of the writer since the start of the process, by reason: `write_failed` counts snapshots, other reasons Stats
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def ending(self) -> Ending | None:
        """Uncaught exception that ended the process, or None."""
        return self.recording.ending
