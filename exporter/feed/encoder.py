"""Snapshot to bytes, in the training process.

What comes in is the recording thread's Snapshot, what goes out the bytes of a feed file as `codec` describes
them. Runs on the thread that calls it and touches no file. What rarely changes, definitions and closed
windows, is kept as text from one flush to the next, so that most flushes render little more than totals.

The JSON is put together here, since the standard library's encoder costs each training process half a
megabyte of regular expressions at import and twice this time at each flush.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from time import sleep
from zlib import crc32

from exporter.errors import FeedFormatError
from exporter.feed.layout import CHECKSUM, CHECKSUM_OFFSET, HEADER, MAGIC, VERSION
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.recording.values import NO_EVENTS, EventsReading, StatDefinition, StatReading, WindowReading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ESCAPES = {code: f"\\u{code:04x}" for code in range(0x20)} | {ord('"'): '\\"', ord("\\"): "\\\\"}


_BREATH = 64
"""Values rendered between two chances for the job's threads to take the interpreter lock: half a millisecond."""
_NOTHING = object()


class Encoder:
    """Encodes the successive snapshots of one process."""

    __slots__ = ("_definitions", "_events", "_events_text", "_identity", "_process", "_totals", "_windows")

    def __init__(self) -> None:
        self._identity: ProcessIdentity | None = None
        self._process = b""
        self._events = NO_EVENTS
        self._events_text = b""
        self._definitions = _Column(_definition)
        self._windows = _Column(_window)
        self._totals = _Column(_total)

    def encode(self, snapshot: Snapshot) -> bytes:
        """Render the whole file.

        A number that is not finite is written as absent; none is ever written as NaN.

        Raises:
            FeedFormatError: `content`: text that is not Unicode, or values of a type that the contract excludes.
        """
        try:
            process_id = bytes.fromhex(snapshot.process.id)
            sections = self._sections(snapshot)
            header = bytearray(
                HEADER.pack(MAGIC, VERSION, 0, 0, process_id, snapshot.sequence, *map(len, sections))
            )
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            raise FeedFormatError(f"a snapshot that cannot be written: {error}", reason="content") from error
        checksum = crc32(header)
        for section in sections:
            checksum = crc32(section, checksum)
        CHECKSUM.pack_into(header, CHECKSUM_OFFSET, checksum)
        return b"".join((header, *sections))

    def _sections(self, snapshot: Snapshot) -> tuple[bytes, bytes, bytes]:
        if snapshot.process is not self._identity:
            self._process = _process(snapshot.process).encode()
            self._identity = snapshot.process
        stats = snapshot.recording.stats
        definitions = self._definitions.render([stat.definition for stat in stats])
        windows = self._windows.render([stat.window for stat in stats])
        totals = self._totals.render(stats)
        if snapshot.recording.events is not self._events:
            self._events_text = _events(snapshot.recording.events).encode()
            self._events = snapshot.recording.events
        return (
            b'{"process":%b,"stats":[%b]}' % (self._process, definitions),
            b'{"windows":[%b]}' % windows,
            b'{%b%b,"stats":[%b]}' % (_flush(snapshot).encode(), self._events_text, totals),
        )


class _Column:
    """One value of every Stat as JSON; only what is another object than the last time is rendered again."""

    __slots__ = ("_joined", "_stale", "_texts", "_to_text", "_values")

    def __init__(self, to_text: Callable[[Any], str]) -> None:
        self._to_text = to_text
        self._values: list[object] = []
        self._texts: list[str] = []
        self._joined = b""
        self._stale = False  # stays true after a value that could not be rendered

    def render(self, values: Sequence[object]) -> bytes:
        known, texts = self._values, self._texts
        rendered = 0
        if len(known) != len(values):
            missing = len(values) - len(known)
            del known[len(values) :], texts[len(values) :]
            known += [_NOTHING] * missing
            texts += [""] * missing
            self._stale = True
        for position, value in enumerate(values):
            if value is not known[position]:
                self._stale = True
                texts[position] = self._to_text(value)
                known[position] = value
                rendered += 1
                if not rendered % _BREATH:
                    sleep(0)
        if self._stale:
            self._joined = ",".join(texts).encode()
            self._stale = False
        return self._joined


