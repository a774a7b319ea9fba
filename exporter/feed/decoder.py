"""Bytes to snapshot, in the sidecar.

What comes in is the content of a feed file, which anyone may have damaged or made up; what goes out is a
Snapshot that keeps every promise of the contract, or `FeedFormatError`. No other exception leaves, and no
number is read that is not finite. This is the one place where what comes out of a file is checked. No I/O, no threads.

The writer may be dead or of another version: keys, aggregations and fields that are unknown here are left out, what is
missing has the default of the contract, a format version that is unknown is refused. Limits are wider than what
recording accepts, since an older sidecar is to read a newer job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from math import inf, isfinite
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
from exporter.recording.aggregations import Aggregation
from exporter.recording.values import (
    KINDS,
    NO_EVENTS,
    NOTHING,
    Ending,
    EventsReading,
    Recording,
    StatDefinition,
    StatReading,
    TrainingReading,
    WindowReading,
)

Parsed = TypeVar("Parsed")
Take = Callable[[Any], Parsed]

STAT_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*(\.[a-zA-Z0-9_]+)*")
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
SLUG = re.compile(r"[a-z][a-z0-9_]{0,63}")
TAKEN_LABELS = frozenset({"run", "rank", "worker", "le", "quantile"})
"""Labels that the sidecar itself puts on a Stat's series; a second one of the name would spoil the scrape."""

MAX_CONTAINERS = 200_000
"""Lists and objects in one section: each costs its reader 60 bytes for the 2 that it takes in the file."""
MAX_NAME = 512
MAX_TEXT = 4096
MAX_SMALL = 64
"""Labels, reasons, facts, phases."""
MAX_ROWS = 256
"""Segments, and bins of the timeline: several times what a writer makes."""
MAX_BUCKETS = 1024
MAX_TIME = 1e11
"""Three thousand years on either side of 1970: differences and sums of what is within stay finite."""
MAX_SECONDS = 1e10
"""Three centuries: sums of what is below this stay finite."""

_AGGREGATIONS = {each.value: each for each in Aggregation}


STAT_BYTES, PART_BYTES = 4_000, 700
"""What a Stat costs the sidecar, roughly, from its decoding to its series, and each aggregation or bucket of it more."""
ROOM_BYTES = 24 << 20
"""What one process may cost by default."""


class Decoder:
    """Decodes the successive snapshots of one process.

    Of a process with more Stats than there is room for, those beyond are left out: first what users have recorded, the
    latest first. How many is told as `dropped["memory"]` of the snapshot.

    Definitions rarely change and windows close once a minute; a section whose bytes are those of the last
    time is not parsed again.
    """

    __slots__ = ("_definitions", "_identity", "_kept", "_what", "_when", "_windows", "cost")

    def __init__(self) -> None:
        self._what = self._when = b""
        self._identity: ProcessIdentity | None = None
        self._definitions: tuple[StatDefinition, ...] = ()
        self._windows: tuple[WindowReading | None, ...] = ()
        self._kept: tuple[bool, ...] = ()
        self.cost = 0

    def decode(self, data: bytes, room: int = ROOM_BYTES) -> Snapshot:
        """Read one file's content.

        Args:
            data: It.
            room: Bytes that its Stats may cost the sidecar; `cost` tells afterwards what they do.

        Raises:
            FeedFormatError: `magic`, `version`, `truncated`, `checksum` or `content`.
        """
        process_id, sequence, (what, when, totals) = _sections(data)
        if self._identity is None or what != self._what or process_id != self._identity.id:
            self._identity, self._definitions, self._kept, self.cost = _parse(
                what, lambda body: _who_and_what(body, process_id, room)
            )
            self._what, self._when = what, b""
        if when != self._when:
            self._windows = _parse(when, lambda body: _windows(body, self._kept))
            self._when = when
        identity, stats = self._identity, (self._definitions, self._windows, self._kept)
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


def _refuse(message: str) -> NoReturn:
    raise FeedFormatError(message, reason="content")


def _integer(digits: str) -> int:
    if len(digits) > 20:  # int() takes quadratic time, and 20 characters hold every number allowed here
        _refuse("a whole number of more than 20 digits")
    return int(digits)


# Made once: `json.loads` makes one for each call that is given functions.
_JSON = json.JSONDecoder(parse_int=_integer, parse_constant=lambda name: _refuse(f"{name} is no number"))


