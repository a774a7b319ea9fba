"""Snapshot: the contract between a training process and whoever reads its feed file.

Made in the training process by the recording thread, read in the sidecar. A snapshot is complete in
itself: the reader needs no earlier one, and losing some costs freshness, never counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from exporter.recording.values import NOTHING, Recording, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final


class ProcessIdentity(Value):
    """Who writes a feed file.

    Attributes:
        id: 32 hexadecimal digits, random per process; the file's name.
        pid: In the writer's own pid namespace, which need not be the reader's.
        started: Unix time at which the process's recording began, seconds.
        run: The run's name.
        rank: Global rank, None for a process of no rank (torchrun's agent).
        local_rank: None where the launcher says nothing.
        role: `trainer`, `agent`, or what the launcher calls it.
        node: Host name.
        labels: What `exporter.configure(labels=…)` added; descriptive, published on an info family only.
        version: The exporter's own version in that process.
    """

    __slots__ = ("id", "pid", "started", "run", "rank", "local_rank", "role", "node", "labels", "version")

    def __init__(
        self,
        id: str,
        pid: int,
        started: float,
        run: str,
        rank: int | None,
        local_rank: int | None = None,
        role: str = "trainer",
        node: str = "",
        labels: tuple[tuple[str, str], ...] = (),
        version: str = "",
    ) -> None:
        self.id: Final = id
        self.pid: Final = pid
        self.started: Final = started
        self.run: Final = run
        self.rank: Final = rank
        self.local_rank: Final = local_rank
        self.role: Final = role
        self.node: Final = node
        self.labels: Final = labels
        self.version: Final = version


class Snapshot(Value):
    """What one process has recorded up to one moment.

    Attributes:
        process: Its writer.
        sequence: 1 for the first snapshot of a process, one more for each that was written.
        written: Unix time, seconds.
        flush_seconds: How often the writer means to write.
        dropped: What the writer lost since its process began, by reason (`write_failed`: snapshots; …).
        recording: What was recorded.
    """

    __slots__ = ("process", "sequence", "written", "flush_seconds", "recording", "dropped")

    def __init__(
        self,
        process: ProcessIdentity,
        sequence: int,
        written: float,
        flush_seconds: float,
        recording: Recording,
        dropped: Mapping[str, int] = NOTHING,
    ) -> None:
        self.process: Final = process
        self.sequence: Final = sequence
        self.written: Final = written
        self.flush_seconds: Final = flush_seconds
        self.recording: Final = recording
        self.dropped: Final = dropped