def _process(process: ProcessIdentity) -> str:
    # The id stands in the header.
    return (
        f'{{"pid":{process.pid:d},"started":{_number(process.started)},"run":{_text(process.run)},'
        f'"rank":{_whole(process.rank)},"local_rank":{_whole(process.local_rank)},'
        f'"role":{_text(process.role)},"node":{_text(process.node)},"labels":{_pairs(process.labels)},'
        f'"version":{_text(process.version)}}}'
    )


def _definition(definition: StatDefinition) -> str:
    aggregations = ",".join(sorted([f'"{each.value}"' for each in definition.aggregations]))
    unit = "null" if definition.unit is None else _text(definition.unit)
    kind = "" if definition.kind == "stat" else f',"kind":{_text(definition.kind)}'
    return (
        f'{{"name":{_text(definition.name)},"aggregations":[{aggregations}],'
        f'"window_seconds":{_optional(definition.window_seconds)},'
        f'"window_samples":{_whole(definition.window_samples)},"unit":{unit},"help":{_text(definition.help)},'
        f'"labels":{_pairs(definition.labels)},"buckets":[{",".join(map(_number, definition.buckets))}],'
        f'"stale_seconds":{_number(definition.stale_seconds)}'
        f"{kind}}}"
    )


def _flush(snapshot: Snapshot) -> str:
    recording = snapshot.recording
    return (
        f'"written":{_number(snapshot.written)},"flush_seconds":{_number(snapshot.flush_seconds)},'
        f'"final":{_flag(recording.final)},"drain_delay_seconds":{_number(recording.drain_delay_seconds)},'
        f'"passive_stuck_since":{_optional(recording.passive_stuck_since)},'
        f'"dropped":{_counts(snapshot.dropped)}'
    )


def _events(events: EventsReading) -> str:
    if not events:
        return ""
    # The latest of a pair that has no count yet (it is being logged right now) comes with the next snapshot.
    counts = ",".join(
        [
            f"[{_text(pair[0])},{_text(pair[1])},{count:d},{_optional(events.last.get(pair))}]"
            for pair, count in events.counts.items()
        ]
    )
    delivered = ",".join([f"[{_text(name)},{count:d}]" for name, count in events.delivered.items()])
    return (
        f',"events":{{"counts":[{counts}],"suppressed":[{_triples(events.suppressed)}],'
        f'"delivered":[{delivered}],"dropped":[{_triples(events.dropped)}]}}'
    )


def _triples(counts: Mapping[tuple[str, str], int]) -> str:
    return ",".join(
        [f"[{_text(first)},{_text(second)},{count:d}]" for (first, second), count in counts.items()]
    )


def _total(stat: StatReading) -> str:
    # What has the value that the contract gives by default is left out: most are three numbers long.
    row = f'{{"count":{stat.count:d},"sum":{_optional(stat.sum)}'
    if stat.last_sample is not None:
        row += f',"last_sample":{_number(stat.last_sample)}'
    if stat.bucket_counts:
        row += f',"bucket_counts":[{",".join(map(str, stat.bucket_counts))}]'
    if stat.rejected:
        row += f',"rejected":{_counts(stat.rejected)}'
    if stat.overflows:
        row += f',"overflows":{stat.overflows:d}'
    if stat.value is not None:
        row += f',"value":{_number(stat.value)}'
    return row + "}"


def _window(window: WindowReading | None) -> str:
    if window is None:
        return "null"
    values = ",".join(
        [f'"{each.value}":{_number(value)}' for each, value in window.values.items() if isfinite(value)]
    )
    return (
        f'{{"started":{_number(window.started)},"ended":{_number(window.ended)},'
        f'"samples":{window.samples:d},"values":{{{values}}}}}'
    )


def _counts(counts: Mapping[str, int]) -> str:
    return "{" + ",".join([f"{_text(reason)}:{count:d}" for reason, count in counts.items()]) + "}"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return "[" + ",".join([f"[{_text(name)},{_text(value)}]" for name, value in pairs]) + "]"


def _text(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'


def _flag(flag: bool) -> str:
    return "true" if flag else "false"


def _whole(number: int | None) -> str:
    return "null" if number is None else f"{number:d}"


def _optional(number: float | None) -> str:
    return "null" if number is None else _number(number)


def _number(number: float) -> str:
    # float() first: numpy's scalars are floats whose repr is no JSON.
    number = float(number)
    return repr(number) if isfinite(number) else "null"
