r"""StateStore: the files that let totals outlive the sidecar.

Runs in the sidecar, called from the threads of the collectors that keep something, one call at a time; no
threads of its own. Bytes come in under a key (run, rank, …) and go to one file per key in `<state directory>/ledger/`; they come back after a
restart, of this sidecar or of another one on another node when the directory is shared storage.

    training-exporter-ledger 1 3f2a90c4 1234\n      magic, format version, CRC-32 and length of what follows
    {"key": ["run", "0", ""], "keeper": "node7"}\n  whose file it is, and which sidecar wrote it last
    …content…                                       the ledger's own (see `exporter.ledger.encoding`)

What holds:

- A file is replaced as a whole, by a rename. SIGKILL at any instant leaves the old or the new one; a
  temporary file that stays behind is overwritten by the next save of the same key.
- One keeper per file at a time: a byte of the file `locks` (see `state_locks`) is a POSIX record lock that a
  sidecar holds while it keeps the key and that the kernel drops when it dies. So sidecars of several nodes
  may share a directory, each keeping its own ranks, and a rank that moves to another node is continued
  there as soon as the first sidecar has let go of it. Nothing is counted twice or overwritten.
- A damaged file, or one of a later version, is never read as zero in silence and never overwritten: it is
  renamed to `<name>.damaged-<unix time>`, logged and counted; the newest four are kept.
- No `fsync`. A sidecar that dies loses nothing that is in the page cache, network file systems flush when
  the file is closed, and by default the directory is a tmpfs. A flush to a local disk would make each pass
  wait behind the job's own checkpoint, for seconds, and cost the very gauges one looks at then. What a loss
  of power can leave, an empty or torn file, is found by length and checksum and treated as damaged.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import socket
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from exporter.errors import StateError
from exporter.ledger.state_locks import StateLocks

StateKey = tuple[str, ...]
Decoded = TypeVar("Decoded")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_MAGIC = b"training-exporter-ledger"
_VERSION = 1
_LONGEST_HEADER = 128
_SUFFIX, _TEMPORARY, _DAMAGED = ".ledger", ".tmp", ".damaged-"
_MOST_DAMAGED = 4


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
    """Name the file of a key: readable where that is harmless, unique by a hash, whatever the run is called."""
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join(key))[:60].strip("._-")
    # Lengths in front keep ("a", "b") and ("ab", "") apart; a lone surrogate is no reason to fail.
    joined = "".join(f"{len(part)}:{part}" for part in key).encode("utf-8", "surrogatepass")
    return f"{readable or 'run'}-{hashlib.sha256(joined).hexdigest()[:32]}{_SUFFIX}"


class StateStore:
    """Reads and writes state files; the ledger's only contact with storage.

    Attributes:
        directory: Where the files are; made, as `ledger` in the directory given, when it is first needed.
        keeper: Who writes; a key is loaded at start only by the keeper that saved it last.
        writes: Saves that succeeded.
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
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Remember where; nothing is touched.

        Args:
            directory: The state directory. It must exist when something is saved.
            keeper: A name for this sidecar that is the same after its restart and differs from that of any
                other sidecar that shares the directory; the host name when None.
            max_bytes: A larger file is neither written nor read.
            clock: Unix time.
        """
        self.directory = directory / "ledger"
        self.keeper = socket.gethostname() if keeper is None else keeper
        self.writes = 0
        self.errors = 0
        self.damaged = 0
        self.last_write: float | None = None
        self._max_bytes = max_bytes
        self._clock = clock
        self._claimed: dict[StateKey, str] = {}
        self._sizes: dict[StateKey, int] = {}
        self._locks = StateLocks(self.directory)
        self._guard = threading.RLock()

    @property
    @_alone
    def total_bytes(self) -> int:
        """Size of the files of all claimed keys together."""
        return sum(self._sizes.values())

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
        with self._failing(name):
            if not self._lock(name):
                return False
        self._claimed[key] = name
        return True

    @_alone
    def release(self, key: StateKey) -> None:
        """Let another sidecar keep the key; harmless when it is not claimed."""
        name = self._claimed.pop(key, None)
        self._sizes.pop(key, None)
        if name is not None:
            self._locks.drop(name)

    @_alone
    def close(self) -> None:
        """Release everything."""
        self._claimed.clear()
        self._sizes.clear()
        self._locks.close()

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
        with self._failing(name), self._opened(create=False) as directory:
            if directory is None:
                return None
            try:
                head, content, size = self._read(directory, name)
                value = _decoded(head, key, content, decode)
            except FileNotFoundError:
                return None
            except _DamagedError as error:
                if key in self._claimed:
                    self._move_aside(directory, name, str(error))
                return None
        if key in self._claimed:
            self._sizes[key] = size
        return value

    @_alone
    def save(self, key: StateKey, content: bytes) -> None:
        """Replace the file of a claimed key.

        Raises:
            StateError: The old file is still there, unchanged, or the key is not claimed.
        """
        name = self._claimed.get(key) or file_name(key)
        with self._failing(name), self._opened(create=True) as directory:
            assert directory is not None  # noqa: S101  # it was to be created, or it raised
            self._keep_locks(directory)
            if key not in self._claimed:
                raise OSError(errno.ENOLCK, "another sidecar keeps this rank")
            head = json.dumps({"key": key, "keeper": self.keeper}).encode() + b"\n"
            size = len(head) + len(content)
            header = b"%s %d %08x %d\n" % (_MAGIC, _VERSION, zlib.crc32(content, zlib.crc32(head)), size)
            if size > self._max_bytes:
                raise OSError(errno.EFBIG, f"{size} bytes are more than {self._max_bytes}")
            _replace(directory, name, header + head + content)
        self._sizes[key] = len(header) + size
        self.writes += 1
        self.last_write = self._clock()

    @_alone
    def recent(self, within_seconds: float) -> Sequence[StateKey]:
        """List the keys that this keeper saved in the last so many seconds.

        Raises:
            StateError: The directory cannot be read.
        """
        keys: list[StateKey] = []
        oldest = self._clock() - within_seconds
        with self._failing("."), self._opened(create=False) as directory:
            for name in _names(directory, _SUFFIX):
                with contextlib.suppress(OSError, _DamagedError):  # it is told when its rank appears
                    if os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime < oldest:
                        continue
                    head, _, _ = self._read(directory, name)
                    key = head.get("key")
                    ours = head.get("keeper") == self.keeper
                    if ours and isinstance(key, list) and all(isinstance(part, str) for part in key):
                        keys.append(tuple(key))
        return keys

    @_alone
    def tidy(self, *, keep_seconds: float = 30 * 86_400.0, keep_files: int = 1000) -> None:
        """Remove files that nobody has kept for long, so that a tmpfs does not fill with past runs."""
        with contextlib.suppress(OSError), self._opened(create=False) as directory:
            aged: list[tuple[float, str]] = []
            for name in [*_names(directory, _SUFFIX), *_names(directory, _SUFFIX + _TEMPORARY)]:
                with contextlib.suppress(OSError):
                    aged.append((os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime, name))
            aged.sort(reverse=True)
            oldest = self._clock() - keep_seconds
            ours = set(self._claimed.values())
            for place, (modified, name) in enumerate(aged):
                of = name.removesuffix(_TEMPORARY)
                if (modified < oldest or place >= keep_files) and of not in ours and self._lock(of):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=directory)
                    self._locks.drop(of)

    def _read(self, directory: int | None, name: str) -> tuple[dict[str, object], bytes, int]:
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
        if not header or header[0] != _MAGIC:
            raise _DamagedError("it is no state file, or empty")
        if len(header) != 4 or not header[1].isdigit():
            raise _DamagedError("its first line is damaged")
        if int(header[1]) != _VERSION:
            version = header[1].decode()
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
        return head, content, status.st_size

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
        _log.error(
            "a state file is damaged: %s; moved aside to %s, totals go on from the feed files alone",
            what,
            self.directory / aside,
        )
        for _, each in old[: max(len(old) + 1 - _MOST_DAMAGED, 0)]:
            with contextlib.suppress(OSError):
                os.unlink(each, dir_fd=directory)

    @contextlib.contextmanager
    def _opened(self, *, create: bool) -> Iterator[int | None]:
        descriptor = self._open_directory(create=create)
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open_directory(self, *, create: bool) -> int | None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self.directory, flags)
        except FileNotFoundError:
            if not create:
                return None
        with contextlib.suppress(FileExistsError):
            self.directory.mkdir(mode=0o700)
        return os.open(self.directory, flags)

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.errors += 1
            raise StateError(error.strerror or str(error), path=str(self.directory / name)) from error

    def _lock(self, name: str) -> bool:
        with self._opened(create=True) as directory:
            assert directory is not None  # noqa: S101  # it was to be created, or it raised
            return self._locks.take(name, directory)

    def _keep_locks(self, directory: int) -> None:
        """Claim all keys again when somebody has removed the lock file."""
        if self._locks.lost:
            taken = set(self._locks.renew(self._claimed.values(), directory))
            self._claimed = {key: name for key, name in self._claimed.items() if name not in taken}


def _decoded(
    head: dict[str, object], key: StateKey, content: bytes, decode: Callable[[bytes], Decoded]
) -> Decoded:
    if head.get("key") != list(key):
        raise _DamagedError("it is the file of something else")
    try:
        return decode(content)
    except ValueError as error:
        raise _DamagedError(f"its content makes no sense: {error}") from error


def _names(directory: int | None, suffix: str) -> list[str]:
    if directory is None:
        return []
    every = os.listdir(directory)  # noqa: PTH208  # pathlib lists no descriptors
    return [name for name in every if name.endswith(suffix)]


def _replace(directory: int, name: str, data: bytes) -> None:
    temporary = name + _TEMPORARY
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, 0o600, dir_fd=directory)
    except FileExistsError:  # of a sidecar that was killed here; the lock says that it is nobody else's
        os.unlink(temporary, dir_fd=directory)
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
