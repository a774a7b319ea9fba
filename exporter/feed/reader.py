"""Feed reader: scans a feed directory for the snapshots of all training processes.

Runs in the sidecar or in a user's tool, on a single thread. Several readers may read at once, and a reader does not block writers.
An invalid file affects no other file. A single reader owns the directory and removes files; the other readers only read.
"""
# ruff: noqa: PTH118, PTH208 - this package uses string paths; pathlib cannot list an open directory

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from exporter.errors import FeedDirectoryError, FeedFormatError
from exporter.feed import files
from exporter.feed.decoder import SNAPSHOT_MEMORY_BYTES, Decoder
from exporter.feed.directory import check_directory, is_trusted, own_uid
from exporter.feed.encoder import HEADER, MAX_BYTES
from exporter.feed.entries import ForeignEntry, foreign_uid, own_entry
from exporter.feed.files import FEED, LOCK, find_lock_holder, open_regular, parse_process_id, remove_process
from exporter.feed.ownership import DirectoryOwnership
from exporter.feed.runs import own_name
from exporter.feed.shares import (
    ChangedFile,
    FileMemory,
    select_files_of_pass,
    select_files_of_users,
    select_files_to_displace,
)
from exporter.feed.snapshot import Snapshot
from exporter.feed.stacks import REQUEST

MAX_FILES = 4096
"""Maximum number of feed files that are read. Further files are refused."""
PASS_BYTES = 4 << 20
"""Bytes of changed files that a pass reads. The other files wait for a later pass. All snapshots that fit into memory together have about
3 MiB of content."""
FIRST_PASS_BYTES = 16 << 20
"""Bytes of files that the first pass reads, which finds all files changed."""
USER_STATS_LIMIT_BYTES = 52 << 20
"""Memory of all snapshots above which a further snapshot receives only `MIN_SNAPSHOT_MEMORY_BYTES`. Stats of users that do not fit are ignored
and counted."""
MIN_SNAPSHOT_MEMORY_BYTES = 1 << 20
"""Minimum memory that a snapshot receives, for the exporter's own families."""
MAX_DECODED_BYTES = 64 << 20
"""Memory of all snapshots above which further files are refused, or displace other files."""
REMOVAL_DELAY_SECONDS = 5.0
"""Time without a change after which `remove` treats a process without a lock as exited. A job that closes all descriptors loses the lock
although it runs, and has the lock again after the next write. Does not apply after a final snapshot."""
LEFTOVER_SECONDS = 60.0
"""Time after which an empty feed file, or a lock or temporary file without a feed file, is removed. Before that, the process may be
about to write its first snapshot."""

