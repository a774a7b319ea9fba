"""Snapshot: the contract between a training process and whoever reads its feed file.

Made in the training process by the recording thread, read in the sidecar. A snapshot is complete in
itself: the reader needs no earlier one, and losing some costs freshness, never counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.recording.values import Ending, Recording, Value


@dataclass(frozen=True, slots=True)
class ProcessIdentity(Value):
    """Who writes a feed file.

    What a process does may change `rank`, `role`, `local_rank` and `trains` once, from none to one, under the same id.

    Attributes:
        id: 32 hexadecimal digits, random per process; the file's name.
        pid: In the writer's own pid namespace, which need not be the reader's.
        started: Unix time at which the process's recording began, seconds.
        run: The run's name.
        rank: Global rank, None for a process of no rank (an agent, a helper).
        local_rank: None where the launcher says nothing.
        role: `trainer`; `agent` for torchrun's; `helper` for a process that has no rank yet, or never will.
        node: Host name.
        labels: What `exporter.configure(labels=…)` added; descriptive, published on an info family only.
        version: The exporter's own version in that process.
        run_given: Whether a person or a launcher chose the run's name; else it was made for this launch.
        trains: Whether the process has told of training; of two that claim one rank such a process goes first.
    """

    id: str
    pid: int
    started: float
    run: str
    rank: int | None
    local_rank: int | None = None
    role: str = "trainer"
    node: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    version: str = ""
    run_given: bool = True
    trains: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot(Value):
    """What one process has recorded up to one moment.

    Attributes:
        process: Its writer.
        sequence: 1 for the first snapshot of a process, one more for each that was written.
        written: Unix time, seconds.
        flush_seconds: How often the writer means to write.
        recording: What was recorded.
        dropped: What the writer lost since its process began, by reason (`write_failed`: snapshots; …).
    """

    process: ProcessIdentity
    sequence: int
    written: float
    flush_seconds: float
    recording: Recording
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def ending(self) -> Ending | None:
        """The exception that has ended the process."""
        return self.recording.ending
