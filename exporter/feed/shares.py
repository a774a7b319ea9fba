"""Fair shares of the reader's limits: selection of the files of a pass, and of the files that stay in memory.

No user can exhaust the limits for other users, and no large file delays small files.
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
    is_alive: bool  # True if the process holds the lock
    skipped_passes: int  # number of passes in which the file was not read


@dataclass(frozen=True, slots=True)
class FileCost:
    """Memory cost of the snapshot of a file."""

    name: str
    uid: int
    cost: int  # bytes


def files_of_pass(changed_files: Iterable[ChangedFile], max_bytes: int) -> list[str]:
    """Return the files to read in a pass: at most *max_bytes*, and at least the file with the longest delay.

    Half of the bytes is reserved for small files, those of running processes first. The other half is for the files with the
    longest delay, so that every file is eventually read.
    """
    changed_files = list(changed_files)
    by_size = sorted(
        changed_files, key=lambda file: (file.size > max_bytes // 2, not file.is_alive, file.size, file.name)
    )
    small_names = _within(by_size, max_bytes // 2)
    remaining = [file for file in by_size if file.name not in small_names]
    by_delay = sorted(remaining, key=lambda file: -file.skipped_passes)
    late_names = _within(by_delay, max_bytes // 2)
    return [*small_names, *(late_names or [file.name for file in by_delay[:1]])]


def _within(files: Sequence[ChangedFile], max_bytes: int) -> dict[str, None]:
    """Return the names of the first files, up to *max_bytes* in total."""
    names: dict[str, None] = {}
    for file in files:
        max_bytes -= file.size
        if max_bytes < 0:
            break
        names[file.name] = None
    return names


def files_of_users(users: Mapping[str, int], max_files: int) -> list[str]:
    """Return at most *max_files* names from a mapping of names to users: the first of each user, then the second, and so on."""
    names_by_user: dict[int, list[str]] = defaultdict(list)
    for name, uid in users.items():
        names_by_user[uid].append(name)
    in_turn = (name for row in zip_longest(*names_by_user.values()) for name in row if name is not None)
    return [name for name, _ in zip(in_turn, range(max_files), strict=False)]


def files_to_displace(newcomer: FileCost, present: Iterable[FileCost], excess: int) -> list[str]:
    """Return the files to remove for *excess* bytes of a new file; empty if the new file is refused.

    A new file displaces files of users with a higher cost, and larger files of the same user, in descending order.
    """
    present = list(present)
    cost_by_user: Counter[int] = Counter()
    for file in (newcomer, *present):
        cost_by_user[file.uid] += file.cost
    newcomer_cost = cost_by_user[newcomer.uid]
    names: list[str] = []
    for file in _largest_first(present, cost_by_user):
        if excess <= 0:
            break
        if (
            (file.cost > newcomer.cost)
            if file.uid == newcomer.uid
            else (cost_by_user[file.uid] > newcomer_cost)
        ):
            names.append(file.name)
            cost_by_user[file.uid] -= file.cost
            excess -= file.cost
    return names if excess <= 0 else []


def _largest_first(files: Iterable[FileCost], cost_by_user: Mapping[int, int]) -> Iterator[FileCost]:
    return iter(sorted(files, key=lambda file: (cost_by_user[file.uid], file.cost), reverse=True))
