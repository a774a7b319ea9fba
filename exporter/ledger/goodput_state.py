"""A task's goodput to bytes and back: the content of its state file.

Runs in the sidecar, on the ledger's collecting thread; no I/O. The bytes are JSON, so that a person can read them; the
keys are the names of the attributes of `Goodput` and `Attempt`, where what they mean stands. A key of a later version
is passed over, a missing one has its default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from exporter.ledger import stored
from exporter.ledger.attempts import CAUSES, Attempt, Segment
from exporter.ledger.goodput import Goodput
from exporter.recording.values import END_REASONS

_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_NOT_KEPT = ("changed",)


def encode_goodput(goodput: Goodput) -> bytes:
    """Write the content of a state file."""
    body = asdict(goodput)
    for name in _NOT_KEPT:
        del body[name]
    return (_dumps(body) + "\n").encode("ascii")


def decode_goodput(content: bytes) -> Goodput:
    """Read it back.

    Raises:
        ValueError: It is not what `encode_goodput` writes.
    """
    try:
        body = json.loads(content, parse_constant=stored.refuse_constant)
        attempt = body.get("attempt")
        goodput = Goodput(**_known(Goodput, body, _GOODPUT))
        goodput.attempt = None if attempt is None else Attempt(**_known(Attempt, attempt, _ATTEMPT))
    # What a missing key, a value of another type or a deep nesting raises on the way.
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return goodput


def _known(
    of: type, body: Mapping[str, Any], readers: Mapping[str, Callable[[Any], object]]
) -> dict[str, Any]:
    names = {each.name for each in fields(of)}
    return {name: readers[name](value) for name, value in body.items() if name in names & readers.keys()}


def _flag(found: object) -> bool:
    if type(found) is not bool:
        raise ValueError("neither true nor false")
    return found


def _whole(found: object) -> int:
    if type(found) is not int:
        raise ValueError("not a whole number")
    return found


def _seconds(found: object) -> float:
    seconds = stored.number(found)
    if seconds < 0:
        raise ValueError("a negative time")
    return seconds


def _pair(found: Any) -> tuple[str, str]:
    first, second = found
    return stored.text(first), stored.text(second)


def _optional(read: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda found: None if found is None else read(found)


def _causes(found: Any) -> dict[str, float]:
    return dict.fromkeys(CAUSES, 0.0) | {
        stored.text(cause): _seconds(value) for cause, value in found.items()
    }


def _spent(found: Any) -> dict[str, float]:
    return {stored.text(cause): _seconds(value) for cause, value in found.items()}


def _reasons(found: Any) -> dict[str, int]:
    return dict.fromkeys(END_REASONS, 0) | {
        stored.text(reason): stored.count(value) for reason, value in found.items()
    }


def _segments(found: Any) -> list[Segment]:
    segments = [(_whole(first), _whole(last), _seconds(seconds)) for first, last, seconds in found]
    if any(first > last for first, last, _ in segments):
        raise ValueError("a segment that ends before it begins")
    return segments


_GOODPUT: Mapping[str, Callable[[Any], object]] = {
    "productive": _seconds,
    "validated": _seconds,
    "badput": _causes,
    "wall": _seconds,
    "lost_steps": stored.count,
    "restarts": _reasons,
    "interruptions": _reasons,
    "pending": _segments,
    "high": _optional(_whole),
    "position": _optional(_whole),
    "gap": _seconds,
    "gap_counted": _seconds,
    "target": _seconds,
    "taken": lambda found: [stored.text(each) for each in found],
    "trains": _flag,
}
_ATTEMPT: Mapping[str, Callable[[Any], object]] = {
    "process": stored.text,
    "run": stored.text,
    "number": stored.count,
    "start": stored.number,
    "recorded": stored.number,
    "pid": stored.count,
    "machine": _pair,
    "validates": _flag,
    "tagged": _flag,
    "perf_tag": stored.text,
    "told": _flag,
    "written": stored.number,
    "seconds": _seconds,
    "spent": _spent,
    "work": _seconds,
    "committed": _seconds,
    "failed": _seconds,
    "open": _seconds,
    "segments": lambda found: tuple(_segments(found)),
    "phase": stored.text,
    "first_step": _optional(_whole),
    "step": _optional(_whole),
    "steps": stored.count,
    "committed_step": _optional(_whole),
    "loop": stored.count,
    "longest": _optional(_seconds),
    "first_step_seconds": _optional(_seconds),
    "resumed": _flag,
    "finished": _flag,
    "final": _flag,
    "failure": stored.text,
    "ended": _optional(stored.number),
    "reason": stored.text,
    "orderly": _flag,
    "settled": _flag,
}
