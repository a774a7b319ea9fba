"""Feed reader: scans a feed directory for the snapshots of all training processes.

Runs in the sidecar or in a user's tool, on a single thread. Several readers may read at once, and no reader blocks a writer. An
invalid file affects no other file. A single reader owns the directory, and only the owner removes files.
"""
# ruff: noqa: PTH118, PTH208 - one kind of path within the folder; pathlib cannot list an open directory

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
from exporter.feed.decoder import ROOM_BYTES, Decoder
from exporter.feed.directory import check_directory, is_trusted, own_uid
from exporter.feed.encoder import HEADER, MAX_BYTES
from exporter.feed.entries import ForeignEntry, foreign_uid, own_entry
from exporter.feed.files import FEED, LOCK, holder, open_regular, process_of, remove_process
from exporter.feed.ownership import DirectoryOwnership
from exporter.feed.runs import own_name
from exporter.feed.shares import ChangedFile, FileCost, displaced, files_of_pass, files_of_users
from exporter.feed.snapshot import Snapshot
from exporter.feed.stacks import REQUEST

MAX_FILES = 4096
FIRST_PASS_BYTES, PASS_BYTES = 16 << 20, 4 << 20
"""Bytes of changed files that the first pass and each later pass read; the other files wait for a later pass. Snapshots that
fit into memory have about 3 MiB of content."""
MAX_DECODED_BYTES = 52 << 20
"""Cost of all files together from which on Stats of users are ignored and counted."""
LEAST_ROOM_BYTES = 1 << 20
"""Room of each further file, for the exporter's own families, up to `MOST_DECODED_BYTES`."""
MOST_DECODED_BYTES = 64 << 20
"""Cost of all files together from which on further files are refused."""
REMOVAL_DELAY_SECONDS = 5.0
"""Time without a change after which `remove` treats a process without a lock as exited; a job that closed all descriptors
has lost the lock until the next write. A final snapshot needs no wait."""
LEFTOVER_SECONDS = 60.0
"""Age after which an empty feed file, or a lock or temporary file without a feed file, is removed; a young process may be
about to write a first snapshot."""

