r"""StateStore: the files that let totals outlive the sidecar.

Runs in the sidecar, called from the threads of the collectors that keep something, one call at a time; no threads of its
own. Bytes come in under a key (kind, run, …) and go to one file per key in `<state directory>/ledger/`; they come back
after a restart, of this sidecar or of another one on another node when the directory is shared storage.

    training-exporter-ledger 2 3f2a90c4 1234\n              magic, format version, CRC-32 and length of what follows
    {"key": ["rank", "run", "0", "", ""], "keeper": "node7"}\n   whose file it is, and which sidecar wrote it last
    …content…                                               JSON (see `exporter.ledger.codec`)

What holds:

- A file is replaced as a whole, by a rename. SIGKILL at any instant leaves the old or the new one.
- One keeper per file at a time: a byte of the file `locks` is a POSIX record lock that a sidecar holds while it keeps
  the key, and that the kernel drops when it dies. So sidecars of several nodes may share a directory, each keeping its
  own ranks, and a rank that moves to another node goes on there as soon as the first sidecar has let go of it.
- A damaged file, one of another version, or something else under its name is never read as zero in silence and never
  overwritten: it is renamed to `<name>.damaged-<unix time>`, logged and counted; the newest four are kept.
- No `fsync`: a flush would make each pass wait behind the job's own checkpoint. What a loss of power can leave, an
  empty or torn file, is found by length and checksum.
- Files that nobody keeps any more go after 30 days, and those of all but the latest 1,000 runs before (`tidy`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from exporter.errors import StateError

StateKey = tuple[str, ...]
"""The kind of content, the run ("" for what is of no run), and what tells this file from others of the run."""

Decoded = TypeVar("Decoded")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_MAGIC = b"training-exporter-ledger"
_VERSION = 2
_LONGEST_HEADER = 128
_SUFFIX, _TEMPORARY, _DAMAGED = ".ledger", ".tmp", ".damaged-"
_MOST_DAMAGED = 4
TIDY_SECONDS = 3600.0
_IN_USE = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_OCCUPIED = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EPERM}


class _DamagedError(Exception):
    """What makes a state file unusable, in words; never leaves this module."""


def _alone(
    method: Callable[Concatenate[StateStore, Arguments], Result],
) -> Callable[Concatenate[StateStore, Arguments], Result]:
    """Let one thread at a time into a store."""

    @functools.wraps(method)
    def guarded(store: StateStore, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with store._guard:  # noqa: SLF001  # its own method
            return method(store, *args, **kwargs)

    return guarded


def file_name(key: StateKey) -> str:
    """Name the file of a key: readable where that is harmless; the same hash in the middle for all of a run."""
    readable = re.sub(r"[^A-Za-z0-9_.]+", "_", "_".join(key))[:60].strip("._")
    return f"{readable or 'run'}-{_hash(key[1:2])[:12] if key[1] else 'machine'}-{_hash(key)[:32]}{_SUFFIX}"


def _hash(key: StateKey) -> str:
    # Lengths in front keep ("a", "b") and ("ab", "") apart; a lone surrogate is no reason to fail.
    joined = "".join(f"{len(part)}:{part}" for part in key).encode("utf-8", "surrogatepass")
    return hashlib.sha256(joined).hexdigest()


class StateStore:
    """Reads and writes state files; the ledger's only contact with storage.

    Attributes:
        directory: Where the files are; made, as `ledger` in the directory given, when it is first needed.
        keeper: Who writes; a key is loaded at start only by the keeper that saved it last.
        errors: Loads, saves and claims that failed.
        damaged: Files that were moved aside.
        last_write: Unix time of the last successful save, None before the first.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keeper: str | None = None,
        max_bytes: int = 16 << 20,
        keep_seconds: float = 30 * 86_400.0,
        keep_runs: int = 1000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Remember where; nothing is touched.

        Args:
            directory: The state directory. It must exist when something is saved.
            keeper: A name for this sidecar that is the same after its restart and differs from that of any other
                sidecar that shares the directory; the host name when None.
            max_bytes: A larger file is neither written nor read.
            keep_seconds: How long a file is kept that nobody keeps up any more.
            keep_runs: Of how many runs there are files at most, but for those that are kept up.
            clock: Unix time.
        """
        self.directory = directory / "ledger"
        self.keeper = socket.gethostname() if keeper is None else keeper
        self.errors = 0
        self.damaged = 0
        self.last_write: float | None = None
        self._max_bytes = max_bytes
        self._keep_seconds, self._keep_runs = keep_seconds, keep_runs
        self._clock = clock
        self._claimed: dict[StateKey, str] = {}
        self._locks: int | None = None
        self._told = False
        self._tidied: float | None = None
        self._released = 0
        self._guard = threading.RLock()

    @_alone
    def claim(self, key: StateKey) -> bool:
        """Become the keeper of a key, until `release` or death.

        Returns:
            False while another sidecar keeps it.

        Raises:
            StateError: The directory cannot be used.
        """
        if key in self._claimed:
            return True
        name = file_name(key)
        with self._failing(name), self._opened() as directory:
            if not self._lock(name, directory):
                return False
        self._claimed[key] = name
        return True

    @_alone
    def release(self, key: StateKey) -> None:
        """Let another sidecar keep the key; harmless when it is not claimed."""
        name = self._claimed.pop(key, None)
        if name is not None:
            self._released += 1
            self._unlock(name)

    @_alone
    def close(self) -> None:
        """Release everything."""
        self._claimed.clear()
        self._drop_locks()

    @_alone
    def load(self, key: StateKey, decode: Callable[[bytes], Decoded]) -> Decoded | None:
        """Read what was last saved under a key.

        Args:
            key: Need not be claimed, but a damaged file is moved aside only by its keeper.
            decode: Turns the content into a value; its ValueError means damage.

        Returns:
            None when nothing was saved, or when it was damaged.

        Raises:
            StateError: There may be a file, but it cannot be read now.
        """
        name = file_name(key)
        if not os.path.lexists(self.directory):
            return None
        with self._failing(name), self._opened() as directory:
            try:
                head, content = self._read(directory, name)
                if head.get("key") != list(key):
                    raise _DamagedError("it is the file of something else")  # noqa: TRY301  # one way out for all
                return decode(content)
            except FileNotFoundError:
                return None
            except (_DamagedError, ValueError) as error:
                if key in self._claimed:
                    self._move_aside(directory, name, str(error))
                return None

    @_alone
    def save(self, key: StateKey, content: bytes) -> None:
        """Replace the file of a claimed key.

        Raises:
            StateError: The old file is still there, unchanged, or the key is not claimed.
        """
        name = self._claimed.get(key) or file_name(key)
        with self._failing(name), self._opened() as directory:
            self._renew_locks(directory)
            if key not in self._claimed:
                raise OSError(errno.ENOLCK, "another sidecar keeps this rank")
            head = json.dumps({"key": key, "keeper": self.keeper}).encode() + b"\n"
            size = len(head) + len(content)
            header = b"%s %d %08x %d\n" % (_MAGIC, _VERSION, zlib.crc32(content, zlib.crc32(head)), size)
            if size > self._max_bytes:
                raise OSError(errno.EFBIG, f"{size} bytes are more than {self._max_bytes}")
            try:
                _replace(directory, name, header + head + content)
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
                for each in (name, name + _TEMPORARY):
                    self._clear_path(directory, each)
                _replace(directory, name, header + head + content)
        self.last_write = self._clock()

    @_alone
    def recent(self, kind: str, within_seconds: float) -> Sequence[StateKey]:
        """List the keys of a kind that this keeper saved in the last so many seconds.

        Raises:
            StateError: The directory cannot be read.
        """
        keys: list[StateKey] = []
        if not os.path.lexists(self.directory):
            return keys
        oldest = self._clock() - within_seconds
        with self._failing("."), self._opened() as directory:
            for name in _names(directory, _SUFFIX):
                with contextlib.suppress(OSError, _DamagedError):  # it is told when its rank appears
                    if not name.startswith(kind) or _modified(directory, name) < oldest:
                        continue
                    head, _ = self._read(directory, name)
                    key = head.get("key")
                    if head.get("keeper") == self.keeper and isinstance(key, list) and key[:1] == [kind]:
                        keys.append(tuple(map(str, key)))
        return keys

    @_alone
    def tidy(self) -> None:
        """Remove files that nobody has kept for long, and those of the oldest runs: hourly, or after many runs."""
        now = self._clock()
        recently = self._tidied is not None and 0 <= now - self._tidied < TIDY_SECONDS
        if recently and self._released < max(10, self._keep_runs // 2):
            return
        self._tidied, self._released = now, 0
        with contextlib.suppress(OSError, StateError), self._opened() as directory:
            aged: list[tuple[float, str]] = []
            for name in [*_names(directory, _SUFFIX), *_names(directory, _SUFFIX + _TEMPORARY)]:
                with contextlib.suppress(OSError):
                    aged.append((_modified(directory, name), name))
            runs: dict[str, int] = {}
            for modified, name in sorted(aged, reverse=True):
                run, file = name.split("-")[-2], name.removesuffix(_TEMPORARY)
                late = run != "machine" and runs.setdefault(run, len(runs)) >= self._keep_runs
                ours = file in self._claimed.values()
                if (modified < now - self._keep_seconds or late) and not ours and self._lock(file, directory):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=directory)
                    self._unlock(file)

    # Files ----------------------------------------------------------------------------------------------

    def _read(self, directory: int, name: str) -> tuple[dict[str, object], bytes]:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=directory)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _DamagedError("it is a symbolic link") from error
            raise
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _DamagedError("it is not a regular file")
            if status.st_size > self._max_bytes + _LONGEST_HEADER:
                raise _DamagedError(f"it is larger than {self._max_bytes} bytes")
            header = file.readline(_LONGEST_HEADER).split()
            rest = file.read(self._max_bytes + 1)
        if len(header) != 4 or header[0] != _MAGIC:
            raise _DamagedError("it is no state file, or empty")
        if header[1] != b"%d" % _VERSION:
            version = header[1].decode(errors="replace")
            raise _DamagedError(f"it has format version {version}, and this program knows {_VERSION} only")
        if header[3] != b"%d" % len(rest):
            raise _DamagedError(f"it ends after {len(rest)} bytes")
        if header[2] != b"%08x" % zlib.crc32(rest):
            raise _DamagedError("its checksum does not fit")
        first, _, content = rest.partition(b"\n")
        try:
            head = json.loads(first)
        except ValueError as error:
            raise _DamagedError("its second line is damaged") from error
        if not isinstance(head, dict):
            raise _DamagedError("its second line is damaged")
        return head, content

    def _move_aside(self, directory: int, name: str, what: str) -> None:
        old = sorted(
            (int(number), each)
            for each in _names(directory, "")
            for _, mark, number in [each.rpartition(_DAMAGED)]
            if mark and number.isdecimal() and len(number) <= 12
        )
        # Later than the last one, even if the clock has been set back: the newest are kept.
        when = max(int(self._clock()), old[-1][0] + 1 if old else 0)
        aside = f"{name}{_DAMAGED}{when}"
        os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=directory)
        self.damaged += 1
        _log.error("a state file is damaged: %s; moved aside to %s", what, self.directory / aside)
        for _, each in old[: max(len(old) + 1 - _MOST_DAMAGED, 0)]:
            with contextlib.suppress(OSError):
                os.unlink(each, dir_fd=directory)
            shutil.rmtree(self.directory / each, ignore_errors=True)  # where it is a directory

    def _clear_path(self, directory: int, name: str) -> None:
        """Move aside what is no file and keeps ours from its place, or totals would be withheld for ever."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                self._move_aside(directory, name, "it is a directory")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.directory, flags)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                self.directory.mkdir(mode=0o700)
            descriptor = os.open(self.directory, flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.errors += 1
            raise StateError(error.strerror or str(error), path=str(self.directory / name)) from error

    # Locks ----------------------------------------------------------------------------------------------

    def _lock(self, name: str, directory: int) -> bool:
        """Lock a state file; on a file system without locks everybody succeeds, which is logged."""
        if self._locks is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                self._locks = os.open("locks", flags, 0o600, dir_fd=directory)
            except IsADirectoryError:
                self._clear_path(directory, "locks")
                self._locks = os.open("locks", flags, 0o600, dir_fd=directory)
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _offset(name))
        except OSError as error:
            if error.errno in _IN_USE:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            if not self._told:
                self._told = True
                _log.warning(
                    "%s is on a file system without record locks: two sidecars that keep the same rank of the same run"
                    " there would overwrite each other's totals",
                    self.directory,
                )
        return True

    def _unlock(self, name: str) -> None:
        if self._locks is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, _offset(name))

    def _drop_locks(self) -> None:
        if self._locks is not None:
            os.close(self._locks)
            self._locks = None

    def _renew_locks(self, directory: int) -> None:
        """Claim all keys again when somebody has removed the lock file (`rm -r` of the directory)."""
        if self._locks is not None and not os.fstat(self._locks).st_nlink:
            self._drop_locks()
            self._claimed = {key: name for key, name in self._claimed.items() if self._lock(name, directory)}


def _offset(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _modified(directory: int, name: str) -> float:
    return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime


def _names(directory: int, suffix: str) -> Collection[str]:
    every = os.listdir(directory)  # pathlib lists no descriptors
    return [name for name in every if name.endswith(suffix)]


def _replace(directory: int, name: str, data: bytes) -> None:
    temporary = name + _TEMPORARY
    with contextlib.suppress(
        FileNotFoundError
    ):  # of a sidecar that was killed here; nobody else's, by the lock
        os.unlink(temporary, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
