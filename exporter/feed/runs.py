"""Launches of `run` in a feed directory, with their jobs and exit statuses.

A launch locks `runs/<pid>-<random>.lock`. An unlocked file belongs to a killed launch, whose job may still be running. JSON files
with the same stem contain the description of the running job (`….job`) and the exit status (`….ended`). In a shared feed
directory, each user has a directory `runs-<uid>` without write access for other users.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from exporter.errors import FeedError
from exporter.feed.directory import own_uid
from exporter.feed.entries import is_shared, own_entry, trusted_entries
from exporter.feed.files import (
    FEED,
    LOCK,
    OWNER_LOCK,
    RecordLock,
    find_lock_holder,
    parse_process_id,
    read_file,
    replace_file,
)

RUNS = "runs"
"""Directory of the launches in a feed directory."""
_RUNS_OF_USER = re.compile(rf"{RUNS}-\d+(-\d+)?(-[0-9a-f]{{16}})?")
ATTACHED_FLAG = "--run.attached"
"""Flag of a sidecar that runs while a launch is registered."""
JOB_SUFFIX = ".job"
END_SUFFIX = ".ended"
MAX_BYTES = 4096
"""Maximum number of bytes that are read of a file. A longer file is invalid JSON, and is ignored."""
MAX_FILES = 4096
"""Maximum number of directories, and of files in the directory of another user, that are read."""
END_RETENTION_SECONDS = 86400.0
"""Retention of exit status files."""
SILENT_SECONDS = 20.0
"""Time after the start of a job at which `run` checks whether the job has recorded anything. A job that has not is silent."""

_INVALID_CONTENT = (LookupError, TypeError, ValueError, OverflowError)
"""Exceptions from a file with missing keys, wrong types or numbers out of range. Other users may write such files."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Diagnosis of a silent job."""

    reason: str  # value of the label `reason`
    found: str  # sentence about the cause, with the interpreter or the file
    remedy: str  # sentence about what to do


@dataclass(frozen=True, slots=True)
class Job:
    """Job of a running launch."""

    pid: int  # process id of the job, in the namespace of `run`
    run: str  # name of the run
    started: float  # Unix time
    silence: Silence | None = None  # None for a job that has recorded, and before the diagnosis
    launch: str = ""  # launch id in the environment of the job's processes; empty from older releases


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """End of the job of a launch, or of a worker of torchrun, with the exit status."""

    path: Path  # file of the exit status
    pid: int  # process id of the job or worker, in the namespace of `run` or of the agent
    status: int  # exit status, or a signal as a negative number
    noticed_at: float  # Unix time at which `run` or the agent noticed the exit
    run: str = ""  # name of the run; empty from older releases
    started_at: float = 0.0  # Unix time of the job's start; 0 from older releases
    launch: str = ""  # launch id in the environment of the job's processes; empty from older releases
    is_worker: bool = False  # True for a worker of torchrun


class Registration:
    """Registration of a launch until `release` or the exit of the process.

    The constructor raises OSError or FeedError if the lock file cannot be created and locked.
    """

    def __init__(self, feed_directory: Path) -> None:
        self._feed_directory = feed_directory
        self._pid = os.getpid()
        self._job: Job | None = None
        self._create_lock()

    def _create_lock(self) -> None:
        """Create and lock the file of the launch. Raises OSError, or FeedError if another process holds the new file."""
        directory = _make_directory(self._feed_directory)
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        new_path, self._path = directory / f"{name}.new", directory / f"{name}{LOCK}"
        # Sidecars of other users can read the file if the directory permits it.
        lock = RecordLock.take(os.fspath(new_path), create_mode=0o644)
        if lock is None:
            raise FeedError(f"{new_path}: locked by another process")
        try:
            # Renamed after it is locked, because an unlocked lock file means a killed launch.
            new_path.rename(self._path)
        except OSError:
            lock.release()
            new_path.unlink(missing_ok=True)
            raise
        lock.path = os.fspath(self._path)
        self._lock = lock

    @property
    def job_file(self) -> str:
        """Path of the file that `write_job` writes."""
        return os.fspath(self._path.with_suffix(JOB_SUFFIX))

    def keep(self) -> None:
        """Restore the registration if its file was removed. Never raises."""
        if self._pid == os.getpid() and not self._lock.keep():
            with contextlib.suppress(OSError, FeedError):
                self._lock.release()
                self._create_lock()
                if self._job is not None:
                    self.write_job(self._job)

    def write_job(self, job: Job) -> None:
        """Write the description of the job. Never raises."""
        self._job = job
        self._write(JOB_SUFFIX, dataclasses.asdict(job))

    def write_end(self, job: Job, wait_status: int) -> None:
        """Write the exit status of the job, from a wait status of `os.waitpid`. Never raises."""
        self.keep()
        status = os.waitstatus_to_exitcode(wait_status)
        end = {"pid": job.pid, "status": status, "at": time.time(), "run": job.run, "started": job.started}
        self._write(END_SUFFIX, {**end, "launch": job.launch})

    def _write(self, suffix: str, content: Mapping[str, object]) -> None:
        """Write a JSON file next to the lock file. An OSError is ignored."""
        path = os.fspath(self._path.with_suffix(suffix))
        with contextlib.suppress(OSError):
            replace_file(path, json.dumps(content).encode(), temporary=f"{path}.tmp", mode=0o644)

    def release(self) -> None:
        """Remove the registration. Never raises, and does nothing in a forked child."""
        if self._pid == os.getpid():
            _remove_registration(self._path)
            with contextlib.suppress(OSError):
                self._lock.release()