_REASONS = {errno.ELOOP: "symlink", errno.EMLINK: "links", errno.EINVAL: "not_regular"}


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """Snapshot of a process, with the state of the process."""

    snapshot: Snapshot  # the last complete snapshot
    is_alive: bool  # True if the process holds its lock, or while a changed file is not read yet
    # time since the reader noticed the latest change; until the first change, time since the file was modified
    age_seconds: float
    # process id in the reader's pid namespace; None for an exited process or an invisible pid namespace
    pid: int | None = None
    is_outdated: bool = False  # the writer has newer values and cannot write them


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of a scan of a feed directory."""

    entries: tuple[FeedEntry, ...]  # readable files, the earliest started process first
    # file name (printable ASCII) and reason of each refused `.feed` file. The reason is `name`, `too_many`, `too_large`,
    # `memory`, `owner`, `symlink`, `links`, `not_regular`, `unreadable`, `lock` (the lock file is unreadable), or a reason
    # of FeedFormatError
    refused_files: tuple[tuple[str, str], ...]
    unread_files: tuple[str, ...] = ()  # names of files that were not read yet; a later pass reads them


@dataclass(frozen=True, slots=True)
class _FileState:
    """State of a file that identifies its content, even if inodes are reused and times are coarse."""

    inode: int
    modified_ns: int
    size: int
    header: bytes  # sequence and checksum


@dataclass(slots=True)
class _CachedFile:
    """Result of the last read of a file, used while the file is unchanged."""

    state: _FileState | None = None  # of the content that was read last
    last_state: _FileState | None = None  # as of the last pass
    outcome: Snapshot | str = ""  # the snapshot, the reason of the refusal, or empty before the first read
    pid: int | None = None  # holder of the lock, 0 in an invisible pid namespace
    uid: int = -1  # user of the file; -1 before the first pass
    size: int = 0  # bytes
    required_bytes: int = 0  # memory of a snapshot that was refused for memory
    is_changed: bool = True  # True if the current content is not read yet
    skipped_passes: int = 0  # consecutive passes in which the changed file was not read
    is_outdated: bool = False  # see `FeedEntry`
    sequence: int | None = None  # of the last valid snapshot
    changed_at: float = 0.0  # monotonic time of the last change
    decoder: Decoder = field(default_factory=Decoder)


class FeedReader:
    """Reader of a feed directory. The constructor touches no file.

    The user's default directory may be missing before the first recording, and files of other users in it are refused. In a
    configured directory, the files of all users are read. Files beyond the limits are refused; known files have precedence.

    Attributes:
        ownership: Ownership of the directory.
        foreign_entries: Entries of other users under the exporter's names, as of the last scan.
    """

    foreign_entries: tuple[ForeignEntry, ...] = ()

    def __init__(
        self,
        directory: Path,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
        max_bytes: int = MAX_BYTES,
        max_files: int = MAX_FILES,
    ) -> None:
        self._directory = os.fspath(directory)
        self._is_trusted = is_trusted(directory)
        self.ownership = DirectoryOwnership(directory)
        self._monotonic, self._clock = monotonic, clock
        self._max_bytes, self._max_files = max_bytes, max_files
        self._files: dict[str, _CachedFile] = {}
        self._decoded_bytes = 0
        self._pass_count = 0
        self._leftovers: dict[str, float] = {}  # monotonic time of the first observation, by process id

    def scan(self) -> Scan:
        """Read changed files within the limits of a pass. Raises `FeedDirectoryError` if the directory cannot be used."""
        if not self._is_trusted and not os.path.lexists(self._directory):
            self._files.clear()
            return Scan((), ())
        check_directory(self._directory)
        try:
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                names = os.listdir(directory)
                scan = self._scan_files(directory, names)
            finally:
                os.close(directory)
        except OSError as error:
            raise FeedDirectoryError(
                f"cannot read the feed directory ({error.strerror})",
                path=self._directory,
                remedy="give this user read and execute access, or choose a different directory with --feed.dir",
            ) from error
        self._clear_leftovers(names)
        self.foreign_entries = tuple(self._find_foreign_entries())
        return scan

    def remove(self, process_id: str) -> bool:
        """Remove the files of a process after its totals were saved. Return True if neither a feed file nor a lock file is left.

        Requires ownership. The files stay if the process is running, if the lock may be lost only temporarily, or if no `scan` has
        read the last snapshot. A later call can succeed.
        """
        name = process_id + FEED
        if not self.ownership.keep() or parse_process_id(name) is None:
            return False
        file = self._files.get(name)
        if file is not None and not self._has_exited(file):
            return False
        return remove_process(self._directory, process_id, condition=lambda: self._is_as_read(name))

    def _find_foreign_entries(self) -> Iterator[ForeignEntry]:
        """Yield the foreign entries under the exporter's names, for which the exporter uses alternative names."""
        for name in (files.OWNER_LOCK, files.OVERRIDES, REQUEST, own_name(Path(self._directory))):
            path = os.path.join(self._directory, name)
            uid = foreign_uid(path)
            if uid is not None:
                yield ForeignEntry(path, uid, own_entry(path))

    def _is_as_read(self, name: str) -> bool:
        """Return True if a file is missing, or unchanged since the last read."""
        file = self._files.get(name)
        try:
            descriptor, status = open_regular(os.path.join(self._directory, name))
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        try:
            return file is not None and _state(descriptor, status) == file.state
        finally:
            os.close(descriptor)

    def _has_exited(self, file: _CachedFile) -> bool:
        """Return True if a process has exited: it has written a final snapshot, or it has no lock and the file has not changed for a while.

        This while is `REMOVAL_DELAY_SECONDS`, or three flush intervals if these are longer.
        """
        wait_seconds = REMOVAL_DELAY_SECONDS
        if isinstance(file.outcome, Snapshot):
            if file.outcome.recording.final:
                return True
            wait_seconds = max(wait_seconds, 3 * file.outcome.flush_seconds)
        return self._monotonic() - file.changed_at >= wait_seconds

    def _scan_files(self, directory: int, names: list[str]) -> Scan:
        """Update the states of the files, read the changed files of this pass, and return the result."""
        existing_names = set(names)
        self._decoded_bytes = sum(
            file.decoder.memory_bytes for name, file in self._files.items() if name in existing_names
        )
        feeds = [name for name in names if name.endswith(FEED)]
        process_files = sorted([name for name in feeds if parse_process_id(name)], key=self._precedence)
        reason_by_name = dict.fromkeys([name for name in feeds if not parse_process_id(name)], "name")
        if len(process_files) > self._max_files:
            users = {name: _uid(name, directory) for name in process_files}
            # Removed below for the selected files.
            reason_by_name |= dict.fromkeys(process_files, "too_many")
            process_files = select_files_of_users(users, self._max_files)
        files_by_name: dict[str, _CachedFile] = {}
        for name in process_files:
            reason_by_name.pop(name, None)
            file = self._files.get(name) or _CachedFile()
            reason = self._attempt(self._update_state, directory, name, file)
            if reason is None:
                files_by_name[name] = file
            elif reason:
                reason_by_name[name] = reason
        self._files = files_by_name
        self._read_changed(directory, reason_by_name)
        return self._result(reason_by_name)

    def _read_changed(self, directory: int, reason_by_name: dict[str, str]) -> None:
        """Read the changed files of this pass."""
        changed_files = [
            ChangedFile(name, file.size, file.pid is not None, file.skipped_passes)
            for name, file in self._files.items()
            if file.is_changed
        ]
        for name in select_files_of_pass(changed_files, PASS_BYTES if self._pass_count else FIRST_PASS_BYTES):
            reason = self._attempt(self._read, directory, name, self._files[name])
            if reason is not None:
                del self._files[name]
            if reason:
                reason_by_name[name] = reason
        self._pass_count += 1

    def _attempt(
        self,
        call: Callable[[int, str, _CachedFile], str | None],
        directory: int,
        name: str,
        file: _CachedFile,
    ) -> str | None:
        """Return the result of *call* for a file: None after a success, otherwise the reason of the refusal.

        Returns "" if the file was removed since the listing, and the reason of an OSError, such as "symlink" or "unreadable".
        """
        try:
            return call(directory, name, file)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return _REASONS.get(error.errno or 0, "unreadable")

    def _result(self, reason_by_name: dict[str, str]) -> Scan:
        """Return the entries, the refusals and the unread files of the pass, and count the skipped passes of changed files."""
        entries: list[FeedEntry] = []
        unread_files: list[str] = []
        for name, file in self._files.items():
            file.skipped_passes = file.skipped_passes + 1 if file.is_changed else 0
            if isinstance(file.outcome, Snapshot):
                age_seconds = max(0.0, self._monotonic() - file.changed_at)
                # A process counts as alive until its last snapshot is read.
                is_alive = file.pid is not None or file.is_changed
                entry = FeedEntry(file.outcome, is_alive, age_seconds, file.pid or None, file.is_outdated)
                entries.append(entry)
            elif file.outcome:
                reason_by_name[name] = file.outcome
            else:
                unread_files.append(name)
        entries.sort(key=lambda entry: (entry.snapshot.process.started, entry.snapshot.process.id))
        reasons = tuple([(ascii(name)[1:-1], reason) for name, reason in reason_by_name.items()])
        return Scan(tuple(entries), reasons, tuple(unread_files))

    def _precedence(self, name: str) -> tuple[int, str]:
        """Return the sort key of a file: known files precede new files, and new files precede refused files."""
        file = self._files.get(name)
        if file is None:
            return 1, name
        return (2 if isinstance(file.outcome, str) and file.outcome else 0), name

    def _update_state(self, directory: int, name: str, file: _CachedFile) -> str | None:
        """Update the lock's holder and the state of a file. Return the reason of a refusal, or None."""
        lock = name.removesuffix(FEED) + LOCK
        try:
            # Queried before the file is read, so that the snapshot of an exited process is its last snapshot.
            file.pid = find_lock_holder(lock, directory=directory)
            file.is_outdated = file.pid is not None and os.stat(lock, dir_fd=directory).st_mtime == 0
        except OSError:
            return "lock"
        descriptor, status = open_regular(name, directory=directory)
        try:
            if not self._is_trusted and status.st_uid != own_uid():
                return "owner"
            if status.st_size > self._max_bytes:
                return "too_large"
            state = _state(descriptor, status)
        finally:
            os.close(descriptor)
        file.uid, file.size = status.st_uid, status.st_size
        file.is_changed = state != file.state or (
            file.outcome == "memory" and self._decoded_bytes + file.required_bytes <= MAX_DECODED_BYTES
        )
        if state != file.last_state:
            file.last_state = state
            # The process writes, even if the file is not read in this pass.
            if isinstance(file.outcome, Snapshot):
                file.changed_at = self._monotonic()
        return None

    def _read(self, directory: int, name: str, file: _CachedFile) -> None:
        """Read and decode a file. Raises OSError, but no error for invalid content, which is the outcome of the file."""
        descriptor, status = open_regular(name, directory=directory)
        try:
            state = _state(descriptor, status)
            data = os.pread(descriptor, min(status.st_size, self._max_bytes), 0)
        finally:
            os.close(descriptor)
        self._decode(data, name, file, modified_at=status.st_mtime)
        file.state = file.last_state = state
        file.is_changed = False

    def _decode(self, data: bytes, name: str, file: _CachedFile, *, modified_at: float) -> None:
        """Decode a file, and store the snapshot or the reason of the refusal as its outcome."""
        try:
            self._decoded_bytes -= file.decoder.memory_bytes
            available_bytes = min(SNAPSHOT_MEMORY_BYTES, USER_STATS_LIMIT_BYTES - self._decoded_bytes)
            snapshot = file.decoder.decode(data, max(MIN_SNAPSHOT_MEMORY_BYTES, available_bytes))
        except FeedFormatError as error:
            file.outcome = error.reason
            return
        finally:
            self._decoded_bytes += file.decoder.memory_bytes
        if not self._fit_into_memory(name, file):
            self._refuse_for_memory(file)
            return
        if snapshot.process.id + FEED != name:  # a copy, whose samples would count twice
            file.outcome = "name"
            return
        now = self._monotonic()
        if file.sequence is None:
            # Another user may set any modification time, also before 1970.
            file.changed_at = now - max(0.0, self._clock() - max(0.0, modified_at))
        elif file.sequence != snapshot.sequence:
            file.changed_at = now
        file.outcome, file.sequence = snapshot, snapshot.sequence

    def _fit_into_memory(self, name: str, file: _CachedFile) -> bool:
        """Return True if a decoded file fits into `MAX_DECODED_BYTES`, possibly after other files are displaced."""
        excess_bytes = self._decoded_bytes - MAX_DECODED_BYTES
        if excess_bytes <= 0:
            return True
        other_files = [
            FileMemory(other_name, other_file.uid, other_file.decoder.memory_bytes)
            for other_name, other_file in self._files.items()
            if other_name != name and other_file.decoder.memory_bytes
        ]
        displaced_names = select_files_to_displace(
            FileMemory(name, file.uid, file.decoder.memory_bytes), other_files, excess_bytes
        )
        for other_name in displaced_names:
            self._refuse_for_memory(self._files[other_name])
        return bool(displaced_names)

    def _refuse_for_memory(self, file: _CachedFile) -> None:
        """Discard the snapshot of a file. The file is read again once its memory is available."""
        file.outcome, file.required_bytes = "memory", file.decoder.memory_bytes
        self._decoded_bytes -= file.decoder.memory_bytes
        file.decoder = Decoder()

    def _clear_leftovers(self, names: list[str]) -> None:
        """Remove the files of processes without a snapshot, `LEFTOVER_SECONDS` after they were first observed.

        These are lock and temporary files without a feed file, and empty feed files. Requires ownership.
        """
        if not self.ownership.keep():
            return
        now = self._monotonic()
        process_ids = {process_id for name in names if (process_id := parse_process_id(name)) is not None}
        empty_files = {
            name
            for name, file in self._files.items()
            if file.last_state is not None and not file.last_state.size
        }
        orphaned_ids = process_ids - {name.removesuffix(FEED) for name in names if name not in empty_files}
        self._leftovers = {process_id: self._leftovers.get(process_id, now) for process_id in orphaned_ids}
        for process_id, noticed_at in list(self._leftovers.items()):
            if now - noticed_at >= LEFTOVER_SECONDS:
                is_unchanged = partial(self._is_as_read, process_id + FEED)
                remove_process(self._directory, process_id, condition=is_unchanged)
                # Files that are left belong to other users: the next attempt is later.
                self._leftovers[process_id] = now


def _uid(name: str, directory: int) -> int:
    """Return the user of a file in an open directory, or -1 for a missing file."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
    except OSError:
        return -1


def _state(descriptor: int, status: os.stat_result) -> _FileState:
    """Return the state of an open feed file."""
    header = os.pread(descriptor, HEADER.size, 0)
    return _FileState(status.st_ino, status.st_mtime_ns, status.st_size, header)
