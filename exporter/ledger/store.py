r"""StateStore: the files that let totals outlive the sidecar, one a key (kind, run, …) in `<state directory>/ledger/`.

    training-exporter-ledger 3 3f2a90c4\n                   magic, format version, CRC-32 of what follows
    {"key": ["rank", "run", "0", "", ""], "keeper": "node7"}\n   whose file it is, and which sidecar wrote it last
    …content…                                               JSON: a dataclass whose fields are the keys

A key that is not known is passed over, a missing one has its default: so versions may differ. A file is replaced as a
whole, by a rename. While a sidecar keeps a key it holds a POSIX record lock on a byte of the file `locks`. A damaged file,
one of another version, or something else under its name is never read as zero in silence and never overwritten: it is
renamed to `<name>.damaged-<unix time>`, logged and counted. No `fsync`: a flush would make each pass wait behind the job's
own checkpoint; what a loss of power can leave is found by the checksum.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from exporter.collectors.job import Keeper, Page, Rows
from exporter.errors import CollectError, StateError
from exporter.feed.files import replace_file

StateKey = tuple[str, ...]
"""The kind of content, the run ("" for what is of no run), and what tells this file from others of the run."""

Decoded = TypeVar("Decoded")

_log = logging.getLogger(__name__)

_MAGIC = b"training-exporter-ledger"
_VERSION = 3
_LONGEST_HEADER = 128
_SUFFIX, _DAMAGED = ".ledger", ".damaged-"
TIDY_SECONDS = 3600.0
_IN_USE = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class _DamagedError(Exception):
    """What makes a state file unusable; never leaves this module."""


def file_name(key: StateKey) -> str:
    """Name the file of a key: readable where that is harmless, and a hash."""
    readable = re.sub(r"[^A-Za-z0-9_.]+", "_", "_".join(key))[:60].strip("._")
    # Lengths in front keep ("a", "b") and ("ab", "") apart; a lone surrogate is no reason to fail.
    joined = "".join(f"{len(part)}:{part}" for part in key).encode("utf-8", "surrogatepass")
    return f"{readable or 'run'}-{hashlib.sha256(joined).hexdigest()[:32]}{_SUFFIX}"


class StateStore(Keeper):
    """Reads and writes state files; raises a StateError where the directory or a file cannot be used now.

    Attributes:
        directory: Where the files are; made, as `ledger` in the directory given, when it is first needed.
        keeper: A name for this sidecar, the host's where none is given, that is the same after its restart and that no
            other one has which shares the directory: a key is loaded at start only by the keeper that saved it last.
        errors: Loads, saves and claims that failed.
        damaged: Files that were moved aside.
        problems: Why totals are withheld, a sentence each; whoever tells them empties it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keeper: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory / "ledger"
        self.keeper = socket.gethostname() if keeper is None else keeper
        self.errors = 0
        self.damaged = 0
        self.problems: list[str] = []
        self._keep_seconds, self._keep_files = 30 * 86_400.0, 5000
        self._clock = clock
        self._claimed: dict[StateKey, str] = {}
        self._locks: int | None = None
        self._told = False
        self._tidied: float | None = None
        self._guard = threading.Lock()

    def claim(self, key: StateKey) -> bool:
        """Become the keeper of a key, until `release` or death; False while another sidecar keeps it."""
        name = file_name(key)
        with self._using(name):
            if key not in self._claimed and self._lock(name):
                self._claimed[key] = name
        return key in self._claimed

    def release(self, key: StateKey) -> None:
        """Let another sidecar keep the key; harmless when it is not claimed."""
        with self._guard:
            if name := self._claimed.pop(key, None):
                self._unlock(name)

    def close(self) -> None:
        """Release everything."""
        with self._guard:
            self._claimed.clear()
            if self._locks is not None:
                os.close(self._locks)
                self._locks = None

    def load(self, key: StateKey, decode: Callable[[bytes], Decoded]) -> Decoded | None:
        """Read what was last saved under a key; None when nothing was, or when it was damaged.

        A ValueError of `decode` means damage; a damaged file is moved aside only by its keeper.
        """
        if not os.path.lexists(self.directory):
            return None
        path = self.directory / file_name(key)
        with self._using(path.name), contextlib.suppress(FileNotFoundError):
            try:
                head, content = self._read(path)
                if head["key"] != list(key):
                    raise _DamagedError("it is the file of something else")  # noqa: TRY301  # one way out for all
                return decode(content)
            except (_DamagedError, ValueError) as error:
                if key in self._claimed:
                    aside = path.rename(path.with_name(f"{path.name}{_DAMAGED}{int(self._clock())}"))
                    self.damaged += 1
                    _log.error("a state file is damaged: %s; moved aside to %s", error, aside)
        return None

    def save(self, key: StateKey, content: bytes) -> None:
        """Replace the file of a claimed key, or leave it as it was."""
        path = self.directory / file_name(key)
        with self._using(path.name):
            self._renew_locks()
            if key not in self._claimed:
                raise OSError(errno.ENOLCK, "another sidecar keeps this rank")
            head = json.dumps({"key": key, "keeper": self.keeper}).encode() + b"\n"
            header = b"%s %d %08x\n" % (_MAGIC, _VERSION, zlib.crc32(content, zlib.crc32(head)))
            temporary = f"{path}.tmp"
            # A leftover is that of a sidecar that was killed here; nobody else's, by the lock.
            replace_file(str(path), header + head + content, temporary=temporary, mode=0o600)

    def recent(self, kind: str, within_seconds: float) -> Sequence[StateKey]:
        """List the keys of a kind that this keeper saved in the last so many seconds."""
        keys: list[StateKey] = []
        if not os.path.lexists(self.directory):
            return keys
        with self._using("."):
            for path in self.directory.glob(f"{kind}*{_SUFFIX}"):
                with contextlib.suppress(OSError, _DamagedError):  # it is told when its rank appears
                    if path.lstat().st_mtime >= self._clock() - within_seconds:
                        head, _ = self._read(path)
                        if head["keeper"] == self.keeper and head["key"][0] == kind:
                            keys.append(tuple(head["key"]))
        return keys

    def tidy(self) -> None:
        """Once an hour, remove files that nobody has kept for long, and the oldest of too many."""
        now = self._clock()
        if self._tidied is not None and 0 <= now - self._tidied < TIDY_SECONDS:
            return
        self._tidied = now
        with contextlib.suppress(StateError), self._using("."):
            aged: list[tuple[float, Path]] = []
            for path in self.directory.iterdir():
                with contextlib.suppress(OSError):  # another sidecar's, just renamed
                    if _SUFFIX in path.name:
                        aged.append((path.lstat().st_mtime, path))
            for place, (modified, path) in enumerate(sorted(aged, reverse=True)):
                name = path.name.partition(_SUFFIX)[0] + _SUFFIX
                old = modified < now - self._keep_seconds or place >= self._keep_files
                if old and name not in self._claimed.values() and self._lock(name):
                    path.unlink(missing_ok=True)
                    self._unlock(name)

    def page(self, subject: str, name: str = "") -> Page:
        """Name the numbers that a collector keeps, for each run where it has a name; nothing is touched yet."""
        # Per machine: on shared storage every machine counts what is its own.
        return _StatePage(self, ("page", name, subject, self.keeper))

    # Files ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _using(self, name: str) -> Iterator[None]:
        """Let one thread at a time into the directory, which is made where it is not there."""
        with self._guard:
            try:
                self.directory.mkdir(mode=0o700, exist_ok=True)
                if self.directory.is_symlink():
                    raise OSError(errno.ELOOP, "the directory is a symbolic link")  # noqa: TRY301  # one way out
                yield
            except OSError as error:
                self.errors += 1
                raise StateError(error.strerror or str(error), path=str(self.directory / name)) from error

    def _read(self, path: Path) -> tuple[dict[str, Any], bytes]:
        try:
            with open(path, "rb", opener=_open) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise _DamagedError("it is not a regular file")
                header, rest = file.readline(_LONGEST_HEADER).split(), file.read()
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.EISDIR}:
                raise _DamagedError("it is a link, or a directory") from error
            raise
        if len(header) != 3 or header[0] != _MAGIC:
            raise _DamagedError("it is no state file, or empty")
        if header[1] != b"%d" % _VERSION:
            version = header[1].decode(errors="replace")
            raise _DamagedError(f"it has format version {version}, and this program knows {_VERSION} only")
        if header[2] != b"%08x" % zlib.crc32(rest):
            raise _DamagedError("it is torn, or its checksum does not fit")
        first, _, content = rest.partition(b"\n")
        return json.loads(first), content

    # Locks ----------------------------------------------------------------------------------------------

    def _lock(self, name: str) -> bool:
        """Lock a state file; on a file system without locks everybody succeeds, which is logged."""
        if self._locks is None:
            self._locks = _open(str(self.directory / "locks"), os.O_RDWR | os.O_CREAT)
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

    def _renew_locks(self) -> None:
        """Claim all keys again when somebody has removed the lock file (`rm -r` of the directory)."""
        if self._locks is not None and not os.fstat(self._locks).st_nlink:
            os.close(self._locks)
            self._locks = None
            self._claimed = {key: name for key, name in self._claimed.items() if self._lock(name)}


