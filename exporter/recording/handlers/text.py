"""An event as one line for people.

Used in the training process, on handlers' threads. Pure functions.
"""

from __future__ import annotations

from time import gmtime, strftime

from exporter.recording.event_values import Datum, Event


def line_of(event: Event) -> str:
    """Render `2026-01-31T12:00:00.123Z WARNING rank=0 checkpoint.failed "no space" step=100`, without line end."""
    rank = "" if event.rank is None else f" rank={event.rank}"
    return f"{time_of(event.timestamp)} {event.severity.upper()}{rank} {summary_of(event)}"


def summary_of(event: Event) -> str:
    """Render what happened: type, message and data."""
    message = "" if event.message is None else f" {_quoted(event.message)}"
    data = "".join(f" {_word(name)}={_shown(value)}" for name, value in event.data.items())
    return f"{_word(event.type)}{message}{data}"


def time_of(seconds: float) -> str:
    """Render Unix time in UTC, to the millisecond; as a number where no calendar reaches."""
    try:
        milliseconds = round(seconds * 1000)
        return f"{strftime('%Y-%m-%dT%H:%M:%S', gmtime(milliseconds // 1000))}.{milliseconds % 1000:03d}Z"
    except (OverflowError, ValueError, OSError):
        return repr(seconds)


def _shown(value: Datum) -> str:
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else _escape(each) for each in escaped) + '"'


def _word(text: str) -> str:
    return text if text.isprintable() and " " not in text and '"' not in text else _quoted(text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
