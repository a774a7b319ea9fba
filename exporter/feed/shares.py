"""Shares of the reader's limits: which files are read in a pass, and which files have room in memory.

A user cannot occupy the share of other users, and a large file does not delay small files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """File with unread content."""

    name: str
    size: int  # bytes
    alive: bool  # True if the process holds the lock
    passes: int  # number of passes in which the file was not read


@dataclass(frozen=True, slots=True)
class FileCost:
    """Memory that the snapshot of a file costs."""

    name: str
    uid: int
    cost: int  # bytes


def files_of_pass(changed: Iterable[ChangedFile], most_bytes: int) -> list[str]:
    """Return the files to read in a pass: at most *most_bytes*, and at least the file with the longest delay.

    Half of the bytes is for small files, first of running processes; the other half is for the files with the longest delay, so
    that every file is read eventually.
    """
    changed = list(changed)
    small = sorted(
        changed, key=lambda each: (each.size > most_bytes // 2, not each.alive, each.size, each.name)
    )
    first = _within(small, most_bytes // 2)
    left = [each for each in small if each.name not in first]
    waiting = sorted(left, key=lambda each: -each.passes)
    second = _within(waiting, most_bytes // 2)
    return [*first, *(second or [each.name for each in waiting[:1]])]


def _within(files: Sequence[ChangedFile], most_bytes: int) -> dict[str, None]:
    """Return the first files with at most *most_bytes* in total."""
    found: dict[str, None] = {}
    for each in files:
        most_bytes -= each.size
        if most_bytes < 0:
            break
        found[each.name] = None
    return found


def files_of_users(users: Mapping[str, int], most: int) -> list[str]:
    """Return at most *most* of the files, given with their users: the first of each user, then the second of each, …."""
    by_user: dict[int, list[str]] = defaultdict(list)
    for name, uid in users.items():
        by_user[uid].append(name)
    in_turn = (name for row in zip_longest(*by_user.values()) for name in row if name is not None)
    return [name for name, _ in zip(in_turn, range(most), strict=False)]


def displaced(newcomer: FileCost, others: Iterable[FileCost], excess: int) -> list[str]:
    """Return files that make room of *excess* bytes for a new file; empty if the new file has no claim to that room.

    A new file displaces files of users with a higher cost, and larger files of the same user, in descending order.
    """
    others = list(others)
    by_user: Counter[int] = Counter()
    for each in (newcomer, *others):
        by_user[each.uid] += each.cost
    own = by_user[newcomer.uid]
    found: list[str] = []
    for each in _largest_first(others, by_user):
        if excess <= 0:
            break
        if (each.cost > newcomer.cost) if each.uid == newcomer.uid else (by_user[each.uid] > own):
            found.append(each.name)
            by_user[each.uid] -= each.cost
            excess -= each.cost
    return found if excess <= 0 else []


def _largest_first(files: Iterable[FileCost], by_user: Mapping[int, int]) -> Iterator[FileCost]:
    return iter(sorted(files, key=lambda each: (by_user[each.uid], each.cost), reverse=True))