# Values: each takes what the JSON holds as its type, or refuses it ---------------------------------------------


def _object(found: object) -> dict[str, Any]:
    return found if type(found) is dict else _refuse(f"{type(found).__name__} where an object belongs")


def _flag(found: object) -> bool:
    return found if type(found) is bool else _refuse("neither true nor false")


def _text(most: int) -> Take[str]:
    def take(found: object) -> str:
        if type(found) is not str or len(found) > most:
            _refuse(f"not a text of at most {most} characters")
        if "\0" in found:  # legal in an exposition, but tools take a page with it for a binary file
            _refuse("a NUL character")
        found.encode()  # half of a surrogate pair raises
        return found

    return take


def _matching(pattern: re.Pattern[str]) -> Take[str]:
    text = _text(MAX_NAME)

    def take(found: object) -> str:
        if pattern.fullmatch(text(found)) is None:
            _refuse(f"{str(found)[:80]!a} is no such name")
        return str(found)

    return take


def _label(found: object) -> str:
    """A type of events or a handler's name, which nobody chose to be a label: any printable text."""
    text = _text(MAX_NAME)(found)
    return text if text and text.isprintable() else _refuse(f"{text[:80]!a} is no type and no handler")


def _whole(least: int = 0) -> Take[int]:
    def take(found: object) -> int:
        if type(found) is not int or not least <= found <= MAX_COUNT:
            _refuse(f"not a whole number from {least} to {MAX_COUNT}")
        return found

    return take


def _number(least: float = -inf, most: float = inf, *, above: bool = False) -> Take[float]:
    def take(found: object) -> float:
        if type(found) is not float and type(found) is not int:
            _refuse("not a finite number")
        number = float(found)
        if not isfinite(number) or not least <= number <= most or (above and number == least):
            _refuse(f"not a finite number from {least:g} to {most:g}")
        return number

    return take


def _optional(take: Take[Parsed]) -> Take[Parsed | None]:
    return lambda found: None if found is None else take(found)


def _list(found: object, take: Take[Parsed], most: int) -> tuple[Parsed, ...]:
    if type(found) is not list or len(found) > most:
        _refuse(f"not a list of at most {most}")
    return tuple([take(each) for each in found])


def _pairs(take_first: Take[Any], take_second: Take[Any], most: int) -> Take[tuple[tuple[Any, Any], ...]]:
    def take(found: object) -> tuple[Any, Any]:
        if type(found) is not list or len(found) != 2:
            _refuse("not a pair")
        return take_first(found[0]), take_second(found[1])

    return lambda found: _list(found, take, most)


def _by(take_key: Take[str], take: Take[Parsed]) -> Take[dict[str, Parsed]]:
    def taken(found: object) -> dict[str, Parsed]:
        body = _object(found)
        if len(body) > MAX_SMALL:
            _refuse(f"more than {MAX_SMALL} keys")
        return {take_key(key): take(value) for key, value in body.items()}

    return taken


def _fields(body: Mapping[str, Any], table: Mapping[str, Take[Any]]) -> dict[str, Any]:
    """Take what a table knows; what is missing is left to the default of the contract, if it has one."""
    return {name: take(body[name]) for name, take in table.items() if name in body}


_slug, _count, _positive_whole = _matching(SLUG), _whole(), _whole(1)
_any_number, _at_least_zero, _positive = _number(), _number(0.0), _number(0.0, above=True)
_time, _seconds, _step = _number(-MAX_TIME, MAX_TIME), _number(0.0, MAX_SECONDS), _whole(-MAX_COUNT)
_identity_text = _text(MAX_IDENTITY_TEXT)
_labels = _pairs(_matching(LABEL_NAME), _text(MAX_TEXT), MAX_SMALL)
_counts = _by(_slug, _count)

# The tables: a row for each field ------------------------------------------------------------------------------

