"""Names of the exporter's own entries in a directory that several users can write to.

Another user may create an entry with a fixed name first. Only entries of trusted users are used; all other entries are *foreign*. Each
fixed name has an alternative with a user id, such as `owner-1000.lock` for `owner.lock`. If the entries of both names are foreign, a name
with a random suffix is used.
"""
# ruff: noqa: PTH116, PTH118, PTH120, PTH122, PTH208 - this package uses string paths in the job and in the sidecar

from __future__ import annotations

import os
import re
from collections.abc import Collection

from exporter.feed.directory import own_uid
from exporter.recording.value_class import Value, value_class

_GROUP_AND_OTHERS_WRITE = 0o022
_random_paths: dict[str, str] = {}
"""Random paths, by the foreign path that they replace."""


@value_class
class ForeignEntry(Value):
    """Entry of another user under a name of the exporter, which is not used."""

    path: str
    uid: int
    replacement: str  # path that the exporter uses instead


@value_class
class FileStamp(Value):
    """Identity of a version of a file, which changes when the file is replaced or written."""

    path: str
    inode: int
    modified_at_nanoseconds: int
    size_bytes: int


@value_class
class TrustedEntry(Value):
    """Entry of a trusted user."""

    path: str
    status: os.stat_result

    def stamp(self) -> FileStamp:
        """Return the identity of the file's version."""
        status = self.status
        return FileStamp(self.path, status.st_ino, status.st_mtime_ns, status.st_size)


def is_shared(directory: str) -> bool:
    """Return True if users other than the owner can create entries in a directory."""
    try:
        return bool(os.stat(directory).st_mode & _GROUP_AND_OTHERS_WRITE)
    except OSError:
        return False


def foreign_uid(path: str, also_trusted: Collection[int] = ()) -> int | None:
    """Return the user of a foreign entry, or None for a trusted entry and a missing entry.

    Trusted are this user, root, the owner of the directory, and the users in *also_trusted*. In a directory that only its owner can write
    to, all entries are trusted, because only the owner can have created them. A network file system may report other user ids for them.
    """
    try:
        parent = os.stat(os.path.dirname(path))
        status = os.lstat(path)
    except OSError:
        return None
    trusted_uids = {own_uid(), 0, parent.st_uid, *also_trusted}
    return (
        status.st_uid
        if parent.st_mode & _GROUP_AND_OTHERS_WRITE and status.st_uid not in trusted_uids
        else None
    )


def own_entry(path: str) -> str:
    """Return a path, or the path of an alternative in the same directory if the entry is foreign.

    An existing alternative stays in use after the foreign entry was removed.
    """
    is_available = foreign_uid(path) is None
    if is_available and os.path.lexists(path):
        return path
    existing_paths = _existing_alternatives(path, str(own_uid()))
    if existing_paths:
        return existing_paths[0]
    if is_available:
        return path
    alternative = _alternative_of_user(path, own_uid())
    if foreign_uid(alternative) is None:
        return alternative
    random_path = _random_paths.get(alternative)
    if random_path is None or foreign_uid(random_path) is not None:
        stem, suffix = os.path.splitext(alternative)
        random_path = _random_paths[alternative] = f"{stem}-{os.urandom(8).hex()}{suffix}"
    return random_path


def trusted_entries(path: str) -> list[str]:
    """Return the path and its existing alternatives, without paths of foreign entries."""
    paths = [path] if foreign_uid(path) is None else []
    return paths + _existing_alternatives(path, r"\d+")


def newest_entry(path: str, owner: int | None = None) -> TrustedEntry | None:
    """Return the trusted entry of a name that was written last, or None.

    The user *owner* is trusted too, if given. Lists the directory only if an alternative is foreign, because training processes call
    this function about once a second.
    """
    try:
        parent = os.stat(os.path.dirname(path))
    except OSError:
        return None
    if not parent.st_mode & _GROUP_AND_OTHERS_WRITE:
        return _stat_entry(path)
    trusted_uids = {own_uid(), 0, parent.st_uid} | (set() if owner is None else {owner})
    alternatives = [_alternative_of_user(path, uid) for uid in sorted(trusted_uids)]
    if any(foreign_uid(alternative, trusted_uids) is not None for alternative in alternatives):
        alternatives += _existing_alternatives(path, r"\d+", trusted_uids)
    entries = [entry for entry in map(_stat_entry, [path, *alternatives]) if entry is not None]
    entries_of_trusted_users = [entry for entry in entries if entry.status.st_uid in trusted_uids]
    return max(entries_of_trusted_users, key=lambda entry: entry.status.st_mtime_ns, default=None)


def foreign_entry(path: str, replacement: str) -> ForeignEntry | None:
    """Return the foreign entry at *path* that is replaced by *replacement*, or None."""
    uid = foreign_uid(path) if replacement != path else None
    return None if uid is None else ForeignEntry(path, uid, replacement)


def _stat_entry(path: str) -> TrustedEntry | None:
    """Return an entry with its status, or None without an entry. The caller has checked the user."""
    try:
        return TrustedEntry(path, os.lstat(path))
    except OSError:
        return None


def _alternative_of_user(path: str, uid: int) -> str:
    """Return the alternative with a user id: `owner-1000.lock` for `owner.lock`."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}-{uid}{suffix}"


def _existing_alternatives(path: str, uid_pattern: str, also_trusted: Collection[int] = ()) -> list[str]:
    """Return the paths of the existing alternatives of trusted users, sorted.

    *uid_pattern* is a regular expression for the user id in the name.
    """
    directory, name = os.path.split(path)
    stem, suffix = os.path.splitext(name)
    alternative = re.compile(rf"{re.escape(stem)}-{uid_pattern}(-[0-9a-f]{{16}})?{re.escape(suffix)}")
    try:
        names = sorted(filter(alternative.fullmatch, os.listdir(directory)))
    except OSError:
        return []
    paths = [os.path.join(directory, entry_name) for entry_name in names]
    return [path for path in paths if foreign_uid(path, also_trusted) is None]
