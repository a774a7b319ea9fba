"""Bytes to snapshot, in the sidecar.

What comes in is the content of a feed file, which anyone may have damaged or made up; what goes out is a
Snapshot that keeps every promise of the contract, or `FeedFormatError`. No other exception leaves, and no
number is read that is not finite. No I/O, no threads.

The writer may be dead or of another version: keys that are unknown here are ignored, a format version that is
unknown is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any, NoReturn, TypeVar
from zlib import crc32

from exporter.errors import FeedFormatError
from exporter.feed.layout import (
    CHECKSUM,
    CHECKSUM_OFFSET,
    HEADER,
    MAGIC,
    MAX_BYTES,
    MAX_COUNT,
    MAX_EVENT_ROWS,
    MAX_IDENTITY_TEXT,
    MAX_STATS,
    VERSION,
)
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.recording.values import (
    KINDS,
    NO_EVENTS,
    NOTHING,
    Aggregation,
    EventsReading,
    Recording,
    StatDefinition,
    StatReading,
    WindowReading,
)

Parsed = TypeVar("Parsed")

STAT_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*(\.[a-zA-Z0-9_]+)*")
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
SLUG = re.compile(r"[a-z][a-z0-9_]{0,63}")
TAKEN_LABELS = frozenset({"run", "rank", "worker", "le", "quantile"})
"""Labels that the sidecar itself puts on a Stat's series; a second one of the name would spoil the scrape."""

# Wider than what recording accepts: an older sidecar is to read a newer job.
MAX_NAME = 512
MAX_TEXT = 4096
MAX_LABELS = 64
MAX_BUCKETS = 1024
MAX_REASONS = 64
MAX_CONTAINERS = 1_000_000
"""Lists and objects in one section: each costs its reader 60 bytes for the 2 that it takes in the file."""

_AGGREGATIONS = {each.value: each for each in Aggregation}
_WINDOWED: Mapping[str, Aggregation] = {
    each.value: each for each in Aggregation if each is not Aggregation.HISTOGRAM
}


class Decoder:
    """Decodes the successive snapshots of one process.

    Definitions rarely change and windows close once a minute; a section whose bytes are those of the last
    time is not parsed again.
    """

    __slots__ = ("_definitions", "_identity", "_what", "_when", "_windows")

    def __init__(self) -> None:
        self._what = self._when = b""
        self._identity: ProcessIdentity | None = None
        self._definitions: tuple[StatDefinition, ...] = ()
        self._windows: tuple[WindowReading | None, ...] = ()

    def decode(self, data: bytes) -> Snapshot:
        """Read one file's content.

        Raises:
            FeedFormatError: `magic`, `version`, `truncated`, `checksum` or `content`.
        """
        process_id, sequence, (what, when, totals) = _sections(data)
        if self._identity is None or what != self._what or process_id != self._identity.id:
            self._identity, self._definitions = _parse(what, lambda body: _who_and_what(body, process_id))
            self._what = what
        if when != self._when:
            self._windows = _parse(when, _windows)
            self._when = when
        identity, stats = self._identity, (self._definitions, self._windows)
        return _parse(totals, lambda body: _snapshot(body, identity, sequence, *stats))


def _sections(data: bytes) -> tuple[str, int, list[bytes]]:
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise FeedFormatError("not a feed file", reason="magic")
    if len(data) < HEADER.size:
        raise FeedFormatError(f"{len(data)} bytes are no header of {HEADER.size}", reason="truncated")
    _, version, flags, checksum, process_id, sequence, *lengths = HEADER.unpack_from(data)
    if version != VERSION:
        raise FeedFormatError(
            f"format version {version} is unknown here (known: {VERSION}); update the sidecar",
            reason="version",
        )
    expected = HEADER.size + sum(lengths)
    if len(data) < expected:
        raise FeedFormatError(f"{len(data)} bytes of {expected}", reason="truncated")
    if len(data) > min(expected, MAX_BYTES):
        _refuse(f"{len(data)} bytes where {min(expected, MAX_BYTES)} are allowed")
    header = bytearray(data[: HEADER.size])
    CHECKSUM.pack_into(header, CHECKSUM_OFFSET, 0)
    if crc32(memoryview(data)[HEADER.size :], crc32(header)) != checksum:
        raise FeedFormatError("the checksum does not fit the bytes", reason="checksum")
    if flags or not 1 <= sequence <= MAX_COUNT:
        _refuse(f"flags {flags} and sequence {sequence}")
    ends = list(accumulate(lengths, initial=HEADER.size))
    return process_id.hex(), sequence, [data[start:end] for start, end in pairwise(ends)]


