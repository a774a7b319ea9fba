"""Console: each event as a line for people, on standard error or on another stream.

Used in the training process, on its worker's thread. A stream that is closed, full or slow costs lines, which are
counted, and nothing else.
"""

from __future__ import annotations

import sys
from time import gmtime, strftime
from typing import TextIO

from exporter.recording.event_values import Datum, Event


class ConsoleHandler:
    """Writes a line for each event; a stream of None is whatever standard error is at that moment."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def handle(self, event: Event) -> None:
        """Write one line and flush it."""
        stream = sys.stderr if self._stream is None else self._stream
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write((line_of(event) + "\n").encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def line_of(event: Event) -> str:
    """Render `2026-01-31T12:00:00.123Z WARNING rank=0 checkpoint.failed "no space" step=100`, without line end."""
    rank = "" if event.rank is None else f" rank={event.rank}"
    try:
        milliseconds = round(event.timestamp * 1000)
        at = f"{strftime('%Y-%m-%dT%H:%M:%S', gmtime(milliseconds // 1000))}.{milliseconds % 1000:03d}Z"
    except (OverflowError, ValueError, OSError):
        at = repr(event.timestamp)  # where no calendar reaches
    return f"{at} {event.severity.upper()}{rank} {summary_of(event)}"


def summary_of(event: Event) -> str:
    """Render what happened: type, message and data."""
    message = "" if event.message is None else f" {_quoted(event.message)}"
    data = "".join(f" {_word(name)}={_shown(value)}" for name, value in event.data.items())
    return f"{_word(event.type)}{message}{data}"


def _shown(value: Datum) -> str:
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else _escape(each) for each in escaped) + '"'


def _word(text: str) -> str:
    return text if text.isprintable() and " " not in text and '"' not in text else _quoted(text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
