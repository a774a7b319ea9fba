"""Which launches of `run` are active in a feed directory, what each has started, and how its job ended.

Used by `run`, `demo` and `start_sidecar`, which register themselves, and by the sidecar, which asks. A registration is a
file `<feed directory>/runs/<pid>-<random>.lock` with a record lock held by the launch; the kernel drops the lock when it
dies, however it dies. An orderly launch removes its file, so that a file without a lock is one that was killed: its job
may well go on, and the sidecar goes on with it while anybody writes the feed.

Beside it lie, as JSON, `<pid>-<random>.job` while the job lives (what was started, and why nothing is recorded where
that is so), and after it `<pid>-<random>.ended` (its exit status, for the sidecar to tell why the training stopped).

No threads; a reader only asks for locks and never waits for one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from exporter.errors import FeedError
from exporter.feed.files import LOCK, OWNER_LOCK, process_of
from exporter.feed.liveness import RecordLock, holder
from exporter.feed.plain import open_plain, read_up_to, replace_file

RUNS = "runs"
ATTACHED_FLAG = "--run.attached"
JOB = ".job"
ENDED = ".ended"
MAX_BYTES = 4096
ENDED_SECONDS = 86400.0
"""What a launch has left is of no use to anybody after a day."""
SILENT_SECONDS = 20.0
"""A job that has recorded nothing for so long since its start is asked why."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Why a job has recorded nothing.

    Attributes:
        reason: A short slug for the label `reason`.
        found: What is the case, with the interpreter or file that it is about.
        remedy: What the user can do.
    """

    reason: str
    found: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Job:
    """What a living launch has started.

    Attributes:
        pid: The job's process, as `run` saw it.
        run: The run's name that the job was given.
        started: Unix time.
        silence: Why it has recorded nothing; None when it has, and as long as it is not asked.
    """

    pid: int
    run: str
    started: float
    silence: Silence | None = None


@dataclass(frozen=True, slots=True)
class End:
    """How the job of a launch ended.

    Attributes:
        path: Where that stands.
        pid: The job's process, as `run` saw it.
        status: Its exit status, or a signal as a negative number.
        at: When `run` saw the end, Unix time.
        run: The run's name that the job was given; "" where an older `run` has left it.
        started: When the job was started, Unix time; 0 likewise.
    """

    path: Path
    pid: int
    status: int
    at: float
    run: str = ""
    started: float = 0.0


class Registration:
    """A launch that is active until it is released or its process ends.

    Args:
        path: The lock file, under its final name.
        lock: Held by this process.
    """

    def __init__(self, path: Path, lock: RecordLock) -> None:
        self._path = path
        self._lock = lock
        self._pid = os.getpid()

    @property
    def job_file(self) -> str:
        """Where `tell_job` writes."""
        return os.fspath(self._path.with_suffix(JOB))

    def tell_job(self, job: Job) -> None:
        """Say what was started, and what is known of it; never raises."""
        self._write(JOB, dataclasses.asdict(job))

    def tell_end(self, job: Job, wait_status: int, *, clock: Callable[[], float] = time.time) -> None:
        """Leave word of how the job ended; never raises.

        Args:
            job: Which.
            wait_status: As `os.waitpid` gave it.
            clock: Unix time.
        """
        status = os.waitstatus_to_exitcode(wait_status)
        self._write(
            ENDED,
            {"pid": job.pid, "status": status, "at": clock(), "run": job.run, "started": job.started},
        )

    def _write(self, suffix: str, content: Mapping[str, object]) -> None:
        path = os.fspath(self._path.with_suffix(suffix))
        with contextlib.suppress(OSError):
            replace_file(path, json.dumps(content).encode(), temporary=f"{path}.tmp", mode=0o644)

    def release(self) -> None:
        """Stop being active; never raises, and does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        for path in (self._path.with_suffix(JOB), self._path):
            with contextlib.suppress(OSError):
                path.unlink()
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
        for left in (path.with_suffix(JOB), path):
            with contextlib.suppress(OSError):
                left.unlink()
    return False


def ends(feed_directory: Path) -> list[End]:
    """Read how jobs have ended; what cannot be read is passed over."""
    found = []
    for path, body in _documents(feed_directory, ENDED):
        with contextlib.suppress(LookupError, TypeError, ValueError):
            pid, status, at = body["pid"], body["status"], body["at"]
            if type(pid) is int and type(status) is int and type(at) is float and isfinite(at):
                found.append(
                    End(path, pid, status, at, str(body.get("run", "")), float(body.get("started", 0.0)))
                )
    return found


def jobs(feed_directory: Path) -> list[Job]:
    """Read what the living launches have started; what cannot be read is passed over."""
    found = []
    for path, body in _documents(feed_directory, JOB):
        with contextlib.suppress(LookupError, TypeError, ValueError):
            silence = body.get("silence")
            job = Job(
                int(body["pid"]),
                str(body["run"]),
                float(body["started"]),
                None
                if silence is None
                else Silence(*(str(silence[each.name]) for each in dataclasses.fields(Silence))),
            )
            if _holder(path.with_suffix(LOCK)) is not None:
                found.append(job)
    return found


def _documents(feed_directory: Path, suffix: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    try:
        paths = [path for path in (feed_directory / RUNS).iterdir() if path.suffix == suffix]
    except OSError:
        return
    for path in paths:
        try:
            descriptor, _ = open_plain(os.fspath(path))
            try:
                body = json.loads(read_up_to(descriptor, MAX_BYTES))
            finally:
                os.close(descriptor)
        except (OSError, ValueError, RecursionError, FeedError):
            continue
        if isinstance(body, dict):
            yield path, body


def forget_ends(feed_directory: Path, *, clock: Callable[[], float] = time.time) -> None:
    """Remove what was left so long ago that nobody asks for it any more; for the owner of the directory."""
    with contextlib.suppress(OSError):
        for path in (feed_directory / RUNS).iterdir():
            with contextlib.suppress(OSError):
                old = path.suffix == ENDED and clock() - path.lstat().st_mtime > ENDED_SECONDS
                if old or (path.suffix == JOB and not path.with_suffix(LOCK).exists()):
                    path.unlink()


def recording_processes(feed_directory: Path) -> set[int]:
    """The living processes that hold the lock of a feed file; 0 for those of another pid namespace."""
    try:
        locks = [path for path in feed_directory.iterdir() if path.suffix == LOCK and process_of(path.name)]
    except OSError:
        return set()
    return {pid for path in locks if (pid := _holder(path)) is not None}


def any_writer(feed_directory: Path) -> bool:
    """Whether a living process holds the lock of a feed file."""
    return bool(recording_processes(feed_directory))


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