def _parse(section: bytes, convert: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    if section.count(b"{") + section.count(b"[") > MAX_CONTAINERS:
        _refuse(f"more than {MAX_CONTAINERS} lists and objects")
    try:
        return convert(_object(_JSON.decode(section.decode())))
    except FeedFormatError:
        raise
    # What a missing key, a value of another type, a bad encoding or a deep nesting raises on the way.
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
        raise FeedFormatError(
            f"content that no writer makes: {type(error).__name__}: {str(error)[:200]}", reason="content"
        ) from error


def _integer(digits: str) -> int:
    if len(digits) > 20:  # int() takes quadratic time, and 20 characters hold every number allowed here
        _refuse("a whole number of more than 20 digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"{name} is no number")


# Made once: `json.loads` makes one for each call that is given functions.
_JSON = json.JSONDecoder(parse_int=_integer, parse_constant=_refuse_constant)


def _refuse(message: str) -> NoReturn:
    raise FeedFormatError(message, reason="content")


def _who_and_what(
    body: dict[str, Any], process_id: str
) -> tuple[ProcessIdentity, tuple[StatDefinition, ...]]:
    definitions = tuple(map(_definition, _list(body["stats"], MAX_STATS)))
    if len({(each.name, each.labels) for each in definitions}) < len(definitions):
        _refuse("the same Stat twice")
    return _process(_object(body["process"]), process_id), definitions


def _process(body: dict[str, Any], process_id: str) -> ProcessIdentity:
    return ProcessIdentity(
        id=process_id,
        pid=_whole(body["pid"], at_least=1),
        started=_number(body["started"]),
        run=_text(body["run"], MAX_IDENTITY_TEXT),
        rank=_optional(body["rank"], _whole),
        local_rank=_optional(body.get("local_rank"), _whole),
        role=_text(body["role"], MAX_IDENTITY_TEXT),
        node=_text(body["node"], MAX_IDENTITY_TEXT),
        labels=_labels(body.get("labels", [])),
        version=_text(body.get("version", ""), MAX_IDENTITY_TEXT),
    )


def _definition(found: object) -> StatDefinition:
    body = _object(found)
    names = _list(body["aggregations"], 64)
    aggregations = frozenset(_AGGREGATIONS[name] for name in names)
    buckets = tuple(map(_number, _list(body.get("buckets", []), MAX_BUCKETS)))
    labels = _labels(body.get("labels", []))
    if any(low >= high for low, high in pairwise(buckets)):
        _refuse("buckets that do not ascend")
    if buckets and Aggregation.HISTOGRAM not in aggregations:
        _refuse("buckets without a histogram")
    if not TAKEN_LABELS.isdisjoint(name for name, _ in labels) or list(labels) != sorted(labels):
        _refuse("labels that are taken, or not sorted")
    definition = StatDefinition(
        name=_matching(body["name"], STAT_NAME),
        aggregations=aggregations,
        window_seconds=_optional(body["window_seconds"], _positive),
        window_samples=_optional(body["window_samples"], lambda number: _whole(number, at_least=1)),
        unit=_optional(body.get("unit"), lambda text: _matching(text, SLUG)),
        help=_text(body.get("help", ""), MAX_TEXT),
        labels=labels,
        buckets=buckets,
        stale_seconds=_positive(body.get("stale_seconds", 300.0)),
        kind=KINDS[KINDS.index(body.get("kind", "stat"))],
    )
    if (Aggregation.HISTOGRAM in aggregations) != (
        definition.kind == "histogram"
    ) and definition.kind != "stat":
        _refuse("a plain family with aggregations that are another kind's")
    if definition.window_seconds is None and definition.window_samples is None:
        _refuse("a Stat without a window")
    return definition


def _windows(body: dict[str, Any]) -> tuple[WindowReading | None, ...]:
    return tuple([_optional(window, _window) for window in _list(body["windows"], MAX_STATS)])


def _window(found: object) -> WindowReading:
    body = _object(found)
    started, ended, samples = _number(body["started"]), _number(body["ended"]), _whole(body["samples"])
    values = {_WINDOWED[name]: _number(value) for name, value in _object(body["values"]).items()}
    # It may end before it starts: that is what a step of the wall clock looks like.
    if values and not samples:
        _refuse("a window with values of no samples")
    return WindowReading(started, ended, samples, values)


def _snapshot(
    body: dict[str, Any],
    identity: ProcessIdentity,
    sequence: int,
    definitions: tuple[StatDefinition, ...],
    windows: tuple[WindowReading | None, ...],
) -> Snapshot:
    totals = _list(body["stats"], MAX_STATS)
    if not len(totals) == len(windows) == len(definitions):
        _refuse(f"{len(totals)} totals and {len(windows)} windows of {len(definitions)} Stats")
    final = body["final"]
    if type(final) is not bool:
        _refuse("final is neither true nor false")
    return Snapshot(
        process=identity,
        sequence=sequence,
        written=_number(body["written"]),
        flush_seconds=_positive(body["flush_seconds"]),
        recording=Recording(
            stats=tuple(map(_reading, definitions, windows, totals)),
            final=final,
            drain_delay_seconds=_at_least_zero(body.get("drain_delay_seconds", 0.0)),
            passive_stuck_since=_optional(body.get("passive_stuck_since"), _number),
            events=_events(body["events"]) if "events" in body else NO_EVENTS,
        ),
        dropped=_counts(body.get("dropped", {})),
    )


def _reading(definition: StatDefinition, window: WindowReading | None, found: object) -> StatReading:
    # The hottest function of the sidecar: called for every Stat of every process, every second.
    total = _object(found)
    count, added, last, value = (
        _whole(total["count"]),
        total["sum"],
        total.get("last_sample"),
        total.get("value"),
    )
    bucket_counts = tuple(map(_whole, total["bucket_counts"])) if "bucket_counts" in total else ()
    if len(bucket_counts) != len(definition.buckets):
        _refuse(f"{len(bucket_counts)} counts for {len(definition.buckets)} buckets")
    if bucket_counts and (list(bucket_counts) != sorted(bucket_counts) or bucket_counts[-1] > count):
        _refuse("counts of buckets that fall, or exceed the total")
    return StatReading(
        definition,
        count,
        None if added is None else _at_least_zero(added),
        bucket_counts,
        window,
        None if last is None else _number(last),
        _counts(total["rejected"]) if "rejected" in total else NOTHING,
        _whole(total["overflows"]) if "overflows" in total else 0,
        None if value is None else _number(value),
    )


def _events(found: object) -> EventsReading:
    body = _object(found)
    counts: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], float] = {}
    for row in _list(body["counts"], MAX_EVENT_ROWS):
        type_, severity, count, when = _row(row, 4)
        pair = _event_label(type_), _matching(severity, SLUG)
        if pair in counts:
            _refuse("the same events counted twice")
        counts[pair] = _whole(count, at_least=1)
        if when is not None:
            last[pair] = _number(when)
    delivered: dict[str, int] = {}
    for row in _list(body.get("delivered", []), MAX_EVENT_ROWS):
        name, count = _row(row, 2)
        if name in delivered:
            _refuse("the same handler twice")
        delivered[_event_label(name)] = _whole(count)
    suppressed, dropped = _triples(body.get("suppressed", [])), _triples(body.get("dropped", []))
    return EventsReading(counts, last, suppressed, delivered, dropped)


