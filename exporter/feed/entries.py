"""Names of the exporter's own entries in a directory that several users can write to."""
# ruff: noqa: PTH116, PTH118, PTH120, PTH122, PTH208 - one kind of path within the folder, which the job and the sidecar share

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass

from exporter.feed.directory import own_uid

_OTHERS_WRITE = 0o022


@dataclass(frozen=True, slots=True)
class ForeignEntry:
    """Entry of another user that is not used."""

    path: str
    uid: int
    used: str  # path in its place


def foreign_uid(path: str) -> int | None:
    """Return the user of an entry that another user has made; None for a trusted entry and a missing entry.

    Trusted are this user, root and the owner of the directory. Only they can make entries in a directory that others cannot
    write to: there every entry is trusted, whatever user ids a network file system shows.
    """
    try:
        parent = os.stat(os.path.dirname(path))
        found = os.lstat(path)
    except OSError:
        return None
    trusted = {own_uid(), 0, parent.st_uid}
    return found.st_uid if parent.st_mode & _OTHERS_WRITE and found.st_uid not in trusted else None


def own_entry(path: str) -> str:
    """Return a path, or a path of this user in the same directory if another user's entry has that name.

    An alternative that exists stays in use after the foreign entry is gone.
    """
    free = foreign_uid(path) is None
    if free and os.path.lexists(path):
        return path
    existing = _alternatives(path, str(own_uid()))
    if existing:
        return existing[0]
    if free:
        return path
    stem, suffix = os.path.splitext(path)
    own = f"{stem}-{own_uid()}"
    if foreign_uid(own + suffix) is None:
        return own + suffix
    return f"{own}-{secrets.token_hex(8)}{suffix}"  # another user cannot occupy names that nobody can predict


def trusted_entries(path: str) -> list[str]:
    """Return all paths under which this user, root or the owner of the directory has an entry of a name."""
    plain = [path] if foreign_uid(path) is None else []
    return plain + _alternatives(path, r"\d+")


def foreign_entry(path: str, used: str) -> ForeignEntry | None:
    """Return the entry for which another path is used, if that is so."""
    uid = foreign_uid(path) if used != path else None
    return None if uid is None else ForeignEntry(path, uid, used)


def _alternatives(path: str, uid: str) -> list[str]:
    directory, name = os.path.split(path)
    stem, suffix = os.path.splitext(name)
    alternative = re.compile(rf"{re.escape(stem)}-{uid}(-[0-9a-f]{{16}})?{re.escape(suffix)}")
    try:
        names = sorted(filter(alternative.fullmatch, os.listdir(directory)))
    except OSError:
        return []
    paths = [os.path.join(directory, each) for each in names]
    return [each for each in paths if foreign_uid(each) is None]
