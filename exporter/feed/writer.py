"""Feed writer: a file per training process, which the recording thread replaces as a whole at each flush.

A failed write raises no error: it is counted in the next snapshot, and the last complete snapshot stays readable. On a full disk, the
final snapshot overwrites the last one, if it fits into the same blocks. A write can block for as long as the file system does; the feed
should therefore be in shared memory.
"""
# This package uses string paths in the job and in the sidecar.
# ruff: noqa: PTH100, PTH108, PTH118, PTH208

from __future__ import annotations

import errno
import json
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from exporter.errors import FeedDirectoryError, FeedFormatError
from exporter.feed import files
from exporter.feed.directory import is_trusted, prepare_directory
from exporter.feed.encoder import HEADER, MAX_BYTES, Encoder
from exporter.feed.entries import foreign_uid
from exporter.feed.files import FEED, LOCK, RecordLock, find_lock_holder, parse_process_id, remove_process
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.recording.values import Recording

RETENTION_SECONDS = 86_400.0
"""Time after the last change after which a new writer removes the files of an exited process."""
MAX_WAIT_SECONDS = 1.0
"""Maximum time for which a thread waits for the write of another thread."""
CONFLICT_SECONDS = 10.0
"""Minimum overlap of two running processes of the same rank before a notice. After a restart, the old and the new process overlap for
less time."""
MAX_NAMED_STATS = 5
"""Maximum number of omitted Stats that a notice names."""
MAX_CHECKED_NAMES = 10_000
"""Maximum number of names in the feed directory that are checked for conflicts and for files of exited processes."""


