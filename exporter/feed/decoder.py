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
from typing import Any, NoReturn, TypeVar
from zlib import crc32

from exporter.errors import FeedFormatError
from exporter.feed.content import (
    MAX_NAME,
    MAX_TEXT,
    SLUG,
    refuse,
    take_at_least_zero,
    take_counts,
    take_flag,
    take_labels,
    take_list,
    take_matching,
    take_number,
    take_object,
    take_optional,
    take_positive,
    take_text,
    take_time,
    take_whole,
)
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
from exporter.feed.training_decoder import take_training
from exporter.recording.values import (
    KINDS,
    NO_EVENTS,
    NOTHING,
    Aggregation,
    Ending,
    EventsReading,
    Recording,
    StatDefinition,
    StatReading,
    WindowReading,
)

Parsed = TypeVar("Parsed")

STAT_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*(\.[a-zA-Z0-9_]+)*")
TAKEN_LABELS = frozenset({"run", "rank", "worker", "le", "quantile"})
"""Labels that the sidecar itself puts on a Stat's series; a second one of the name would spoil the scrape."""

MAX_BUCKETS = 1024  # wider than what recording accepts, as all limits here
MAX_CONTAINERS = 200_000
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
        refuse(f"{len(data)} bytes where {min(expected, MAX_BYTES)} are allowed")
    header = bytearray(data[: HEADER.size])
    CHECKSUM.pack_into(header, CHECKSUM_OFFSET, 0)
    if crc32(memoryview(data)[HEADER.size :], crc32(header)) != checksum:
        raise FeedFormatError("the checksum does not fit the bytes", reason="checksum")
    if flags or not 1 <= sequence <= MAX_COUNT:
        refuse(f"flags {flags} and sequence {sequence}")
    ends = list(accumulate(lengths, initial=HEADER.size))
    return process_id.hex(), sequence, [data[start:end] for start, end in pairwise(ends)]