def needs_sidecar(feed_directory: Path, *, launcher: int | None = None) -> bool:
    """Return True if the sidecar is needed: a launch is running, or a process is recording after its launch was killed.

    Otherwise, the files of killed launches are removed. *launcher* is the pid of the launch that started the sidecar. If all files were
    removed and this launch is still the parent, the sidecar is needed, because the launch is about to restore its registration.
    """
    lock_files = _files(feed_directory, LOCK)
    if any(_holder(path) is not None for path in lock_files):
        return True
    if launcher is not None and launcher == os.getppid() and not _directories(feed_directory):
        return True
    # A file that disappeared after the listing belonged to a launch that ended normally.
    abandoned_files = [path for path in lock_files if _exists(path)]
    if abandoned_files and recording_pids(feed_directory):
        return True
    for path in abandoned_files:
        _remove_registration(path)
    return False


def process_ends(feed_directory: Path) -> list[ProcessEnd]:
    """Return the ends of jobs and workers, with their exit statuses. Unreadable and invalid files are ignored."""
    ends = []
    for path, body in _documents(feed_directory, END_SUFFIX):
        with contextlib.suppress(*_INVALID_CONTENT):
            end = ProcessEnd(
                path,
                pid=int(body["pid"]),
                status=int(body["status"]),
                noticed_at=float(body["at"]),
                run=str(body.get("run", "")),
                started_at=float(body.get("started", 0.0)),
                launch=str(body.get("launch", "")),
                is_worker=body.get("worker") is True,
            )
            if isfinite(end.noticed_at) and isfinite(end.started_at):
                ends.append(end)
    return ends


def jobs(feed_directory: Path) -> list[Job]:
    """Return the jobs of running launches. Unreadable and invalid files are ignored."""
    running_jobs = []
    for path, body in _documents(feed_directory, JOB_SUFFIX):
        with contextlib.suppress(*_INVALID_CONTENT):
            silence_body = body.get("silence")
            silence = None
            if silence_body is not None:
                silence = Silence(*(str(silence_body[field]) for field in Silence.__slots__))
            job = Job(
                pid=int(body["pid"]),
                run=str(body["run"]),
                started=float(body["started"]),
                silence=silence,
                launch=str(body.get("launch", "")),
            )
            if isfinite(job.started) and _holder(path.with_suffix(LOCK)) is not None:
                running_jobs.append(job)
    return running_jobs


def launch_ids(feed_directory: Path) -> set[str]:
    """Return the launch ids of the jobs of running launches. The set contains "" for a launch of an older release."""
    return {job.launch for job in jobs(feed_directory)}


def write_worker_end(feed_directory: Path, *, pid: int, status: int, launch: str) -> None:
    """Write the exit status of a worker, in torchrun's agent. Never raises OSError."""
    end = {"pid": pid, "status": status, "at": time.time(), "launch": launch, "worker": True}
    with contextlib.suppress(OSError):
        path = _make_directory(feed_directory) / f"worker-{pid}-{secrets.token_hex(4)}{END_SUFFIX}"
        replace_file(os.fspath(path), json.dumps(end).encode(), temporary=f"{path}.tmp", mode=0o644)