_PROCESS: Mapping[str, Take[Any]] = {
    "pid": _positive_whole,
    "started": _time,
    "run": _identity_text,
    "rank": _optional(_count),
    "local_rank": _optional(_count),
    "role": _identity_text,
    "node": _identity_text,
    "labels": _labels,
    "version": _identity_text,
    "run_given": _flag,
    "trains": _flag,
}
_DEFINITION: Mapping[str, Take[Any]] = {
    "name": _matching(STAT_NAME),
    "window_seconds": _optional(_positive),
    "window_samples": _optional(_positive_whole),
    "unit": _optional(_slug),
    "help": _text(MAX_TEXT),
    "labels": _labels,
    "buckets": lambda found: _list(found, _any_number, MAX_BUCKETS),
    "stale_seconds": _positive,
    "kind": lambda found: KINDS[KINDS.index(found)],
}
_TRAINING: Mapping[str, Take[Any]] = {
    "facts": _pairs(_slug, _identity_text, MAX_SMALL),
    "phase": _slug,
    "phase_since": _time,
    "phases": _by(_slug, _seconds),
    "last_progress": _optional(_time),
    "first_step": _optional(_step),
    "loop": _count,
    "step": _optional(_step),
    "steps": _count,
    "work_seconds": _seconds,
    "open_seconds": _seconds,
    "failed_seconds": _seconds,
    "committed_step": _optional(_step),
    "committed_seconds": _seconds,
    "segments": lambda found: _list(found, _segment, MAX_ROWS),
    "finished": _flag,
    "failure": lambda found: "" if found == "" else _slug(found),
    "longest_step_seconds": _optional(_seconds),
    "timeline": _pairs(_any_number, _pairs(_slug, _seconds, MAX_SMALL), MAX_ROWS),
    "flops_per_token": _optional(_at_least_zero),
    "hardware_flops_per_token": _optional(_at_least_zero),
    "peak_flops": _optional(_at_least_zero),
}
_RECORDING: Mapping[str, Take[Any]] = {
    "final": _flag,
    "drain_delay_seconds": _at_least_zero,
    "passive_stuck_since": _optional(_any_number),
    "events": lambda found: _events(_object(found)),
    "training": lambda found: _training(_object(found)),
    "ending": lambda found: Ending(_text(MAX_NAME)(found["exception"]), _time(found["at"])),
    "stats_refused": _count,
}


def _who_and_what(
    body: dict[str, Any], process_id: str, room: int
) -> tuple[ProcessIdentity, tuple[StatDefinition, ...], tuple[bool, ...], int]:
    found = _list(body["stats"], _object, MAX_STATS)
    costs = [
        STAT_BYTES + PART_BYTES * (len(each["aggregations"]) + len(each.get("buckets", ()))) for each in found
    ]
    kept, cost = [False] * len(found), 0
    for plain in (True, False):  # the exporter's own families before those of users
        for place, each in enumerate(found):
            if (each.get("kind", "stat") != "stat") is plain and cost + costs[place] <= room:
                kept[place] = True
                cost += costs[place]
    known: dict[object, Any] = {}
    definitions = tuple([_definition(each, known) for each, keep in zip(found, kept, strict=True) if keep])
    if len({(each.name, each.labels) for each in definitions}) < len(definitions):
        _refuse("the same Stat twice")
    identity = ProcessIdentity(id=process_id, **_fields(_object(body["process"]), _PROCESS))
    return identity, definitions, tuple(kept), cost


def _definition(body: dict[str, Any], known: dict[object, Any]) -> StatDefinition:
    names = _list(body["aggregations"], lambda name: name, MAX_SMALL)
    aggregations = frozenset(_AGGREGATIONS[name] for name in names if name in _AGGREGATIONS)
    found = _fields(body, _DEFINITION)
    # Most Stats have the same ones: kept once for a process, a Stat's memory is a third less.
    for name, value in (("aggregations", aggregations), ("buckets", found.get("buckets", ()))):
        found[name] = known.setdefault(value, value)
    definition = StatDefinition(**found)
    buckets, labels = definition.buckets, definition.labels
    histogram = Aggregation.HISTOGRAM in aggregations
    if any(low >= high for low, high in pairwise(buckets)) or (buckets and not histogram):
        _refuse("buckets that do not ascend, or without a histogram")
    names_of_labels = [name for name, _ in labels]
    if not TAKEN_LABELS.isdisjoint(names_of_labels) or names_of_labels != sorted(set(names_of_labels)):
        _refuse("labels that are taken, not sorted, or there twice")
    if definition.kind != "stat" and histogram != (definition.kind == "histogram"):
        _refuse("a plain family with aggregations that are another kind's")
    if body["window_seconds"] is None and body["window_samples"] is None:
        _refuse("a Stat without a window")
    return definition


