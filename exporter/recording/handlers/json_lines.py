"""JSON lines: each event as one line of JSON in a file that rotates.

Used in the training process, on its delivery's thread. Events that wait together are written together, with one
call, as soon as none waits behind them. Lines that cannot be written are counted under the reason `write`.
"""

from __future__ import annotations

import json
import os
from math import isfinite
from pathlib import Path

from exporter.recording.event_values import Datum, Event
from exporter.recording.handlers.lines_file import LinesFile, filled, read_lines

__all__ = ["JsonLinesHandler", "line_of", "read_lines"]


class JsonLinesHandler:
    """Appends events to a file.

    Args:
        path: `{run}`, `{rank}` and `{pid}` in it stand for those of the process. Missing directories are made.
        max_bytes: A file that would become larger is rotated: `events.jsonl` becomes `events.jsonl.1`, and so on.
        backups: Rotated files that are kept; 0 keeps none.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `max_bytes` is below 1024, or `backups` is not from 0 to 1000.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = 64 << 20, backups: int = 5) -> None:
        self._pattern = os.path.abspath(os.fspath(path))  # noqa: PTH100  # before the job changes its directory
        self._file = LinesFile(max_bytes=max_bytes, backups=backups)
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lines: list[bytes] = []
        self._path: Path | None = None

    def handle(self, event: Event) -> None:
        """Take one event; it is written by `flush`."""
        if self._pid != os.getpid():
            self._begin()  # a forked child: what was not written yet is the parent's
        if self._path is None:
            self._path = filled(self._pattern, event.run, event.rank)
        self._lines.append(line_of(event))

    def flush(self) -> None:
        """Write what was taken since the last time.

        Raises:
            EventsLostError: Some of it could not be written.
        """
        lines, self._lines = self._lines, []
        if self._path is not None:
            self._file.append(self._path, lines)


def line_of(event: Event) -> bytes:
    """Render an event as JSON, whatever is in it; a number that is not finite becomes text."""
    fields = event.as_dict()
    fields["data"] = {name: _plain(value) for name, value in event.data.items()}
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def _plain(value: Datum) -> Datum:
    return value if not isinstance(value, float) or isfinite(value) else str(value)