def remove_old_ends(feed_directory: Path, *, clock: Callable[[], float] = time.time) -> None:
    """Remove exit statuses older than `END_RETENTION_SECONDS`, and descriptions of jobs whose launch has ended."""
    for path in _files(feed_directory, END_SUFFIX, JOB_SUFFIX):
        with contextlib.suppress(OSError):
            is_old = path.suffix == END_SUFFIX and clock() - path.lstat().st_mtime > END_RETENTION_SECONDS
            if is_old or (path.suffix == JOB_SUFFIX and not path.with_suffix(LOCK).exists()):
                path.unlink()


def _make_directory(feed_directory: Path) -> Path:
    """Return the directory of this user's launches, created on first use. Raises OSError."""
    directory = Path(own_entry(os.fspath(feed_directory / own_name(feed_directory))))
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        # Readable for the same users as the feed directory.
        directory.chmod(stat.S_IMODE(feed_directory.stat().st_mode) & ~0o1022)
    return directory


def own_name(feed_directory: Path) -> str:
    """Return the name of the directory of this user's launches."""
    return f"{RUNS}-{own_uid()}" if is_shared(os.fspath(feed_directory)) else RUNS


def _directories(feed_directory: Path) -> list[Path]:
    """Return the directories of launches, this user's first. A shared feed directory has a directory per user."""
    names = [RUNS]
    if is_shared(os.fspath(feed_directory)):
        with contextlib.suppress(OSError):
            names = sorted(filter(_RUNS_OF_USER.fullmatch, os.listdir(feed_directory)))[:MAX_FILES]  # noqa: PTH208 - names are needed, not paths
    paths = [path for name in names if (path := feed_directory / name).is_dir() and not path.is_symlink()]
    return sorted(paths, key=lambda path: not _is_own(path))


def _is_own(path: Path) -> bool:
    """Return True if a directory belongs to this user."""
    try:
        return path.lstat().st_uid == own_uid()
    except OSError:
        return False


def _files(feed_directory: Path, *suffixes: str) -> list[Path]:
    """Return the files of all launches with these suffixes, at most `MAX_FILES` of another user's directory."""
    paths: list[Path] = []
    for directory in _directories(feed_directory):
        limit = None if _is_own(directory) else MAX_FILES
        with contextlib.suppress(OSError):
            paths += [path for path in islice(directory.iterdir(), limit) if path.suffix in suffixes]
    return paths


def _documents(feed_directory: Path, suffix: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the path and the JSON object of each file with a suffix. Unreadable and invalid files are skipped."""
    for path in _files(feed_directory, suffix):
        try:
            data, _ = read_file(os.fspath(path), MAX_BYTES)
            body = json.loads(data)
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(body, dict):
            yield path, body


def _remove_registration(lock_file: Path) -> None:
    """Remove the description of the job and the lock file of a launch. The exit status stays."""
    for path in (lock_file.with_suffix(JOB_SUFFIX), lock_file):
        with contextlib.suppress(OSError):
            path.unlink()


def recording_pids(feed_directory: Path) -> set[int]:
    """Return the pids of processes with a feed; 0 for a process in an invisible pid namespace."""
    try:
        locks = [
            path for path in feed_directory.iterdir() if path.suffix == LOCK and parse_process_id(path.name)
        ]
    except OSError:
        return set()
    return {pid for path in locks if (pid := _holder(path)) is not None}


def has_feed(feed_directory: Path) -> bool:
    """Return True if a process has recorded into the directory, or if the directory cannot be read."""
    try:
        return any(path.suffix == FEED for path in feed_directory.iterdir())
    except OSError:
        return True


def owner(feed_directory: Path) -> int | None:
    """Return the pid of the sidecar that owns the directory, or None without an owner.

    The pid is 0 if the sidecar is in an invisible pid namespace. Lock files of users that are not trusted are ignored.
    """
    for path in trusted_entries(os.fspath(feed_directory / OWNER_LOCK)):
        if (pid := _holder(Path(path))) is not None:
            return pid
    return None


def attached_owner(feed_directory: Path, proc: Path = Path("/proc")) -> int | None:
    """Return the pid of the owner, or None if `run` did not start the owner or its pid is unknown."""
    pid = owner(feed_directory)
    if not pid:
        return None
    try:
        arguments = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return pid if ATTACHED_FLAG.encode() in arguments else None


def _exists(path: Path) -> bool:
    """Return True if a file exists. A file in an inaccessible directory of another user counts as missing."""
    try:
        return path.exists()
    except OSError:
        return False


def _holder(path: Path) -> int | None:
    """Return the pid of the holder of a lock, or None without a holder.

    An unreadable file counts as unlocked. Otherwise, a file of another user could keep a sidecar running.
    """
    try:
        return find_lock_holder(os.fspath(path))
    except OSError:
        return None
