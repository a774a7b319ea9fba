"""RunCounts: counters of a run's processes that do not fall when one of them ends.

Used in the sidecar by the collector of processes, on one thread; no I/O. Every process counts from zero, so a
group's counter is the sum over all processes it ever had; of those that ended, the last value seen. Totals and
the last values of the living go into rows, so that a sidecar that is started again goes on where it was.

    ("total", rank, role)                       COUNTERS
    ("ends", rank, role)                        ENDS
    ("gpu", rank, role, gpu, uuid)              SM seconds
    ("process", boot, pid, start, rank, role)   COUNTERS, as last seen
    ("process gpu", boot, pid, start, uuid)     SM seconds, as last seen
    ("seen",)                                   Unix time of the last pass with a living process
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from exporter.collectors.job import Role
from exporter.collectors.keeping import Rows
from exporter.collectors.process_tree import Identity

COUNTERS = (
    "user",
    "system",
    "major_faults",
    "voluntary",
    "involuntary",
    "read_bytes",
    "write_bytes",
    "rchar",
    "wchar",
    "syscr",
    "syscw",
)
"""What is counted of a process, in the order of the rows."""

ENDS = ("completed", "failed", "orderly", "unknown")
"""How processes end, in the order of the rows: with status 0, with another one or by a signal, in order as far as
the feed knows, and nobody knows how."""

Group = tuple[str, Role]
"""Rank and role."""
GpuGroup = tuple[str, Role, str, str]
"""Rank, role, GPU and its UUID."""

_ORDER = {"process": 1, "process gpu": 2}
"""What builds on other rows comes after them."""
_ROLES: tuple[str, ...] = get_args(Role)


@dataclass(slots=True, eq=False)
class Mark:
    """What a living process had when it was last seen.

    Attributes:
        group: Where it is counted.
        values: COUNTERS; None is what could not be read.
        sm_seconds: By GPU.
    """

    group: Group
    values: list[float | None] = field(default_factory=lambda: [None] * len(COUNTERS))
    sm_seconds: dict[str, float] = field(default_factory=dict)


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
        self._gpus: dict[GpuGroup, float] = {}
        self._marks: dict[Identity, Mark] = {}

    def groups(self) -> Iterator[tuple[Group, dict[str, float], dict[str, float]]]:
        """Give every group's counters and ends, each by name."""
        for group, values in sorted(self._totals.items()):
            yield (
                group,
                dict(zip(COUNTERS, values, strict=True)),
                dict(zip(ENDS, self._ends[group], strict=True)),
            )

    def gpus(self) -> Iterator[tuple[GpuGroup, float]]:
        """Give every group's SM seconds."""
        yield from sorted(self._gpus.items())

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

    def count_gpu(self, identity: Identity, gpu: str, uuid: str, sm_seconds: float) -> None:
        """Take a look at a counter that begins anew whenever its watcher does."""
        mark = self._marks[identity]
        before = mark.sm_seconds.get(uuid, 0.0)
        key = (*mark.group, gpu, uuid)
        grown = sm_seconds - before if sm_seconds >= before else sm_seconds
        self._gpus[key] = self._gpus.get(key, 0.0) + grown
        self.changed = self.changed or grown > 0 or uuid not in mark.sm_seconds
        mark.sm_seconds[uuid] = sm_seconds

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
        rows: list[tuple[tuple[str, ...], tuple[float | None, ...]]] = [(("seen",), (self.seen,))]
        for group, values in self._totals.items():
            rows.append((("total", *group), tuple(values)))
            rows.append((("ends", *group), tuple(self._ends[group])))
        for gpu_group, seconds in self._gpus.items():
            rows.append((("gpu", *gpu_group), (seconds,)))
        for (pid, start), mark in self._marks.items():
            who = (self._boot, str(pid), str(start))
            rows.append((("process", *who, *mark.group), tuple(mark.values)))
            for uuid, seconds in mark.sm_seconds.items():
                rows.append((("process gpu", *who, uuid), (seconds,)))
        return dict(rows)

    def resume(self, rows: Rows) -> None:
        """Go on from what was written, by this or an older version; what makes no sense is passed over."""
        self.changed = False
        for (kind, *rest), values in sorted(rows.items(), key=lambda row: _ORDER.get(row[0][0], 0)):
            numbers = [value or 0.0 for value in values]
            if kind == "seen" and numbers:
                self.seen = numbers[0]
            elif kind in {"total", "ends"} and len(rest) == 2 and rest[1] in _ROLES:
                group = rest[0], _role(rest[1])
                self._total(group)
                into = (self._totals if kind == "total" else self._ends)[group]
                into[: len(numbers)] = numbers[: len(into)]
            elif kind == "gpu" and len(rest) == 4 and rest[1] in _ROLES and numbers:
                self._gpus[rest[0], _role(rest[1]), rest[2], rest[3]] = numbers[0]
            elif kind == "process" and len(rest) == 5 and rest[4] in _ROLES:
                self._resume_mark(rest, values)
            elif kind == "process gpu" and len(rest) == 4 and numbers:
                mark = self._marks.get(_identity(rest))
                if mark is not None:
                    mark.sm_seconds[rest[3]] = numbers[0]

    def _resume_mark(self, words: Sequence[str], values: Sequence[float | None]) -> None:
        boot, _, _, rank, role = words
        group = rank, _role(role)
        identity = _identity(words)
        mark = self._marks[identity] = Mark(group)
        self._total(group)
        mark.values[: len(values)] = values[: len(COUNTERS)]
        if boot != self._boot:  # whoever has this pid now is somebody else
            self.end(identity, "unknown")


def _role(text: str) -> Role:
    for role in get_args(Role):
        if role == text:
            found: Role = role
            return found
    raise ValueError(text)


def _identity(words: Sequence[str]) -> Identity:
    _, pid, start = words[:3]
    return (int(pid), int(start)) if pid.isdecimal() and start.isdecimal() else (0, 0)