class _StatePage(Page):
    """Rows of numbers in a state file."""

    def __init__(self, state: StateStore, key: StateKey) -> None:
        self._state = state
        self._key = key

    def load(self) -> Rows | None:
        try:
            if not self._state.claim(self._key):
                return None
            return self._state.load(self._key, lambda content: loads(Rows, content)) or {}
        except StateError as error:
            raise CollectError(str(error), reason="state") from error

    def save(self, rows: Rows) -> None:
        try:
            self._state.save(self._key, dumps(rows))
        except StateError as error:
            raise CollectError(f"totals are withheld: {error}", reason="state") from error

    def close(self) -> None:
        self._state.release(self._key)


def _open(path: str, flags: int) -> int:
    """Open what is no link, and wait for nobody where it is a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _offset(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


# The content of state files: dataclasses to JSON and back -------------------------------------------------


def dumps(value: object) -> bytes:
    """Write a dataclass."""
    return json.dumps(to_json(value), separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def loads(kind: Any, content: bytes) -> Any:
    """Read a value of a type back; raises a ValueError where it is not what `dumps` writes."""
    try:
        return from_json(kind, json.loads(content))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def to_json(value: Any) -> Any:
    """Turn a value into what `json` writes; a mapping whose keys are no text becomes a list of pairs."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(each) for key, each in value.items()}
        return [[to_json(key), to_json(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return {name: to_json(getattr(value, name)) for name in _hints(value.__class__)}


def from_json(kind: Any, found: Any) -> Any:
    """Turn what `json` has read into a value of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in {Union, UnionType}:  # of None and one other type
        other = next(each for each in arguments if each is not NoneType)
        return None if found is None else from_json(other, found)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple([from_json(each, value) for each, value in zip(arguments, found, strict=True)])
    if origin in {list, tuple}:
        return origin([from_json(arguments[0], each) for each in found])
    if origin is not None:  # a mapping
        pairs = found.items() if isinstance(found, dict) else found
        return {from_json(arguments[0], key): from_json(arguments[1], value) for key, value in pairs}
    if kind in {str, int, float, bool}:
        return kind(found)
    return kind(
        **{name: from_json(hint, found[name]) for name, hint in _hints(kind).items() if name in found}
    )


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Give the types of the fields of a dataclass that are written: all, or those that its `KEPT` names."""
    hints = get_type_hints(kind)
    return {name: hints[name] for name in getattr(kind, "KEPT", [each.name for each in fields(kind)])}
