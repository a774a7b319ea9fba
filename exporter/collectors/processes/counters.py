"""RunCounts: counters of a run's processes that do not fall when one of them ends.

Used in the sidecar by the collector of processes, on one thread; no I/O. Every process counts from zero, so a
group's counter is the sum over all processes it ever had; of those that ended, the last value seen. Totals and
the last values of the living go into rows, so that a sidecar that is started again goes on where it was.

    ("counters", rank, role)                     COUNTERS
    ("ends", rank, role)                         ENDS
    ("living", boot, pid, start, rank, role)     COUNTERS, as last seen
    ("seen",)                                    Unix time of the last pass with a living process
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from exporter.collectors.job import Role
from exporter.collectors.keeping import Rows
from exporter.collectors.processes.tree import Identity

COUNTERS = ("user", "system", "read_bytes", "written_bytes")
"""What is counted of a process, in the order of the rows."""

ENDS = ("completed", "failed", "orderly", "unknown")
"""How processes end, in the order of the rows: with status 0, with another one or by a signal, in order as far as
the feed knows, and nobody knows how."""

Group = tuple[str, Role]
"""Rank and role."""
_ROLES: tuple[str, ...] = get_args(Role)


@dataclass(slots=True, eq=False)
class Mark:
    """What a living process had when it was last seen.

    Attributes:
        group: Where it is counted.
        values: COUNTERS; None is what could not be read.
    """

    group: Group
    values: list[float | None] = field(default_factory=lambda: [None] * len(COUNTERS))


class RunCounts:
    """The counters of one run.

    Attributes:
        seen: Unix time of the last pass with a living process; 0 before.
        changed: Whether there is something that was not yet saved.
    """

    def __init__(self, boot: str) -> None:
        self.seen = 0.0
        self.changed = False
        self._boot = boot
        self._totals: dict[Group, list[float]] = {}
        self._ends: dict[Group, list[float]] = {}
        self._marks: dict[Identity, Mark] = {}

    def groups(self) -> Iterator[tuple[Group, dict[str, float], dict[str, float]]]:
        """Give every group's counters and ends, each by name."""
        for group, values in sorted(self._totals.items()):
            yield (
                group,
                dict(zip(COUNTERS, values, strict=True)),
                dict(zip(ENDS, self._ends[group], strict=True)),
            )

    def living(self) -> dict[Identity, Group]:
        """Give the processes that have not been seen to end."""
        return {identity: mark.group for identity, mark in self._marks.items()}

    def knows(self, identity: Identity) -> bool:
        """Whether a process is counted and has not been seen to end."""
        return identity in self._marks

    @property
    def cpu_seconds(self) -> float:
        """All CPU time of the run."""
        return sum(values[0] + values[1] for values in self._totals.values())

    def count(self, identity: Identity, group: Group, values: Sequence[float | None]) -> None:
        """Take a look at a living process.

        A value that fell is not believed: it changes nothing until it has grown again.
        """
        mark = self._marks.setdefault(identity, Mark(group))
        if mark.group != group:
            mark.group = group
            self.changed = True
        total = self._total(group)
        for place, value in enumerate(values):
            before = mark.values[place] or 0.0
            if value is None or (mark.values[place] is not None and value <= before):
                continue
            total[place] += value - before
            mark.values[place] = value
            self.changed = True

    def end(self, identity: Identity, how: str) -> None:
        """Note the end of a process."""
        mark = self._marks.pop(identity, None)
        if mark is not None:
            self._total(mark.group)
            self._ends[mark.group][ENDS.index(how)] += 1
            self.changed = True

    def _total(self, group: Group) -> list[float]:
        total = self._totals.get(group)
        if total is None:
            total = self._totals[group] = [0.0] * len(COUNTERS)
            self._ends[group] = [0.0] * len(ENDS)
            self.changed = True
        return total

    def rows(self) -> Rows:
        """Write everything."""
        rows: Rows = {("seen",): (self.seen,)}
        for group, values in self._totals.items():
            rows.update({("counters", *group): tuple(values), ("ends", *group): tuple(self._ends[group])})
        for (pid, start), mark in self._marks.items():
            rows.update({("living", self._boot, str(pid), str(start), *mark.group): tuple(mark.values)})
        return rows

    def resume(self, rows: Rows) -> None:
        """Go on from what was written; what makes no sense is passed over."""
        self.changed = False
        ended: list[Identity] = []
        for (kind, *rest), values in rows.items():
            if kind == "seen" and values:
                self.seen = values[0] or 0.0
            elif kind in {"counters", "ends"} and len(rest) == 2 and rest[1] in _ROLES:
                group = rest[0], _role(rest[1])
                self._total(group)
                into = (self._totals if kind == "counters" else self._ends)[group]
                into[:] = [value or 0.0 for value in (*values, *into[len(values) :])][: len(into)]
            elif kind == "living" and len(rest) == 5 and rest[4] in _ROLES:
                boot, pid, start, rank, role = rest
                identity = (int(pid), int(start)) if pid.isdecimal() and start.isdecimal() else (0, 0)
                padded = (*values, *[None] * len(COUNTERS))[: len(COUNTERS)]
                self._marks[identity] = Mark((rank, _role(role)), list(padded))
                if boot != self._boot:  # whoever has this pid now is somebody else
                    ended.append(identity)
        for identity in ended:
            self.end(identity, "unknown")


def _role(text: str) -> Role:
    for role in get_args(Role):
        if role == text:
            found: Role = role
            return found
    raise ValueError(text)
