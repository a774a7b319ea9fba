"""Snapshot: the contract between a training process and the readers of a feed file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from exporter.recording.value_class import Value, value_class
from exporter.recording.values import Ending, ProcessIdentity, Recording

__all__ = ["ProcessIdentity", "Snapshot"]


@value_class
class Snapshot(Value):
    """Complete state of a process's recording. A lost snapshot delays values and loses no counts."""

    process: ProcessIdentity  # the writer
    sequence: int  # 1 for the first snapshot of a process, incremented with each write
    written: float  # Unix time, seconds
    flush_seconds: float  # interval between writes
    recording: Recording
    # losses of the writer since the start of the process, by reason (`write_failed`: snapshots; …)
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def ending(self) -> Ending | None:
        """Exception that ended the process, or None."""
        return self.recording.ending
