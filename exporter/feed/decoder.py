"""Bytes to snapshot, in the sidecar: content that may be damaged, of another version or made up gives `FeedFormatError`.

Keys, aggregations and fields that are unknown here are left out; what is missing has the default of the contract.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from itertools import accumulate, compress, pairwise
from math import isfinite
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints
from zlib import crc32

from exporter.errors import FeedFormatError
from exporter.feed.encoder import CHECKSUM, CHECKSUM_OFFSET, HEADER, MAGIC, MAX_BYTES, MAX_COUNT, VERSION
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.recording.exponential import BEYOND, LEAST
from exporter.recording.values import (
    KINDS,
    NOTHING,
    Aggregation,
    Recording,
    StatDefinition,
    StatReading,
    WindowReading,
)

Parsed = TypeVar("Parsed")
Take = Callable[[Any], Any]

STAT_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*(\.[a-zA-Z0-9_]+)*")
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
TAKEN_LABELS = frozenset({"run", "rank", "worker", "le", "quantile"})
"""Labels that the sidecar itself puts on a Stat's series; a second one of the name would spoil the scrape."""
MAX_TEXT = 4096

STAT_BYTES, PART_BYTES = 4_000, 700
"""What a Stat costs the sidecar, roughly, from its decoding to its series, and each aggregation or bucket of it more."""
MOST_EXPONENTIAL = 40_000
"""Exponential buckets taken of one process, 4 MiB in memory; histograms beyond it stay classic."""
ROOM_BYTES = 24 << 20
"""What one process may cost by default."""

_AGGREGATIONS = {each.value: each for each in Aggregation}


class Decoder:
    """Decodes the successive snapshots of one process; a section whose bytes are those of the last time is not parsed again.

    Of a process with more Stats than there is room for, those beyond are left out: first what users have recorded, the
    latest first. How many is told as `dropped["memory"]` of the snapshot. `cost` is the bytes that they cost the sidecar.
    """

    def __init__(self) -> None:
        self._what = self._when = b""
        self._identity = ProcessIdentity(id="", pid=0, started=0.0, run="", rank=None)
        self._definitions: tuple[StatDefinition, ...] = ()
        self._windows: tuple[WindowReading | None, ...] = ()
        self._kept: tuple[bool, ...] = ()
        self.cost = 0

    def decode(self, data: bytes, room: int = ROOM_BYTES) -> Snapshot:
        """Read one file's content, whose Stats may cost so many bytes; no exception leaves but `FeedFormatError`."""
        process_id, sequence, (what, when, totals) = _sections(data)
        if what != self._what or process_id != self._identity.id:
            _parse(what, lambda body: self._take_definitions(body, process_id, room))
            self._what, self._when = what, b""
        if when != self._when:
            _parse(when, self._take_windows)
            self._when = when
        return _parse(totals, lambda body: self._snapshot(body, sequence))

    def _take_definitions(self, body: dict[str, Any], process_id: str, room: int) -> None:
        found = [_object(each) for each in _list(body["stats"])]
        kept, cost = [False] * len(found), 0
        for ours in (True, False):  # the exporter's own families before those of users
            for place, each in enumerate(found):
                parts = len(each["aggregations"]) + len(each.get("buckets", ()))
                needed = STAT_BYTES + PART_BYTES * parts
                if (each.get("kind", "stat") != "stat") is ours and cost + needed <= room:
                    kept[place] = True
                    cost += needed
        known: dict[object, Any] = {}
        definitions = [_definition(each, known) for each in compress(found, kept)]
        if len({(each.name, each.labels) for each in definitions}) < len(definitions):
            _refuse("the same Stat twice")
        self._identity = ProcessIdentity(id=process_id, **_fields(_object(body["process"]), _PROCESS))
        self._definitions, self._kept, self.cost = tuple(definitions), tuple(kept), cost

    def _take_windows(self, body: dict[str, Any]) -> None:
        found = self._of_kept(body["windows"])
        self._windows = tuple([None if window is None else _window(window) for window in found])

    def _of_kept(self, found: object) -> list[Any]:
        if len(_list(found)) != len(self._kept):
            _refuse(f"{len(_list(found))} items of {len(self._kept)} Stats")
        return list(compress(_list(found), self._kept))

    def _snapshot(self, body: dict[str, Any], sequence: int) -> Snapshot:
        totals = [_object(each) for each in self._of_kept(body["stats"])]
        filled = 0
        for each in totals:
            if "exponential" in each:
                filled += len(each["exponential"][0])
                if filled > MOST_EXPONENTIAL:
                    del each["exponential"]
        readings = tuple(map(_reading, self._definitions, self._windows, totals))
        recording = Recording(readings, **_fields(body, _RECORDING))
        snapshot = Snapshot(self._identity, sequence, recording=recording, **_fields(body, _REST))
        if not all(self._kept):
            snapshot = snapshot.replace(dropped={**snapshot.dropped, "memory": self._kept.count(False)})
        return snapshot


