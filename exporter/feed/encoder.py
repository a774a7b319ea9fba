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
from exporter.feed.layout import CHECKSUM, CHECKSUM_OFFSET, HEADER, MAGIC, MAX_COUNT, VERSION
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.recording.values import (
    NO_EVENTS,
    Ending,
    EventsReading,
    StatDefinition,
    StatReading,
    TrainingReading,
    WindowReading,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ESCAPES = {code: f"\\u{code:04x}" for code in range(0x20)} | {ord('"'): '\\"', ord("\\"): "\\\\"}


_BREATH = 64
"""Values rendered between two chances for the job's threads to take the interpreter lock: half a millisecond."""
_NOTHING = object()
_TRAINING_NUMBERS = (
    "phase_since",
    "last_progress",
    "work_seconds",
    "open_seconds",
    "failed_seconds",
    "committed_seconds",
    "longest_step_seconds",
    "flops_per_token",
    "hardware_flops_per_token",
    "peak_flops",
)


class Encoder:
    """Encodes the successive snapshots of one process."""

    __slots__ = (
        "_definitions",
        "_events",
        "_events_text",
        "_identity",
        "_process",
        "_totals",
        "_training",
        "_windows",
    )

    def __init__(self) -> None:
        self._identity: ProcessIdentity | None = None
        self._process = b""
        self._events = NO_EVENTS
        self._events_text = b""
        self._training = _Training()
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
        if snapshot.process != self._identity:
            self._process = _process(snapshot.process).encode()
            self._identity = snapshot.process
        stats = snapshot.recording.stats
        definitions = self._definitions.render([stat.definition for stat in stats])
        windows = self._windows.render([stat.window for stat in stats])
        totals = self._totals.render(stats)
        if snapshot.recording.events is not self._events:
            self._events_text = _events(snapshot.recording.events).encode()
            self._events = snapshot.recording.events
        training = self._training.render(snapshot.recording.training).encode()
        return (
            b'{"process":%b,"stats":[%b]}' % (self._process, definitions),
            b'{"windows":[%b]}' % windows,
            b'{%b%b%b,"stats":[%b]}' % (_flush(snapshot).encode(), self._events_text, training, totals),
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


class _Training:
    """What the process tells of its training; what it told the last time is not rendered again.

    That is the facts, which rarely change, the segments between two steps of a slow job, and most bins of the
    timeline. Whatever has the value that the contract gives by default is left out.
    """

    __slots__ = ("_bins", "_facts", "_facts_text", "_segments", "_segments_text")

    def __init__(self) -> None:
        self._facts: object = ()
        self._facts_text = self._segments_text = "[]"
        self._segments: object = ()
        self._bins: dict[float, tuple[object, str]] = {}

    def render(self, training: TrainingReading | None) -> str:
        if training is None:
            return ""
        if training.facts != self._facts:  # made anew each time, though they rarely change
            self._facts_text, self._facts = _pairs(training.facts), training.facts
        if training.segments is not self._segments:
            finite = [_segment(*each) for each in training.segments if _is_told(*each)]
            self._segments_text = f"[{','.join(finite)}]"
            self._segments = training.segments
        phases = ",".join(
            [f"{_text(name)}:{_number(value)}" for name, value in training.phases.items() if isfinite(value)]
        )
        text = (
            f',"training":{{"facts":{self._facts_text},"phase":{_text(training.phase)},"phases":{{{phases}}},'
            f'"loop":{training.loop:d},"steps":{training.steps:d},"segments":{self._segments_text},'
            f'"finished":{_flag(training.finished)},"failure":{_text(training.failure)},'
            f'"timeline":[{self._timeline(training.timeline)}]'
        )
        for name in ("first_step", "step", "committed_step"):
            step = getattr(training, name)
            if step is not None and -MAX_COUNT <= step <= MAX_COUNT:
                text += f',"{name}":{step:d}'
        for name in _TRAINING_NUMBERS:
            number = getattr(training, name)
            if number is not None and isfinite(number):
                text += f',"{name}":{_number(number)}'
        return text + "}"

    def _timeline(self, timeline: Iterable[tuple[float, tuple[tuple[str, float], ...]]]) -> str:
        known, kept = self._bins, {}
        for each in timeline:
            end, parts = each
            before = known.get(end)
            if before is None or before[0] is not each:
                pairs = ",".join(
                    [f"[{_text(phase)},{_number(seconds)}]" for phase, seconds in parts if isfinite(seconds)]
                )
                before = each, f"[{_number(end)},[{pairs}]]"
            kept[end] = before
        self._bins = kept
        return ",".join([text for _, text in kept.values()])


def _is_told(_loop: int, first: int, last: int, seconds: float) -> bool:
    """Whether a reader takes it: a job may count its steps from anywhere."""
    return isfinite(seconds) and -MAX_COUNT <= first <= last <= MAX_COUNT


def _segment(loop: int, first: int, last: int, seconds: float) -> str:
    return f"[{loop:d},{first:d},{last:d},{_number(seconds)}]"


def _process(process: ProcessIdentity) -> str:
    # The id stands in the header.
    return (
        f'{{"pid":{process.pid:d},"started":{_number(process.started)},"run":{_text(process.run)},'
        f'"rank":{_whole(process.rank)},"local_rank":{_whole(process.local_rank)},'
        f'"role":{_text(process.role)},"node":{_text(process.node)},"labels":{_pairs(process.labels)},'
        f'"version":{_text(process.version)},"run_given":{_flag(process.run_given)},'
        f'"trains":{_flag(process.trains)}}}'
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
        f"{_ending(recording.ending)}"
        + (f',"stats_refused":{recording.stats_refused:d}' if recording.stats_refused else "")
    )


def _ending(ending: Ending | None) -> str:
    if ending is None:
        return ""
    return f',"ending":{{"exception":{_text(ending.exception)},"at":{_number(ending.at)}}}'


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
