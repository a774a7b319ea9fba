"""Snapshot to bytes, in the training process.

What comes in is the recording thread's Snapshot, what goes out the bytes of a feed file as `layout` describes
them. Runs on the thread that calls it and touches no file. What rarely changes, definitions and closed
windows, is kept as text from one flush to the next, so that most flushes render little more than totals. A value that
is the default of the contract is left out, and so is a number that is not finite.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from json import JSONEncoder
from math import isfinite
from time import sleep
from typing import Any
from zlib import crc32

from exporter.errors import FeedFormatError
from exporter.feed.layout import CHECKSUM, CHECKSUM_OFFSET, HEADER, MAGIC, MAX_COUNT, VERSION
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.recording.values import (
    EventsReading,
    StatDefinition,
    StatReading,
    TrainingReading,
    WindowReading,
)

_BREATH = 64
"""Values rendered between two chances for the job's threads to take the interpreter lock: half a millisecond."""
_STEPS = frozenset({"first_step", "step", "committed_step"})
_TRAINING_DEFAULTS = {each.name: each.default for each in fields(TrainingReading)}

_dumps: Callable[[object], str] = JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False
).encode


def encode(snapshot: Snapshot) -> bytes:
    """Render one snapshot; a writer of many uses one `Encoder`."""
    return Encoder().encode(snapshot)


class Encoder:
    """Encodes the successive snapshots of one process."""

    def __init__(self) -> None:
        self._definitions = _Column(_definition)
        self._windows = _Column(_window)
        self._totals = _Column(_total)

    def encode(self, snapshot: Snapshot) -> bytes:
        """Render the whole file.

        Raises:
            FeedFormatError: `content`: text that is not Unicode, or values of a type that the contract excludes.
        """
        try:
            process_id = bytes.fromhex(snapshot.process.id)
            sections = self._sections(snapshot)
            header = bytearray(
                HEADER.pack(MAGIC, VERSION, 0, 0, process_id, snapshot.sequence, *map(len, sections))
            )
        except (AttributeError, TypeError, ValueError, OverflowError, struct.error) as error:
            raise FeedFormatError(f"a snapshot that cannot be written: {error}", reason="content") from error
        checksum = crc32(header)
        for section in sections:
            checksum = crc32(section, checksum)
        CHECKSUM.pack_into(header, CHECKSUM_OFFSET, checksum)
        return b"".join((header, *sections))

    def _sections(self, snapshot: Snapshot) -> tuple[bytes, bytes, bytes]:
        stats = snapshot.recording.stats
        definitions = self._definitions.render([stat.definition for stat in stats])
        windows = self._windows.render([stat.window for stat in stats])
        return (
            b'{"process":%b,"stats":[%b]}' % (_dumps(_process(snapshot.process)).encode(), definitions),
            b'{"windows":[%b]}' % windows,
            b'%b,"stats":[%b]}' % (_dumps(_rest(snapshot)).encode()[:-1], self._totals.render(stats)),
        )


class _Column:
    """One value of every Stat as JSON; only what is another object than the last time is rendered again."""

    def __init__(self, to_json: Callable[[Any], object]) -> None:
        self._to_json = to_json
        self._texts: dict[
            int, tuple[object, str]
        ] = {}  # by identity; the object is kept so that it stays one

    def render(self, values: Sequence[object]) -> bytes:
        """Give them, joined by commas."""
        known, self._texts = self._texts, {}
        texts = []
        for position, value in enumerate(values):
            kept = known.get(id(value))
            if kept is None:
                kept = value, _dumps(self._to_json(value))
                if not position % _BREATH:
                    sleep(0)
            self._texts[id(value)] = kept
            texts.append(kept[1])
        return ",".join(texts).encode()


def _process(process: ProcessIdentity) -> dict[str, object]:
    # The id stands in the header.
    return {each.name: getattr(process, each.name) for each in fields(process) if each.name != "id"}


def _definition(definition: StatDefinition) -> dict[str, object]:
    body = {each.name: getattr(definition, each.name) for each in fields(definition)}
    del body["min_samples"]
    body["aggregations"] = sorted(each.value for each in definition.aggregations)
    if definition.kind == "stat":
        del body["kind"]
    return body


def _window(window: WindowReading | None) -> dict[str, object] | None:
    if window is None:
        return None
    return {
        "started": window.started,
        "ended": window.ended,
        "samples": window.samples,
        "values": {each.value: value for each, value in window.values.items() if isfinite(value)},
    }


def _total(stat: StatReading) -> dict[str, object]:
    # The hottest: most are three numbers long.
    row: dict[str, object] = {"count": stat.count, "sum": _finite(stat.sum)}
    if stat.last_sample is not None:
        row["last_sample"] = _finite(stat.last_sample)
    if stat.bucket_counts:
        row["bucket_counts"] = stat.bucket_counts
    if stat.rejected:
        row["rejected"] = stat.rejected
    if stat.overflows:
        row["overflows"] = stat.overflows
    if stat.value is not None:
        row["value"] = _finite(stat.value)
    return row


def _rest(snapshot: Snapshot) -> dict[str, object]:
    recording = snapshot.recording
    body: dict[str, object] = {
        "written": snapshot.written,
        "flush_seconds": snapshot.flush_seconds,
        "final": recording.final,
        "dropped": snapshot.dropped,
    }
    if recording.ending is not None:
        body["ending"] = asdict(recording.ending)
    if recording.stats_refused:
        body["stats_refused"] = recording.stats_refused
    if recording.events:
        body["events"] = _events(recording.events)
    if recording.training is not None:
        body["training"] = _training(recording.training)
    return body


def _events(events: EventsReading) -> dict[str, object]:
    # The latest of a pair that has no count yet (it is being logged right now) comes with the next snapshot.
    return {
        "counts": [[*pair, count, _finite(events.last.get(pair))] for pair, count in events.counts.items()],
        "suppressed": _rows(events.suppressed),
        "delivered": list(events.delivered.items()),
        "dropped": _rows(events.dropped),
    }


def _rows(counts: Mapping[tuple[str, str], int]) -> list[tuple[object, ...]]:
    return [(*pair, count) for pair, count in counts.items()]


def _training(training: TrainingReading) -> dict[str, object]:
    body: dict[str, object] = {}
    for name, default in _TRAINING_DEFAULTS.items():
        value = getattr(training, name)
        if isinstance(value, float):
            value = _finite(value)
        if value is None or value == default or (name in _STEPS and not -MAX_COUNT <= value <= MAX_COUNT):
            continue
        body[name] = value
    # A reader takes no others: a job may count its steps from anywhere.
    body["segments"] = [row for row in training.segments if -MAX_COUNT <= row[1] <= row[2] <= MAX_COUNT]
    return body


def _finite(number: float | None) -> float | None:
    return None if number is None or not isfinite(number) else float(number)