def _windows(body: dict[str, Any], kept: tuple[bool, ...]) -> tuple[WindowReading | None, ...]:
    windows = _list(body["windows"], lambda window: window, MAX_STATS)
    if len(windows) != len(kept):
        _refuse(f"{len(windows)} windows of {len(kept)} Stats")
    read = _optional(_window)
    return tuple([read(window) for window, keep in zip(windows, kept, strict=True) if keep])


def _window(found: object) -> WindowReading:
    body = _object(found)
    values = {
        _AGGREGATIONS[name]: _any_number(value)
        for name, value in _object(body["values"]).items()
        if name in _AGGREGATIONS  # else of a later version
    }
    # It may end before it starts: that is what a step of the wall clock looks like.
    samples = _count(body["samples"])
    if values and not samples:
        _refuse("a window with values of no samples")
    return WindowReading(_any_number(body["started"]), _any_number(body["ended"]), samples, values)


def _snapshot(
    body: dict[str, Any],
    identity: ProcessIdentity,
    sequence: int,
    definitions: tuple[StatDefinition, ...],
    windows: tuple[WindowReading | None, ...],
    kept: tuple[bool, ...],
) -> Snapshot:
    totals = _list(body["stats"], _object, MAX_STATS)
    if len(totals) != len(kept):
        _refuse(f"{len(totals)} totals of {len(kept)} Stats")
    dropped = _counts(body.get("dropped", {}))
    if not all(kept):
        totals = tuple([each for each, keep in zip(totals, kept, strict=True) if keep])
        dropped = {**dropped, "memory": kept.count(False)}
    return Snapshot(
        process=identity,
        sequence=sequence,
        written=_time(body["written"]),
        flush_seconds=_positive(body["flush_seconds"]),
        recording=Recording(
            stats=tuple(map(_reading, definitions, windows, totals)),
            **{"final": body["final"], **_fields(body, _RECORDING)},
        ),
        dropped=dropped,
    )


def _reading(definition: StatDefinition, window: WindowReading | None, total: dict[str, Any]) -> StatReading:
    # The hottest function of the sidecar: called for every Stat of every process, every second.
    count, added, last, value = (
        _count(total["count"]),
        total["sum"],
        total.get("last_sample"),
        total.get("value"),
    )
    bucket_counts = tuple(map(_count, total["bucket_counts"])) if "bucket_counts" in total else ()
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
        None if last is None else _any_number(last),
        _counts(total["rejected"]) if "rejected" in total else NOTHING,
        _count(total["overflows"]) if "overflows" in total else 0,
        None if value is None else _any_number(value),
    )


def _events(body: dict[str, Any]) -> EventsReading:
    counts: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], float] = {}
    for type_, severity, count, when in _rows(body["counts"]):
        pair = _label(type_), _slug(severity)
        _add(counts, pair, _positive_whole(count))
        if when is not None:
            last[pair] = _any_number(when)
    delivered: dict[str, int] = {}
    for name, count in _rows(body.get("delivered", [])):
        _add(delivered, _label(name), _count(count))
    found: list[dict[tuple[str, str], int]] = [{}, {}]
    for key, triples in zip(("suppressed", "dropped"), found, strict=True):
        for first, reason, count in _rows(body.get(key, [])):
            _add(triples, (_label(first), _slug(reason)), _positive_whole(count))
    return EventsReading(counts, last, found[0], delivered, found[1]) if body else NO_EVENTS


def _rows(found: object) -> tuple[list[Any], ...]:
    return _list(found, lambda row: row if type(row) is list else _refuse("not a row"), MAX_EVENT_ROWS)


def _add(counts: dict[Any, int], key: object, count: int) -> None:
    if key in counts:
        _refuse("the same counted twice")
    counts[key] = count


def _training(body: dict[str, Any]) -> TrainingReading:
    training = TrainingReading(**_fields(body, _TRAINING))
    for rows in (training.facts, training.timeline):
        if any(first[0] >= second[0] for first, second in pairwise(rows)):  # type: ignore[operator]  # of one kind
            _refuse("facts or bins that are not in order, or there twice")
    return training


def _segment(found: object) -> tuple[int, int, int, float]:
    loop, first, last, seconds = _list(found, lambda each: each, 4)
    if _step(first) > _step(last):
        _refuse("a segment that ends before it begins")
    return _count(loop), first, last, _seconds(seconds)


def decode(data: bytes) -> Snapshot:
    """Read one snapshot; a reader of many uses one `Decoder` for each process."""
    return Decoder().decode(data)