def _parse(section: bytes, convert: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    if section.count(b"{") + section.count(b"[") > MAX_CONTAINERS:
        refuse(f"more than {MAX_CONTAINERS} lists and objects")
    try:
        return convert(take_object(_JSON.decode(section.decode())))
    except FeedFormatError:
        raise
    # What a missing key, a value of another type, a bad encoding or a deep nesting raises on the way.
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
        raise FeedFormatError(
            f"content that no writer makes: {type(error).__name__}: {str(error)[:200]}", reason="content"
        ) from error


def _integer(digits: str) -> int:
    if len(digits) > 20:  # int() takes quadratic time, and 20 characters hold every number allowed here
        refuse("a whole number of more than 20 digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    refuse(f"{name} is no number")


# Made once: `json.loads` makes one for each call that is given functions.
_JSON = json.JSONDecoder(parse_int=_integer, parse_constant=_refuse_constant)


def _who_and_what(
    body: dict[str, Any], process_id: str
) -> tuple[ProcessIdentity, tuple[StatDefinition, ...]]:
    definitions = tuple(map(_definition, take_list(body["stats"], MAX_STATS)))
    if len({(each.name, each.labels) for each in definitions}) < len(definitions):
        refuse("the same Stat twice")
    return _process(take_object(body["process"]), process_id), definitions


def _process(body: dict[str, Any], process_id: str) -> ProcessIdentity:
    return ProcessIdentity(
        id=process_id,
        pid=take_whole(body["pid"], at_least=1),
        started=take_time(body["started"]),
        run=take_text(body["run"], MAX_IDENTITY_TEXT),
        rank=take_optional(body["rank"], take_whole),
        local_rank=take_optional(body.get("local_rank"), take_whole),
        role=take_text(body["role"], MAX_IDENTITY_TEXT),
        node=take_text(body["node"], MAX_IDENTITY_TEXT),
        labels=take_labels(body.get("labels", [])),
        version=take_text(body.get("version", ""), MAX_IDENTITY_TEXT),
        run_given=take_flag(body.get("run_given", True)),
        trains=take_flag(body.get("trains", False)),
    )


def _definition(found: object) -> StatDefinition:
    body = take_object(found)
    names = take_list(body["aggregations"], 64)
    aggregations = frozenset(_AGGREGATIONS[name] for name in names if name in _AGGREGATIONS)
    buckets = tuple(map(take_number, take_list(body.get("buckets", []), MAX_BUCKETS)))
    labels = take_labels(body.get("labels", []))
    if any(low >= high for low, high in pairwise(buckets)):
        refuse("buckets that do not ascend")
    if buckets and Aggregation.HISTOGRAM not in aggregations:
        refuse("buckets without a histogram")
    if not TAKEN_LABELS.isdisjoint(name for name, _ in labels) or list(labels) != sorted(labels):
        refuse("labels that are taken, or not sorted")
    definition = StatDefinition(
        name=take_matching(body["name"], STAT_NAME),
        aggregations=aggregations,
        window_seconds=take_optional(body["window_seconds"], take_positive),
        window_samples=take_optional(body["window_samples"], lambda number: take_whole(number, at_least=1)),
        unit=take_optional(body.get("unit"), lambda text: take_matching(text, SLUG)),
        help=take_text(body.get("help", ""), MAX_TEXT),
        labels=labels,
        buckets=buckets,
        stale_seconds=take_positive(body.get("stale_seconds", 300.0)),
        kind=KINDS[KINDS.index(body.get("kind", "stat"))],
    )
    if (Aggregation.HISTOGRAM in aggregations) != (
        definition.kind == "histogram"
    ) and definition.kind != "stat":
        refuse("a plain family with aggregations that are another kind's")
    if definition.window_seconds is None and definition.window_samples is None:
        refuse("a Stat without a window")
    return definition


def _windows(body: dict[str, Any]) -> tuple[WindowReading | None, ...]:
    return tuple([take_optional(window, _window) for window in take_list(body["windows"], MAX_STATS)])


def _window(found: object) -> WindowReading:
    body = take_object(found)
    started, ended, samples = (
        take_number(body["started"]),
        take_number(body["ended"]),
        take_whole(body["samples"]),
    )
    values = {
        _WINDOWED[name]: take_number(value)
        for name, value in take_object(body["values"]).items()
        if name in _WINDOWED  # of a later version
    }
    # It may end before it starts: that is what a step of the wall clock looks like.
    if values and not samples:
        refuse("a window with values of no samples")
    return WindowReading(started, ended, samples, values)


def _snapshot(
    body: dict[str, Any],
    identity: ProcessIdentity,
    sequence: int,
    definitions: tuple[StatDefinition, ...],
    windows: tuple[WindowReading | None, ...],
) -> Snapshot:
    totals = take_list(body["stats"], MAX_STATS)
    if not len(totals) == len(windows) == len(definitions):
        refuse(f"{len(totals)} totals and {len(windows)} windows of {len(definitions)} Stats")
    return Snapshot(
        process=identity,
        sequence=sequence,
        written=take_time(body["written"]),
        flush_seconds=take_positive(body["flush_seconds"]),
        recording=Recording(
            stats=tuple(map(_reading, definitions, windows, totals)),
            final=take_flag(body["final"]),
            drain_delay_seconds=take_at_least_zero(body.get("drain_delay_seconds", 0.0)),
            passive_stuck_since=take_optional(body.get("passive_stuck_since"), take_number),
            events=_events(body["events"]) if "events" in body else NO_EVENTS,
            training=take_training(body["training"]) if "training" in body else None,
            ending=_ending(body["ending"]) if "ending" in body else None,
            stats_refused=take_whole(body.get("stats_refused", 0)),
        ),
        dropped=take_counts(body.get("dropped", {})),
    )


def _reading(definition: StatDefinition, window: WindowReading | None, found: object) -> StatReading:
    # The hottest function of the sidecar: called for every Stat of every process, every second.
    total = take_object(found)
    count, added, last, value = (
        take_whole(total["count"]),
        total["sum"],
        total.get("last_sample"),
        total.get("value"),
    )
    bucket_counts = tuple(map(take_whole, total["bucket_counts"])) if "bucket_counts" in total else ()
    if len(bucket_counts) != len(definition.buckets):
        refuse(f"{len(bucket_counts)} counts for {len(definition.buckets)} buckets")
    if bucket_counts and (list(bucket_counts) != sorted(bucket_counts) or bucket_counts[-1] > count):
        refuse("counts of buckets that fall, or exceed the total")
    return StatReading(
        definition,
        count,
        None if added is None else take_at_least_zero(added),
        bucket_counts,
        window,
        None if last is None else take_number(last),
        take_counts(total["rejected"]) if "rejected" in total else NOTHING,
        take_whole(total["overflows"]) if "overflows" in total else 0,
        None if value is None else take_number(value),
    )


def _ending(found: object) -> Ending:
    body = take_object(found)
    return Ending(take_text(body["exception"], MAX_NAME), take_time(body["at"]))


def _events(found: object) -> EventsReading:
    body = take_object(found)
    counts: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], float] = {}
    for row in take_list(body["counts"], MAX_EVENT_ROWS):
        type_, severity, count, when = _row(row, 4)
        pair = _event_label(type_), take_matching(severity, SLUG)
        if pair in counts:
            refuse("the same events counted twice")
        counts[pair] = take_whole(count, at_least=1)
        if when is not None:
            last[pair] = take_number(when)
    delivered: dict[str, int] = {}
    for row in take_list(body.get("delivered", []), MAX_EVENT_ROWS):
        name, count = _row(row, 2)
        if name in delivered:
            refuse("the same handler twice")
        delivered[_event_label(name)] = take_whole(count)
    suppressed, dropped = _triples(body.get("suppressed", [])), _triples(body.get("dropped", []))
    return EventsReading(counts, last, suppressed, delivered, dropped)


def _triples(found: object) -> dict[tuple[str, str], int]:
    triples: dict[tuple[str, str], int] = {}
    for row in take_list(found, MAX_EVENT_ROWS):
        first, reason, count = _row(row, 3)
        pair = _event_label(first), take_matching(reason, SLUG)
        if pair in triples:
            refuse("the same reason twice")
        triples[pair] = take_whole(count, at_least=1)
    return triples


def _row(found: object, length: int) -> list[Any]:
    row = take_list(found, length)
    return row if len(row) == length else refuse(f"a row of {len(row)} where {length} belong")


def _event_label(found: object) -> str:
    """A type or a handler's name, which nobody chose to be a label: any printable text."""
    text = take_text(found, MAX_NAME)
    return text if text and text.isprintable() else refuse(f"{text[:80]!a} is no type and no handler")