def _triples(found: object) -> dict[tuple[str, str], int]:
    triples: dict[tuple[str, str], int] = {}
    for row in _list(found, MAX_EVENT_ROWS):
        first, reason, count = _row(row, 3)
        pair = _event_label(first), _matching(reason, SLUG)
        if pair in triples:
            _refuse("the same reason twice")
        triples[pair] = _whole(count, at_least=1)
    return triples


def _row(found: object, length: int) -> list[Any]:
    row = _list(found, length)
    return row if len(row) == length else _refuse(f"a row of {len(row)} where {length} belong")


def _event_label(found: object) -> str:
    """A type or a handler's name, which nobody chose to be a label: any printable text."""
    text = _text(found, MAX_NAME)
    return text if text and text.isprintable() else _refuse(f"{text[:80]!a} is no type and no handler")


def _counts(found: object) -> Mapping[str, int]:
    body = _object(found)
    if len(body) > MAX_REASONS:
        _refuse(f"more than {MAX_REASONS} reasons")
    return {_matching(reason, SLUG): _whole(count) for reason, count in body.items()}


def _labels(found: object) -> tuple[tuple[str, str], ...]:
    pairs = []
    for pair in _list(found, MAX_LABELS):
        name, value = _list(pair, 2)
        pairs.append((_matching(name, LABEL_NAME), _text(value, MAX_TEXT)))
    if len(dict(pairs)) < len(pairs):
        _refuse("a label twice")
    return tuple(pairs)


def _object(found: object) -> dict[str, Any]:
    if type(found) is not dict:
        _refuse(f"{type(found).__name__} where an object belongs")
    return found


def _list(found: object, at_most: int) -> list[Any]:
    if type(found) is not list or len(found) > at_most:
        _refuse(f"not a list of at most {at_most}")
    return found


def _text(found: object, at_most: int) -> str:
    if type(found) is not str or len(found) > at_most:
        _refuse(f"not a text of at most {at_most} characters")
    if "\0" in found:  # legal in an exposition, but tools take a page with it for a binary file
        _refuse("a NUL character")
    found.encode()  # half of a surrogate pair raises
    return found


def _matching(found: object, pattern: re.Pattern[str]) -> str:
    if pattern.fullmatch(_text(found, MAX_NAME)) is None:
        _refuse(f"{str(found)[:80]!a} is no such name")
    return str(found)


def _whole(found: object, *, at_least: int = 0) -> int:
    if type(found) is not int or not at_least <= found <= MAX_COUNT:
        _refuse(f"not a whole number from {at_least} to {MAX_COUNT}")
    return found


def _number(found: object) -> float:
    if type(found) is float and isfinite(found):
        return found
    if type(found) is int:
        return float(found)
    _refuse("not a finite number")


def _at_least_zero(found: object) -> float:
    number = _number(found)
    return number if number >= 0 else _refuse("a negative number where none belongs")


def _positive(found: object) -> float:
    number = _number(found)
    return number if number > 0 else _refuse("a number that is not above 0")


def _optional(found: object, convert: Callable[[Any], Parsed]) -> Parsed | None:
    return None if found is None else convert(found)