class FeedWriter:
    """Writer of the snapshots of a process. The constructor accesses no file.

    A writer that a forked child inherits has no effect. A missing feed directory is created, also after its removal. If a snapshot
    exceeds `max_bytes`, the newest Stats are omitted.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        identity: ProcessIdentity,
        *,
        flush_seconds: float = 1.0,
        clock: Callable[[], float] = time.time,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if not files.is_process_id(identity.id):
            raise ValueError(f"a process id is 32 hexadecimal digits, not {identity.id!r}")
        # Absolute, because the job may change the working directory.
        self.directory = os.path.abspath(directory)
        self._mode = files.SHARED_MODE if is_trusted(self.directory) else files.OWN_MODE
        self.identity = identity  # may be replaced by an identity of the same id
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_stats = 1 << 30  # as many as fit
        self._stem = os.path.join(self.directory, identity.id)
        self._encoder = Encoder()
        self._write_lock = threading.Lock()
        self._lock: RecordLock | None = None
        self._sequence = 0
        self.dropped_counts: dict[str, int] = {}  # failed writes and omitted Stats, by reason
        self.problem: str | None = None  # error of the last write; None if it succeeded
        self.notice: str | None = None  # sentence to log in the job
        self._pid = os.getpid()
        self._has_removed_old_files = False
        # Unix time from which a conflicting process is searched; infinite before the first snapshot, -inf after the search
        self._conflict_search_at = float("inf")
        self._is_closed = False

    def publish(self, recording: Recording) -> bool:
        """Replace the last snapshot with a snapshot of this recording. Return False if it is not written.

        Errors of the file system, of the encoding and of the memory are counted and stored in `problem`.
        """
        if (
            self._is_closed
            or self._pid != os.getpid()
            or not self._write_lock.acquire(timeout=MAX_WAIT_SECONDS)
        ):
            return False
        try:
            self._write(recording)
        except (OSError, FeedDirectoryError, FeedFormatError, MemoryError) as error:
            self.problem = f"{type(error).__name__}: {error}"
            self.dropped_counts["write_failed"] = self.dropped_counts.get("write_failed", 0) + 1
            self._set_outdated(is_outdated=True)
            return False
        finally:
            self._write_lock.release()
        if self.problem is not None:
            self.problem = None
            self._set_outdated(is_outdated=False)
        if self.identity.trains and self.identity.run_given and self.identity.rank is not None:
            self._search_conflict()
        return True

    def close(self) -> None:
        """Release the lock and keep the last snapshot; a later `publish` has no effect."""
        self._is_closed = True
        self._drop_lock()

    def _set_outdated(self, *, is_outdated: bool) -> None:
        """Mark the last snapshot as outdated or current, if the lock file exists. Errors are ignored."""
        with suppress(OSError):
            if self._lock is not None:
                self._lock.mark(is_outdated=is_outdated)

    def _drop_lock(self) -> None:
        """Release the lock, except in a forked child."""
        if self._pid == os.getpid() and self._lock is not None:
            self._lock.release()
            self._lock = None

    def _write(self, recording: Recording) -> None:
        """Write a snapshot, after the lock is taken or restored. Raises the errors that `publish` counts."""
        # Once the lock file exists, it reveals the process id, and other users can create a file of that name. The encoding before it leaves
        # them less time.
        data = self._encode(recording)
        if self._lock is None or not self._lock.keep():
            # The first snapshot, or the job closed the descriptor, or the files were removed.
            self._drop_lock()
            prepare_directory(self.directory)
            self._lock = RecordLock.take(self._stem + LOCK, create_mode=self._mode)
            if self._lock is None:
                raise BlockingIOError(f"another process holds {self._stem}{LOCK}")
        try:
            files.replace_file(
                self._stem + FEED, data, temporary=self._stem + files.TEMPORARY, mode=self._mode
            )
        except (PermissionError, IsADirectoryError):
            if self._sequence == 0 and foreign_uid(self._stem + FEED) is not None:
                self._change_id()
            raise
        except OSError as error:
            # The last snapshot is not replaced later, so that its samples would be lost.
            if not recording.final or not self._sequence or error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            files.overwrite_file(self._stem + FEED, data)
        self._sequence += 1
        if not self._has_removed_old_files:
            self._has_removed_old_files = True
            self._remove_old_files()

    def _change_id(self) -> None:
        """Continue with a new process id, because another user has created a file with the current id."""
        self._drop_lock()
        with suppress(OSError):
            os.unlink(self._stem + LOCK)
        self.identity = self.identity.replace(id=os.urandom(16).hex())
        self._stem = os.path.join(self.directory, self.identity.id)
        self._encoder = Encoder()

    def _encode(self, recording: Recording) -> bytes:
        """Return the bytes of a snapshot, without the newest Stats if the snapshot would exceed `max_bytes`.

        A snapshot without Stats may exceed `max_bytes`. The reader refuses this file.
        """
        stats, next_sequence = recording.stats, self._sequence + 1
        while True:
            part, dropped_counts = recording, self.dropped_counts
            if len(stats) > self._max_stats:
                part = recording.replace(stats=stats[: self._max_stats])
            count = len(part.stats)
            if count < len(stats):
                dropped_counts = dropped_counts | {
                    "too_large": dropped_counts.get("too_large", 0) + len(stats) - count
                }
            data = self._encoder.encode(
                Snapshot(
                    self.identity, next_sequence, self._clock(), self._flush_seconds, part, dropped_counts
                )
            )
            if len(data) <= self._max_bytes or not count:
                break
            # A tenth of the size is reserved for growing numbers, so that later snapshots fit at once.
            self._max_stats = min(count - 1, int(count * 0.9 * self._max_bytes / len(data)))
        self.dropped_counts = dropped_counts
        if count < len(stats) and self.notice is None:
            omitted_stats = stats[count : count + MAX_NAMED_STATS]
            names = ", ".join(repr(stat.definition.name) for stat in omitted_stats)
            self.notice = (
                f"{len(stats) - count} Stats, starting with {names}, are not exported: the feed file of a process is"
                f" limited to {self._max_bytes} bytes"
            )
        return data

    def _search_conflict(self) -> None:
        """Search once for another running process of this rank, `CONFLICT_SECONDS` after the first snapshot."""
        now, identity = self._clock(), self.identity
        self._conflict_search_at = min(self._conflict_search_at, now + CONFLICT_SECONDS)
        if now < self._conflict_search_at:
            return
        self._conflict_search_at = float("-inf")
        try:
            names = [name for name in os.listdir(self.directory)[:MAX_CHECKED_NAMES] if name.endswith(FEED)]
        except OSError:
            return
        conflicting_pid = next(
            (pid for name in names if (pid := _conflicting_pid(self.directory, name, identity))), None
        )
        if conflicting_pid is not None:
            self.notice = (
                f"process {conflicting_pid} also records as rank {identity.rank} of run {identity.run!r}; this process"
                f" ({identity.pid}) is shown as a second worker of the rank; set a different rank for each process"
                " (launcher, RANK or exporter.configure(rank=…)), or a different run name"
            )

    def _remove_old_files(self) -> None:
        """Remove the files of exited processes that did not change for `RETENTION_SECONDS`."""
        modified_at_by_id: dict[str, float] = {}  # Unix time of the last change of any file of the process
        try:
            for name in os.listdir(self.directory)[:MAX_CHECKED_NAMES]:
                process_id = parse_process_id(name)
                if process_id is not None and process_id != self.identity.id:
                    with suppress(FileNotFoundError):  # a different process removes files too
                        modified_at = os.lstat(os.path.join(self.directory, name)).st_mtime
                        modified_at_by_id[process_id] = max(
                            modified_at_by_id.get(process_id, 0.0), modified_at
                        )
            for process_id, modified_at in modified_at_by_id.items():
                if self._clock() - modified_at > RETENTION_SECONDS:
                    remove_process(self.directory, process_id)
        except OSError:
            return  # permissions are missing


def _conflicting_pid(directory: str, name: str, identity: ProcessIdentity) -> int | None:
    """Return the pid of the process with a feed file if it is running, trains as the same rank and started earlier.

    Returns None for an unreadable or invalid file, which another user may have written.
    """
    path = os.path.join(directory, name)
    try:
        if find_lock_holder(path.removesuffix(FEED) + LOCK) is None:
            return None
        data, _ = files.read_file(path, MAX_BYTES)
        *_, definitions_length, _, _ = HEADER.unpack_from(data)
        definitions = data[HEADER.size : HEADER.size + definitions_length]
        other_process = json.loads(definitions)["process"]
        is_same_rank = (other_process["run"], other_process["rank"], other_process.get("trains")) == (
            identity.run,
            identity.rank,
            True,
        )
        is_earlier = (other_process["started"], name) < (identity.started, identity.id + FEED)
        return int(other_process["pid"]) if is_same_rank and is_earlier else None
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError, struct.error):
        return None
