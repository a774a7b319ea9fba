"""Carbon intensity from a file."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from exporter.errors import CollectError
from exporter.ledger.energy.options import JOULES_PER_KWH, MAX_GRAMS_PER_KWH, Intensity

MAX_BYTES = 4096
"""Maximum size of the file."""
MAX_SHOWN_CHARACTERS = 40
"""Maximum length of an invalid content in a message."""
CARBON_FILE = "carbon_file"
"""Reason of a collector failure: the file is unreadable or contains no valid number."""


@dataclass(frozen=True, slots=True)
class _FileVersion:
    """State of the file by which a change is recognized."""

    inode: int
    size: int
    modified_ns: int


class CarbonFile:
    """File with the carbon intensity in grams per kWh, read after each change.

    After a failed read the last valid number stays in use, with its modification time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: _FileVersion | None = None
        self._intensity: Intensity | None = None

    def read(self) -> None:
        """Read the file if it has changed. Raises CollectError for an unreadable file or an invalid number."""
        try:
            self._read()
        except (OSError, ValueError) as error:
            self._version = None
            cause = error.strerror if isinstance(error, OSError) else None
            raise CollectError(f"{self._path}: {cause or error}", reason=CARBON_FILE) from error

    @property
    def intensity(self) -> Intensity | None:
        """Last valid intensity, or None before the first."""
        return self._intensity

    def _read(self) -> None:
        """Read the file if it has changed. Raises OSError or ValueError."""
        # Not blocking: the path may name a pipe without a writer.
        with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise ValueError(f"not a file of at most {MAX_BYTES} bytes")
            version = _FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)
            if version != self._version:
                grams_per_kwh = _parse_grams_per_kwh(file.read(MAX_BYTES))
                self._intensity = Intensity(grams_per_kwh / JOULES_PER_KWH, "file", status.st_mtime)
                self._version = version


def _parse_grams_per_kwh(content: bytes) -> float:
    """Return the number in the content of a file. Raises ValueError outside of 0 to `MAX_GRAMS_PER_KWH`."""
    text = content.decode("utf-8-sig").strip()
    try:
        grams_per_kwh = float(text)
    except ValueError:
        grams_per_kwh = -1.0
    if not 0 <= grams_per_kwh <= MAX_GRAMS_PER_KWH:
        shown_text = text[:MAX_SHOWN_CHARACTERS]
        raise ValueError(f"expected grams per kWh from 0 to {MAX_GRAMS_PER_KWH:g}, found {shown_text!r}")
    return grams_per_kwh
