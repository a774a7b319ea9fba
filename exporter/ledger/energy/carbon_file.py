"""CarbonFile: carbon intensity of electricity, from a file that somebody else keeps up to date.

Runs in the sidecar, on the energy ledger's thread. The file is looked at in every pass and read when it has
changed. One of

    327.5                                   grams per kWh, as of the file's time of change

    time,grams_per_kwh                      the heading may be left out
    2026-03-01T12:00:00Z,327.5              ISO 8601 with a time zone, or Unix seconds
    2026-03-01T13:00:00+01:00,310

    [["2026-03-01T12:00:00Z", 327.5], [1772370000, 310]]      the same as JSON

The last entry whose time has come is in force; entries of the future are a forecast, and wait. A file that
cannot be understood leaves the last one that could in force, and its age shows. No network, no guessed region:
before the first entry, and without a file, there is no intensity.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from exporter.errors import CollectError

MAX_BYTES = 4 << 20
HIGHEST = 10_000.0
"""Grams per kWh that no grid has; a larger number is in another unit."""
EARLIEST, LATEST = 946_684_800.0, 4_102_444_800.0
"""2000 and 2100 in Unix time: what lies outside is no time in seconds. `327,5` is a number with a comma for its point."""
REASON = "carbon_file"


class CarbonFile:
    """One file.

    Args:
        path: Where it is; need not be there yet.
        clock: Unix time.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._state: tuple[int, int, int] | None = None
        self._times: list[float] = []
        self._values: list[float] = []

    def look(self) -> None:
        """Read it if it has changed.

        Raises:
            CollectError: `carbon_file`: it cannot be read or understood; what was in force stays so.
        """
        try:
            with open(self._path, "rb", opener=_open) as file:
                found = os.fstat(file.fileno())
                state = (found.st_ino, found.st_mtime_ns, found.st_size)
                if state == self._state:
                    return
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            self._state = None
            raise CollectError(f"{self._path}: {error.strerror or error}", reason=REASON) from error
        self._state = None  # so that a file that makes no sense is told in every pass
        if len(content) > MAX_BYTES:
            raise CollectError(f"{self._path} is longer than {MAX_BYTES} bytes", reason=REASON)
        try:
            entries = sorted(_entries(content.decode("utf-8-sig"), found.st_mtime))
        except (ValueError, OverflowError, RecursionError) as error:
            raise CollectError(f"{self._path}: {error}", reason=REASON) from error
        self._times = [time for time, _ in entries]
        self._values = [value for _, value in entries]
        self._state = state

    def now(self) -> tuple[float, float] | None:
        """Give the intensity in force, grams per kWh, and since when, Unix time; None before the first."""
        place = bisect_right(self._times, self._clock()) - 1
        return (self._values[place], self._times[place]) if place >= 0 else None


def _open(path: str, flags: int) -> int:
    # Without O_NONBLOCK, which no regular file minds, a pipe in its place would be waited for for ever.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file")


def _entries(text: str, modified: float) -> Iterable[tuple[float, float]]:
    text = text.strip()
    if text.startswith(("[", "{")):
        pairs = json.loads(text)
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in pairs
        ):
            raise ValueError("expected a JSON list of [time, grams per kWh]")
        rows = [(str(time), str(value)) for time, value in pairs]
    elif "," not in text:
        return [(modified, _grams(text))]
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        parts = [[part.strip() for part in line.split(",")] for line in lines]
        if any(len(part) != 2 for part in parts):
            raise ValueError("expected lines of time,grams_per_kwh")
        rows = [(time, value) for time, value in parts]
        if not _is_number(rows[0][1]):
            rows = rows[1:]  # the heading
    if not rows:
        raise ValueError("expected at least one entry")
    return [(_time(time), _grams(value)) for time, value in rows]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _grams(text: str) -> float:
    value = float(text) if _is_number(text) else math.nan
    if not 0 <= value <= HIGHEST:
        raise ValueError(f"expected grams per kWh from 0 to {HIGHEST:g}, found {text[:40]!r}")
    return value


def _time(text: str) -> float:
    if _is_number(text):
        seconds = float(text)
    else:
        # CPython before 3.11 does not know the Z.
        moment = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
        seconds = math.nan if moment.tzinfo is None else moment.timestamp()
    if not EARLIEST <= seconds < LATEST:
        raise ValueError(
            f"expected a time from 2000 to 2100 with its zone, or Unix seconds, found {text[:40]!r}"
        )
    return seconds
