"""Fair shares of the reader's limits: selection of the files of a pass, and of the files that stay in memory.

The selection prevents the files of one user from exhausting the limits for other users, and large files from delaying small files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """File with unread content."""

    name: str
    size: int  # bytes
    is_alive: bool  # True if the process holds the lock
    skipped_passes: int  # number of passes since the change in which the file was not read


@dataclass(frozen=True, slots=True)
class FileMemory:
    """Memory of the snapshot of a file, and the user to whom the file belongs."""

    name: str
    uid: int
    memory_bytes: int


def select_files_of_pass(changed_files: Iterable[ChangedFile], max_bytes: int) -> list[str]:
    """Return the names of the files to read in a pass, about *max_bytes* in total.

    Half of the bytes is for small files, files of running processes first. The other half is for the files with the longest delay.
    The file with the longest delay is read even if its size exceeds the limit, so that every file is eventually read.
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
    """Return the names of the first files that have at most *max_bytes* in total, as an ordered set.

    The first file that exceeds the total ends the selection, also if a later file would fit.
    """
    names: dict[str, None] = {}
    total_bytes = 0
    for file in files:
        total_bytes += file.size
        if total_bytes > max_bytes:
            break
        names[file.name] = None
    return names


def select_files_of_users(user_by_name: Mapping[str, int], max_files: int) -> list[str]:
    """Return at most *max_files* names of files: the first file of each user, then the second of each user, and so on."""
    names_by_user: dict[int, list[str]] = defaultdict(list)
    for name, uid in user_by_name.items():
        names_by_user[uid].append(name)
    names = (name for row in zip_longest(*names_by_user.values()) for name in row if name is not None)
    return list(islice(names, max_files))


def select_files_to_displace(
    new_file: FileMemory, other_files: Iterable[FileMemory], excess_bytes: int
) -> list[str]:
    """Return the files that a new file displaces to free *excess_bytes*. Return no files if the new file is refused.

    A new file displaces two kinds of files: larger files of the same user, and files of users that use more memory than this user. The files
    of the users with the most memory are displaced first, and among them the largest file.
    """
    other_files = list(other_files)
    bytes_by_user: Counter[int] = Counter()
    for file in (new_file, *other_files):
        bytes_by_user[file.uid] += file.memory_bytes
    bytes_of_new_user = bytes_by_user[new_file.uid]
    names: list[str] = []
    for file in _largest_first(other_files, bytes_by_user):
        if excess_bytes <= 0:
            break
        if file.uid == new_file.uid:
            is_displaced = file.memory_bytes > new_file.memory_bytes
        else:
            is_displaced = bytes_by_user[file.uid] > bytes_of_new_user
        if is_displaced:
            names.append(file.name)
            bytes_by_user[file.uid] -= file.memory_bytes
            excess_bytes -= file.memory_bytes
    return names if excess_bytes <= 0 else []


def _largest_first(files: Iterable[FileMemory], bytes_by_user: Mapping[int, int]) -> Iterator[FileMemory]:
    """Return the files of the user with the most memory first, and the largest files of a user first."""
    return iter(sorted(files, key=lambda file: (bytes_by_user[file.uid], file.memory_bytes), reverse=True))