_REASONS = {errno.ELOOP: "symlink", errno.EMLINK: "links", errno.EINVAL: "not_regular"}


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """Recording of a process."""

    snapshot: Snapshot  # the last complete snapshot
    alive: bool  # True if the process holds its lock; False after an orderly close
    # monotonic seconds since the reader saw the sequence change; at first sight since the file's modification time
    age_seconds: float
    # process id in the reader's pid namespace; None for an exited process or an invisible pid namespace
    pid: int | None = None
    outdated: bool = False  # the writer has newer values and cannot write them


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of a scan of a feed directory."""

    entries: tuple[FeedEntry, ...]  # readable files, the earliest started process first
    # file name (printable ASCII) and reason of each refused `.feed` file. The reason is `name`, `too_many`, `too_large`,
    # `memory`, `owner`, `symlink`, `links`, `not_regular`, `unreadable`, `lock` (the state of the process is unknown), or
    # a reason of FeedFormatError
    refused: tuple[tuple[str, str], ...]
    waiting: tuple[str, ...] = ()  # names of files that were not read yet; a later pass reads them


@dataclass(frozen=True, slots=True)
class _FileState:
    """State of a file, which differs after a change even if inodes are reused and times are coarse."""

    inode: int
    modified_ns: int
    size: int
    header: bytes  # sequence and checksum


@dataclass(slots=True)
class _Known:
    """Result of the last read of a file, used while the file is unchanged."""

    state: _FileState | None = None  # of the content that was read last
    seen: _FileState | None = None  # as of the last pass
    outcome: Snapshot | str = ""  # the snapshot, the reason for the refusal, or empty before the first read
    pid: int | None = None  # holder of the lock, 0 in an invisible pid namespace
    uid: int = -1
    size: int = 0
    needed: int = 0  # cost that exceeded the room
    is_changed: bool = True  # not read yet
    passes: int = 0  # passes in which the file was changed and not read
    outdated: bool = False
    sequence: int | None = None  # of the last good snapshot
    changed: float = 0.0  # monotonic time at which the sequence changed
    decoder: Decoder = field(default_factory=Decoder)


class FeedReader:
    """Reader of a feed directory. The constructor touches no file.

    The user's default directory may be missing before the first recording, and only files of the user are read from that directory; in
    a configured directory the files of all users are read. Files beyond the limits are refused; known files have precedence.
    """

    foreign: tuple[ForeignEntry, ...] = ()  # foreign entries with names of the exporter, as of the last scan

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
        self._trusted = is_trusted(directory)
        self.ownership = DirectoryOwnership(directory)
        self._monotonic, self._clock = monotonic, clock
        self._max_bytes, self._max_files = max_bytes, max_files
        self._known: dict[str, _Known] = {}
        self._decoded = 0
        self._passes = 0
        self._leftovers: dict[str, float] = {}

    def scan(self) -> Scan:
        """Scan every file; raises `FeedDirectoryError` if the directory is missing, foreign or unreadable."""
        if not self._trusted and not os.path.lexists(self._directory):
            self._known.clear()
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
        self.foreign = tuple(self._foreign_entries())
        return scan

    def remove(self, process_id: str) -> bool:
        """Remove the files of a process after its totals were saved; returns True if no file is left.

        Requires ownership. The files stay if the process runs, if the lock may be lost only temporarily, or if the last snapshot was
        not read by a `scan`; a later call can succeed.
        """
        name = process_id + FEED
        if not self.ownership.keep() or process_of(name) is None:
            return False
        known = self._known.get(name)
        if known is not None and not self._is_over(known):
            return False
        return remove_process(self._directory, process_id, if_true=lambda: self._is_as_read(name))

    def _foreign_entries(self) -> Iterator[ForeignEntry]:
        """Find foreign entries with a name of the exporter; the exporter uses alternative names."""
        for name in (files.OWNER_LOCK, files.OVERRIDES, REQUEST, own_name(Path(self._directory))):
            path = os.path.join(self._directory, name)
            uid = foreign_uid(path)
            if uid is not None:
                yield ForeignEntry(path, uid, own_entry(path))

    def _is_as_read(self, name: str) -> bool:
        """Return True if a file is unchanged since the last read: no unread snapshot is removed."""
        known = self._known.get(name)
        try:
            descriptor, found = open_regular(os.path.join(self._directory, name))
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        try:
            return known is not None and _state(descriptor, found) == known.state
        finally:
            os.close(descriptor)

    def _is_over(self, known: _Known) -> bool:
        wait_seconds = REMOVAL_DELAY_SECONDS
        if isinstance(known.outcome, Snapshot):
            if known.outcome.recording.final:
                return True
            wait_seconds = max(wait_seconds, 3 * known.outcome.flush_seconds)
        return self._monotonic() - known.changed >= wait_seconds

    def _scan_files(self, directory: int, names: list[str]) -> Scan:
        self._decoded = sum(each.decoder.cost for name, each in self._known.items() if name in names)
        feeds = [name for name in names if name.endswith(FEED)]
        of_processes = sorted([name for name in feeds if process_of(name)], key=self._precedence)
        refused = dict.fromkeys([name for name in feeds if not process_of(name)], "name")
        if len(of_processes) > self._max_files:
            users = {name: _uid(name, directory) for name in of_processes}
            refused |= dict.fromkeys(of_processes, "too_many")
            of_processes = files_of_users(users, self._max_files)
        known: dict[str, _Known] = {}
        for name in of_processes:
            refused.pop(name, None)
            each = self._known.get(name) or _Known()
            reason = self._attempt(self._look, directory, name, each)
            if reason is None:
                known[name] = each
            elif reason:
                refused[name] = reason
        self._known = known
        self._read_changed(directory, refused)
        return self._result(refused)

    def _read_changed(self, directory: int, refused: dict[str, str]) -> None:
        """Read the changed files of this pass."""
        changed = [
            ChangedFile(name, each.size, each.pid is not None, each.passes)
            for name, each in self._known.items()
            if each.is_changed
        ]
        for name in files_of_pass(changed, PASS_BYTES if self._passes else FIRST_PASS_BYTES):
            reason = self._attempt(self._read, directory, name, self._known[name])
            if reason is not None:
                del self._known[name]
            if reason:
                refused[name] = reason
        self._passes += 1

    def _attempt(
        self, call: Callable[[int, str, _Known], str | None], directory: int, name: str, known: _Known
    ) -> str | None:
        """Return None, the reason for a refusal, or an empty string for a file that was removed since the listing."""
        try:
            return call(directory, name, known)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return _REASONS.get(error.errno or 0, "unreadable")

    def _result(self, refused: dict[str, str]) -> Scan:
        entries: list[FeedEntry] = []
        waiting: list[str] = []
        for name, each in self._known.items():
            each.passes = each.passes + 1 if each.is_changed else 0
            if isinstance(each.outcome, Snapshot):
                age = max(0.0, self._monotonic() - each.changed)
                # A process counts as alive until the last snapshot was read.
                alive = each.pid is not None or each.is_changed
                entries.append(FeedEntry(each.outcome, alive, age, each.pid or None, each.outdated))
            elif each.outcome:
                refused[name] = each.outcome
            else:
                waiting.append(name)
        entries.sort(key=lambda entry: (entry.snapshot.process.started, entry.snapshot.process.id))
        reasons = tuple([(ascii(name)[1:-1], why) for name, why in refused.items()])
        return Scan(tuple(entries), reasons, tuple(waiting))

    def _precedence(self, name: str) -> tuple[int, str]:
        # Known files first, however many are added to the directory; then new files; refused files last.
        known = self._known.get(name)
        if known is None:
            return 1, name
        return (2 if isinstance(known.outcome, str) and known.outcome else 0), name

    def _look(self, directory: int, name: str, known: _Known) -> str | None:
        """Update the lock's holder and the state of a file; returns the reason for a refusal, or None."""
        lock = name.removesuffix(FEED) + LOCK
        try:
            # Before reading: the snapshot of an exited process is the last snapshot.
            known.pid = holder(lock, directory=directory)
            known.outdated = known.pid is not None and os.stat(lock, dir_fd=directory).st_mtime == 0
        except OSError:
            return "lock"
        descriptor, found = open_regular(name, directory=directory)
        try:
            if not self._trusted and found.st_uid != own_uid():
                return "owner"
            if found.st_size > self._max_bytes:
                return "too_large"
            state = _state(descriptor, found)
        finally:
            os.close(descriptor)
        known.uid, known.size = found.st_uid, found.st_size
        known.is_changed = state != known.state or (
            known.outcome == "memory" and self._decoded + known.needed <= MOST_DECODED_BYTES
        )
        if state != known.seen:
            known.seen = state
            if isinstance(
                known.outcome, Snapshot
            ):  # the process writes, even if the file is not read in this pass
                known.changed = self._monotonic()
        return None

    def _read(self, directory: int, name: str, known: _Known) -> None:
        """Read a file."""
        descriptor, found = open_regular(name, directory=directory)
        try:
            state = _state(descriptor, found)
            data = os.pread(descriptor, min(found.st_size, self._max_bytes), 0)
        finally:
            os.close(descriptor)
        self._decode(data, name, known, modified=found.st_mtime)
        known.state = known.seen = state
        known.is_changed = False

    def _decode(self, data: bytes, name: str, known: _Known, *, modified: float) -> None:
        try:
            self._decoded -= known.decoder.cost
            left = min(ROOM_BYTES, MAX_DECODED_BYTES - self._decoded)
            snapshot = known.decoder.decode(data, max(LEAST_ROOM_BYTES, left))
        except FeedFormatError as error:
            known.outcome = error.reason
            return
        finally:
            self._decoded += known.decoder.cost
        if not self._make_room(name, known):
            self._refuse_for_memory(known)
            return
        if snapshot.process.id + FEED != name:  # a copy: its samples would count twice
            known.outcome = "name"
            return
        now = self._monotonic()
        if known.sequence is None:
            known.changed = now - max(0.0, self._clock() - modified)
        elif known.sequence != snapshot.sequence:
            known.changed = now
        known.outcome, known.sequence = snapshot, snapshot.sequence

    def _make_room(self, name: str, known: _Known) -> bool:
        """Return True if a file has room, possibly after the displacement of other files."""
        excess = self._decoded - MOST_DECODED_BYTES
        if excess <= 0:
            return True
        others = [
            FileCost(each, other.uid, other.decoder.cost)
            for each, other in self._known.items()
            if each != name and other.decoder.cost
        ]
        found = displaced(FileCost(name, known.uid, known.decoder.cost), others, excess)
        for each in found:
            self._refuse_for_memory(self._known[each])
        return bool(found)

    def _refuse_for_memory(self, known: _Known) -> None:
        known.outcome, known.needed = "memory", known.decoder.cost
        self._decoded -= known.decoder.cost
        known.decoder = Decoder()

    def _clear_leftovers(self, names: list[str]) -> None:
        """Remove files of processes that died before the first snapshot, and empty feed files."""
        if not self.ownership.keep():
            return
        now = self._monotonic()
        processes = {process for each in names if (process := process_of(each)) is not None}
        empty = {name for name, each in self._known.items() if each.seen is not None and not each.seen.size}
        orphans = processes - {name.removesuffix(FEED) for name in names if name not in empty}
        self._leftovers = {process: self._leftovers.get(process, now) for process in orphans}
        for process, seen in list(self._leftovers.items()):
            if now - seen >= LEFTOVER_SECONDS:
                remove_process(self._directory, process, if_true=partial(self._is_as_read, process + FEED))
                self._leftovers[process] = now  # the remaining files are foreign; the next attempt is later


def _uid(name: str, directory: int) -> int:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
    except OSError:
        return -1


def _state(descriptor: int, found: os.stat_result) -> _FileState:
    header = os.pread(descriptor, HEADER.size, 0)
    return _FileState(found.st_ino, found.st_mtime_ns, found.st_size, header)