def decode(data: bytes) -> Snapshot:
    """Read one snapshot; a reader of many uses one `Decoder` for each process."""
    return Decoder().decode(data)


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
    try:
        return convert(_object(_JSON.decode(section.decode())))
    # What a missing key, a value of another type, a bad encoding or a deep nesting raises on the way.
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
        raise FeedFormatError(
            f"content that no writer makes: {type(error).__name__}: {str(error)[:200]}", reason="content"
        ) from error


def _refuse(message: str) -> NoReturn:
    raise FeedFormatError(message, reason="content")


_JSON = json.JSONDecoder(parse_constant=lambda name: _refuse(f"{name} is no number"))


# Values: each function takes what JSON holds as one type, or refuses it ----------------------------------------


def _object(found: object) -> dict[str, Any]:
    return found if type(found) is dict else _refuse(f"{type(found).__name__} where an object belongs")


def _list(found: object) -> list[Any]:
    return found if type(found) is list else _refuse(f"{type(found).__name__} where a list belongs")


def _flag(found: object) -> bool:
    return found if type(found) is bool else _refuse("neither true nor false")


def _text(found: object) -> str:
    if type(found) is not str or len(found) > MAX_TEXT or "\0" in found:
        _refuse(f"not a text of at most {MAX_TEXT} characters without NUL")
    found.encode()  # half of a surrogate pair raises
    return found


def _whole(found: object) -> int:
    if type(found) is not int or not -MAX_COUNT <= found <= MAX_COUNT:
        _refuse("not a whole number of 64 bits")
    return found


def _count(found: object) -> int:
    return _whole(found) if type(found) is int and found >= 0 else _refuse("not a whole number from 0")


def _number(found: object) -> float:
    if (type(found) is not float and type(found) is not int) or not isfinite(found):
        _refuse("not a finite number")
    return float(found)


def _take(hint: Any) -> Take:
    """Make the function that takes what JSON holds as a type of the contract."""
    inner, origin = get_args(hint), get_origin(hint)
    if NoneType in inner:
        take = _take(next(each for each in inner if each is not NoneType))
        return lambda found: None if found is None else take(found)
    if origin is tuple and inner[-1] is Ellipsis:
        take = _take(inner[0])
        return lambda found: tuple(map(take, _list(found)))
    if origin is tuple:
        takes = tuple(map(_take, inner))
        return lambda found: tuple([each(value) for each, value in zip(takes, _list(found), strict=True)])
    if origin is frozenset:
        return lambda found: frozenset(_AGGREGATIONS[name] for name in _list(found) if name in _AGGREGATIONS)
    if inner:  # a mapping: numbers by name, by aggregation (those of a later version left out), or by a pair, in rows
        take = _count if inner[1] is int else _take(inner[1])
        if inner[0] is str:
            return lambda found: {_text(key): take(value) for key, value in _object(found).items()}
        if inner[0] is Aggregation:
            return lambda found: {
                known: take(value)
                for name, value in _object(found).items()
                if (known := _AGGREGATIONS.get(name)) is not None
            }
        return lambda found: {(_text(one), _text(two)): take(value) for one, two, value in _list(found)}
    if is_dataclass(hint):
        table = _table(hint)
        make: Any = hint
        return lambda found: make(**_fields(_object(found), table))
    takes_by_type: dict[object, Take] = {float: _number, int: _whole, str: _text, bool: _flag}
    return takes_by_type[hint]


