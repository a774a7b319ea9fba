"""Store of state files by key in `<state directory>/ledger/`.

A file is replaced as a whole by a rename. For each claimed key a sidecar holds a record lock on a byte of the file
`locks`. An unusable file (damaged, too large, not a regular file, or of a different version) is renamed to
`<name>.damaged-<unix time>`, logged and counted. Totals that no other file contains then restart at 0. The store does not call
`fsync`, which would wait for the job's checkpoint; the checksum detects a file that a power loss has truncated.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from exporter.errors import CollectError, StateError
from exporter.feed.entries import ForeignEntry, foreign_entry, foreign_uid, own_entry
from exporter.feed.files import replace_file
from exporter.ledger.state.codec import DecodedT, to_line
from exporter.ledger.state.files import (
    DAMAGED_MARK,
    SUFFIX,
    DamagedFileError,
    StateFile,
    StateKey,
    encode_file,
    file_name,
    read_state_file,
)
from exporter.ledger.state.locks import StateLocks

RecordT = TypeVar("RecordT")

_log = logging.getLogger(__name__)

TIDY_SECONDS = 3600.0
"""Minimum time between two removals of old files, unless many keys were claimed."""
MAX_AGE_SECONDS = 30 * 86_400.0
"""Time since the last save after which a file is removed."""
MAX_FILES = 5000
"""Number of files above which the oldest files are removed."""


class StateStore:
    """State files of a sidecar. Thread-safe, except for the recorded problems.

    Methods raise StateError if the directory or a file cannot be read, written or locked.

    Attributes:
        directory: Directory of the files: `ledger` in the given directory, created on first use. In a directory of several
            users, `ledger-<uid>` if another user has created `ledger`.
        foreign_directory: The `ledger` of another user, which is ignored; None without one.
        sidecar: Name of this sidecar, the same after a restart and unique among the sidecars that share the directory;
            the host name by default. `recent` returns the keys that a sidecar of this name saved last.
        errors: Number of failed operations on files and locks.
        damaged_files: Number of files that were moved aside.
    """

    def __init__(
        self,
        directory: Path,
        *,
        sidecar: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._default_directory = self._directory = directory / "ledger"
        self._is_created = False
        self.foreign_directory: ForeignEntry | None = None
        self.sidecar = socket.gethostname() if sidecar is None else sidecar
        self.errors = 0
        self.damaged_files = 0
        self._problems: list[str] = []
        self._clock = clock
        self._name_by_key: dict[StateKey, str] = {}
        self._locks = StateLocks(self._directory / "locks")
        self._tidied_at: float | None = None
        self._claims = 0  # since the last `tidy`
        self._guard = threading.Lock()

    @property
    def directory(self) -> Path:
        """Directory of the files."""
        current, default = os.fspath(self._directory), os.fspath(self._default_directory)
        if not self._is_created and (current == default or foreign_uid(current) is not None):
            own = own_entry(default)
            if own != current:
                self._directory = Path(own)
                self._locks = StateLocks(self._directory / "locks")
                self.foreign_directory = foreign_entry(default, own)
        return self._directory

    def report(self, problem: str) -> None:
        """Record a problem, as a sentence that states why totals are suppressed."""
        self._problems.append(problem)

    def take_problems(self) -> list[str]:
        """Return the recorded problems and clear the list."""
        problems, self._problems = self._problems, []
        return problems

    def claim(self, key: StateKey) -> bool:
        """Lock a key until `release`. Return False if a different sidecar holds the key."""
        name = file_name(key)
        with self._using(name):
            if key not in self._name_by_key and self._locks.acquire(name):
                self._name_by_key[key] = name
                self._claims += 1
        return key in self._name_by_key

    def release(self, key: StateKey) -> None:
        """Release a key for other sidecars. A key that is not claimed is ignored."""
        with self._guard:
            if name := self._name_by_key.pop(key, None):
                self._locks.release(name)

    def close(self) -> None:
        """Release every key."""
        with self._guard:
            self._name_by_key.clear()
            self._locks.close()

    def load(self, key: StateKey, decode: Callable[[bytes], DecodedT]) -> DecodedT | None:
        """Return the last saved state of a key, or None without a file or with a damaged file.

        ValueError from *decode* means damage. A damaged file is moved aside only if this sidecar holds the key.
        """
        if not os.path.lexists(self.directory):
            return None
        path = self.directory / file_name(key)
        with self._using(path.name), contextlib.suppress(FileNotFoundError):
            try:
                file = read_state_file(path)
                if file.key != key:
                    raise DamagedFileError("the file belongs to a different key")  # noqa: TRY301 - the error is converted below
                return decode(file.content)
            except (DamagedFileError, ValueError) as error:
                if key in self._name_by_key:
                    self._move_aside(path, error)
        return None

    def save(self, key: StateKey, content: bytes) -> None:
        """Replace the file of a claimed key. After an error, the previous file is unchanged."""
        path = self.directory / file_name(key)
        with self._using(path.name):
            self._renew_locks()
            if key not in self._name_by_key:
                raise OSError(errno.ENOLCK, "a different sidecar holds the lock")
            data = encode_file(StateFile(key, self.sidecar, content))
            # The lock excludes other writers: a leftover temporary file is from a killed sidecar.
            replace_file(str(path), data, temporary=f"{path}.tmp", mode=0o600)

    def recent(self, kind: str, within_seconds: float) -> Sequence[StateKey]:
        """Return the keys of a kind that this sidecar saved within the given time.

        Damaged files are moved aside, unless a different sidecar holds them.
        """
        keys: list[StateKey] = []
        if not os.path.lexists(self.directory):
            return keys
        with self._using("."):
            for path in self.directory.glob(f"{kind}*{SUFFIX}"):
                # For an unreadable file, the load of its rank reports the error.
                with contextlib.suppress(OSError):
                    if path.lstat().st_mtime < self._clock() - within_seconds:
                        continue
                    try:
                        file = read_state_file(path)
                    except DamagedFileError as error:
                        self._move_aside_if_lockable(path, error)
                        continue
                    if (
                        file.sidecar == self.sidecar
                        and file.key[:1] == (kind,)
                        and file_name(file.key) == path.name
                    ):
                        keys.append(file.key)
        return keys

    def tidy(self) -> None:
        """Remove files that were not saved for `MAX_AGE_SECONDS`, and the oldest files above `MAX_FILES`.

        Does nothing unless `TIDY_SECONDS` have passed since the last removal, or `MAX_FILES` keys were claimed. Files that a sidecar
        holds are not removed.
        """
        now = self._clock()
        is_recent = self._tidied_at is not None and 0 <= now - self._tidied_at < TIDY_SECONDS
        if is_recent and self._claims < MAX_FILES:
            return
        self._tidied_at, self._claims = now, 0
        with contextlib.suppress(StateError), self._using("."):
            files_by_age: list[tuple[float, Path]] = []  # with the Unix time of the last save
            for path in self.directory.iterdir():
                with contextlib.suppress(OSError):  # another sidecar renamed the file
                    if SUFFIX in path.name:
                        files_by_age.append((path.lstat().st_mtime, path))
            for index, (modified_at, path) in enumerate(sorted(files_by_age, reverse=True)):
                name = path.name.partition(SUFFIX)[0] + SUFFIX
                is_surplus = modified_at < now - MAX_AGE_SECONDS or index >= MAX_FILES
                if is_surplus and name not in self._name_by_key.values() and self._locks.acquire(name):
                    try:
                        path.unlink(missing_ok=True)
                    except OSError:
                        self.errors += 1
                    finally:
                        self._locks.release(name)

    def record(
        self, subject: str, decode: Callable[[bytes], RecordT], *, run: str = ""
    ) -> StateRecord[RecordT]:
        """Return the record of a subject, of the whole machine or of a run. Opens no file."""
        # The key contains the sidecar, because each machine counts separately in a shared state directory. The kind is "page" in the
        # files of all releases.
        return StateRecord(self, ("page", run, subject, self.sidecar), decode)

    @contextlib.contextmanager
    def _using(self, name: str) -> Iterator[None]:
        """Lock the store, create the directory, and convert OSError to StateError, which names the file *name*."""
        with self._guard:
            try:
                self.directory.mkdir(mode=0o700, exist_ok=True)
                if self.directory.is_symlink():
                    raise OSError(errno.ELOOP, "the directory is a symbolic link")  # noqa: TRY301 - the error is converted below
                # A different user may have created the directory after the check.
                if foreign_uid(os.fspath(self._directory)) is not None:
                    raise OSError(errno.EPERM, "the directory belongs to a different user")  # noqa: TRY301 - the error is converted below
                self._is_created = True
                yield
            except OSError as error:
                self.errors += 1
                raise StateError(error.strerror or str(error), path=str(self.directory / name)) from error

    def _move_aside(self, path: Path, error: Exception) -> None:
        """Rename an unusable file, so that the next save does not overwrite it."""
        aside = path.rename(path.with_name(f"{path.name}{DAMAGED_MARK}{int(self._clock())}"))
        self.damaged_files += 1
        _log.error(
            "state file %s is unusable: %s; the file was renamed to %s, and totals that only this file contains restart at 0",
            path,
            error,
            aside.name,
        )

    def _move_aside_if_lockable(self, path: Path, error: Exception) -> None:
        """Move a file aside unless a different sidecar holds the key."""
        if path.name in self._name_by_key.values():
            self._move_aside(path, error)
        elif self._locks.acquire(path.name):
            try:
                self._move_aside(path, error)
            finally:
                self._locks.release(path.name)

    def _renew_locks(self) -> None:
        """Lock all keys again after a deletion of the lock file (`rm -r` of the directory)."""
        if self._locks.is_removed():
            self._locks.close()
            self._name_by_key = {
                key: name for key, name in self._name_by_key.items() if self._locks.acquire(name)
            }


class StateRecord(Generic[RecordT]):
    """Saved dataclass of a subject. Methods except `release` raise CollectError with the reason `state`."""

    def __init__(self, store: StateStore, key: StateKey, decode: Callable[[bytes], RecordT]) -> None:
        self._store = store
        self._key = key
        self._decode = decode

    def claim(self) -> bool:
        """Lock the record. Return False if a different sidecar holds the record."""
        try:
            return self._store.claim(self._key)
        except StateError as error:
            raise CollectError(str(error), reason="state") from error

    def load(self) -> RecordT | None:
        """Return the last saved value, or None without a file or with a damaged file."""
        try:
            return self._store.load(self._key, self._decode)
        except StateError as error:
            raise CollectError(str(error), reason="state") from error

    def save(self, value: RecordT) -> None:
        """Save a value. After an error, the previous file is unchanged."""
        try:
            self._store.save(self._key, to_line(value))
        except StateError as error:
            raise CollectError(f"totals are suppressed: {error}", reason="state") from error

    def release(self) -> None:
        """Release the record for other sidecars."""
        self._store.release(self._key)
