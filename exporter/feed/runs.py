"""Which runs are active in a feed directory: what tells an attached sidecar that its work is done.

Used by `run` and `demo`, which register themselves, and by the sidecar, which asks. A registration is a file
`<feed directory>/runs/<pid>-<random>.lock` with a record lock held by the run; the kernel drops the lock
when the run dies, however it dies. An orderly run removes its file, so that a file without a lock is a run
that was killed: its job may well go on, and the sidecar goes on with it while anybody writes the feed.

A run that has seen its job end leaves the exit status beside it, as `<pid>-<random>.ended`, for the sidecar to tell
why the training stopped.

No threads; a reader only asks for locks and never waits for one.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from exporter.errors import FeedError
from exporter.feed.files import LOCK, OWNER_LOCK, process_of
from exporter.feed.liveness import RecordLock, holder
from exporter.feed.plain import open_plain, read_up_to, replace_file

RUNS = "runs"
ATTACHED_FLAG = "--run.attached"
ENDED = ".ended"
ENDED_BYTES = 4096
ENDED_SECONDS = 86400.0
"""What a run has left is of no use to anybody after a day."""


@dataclass(frozen=True, slots=True)
class End:
    """How the job of a run ended.

    Attributes:
        path: Where that stands.
        pid: The job's process, as `run` saw it.
        status: Its exit status, or a signal as a negative number.
        at: Unix time.
    """

    path: Path
    pid: int
    status: int
    at: float


class Registration:
    """A run that is active until it is released or its process ends.

    Args:
        path: The lock file, under its final name.
        lock: Held by this process.
    """

    def __init__(self, path: Path, lock: RecordLock) -> None:
        self._path = path
        self._lock = lock
        self._pid = os.getpid()

    def tell_end(self, pid: int, wait_status: int, *, clock: Callable[[], float] = time.time) -> None:
        """Leave word of how the job ended; never raises.

        Args:
            pid: Of the job's process.
            wait_status: As `os.waitpid` gave it.
            clock: Unix time.
        """
        end = {"pid": pid, "status": os.waitstatus_to_exitcode(wait_status), "at": clock()}
        path = os.fspath(self._path.with_suffix(ENDED))
        with contextlib.suppress(OSError):
            replace_file(path, json.dumps(end).encode(), temporary=f"{path}.tmp", mode=0o644)

    def release(self) -> None:
        """Stop being active; never raises, and does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            self._lock.release()


def register(feed_directory: Path) -> Registration:
    """Make this process an active run.

    Raises:
        OSError: The directory cannot be written.
        FeedError: Somebody plays with its files.
    """
    directory = feed_directory / RUNS
    _make_like(directory, feed_directory)
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    beginning, path = directory / f"{name}.new", directory / f"{name}{LOCK}"
    # Readable by a sidecar of another user, where the directory lets it in.
    lock = RecordLock.take(os.fspath(beginning), create_mode=0o644)
    if lock is None:
        raise FeedError(f"{beginning}: locked by another process")
    try:
        # Only now may others see it: without the lock it would look like a run that was killed.
        beginning.rename(path)
    except OSError:
        lock.release()
        beginning.unlink(missing_ok=True)
        raise
    return Registration(path, lock)


def any_active(feed_directory: Path, writers_alive: Callable[[], bool] | None = None) -> bool:
    """Whether a run still needs the sidecar.

    Args:
        feed_directory: Where runs register.
        writers_alive: Whether anybody writes the feed; asked only when a run was killed. None asks for the
            locks of the feed's files.

    Returns:
        True while a run is alive, or was killed and leaves a job that still records. What is left of a
        killed run is removed when nobody records any more.
    """
    try:
        registered = [path for path in (feed_directory / RUNS).iterdir() if path.suffix == LOCK]
    except OSError:
        return False
    if any(_holder(path) is not None for path in registered):
        return True
    # A run may have ended in order since the directory was listed: its file is gone, not abandoned.
    abandoned = [path for path in registered if path.exists()]
    if not abandoned:
        return False
    if any_writer(feed_directory) if writers_alive is None else writers_alive():
        return True
    for path in abandoned:
        with contextlib.suppress(OSError):
            path.unlink()
    return False


def ends(feed_directory: Path) -> list[End]:
    """Read how jobs have ended; what cannot be read is passed over."""
    found = []
    with contextlib.suppress(OSError):
        for path in (feed_directory / RUNS).iterdir():
            if path.suffix == ENDED:
                with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
                    found.append(_end(path))
    return found


def forget_ends(feed_directory: Path, *, clock: Callable[[], float] = time.time) -> None:
    """Remove what was left so long ago that nobody asks for it any more; for the owner of the directory."""
    with contextlib.suppress(OSError):
        for path in (feed_directory / RUNS).iterdir():
            if path.suffix == ENDED:
                with contextlib.suppress(OSError):
                    if clock() - path.lstat().st_mtime > ENDED_SECONDS:
                        path.unlink()


def _end(path: Path) -> End:
    descriptor, _ = open_plain(os.fspath(path))
    try:
        body = json.loads(read_up_to(descriptor, ENDED_BYTES))
    finally:
        os.close(descriptor)
    pid, status, at = body["pid"], body["status"], body["at"]
    if type(pid) is not int or type(status) is not int or type(at) is not float or not isfinite(at):
        raise ValueError(path)
    return End(path, pid, status, at)


def any_writer(feed_directory: Path) -> bool:
    """Whether a living process holds the lock of a feed file."""
    try:
        locks = [path for path in feed_directory.iterdir() if path.suffix == LOCK and process_of(path.name)]
    except OSError:
        return False
    return any(_holder(path) is not None for path in locks)


def owner(feed_directory: Path) -> int | None:
    """The sidecar that owns the directory: its pid, 0 where it is in another pid namespace, None for none."""
    return _holder(feed_directory / OWNER_LOCK)


def attached_owner(feed_directory: Path, proc: Path = Path("/proc")) -> int | None:
    """The pid of the owner if it was started by a run and ends with the last one."""
    pid = owner(feed_directory)
    if not pid:
        return None
    try:
        arguments = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return pid if ATTACHED_FLAG.encode() in arguments else None


def _holder(path: Path) -> int | None:
    """As `holder`; what cannot be asked counts as nobody, or one stray file would keep a sidecar for ever."""
    try:
        return holder(os.fspath(path))
    except OSError:
        return None


def _make_like(directory: Path, parent: Path) -> None:
    """Make a directory with the permissions of its parent, which may be shared by several users."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return
    directory.chmod(stat.S_IMODE(parent.stat().st_mode))
