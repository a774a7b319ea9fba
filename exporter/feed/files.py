"""The files in a feed directory: their names, and how those of a dead process go.

Used in training processes and in the sidecar. A process with the id `<id>` (32 hexadecimal digits) has
`<id>.feed`, its last complete snapshot; `<id>.lock`, which it holds for as long as it lives; and for a moment
`<id>.tmp`, a snapshot being written. `owner.lock` is held by the sidecar that owns the directory, which also
writes `overrides.json`. Other files are nobody's business here.
"""
# one kind of path within the folder, which the job and the sidecar share:
# ruff: noqa: PTH108, PTH118

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from exporter.feed.liveness import RecordLock, holder

FEED, LOCK, TEMPORARY = ".feed", ".lock", ".tmp"
OWNER_LOCK = "owner.lock"
OVERRIDES = "overrides.json"

OWN_MODE = 0o600
"""Permissions in the user's default directory."""
SHARED_MODE = 0o644
"""Permissions in a directory that somebody chose, less the umask: a sidecar of another user is to read there.
A job with umask 027 is read by its group, one with 077 by its own user only."""

_DIGITS = frozenset("0123456789abcdef")


def is_process_id(text: str) -> bool:
    """Say whether this is an id as file names carry it."""
    return len(text) == 32 and _DIGITS.issuperset(text)


def process_of(name: str) -> str | None:
    """Give the id of the process that a file belongs to; None for any other file."""
    stem, dot, suffix = name.rpartition(".")
    return stem if dot + suffix in {FEED, LOCK, TEMPORARY} and is_process_id(stem) else None


def remove_process(directory: str, process_id: str, *, if_true: Callable[[], bool] = lambda: True) -> bool:
    """Remove the files of a process that is dead at this moment.

    Its lock is held meanwhile, and made for that if it is missing, so that a process that had only lost it (a job
    that closed all descriptors) cannot come back between the question and the removal.

    Args:
        directory: The feed directory.
        process_id: Whose files.
        if_true: Asked once the process cannot come back; the files stay unless it says so.

    Returns:
        Whether none of its files is left.
    """
    stem = os.path.join(directory, process_id)
    lock: RecordLock | None = None
    try:
        lock = RecordLock.take(stem + LOCK, create_mode=OWN_MODE)
        if lock is None:
            return False
    except OSError:
        # Another user's lock file, or no room for one: the kernel still says whether it is held, and the
        # directory whether we may.
        if _may_be_held(stem + LOCK):
            return False
    try:
        if not if_true():
            return False
        # The lock file last: what a crash leaves behind is then still known by it.
        for suffix in (FEED, TEMPORARY, LOCK):
            with suppress(FileNotFoundError):
                os.unlink(stem + suffix)
    except OSError:
        return False
    finally:
        if lock is not None:
            lock.release()
    return True


def _may_be_held(path: str) -> bool:
    try:
        return holder(path) is not None
    except OSError:
        return True
