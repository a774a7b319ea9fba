"""RunCounts: counters of a run's processes that do not fall when one of them ends: of those that ended, the last value seen.

Rows of a page:

("counters", rank, role)                     COUNTERS
("living", boot, pid, start, rank, role)     COUNTERS, as last seen
("seen",)                                    Unix time of the last pass with a living process
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from exporter.collectors.job import Role, Rows
from exporter.collectors.processes.tree import Identity

COUNTERS = ("user", "system", "read_bytes", "written_bytes")
"""What is counted of a process, in the order of the rows."""
Group = tuple[str, Role]
"""Rank and role."""


@dataclass(slots=True, eq=False)
class Mark:
    """What a living process of a group had when it was last seen; None is what could not be read."""

    group: Group
    values: list[float | None] = field(default_factory=lambda: [None] * len(COUNTERS))


class RunCounts:
    """The counters of one run, on from what an earlier sidecar has written in this boot or another."""

    def __init__(self, boot: str, rows: Rows) -> None:
        self.seen = 0.0  # Unix time of the last pass with a living process; 0 before
        self.changed = False  # since they were last saved
        self.totals: dict[Group, dict[str, float]] = {}  # every group's COUNTERS
        self.living: dict[Identity, Mark] = {}  # the processes that have not been seen to end
        self._boot = boot
        ended: list[Identity] = []
        for (kind, *rest), values in rows.items():
            if kind == "seen":
                self.seen = values[0] or 0.0
            elif kind == "counters":
                rank, role = rest
                counts = zip(COUNTERS, values, strict=False)
                self._total((rank, cast("Role", role))).update((name, count or 0.0) for name, count in counts)
            elif kind == "living":
                of_boot, pid, start, rank, role = rest
                identity = int(pid), int(start)
                self.living[identity] = Mark((rank, cast("Role", role)), list(values))
                if of_boot != boot:  # whoever has this pid now is somebody else
                    ended.append(identity)
        for identity in ended:
            self.end(identity)

    @property
    def cpu_seconds(self) -> float:
        """All CPU time of the run."""
        return sum(total["user"] + total["system"] for total in self.totals.values())

    def count(self, identity: Identity, group: Group, values: Sequence[float | None]) -> None:
        """Take a look at a living process; a value that fell changes nothing until it has grown again."""
        mark = self.living.setdefault(identity, Mark(group))
        mark.group = group
        total = self._total(group)
        for place, value in enumerate(values):
            before = mark.values[place]
            if value is not None and (before is None or value > before):
                total[COUNTERS[place]] += value - (before or 0.0)
                mark.values[place] = value
                self.changed = True

    def end(self, identity: Identity) -> None:
        """Note the end of a process; what it counted stays."""
        self.changed |= self.living.pop(identity, None) is not None

    def _total(self, group: Group) -> dict[str, float]:
        return self.totals.setdefault(group, dict.fromkeys(COUNTERS, 0.0))

    def rows(self) -> Rows:
        """Write everything."""
        rows: Rows = {("seen",): (self.seen,)}
        rows |= {("counters", *group): tuple(total.values()) for group, total in self.totals.items()}
        for (pid, start), mark in self.living.items():
            rows |= {("living", self._boot, str(pid), str(start), *mark.group): tuple(mark.values)}
        return rows
