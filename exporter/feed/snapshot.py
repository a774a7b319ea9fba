"""Snapshot: the contract between a training process and whoever reads its feed file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.recording.values import Ending, ProcessIdentity, Recording, Value

__all__ = ["ProcessIdentity", "Snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot(Value):
    """What one process has recorded up to one moment, complete in itself: losing some costs freshness, never counts."""

    process: ProcessIdentity  # its writer
    sequence: int  # 1 for the first snapshot of a process, one more for each that was written
    written: float  # Unix time, seconds
    flush_seconds: float  # how often the writer means to write
    recording: Recording  # what was recorded
    # what the writer lost since its process began, by reason (`write_failed`: snapshots; …)
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def ending(self) -> Ending | None:
        """The exception that has ended the process."""
        return self.recording.ending
