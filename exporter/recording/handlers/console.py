"""Console: each event as a line on standard error, or on another stream.

Used in the training process, on its delivery's thread. A stream that is closed, full or slow costs lines, which
are counted, and nothing else.
"""

from __future__ import annotations

import sys
from typing import TextIO

from exporter.recording.event_values import Event
from exporter.recording.handlers.text import line_of


class ConsoleHandler:
    """Writes a line for each event.

    Args:
        stream: None for whatever standard error is at that moment.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def handle(self, event: Event) -> None:
        """Write one line and flush it."""
        stream = sys.stderr if self._stream is None else self._stream
        line = line_of(event) + "\n"
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