def _table(of: Any, *without: str) -> dict[str, Take]:
    return {name: _take(hint) for name, hint in get_type_hints(of).items() if name not in without}


def _fields(body: Mapping[str, Any], table: Mapping[str, Take]) -> dict[str, Any]:
    """Take what a table knows; what is missing is left to the default of the contract, if it has one."""
    return {name: take(body[name]) for name, take in table.items() if name in body}


_counts = _take(Mapping[str, int])
_window = _take(WindowReading)  # it may end before it starts: so a step of the wall clock looks
_PROCESS = _table(ProcessIdentity, "id")
_DEFINITION = _table(StatDefinition, "min_samples")
_RECORDING = _table(Recording, "stats")
_REST = _table(Snapshot, "process", "sequence", "recording")


def _definition(body: dict[str, Any], known: dict[object, Any]) -> StatDefinition:
    found = _fields(body, _DEFINITION)
    # Most Stats have the same ones: kept once for a process, a Stat's memory is a third less.
    for name in ("aggregations", "buckets"):
        found[name] = known.setdefault(found.get(name, ()), found.get(name, ()))
    definition = StatDefinition(**found)
    labels = [name for name, _ in definition.labels]
    histogram = Aggregation.HISTOGRAM in definition.aggregations
    if STAT_NAME.fullmatch(definition.name) is None or definition.kind not in KINDS:
        _refuse(f"{definition.name[:80]!a} or {definition.kind[:80]!a} is no such name")
    if any(low >= high for low, high in pairwise(definition.buckets)) or (
        definition.buckets and not histogram
    ):
        _refuse("buckets that do not ascend, or without a histogram")
    if (
        not TAKEN_LABELS.isdisjoint(labels)
        or labels != sorted(set(labels))
        or not all(map(LABEL_NAME.fullmatch, labels))
    ):
        _refuse("labels that are taken, no names, not sorted, or there twice")
    if definition.kind != "stat" and histogram != (definition.kind == "histogram"):
        _refuse("a family without windows, with aggregations that are another kind's")
    return definition


def _reading(definition: StatDefinition, window: WindowReading | None, total: dict[str, Any]) -> StatReading:
    # The hottest function of the sidecar: called for each Stat of each process, every second.
    added, last, value = total["sum"], total.get("last_sample"), total.get("value")
    bucket_counts = tuple(map(_count, total["bucket_counts"])) if "bucket_counts" in total else ()
    if len(bucket_counts) != len(definition.buckets):
        _refuse(f"{len(bucket_counts)} counts for {len(definition.buckets)} buckets")
    return StatReading(
        definition,
        _count(total["count"]),
        None if added is None else _number(added),
        bucket_counts,
        window,
        None if last is None else _number(last),
        _counts(total["rejected"]) if "rejected" in total else NOTHING,
        _count(total["overflows"]) if "overflows" in total else 0,
        None if value is None else _number(value),
        _exponential(total["exponential"]) if "exponential" in total else {},
    )


def _exponential(found: Any) -> dict[int, int]:
    buckets, counts = found
    if {*map(type, buckets), *map(type, counts)} - {int}:
        _refuse("exponential buckets that are no whole numbers")
    if buckets and not (
        0 <= min(counts) <= max(counts) <= MAX_COUNT and LEAST <= min(buckets) <= max(buckets) <= BEYOND
    ):
        _refuse("an exponential bucket or a count out of range")
    return dict(zip(buckets, counts, strict=True))
