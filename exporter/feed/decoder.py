"""Decoder of feed files: converts bytes to snapshots in the sidecar, within memory limits.

Damaged content, invalid content and content of an unknown version raise `FeedFormatError`. Unknown keys and aggregations are
ignored, and missing fields have the default values of the contract. The decoder checks the limits of the writer again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, compress, pairwise
from typing import Any, TypeVar
from zlib import crc32

from exporter.errors import FeedFormatError
from exporter.feed.encoder import CHECKSUM, CHECKSUM_OFFSET, HEADER, MAGIC, MAX_BYTES, MAX_COUNT, VERSION
from exporter.feed.json_values import (
    check_size,
    check_text,
    convert_fields,
    converter,
    field_converters,
    refuse,
    to_count,
    to_list,
    to_number,
    to_object,
)
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.recording.exponential import LOWEST_BUCKET, OVERFLOW_BUCKET
from exporter.recording.limits import (
    MAX_BUCKETS,
    MAX_HELP_CHARACTERS,
    MAX_IDENTITY_CHARACTERS,
    MAX_LABEL_VALUE_CHARACTERS,
    MAX_STAT_LABELS,
    MAX_STAT_NAME_CHARACTERS,
)
from exporter.recording.values import (
    KINDS,
    NO_COUNTS,
    Aggregation,
    Recording,
    StatDefinition,
    StatReading,
    WindowReading,
)

ParsedT = TypeVar("ParsedT")

STAT_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*(\.[a-zA-Z0-9_]+)*")
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
RESERVED_LABELS = frozenset({"run", "rank", "worker", "le", "quantile"})
"""Labels that the sidecar adds to the series of a Stat. A duplicate label name would invalidate the scrape."""

MAX_CONTAINERS = 200_000
"""Maximum number of lists and objects in a section. 10,000 Stats with 16 labels each have 180,000."""
MAX_AGGREGATIONS = 64
"""Maximum number of aggregations of a Stat, including aggregations of later versions."""
MAX_REASONS = 32
"""Maximum number of reasons for rejected samples of a Stat."""
STAT_BYTES = 4_000
"""Estimated memory of a Stat in the sidecar, from the snapshot to the series, without aggregations and buckets."""
PART_BYTES = 700
"""Estimated memory of an aggregation or bucket of a Stat in the sidecar."""
BUCKET_BYTES = 100
"""Estimated memory of an exponential bucket."""
ITEM_BYTES = 200
"""Estimated memory of a fact, an event type or a phase."""
MAX_OTHER_BYTES = 1 << 20
"""Maximum memory of the facts, events and phases of a process. 500 event types and all handlers use half of it."""
MAX_EXPONENTIAL_BUCKETS = 40_000
"""Maximum number of exponential buckets of a process. Further histograms are published without exponential buckets."""
SNAPSHOT_MEMORY_BYTES = 24 << 20
"""Default memory limit of the snapshot of a process."""
MAX_ERROR_CHARACTERS = 200
"""Maximum length of an error's text in a message, because the text may contain a value of the file."""
MAX_SHOWN_CHARACTERS = 80
"""Maximum length of an invalid name or kind in a message."""
MAX_SECONDS = 1e15
"""Limit of times and durations, 30 million years. Sums of larger numbers could overflow, and calendars end."""


class Decoder:
    """Decoder of the successive snapshots of a process. Definitions and windows are parsed only after a change.

    A Stat that does not fit into the memory limit is ignored, and `dropped["memory"]` of the snapshot counts the Stat. The
    exporter's own families take precedence over Stats of users, then earlier over later Stats.

    Attributes:
        memory_bytes: Estimated memory of the snapshot and its series in the sidecar.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        """Discard the stored definitions and windows, so that the next file is parsed completely."""
        self._definitions_hash = self._windows_hash = b""
        self._identity = ProcessIdentity(id="", pid=0, started=0.0, run="", rank=None)
        self._definitions: tuple[StatDefinition, ...] = ()
        self._windows: tuple[WindowReading | None, ...] = ()
        self._is_kept: tuple[bool, ...] = ()
        self._definitions_bytes = 0
        self.memory_bytes = 0

    def decode(self, data: bytes, memory_limit_bytes: int = SNAPSHOT_MEMORY_BYTES) -> Snapshot:
        """Return the snapshot of a file, within *memory_limit_bytes*. Raises `FeedFormatError` for invalid content.

        After an error, the next file is parsed completely.
        """
        try:
            file = _feed_file(data)
            section_hash = _hash(file.definitions)
            if section_hash != self._definitions_hash or file.process_id != self._identity.id:
                self._reset()
                _parse(
                    file.definitions,
                    lambda body: self._decode_definitions(body, file.process_id, memory_limit_bytes),
                )
                self._definitions_hash = section_hash
            section_hash = _hash(file.windows)
            if section_hash != self._windows_hash:
                _parse(file.windows, self._decode_windows)
                self._windows_hash = section_hash
            return _parse(file.totals, lambda body: self._snapshot(body, file.sequence, memory_limit_bytes))
        except FeedFormatError:
            self._reset()
            raise

    def _decode_definitions(self, body: dict[str, Any], process_id: str, memory_limit_bytes: int) -> None:
        """Store the identity and the definitions of section 1, without the Stats that do not fit into the memory limit."""
        stats = [to_object(stat) for stat in to_list(body["stats"])]
        is_kept, total_bytes = [False] * len(stats), 0
        # The exporter's own families take precedence over Stats of users. The sort is stable.
        for index in sorted(range(len(stats)), key=lambda index: stats[index].get("kind", "stat") == "stat"):
            stat_bytes = _definition_bytes(stats[index])
            if total_bytes + stat_bytes <= memory_limit_bytes:
                is_kept[index] = True
                total_bytes += stat_bytes
        shared_values: dict[object, Any] = {}
        definitions = [_definition(stat, shared_values) for stat in compress(stats, is_kept)]
        if len({(definition.name, definition.labels) for definition in definitions}) < len(definitions):
            refuse("duplicate Stat")
        self._identity = _identity(process_id, to_object(body["process"]))
        self._definitions, self._is_kept = tuple(definitions), tuple(is_kept)
        self._definitions_bytes = self.memory_bytes = total_bytes

    def _decode_windows(self, body: dict[str, Any]) -> None:
        """Store the windows of section 2; None for a Stat without a closed window."""
        values = self._select_kept(body["windows"])
        self._windows = tuple([None if window is None else _window(window) for window in values])

    def _select_kept(self, values: object) -> list[Any]:
        """Return the items of the kept Stats, which fit into the memory limit. *values* has an item for each Stat of the file."""
        if len(to_list(values)) != len(self._is_kept):
            refuse(f"{len(to_list(values))} items for {len(self._is_kept)} Stats")
        return list(compress(to_list(values), self._is_kept))

    def _snapshot(self, body: dict[str, Any], sequence: int, memory_limit_bytes: int) -> Snapshot:
        """Return the snapshot from section 3 and the stored definitions and windows.

        The exponential buckets of a histogram that do not fit into the memory limit are omitted.
        """
        totals = [to_object(total) for total in self._select_kept(body["stats"])]
        max_buckets = min(
            MAX_EXPONENTIAL_BUCKETS, max(memory_limit_bytes - self._definitions_bytes, 0) // BUCKET_BYTES
        )
        used_buckets = 0
        for total in totals:
            if "exponential" in total:
                bucket_count = len(total["exponential"][0])
                if used_buckets + bucket_count > max_buckets:
                    del total["exponential"]
                else:
                    used_buckets += bucket_count
        readings = tuple(map(_reading, self._definitions, self._windows, totals))
        recording = Recording(readings, **convert_fields(body, _RECORDING_CONVERTERS))
        snapshot = Snapshot(
            self._identity, sequence, recording=recording, **convert_fields(body, _SNAPSHOT_CONVERTERS)
        )
        _check_times(snapshot)
        if not all(self._is_kept):
            snapshot = snapshot.replace(dropped={**snapshot.dropped, "memory": self._is_kept.count(False)})
        other_bytes = _other_bytes(snapshot)
        check_size(other_bytes, MAX_OTHER_BYTES, "bytes of events and training data")
        self.memory_bytes = self._definitions_bytes + used_buckets * BUCKET_BYTES + other_bytes
        return snapshot


def decode(data: bytes) -> Snapshot:
    """Return the snapshot of a file. For successive snapshots of a process, use a `Decoder`."""
    return Decoder().decode(data)


def _hash(section: bytes) -> bytes:
    """Return the hash by which a changed section is recognized."""
    return blake2b(section, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class FeedFile:
    """Content of a feed file: process id and sequence from the header, and the sections."""

    process_id: str
    sequence: int
    definitions: bytes
    windows: bytes
    totals: bytes


def _feed_file(data: bytes) -> FeedFile:
    """Return the sections of a feed file. Raises `FeedFormatError` for any damage."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise FeedFormatError("not a feed file", reason="magic")
    if len(data) < HEADER.size:
        raise FeedFormatError(
            f"{len(data)} bytes are less than the header of {HEADER.size} bytes", reason="truncated"
        )
    _, version, flags, checksum, process_id, sequence, *lengths = HEADER.unpack_from(data)
    if version != VERSION:
        raise FeedFormatError(
            f"format version {version} is not supported (supported: {VERSION}); update the sidecar",
            reason="version",
        )
    expected = HEADER.size + sum(lengths)
    if len(data) < expected:
        raise FeedFormatError(f"{len(data)} bytes of {expected}", reason="truncated")
    if len(data) > min(expected, MAX_BYTES):
        refuse(f"{len(data)} bytes; at most {min(expected, MAX_BYTES)} are allowed")
    header = bytearray(data[: HEADER.size])
    CHECKSUM.pack_into(header, CHECKSUM_OFFSET, 0)
    if crc32(memoryview(data)[HEADER.size :], crc32(header)) != checksum:
        raise FeedFormatError("the checksum is wrong", reason="checksum")
    if flags or not 1 <= sequence <= MAX_COUNT:
        refuse(f"flags {flags} and sequence {sequence}")
    ends = list(accumulate(lengths, initial=HEADER.size))
    sections = (data[start:end] for start, end in pairwise(ends))
    return FeedFile(process_id.hex(), sequence, *sections)


def _parse(section: bytes, convert: Callable[[dict[str, Any]], ParsedT]) -> ParsedT:
    """Return the result of *convert* for a section. Raises FeedFormatError for any invalid content."""
    # Checked before parsing, because an empty container of 2 bytes of JSON occupies 64 bytes of memory.
    check_size(section.count(b"[") + section.count(b"{"), MAX_CONTAINERS, "lists and objects")
    try:
        return convert(to_object(_JSON.decode(section.decode())))
    # Raised for missing keys, wrong types, an invalid encoding and deep nesting.
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
        raise FeedFormatError(
            f"invalid content: {type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}", reason="content"
        ) from error


_JSON = json.JSONDecoder(parse_constant=lambda name: refuse(f"{name} is not a number"))

_counts = converter(Mapping[str, int])
_window = converter(WindowReading)  # the end may precede the start, after a step of the wall clock
_PROCESS_CONVERTERS = field_converters(ProcessIdentity, "id")
_DEFINITION_CONVERTERS = field_converters(StatDefinition, "min_samples")
_RECORDING_CONVERTERS = field_converters(Recording, "stats")
_SNAPSHOT_CONVERTERS = field_converters(Snapshot, "process", "sequence", "recording")


def _identity(process_id: str, body: dict[str, Any]) -> ProcessIdentity:
    """Return the identity of a process, whose id is in the header."""
    identity = ProcessIdentity(id=process_id, **convert_fields(body, _PROCESS_CONVERTERS))
    for text in (identity.run, identity.node, identity.role, identity.version):
        check_text(text, MAX_IDENTITY_CHARACTERS, "a text of the identity")
    _check_labels(identity.labels)
    return identity


def _definition_bytes(body: dict[str, Any]) -> int:
    """Check the limits of a definition, and return its estimated memory with a series for each aggregation and bucket."""
    labels, buckets, aggregations = body.get("labels", []), body.get("buckets", []), body["aggregations"]
    check_size(len(to_list(labels)), MAX_STAT_LABELS, "labels")
    check_size(len(to_list(buckets)), MAX_BUCKETS, "buckets")
    check_size(len(to_list(aggregations)), MAX_AGGREGATIONS, "aggregations")
    text_length = len(body["name"]) + sum([len(name) + len(value) for name, value in labels])
    return STAT_BYTES + (PART_BYTES + text_length) * (len(aggregations) + len(buckets))


def _check_labels(labels: tuple[tuple[str, str], ...]) -> None:
    """Check the number and the lengths of labels."""
    check_size(len(labels), MAX_STAT_LABELS, "labels")
    for name, value in labels:
        check_text(name, MAX_STAT_NAME_CHARACTERS, "a label's name")
        check_text(value, MAX_LABEL_VALUE_CHARACTERS, "a label's value")


def _definition(body: dict[str, Any], shared_values: dict[object, Any]) -> StatDefinition:
    """Return a checked definition. Equal aggregations and buckets are replaced by the objects in *shared_values*."""
    values = convert_fields(body, _DEFINITION_CONVERTERS)
    # Most Stats of a process share these values; sharing the objects saves a third of the memory.
    for name in ("aggregations", "buckets"):
        values[name] = shared_values.setdefault(values.get(name, ()), values.get(name, ()))
    definition = StatDefinition(**values)
    check_text(definition.name, MAX_STAT_NAME_CHARACTERS, "a name")
    check_text(definition.help, MAX_HELP_CHARACTERS, "a help text")
    check_text(definition.unit or "", MAX_STAT_NAME_CHARACTERS, "a unit")
    _check_labels(definition.labels)
    labels = [name for name, _ in definition.labels]
    has_histogram = Aggregation.HISTOGRAM in definition.aggregations
    if STAT_NAME.fullmatch(definition.name) is None or definition.kind not in KINDS:
        name, kind = definition.name[:MAX_SHOWN_CHARACTERS], definition.kind[:MAX_SHOWN_CHARACTERS]
        refuse(f"{name!a} is not a valid name, or {kind!a} is not a valid kind")
    if any(low >= high for low, high in pairwise(definition.buckets)) or (
        definition.buckets and not has_histogram
    ):
        refuse("buckets are not ascending, or the Stat has no histogram")
    if (
        not RESERVED_LABELS.isdisjoint(labels)
        or labels != sorted(set(labels))
        or not all(map(LABEL_NAME.fullmatch, labels))
    ):
        refuse("labels are reserved, invalid, unsorted or duplicate")
    if definition.kind != "stat" and has_histogram != (definition.kind == "histogram"):
        refuse("the aggregations do not fit the kind of the family")
    return definition


def _reading(definition: StatDefinition, window: WindowReading | None, total: dict[str, Any]) -> StatReading:
    """Return the reading of a Stat; *total* is the item of the Stat in section 3.

    Called about once per second for each Stat of each process, more often than any other function of the sidecar.
    """
    total_sum, last_sample, value = total["sum"], total.get("last_sample"), total.get("value")
    bucket_counts = tuple(map(to_count, total["bucket_counts"])) if "bucket_counts" in total else ()
    if len(bucket_counts) != len(definition.buckets):
        refuse(f"{len(bucket_counts)} counts for {len(definition.buckets)} buckets")
    return StatReading(
        definition,
        count=to_count(total["count"]),
        sum=None if total_sum is None else to_number(total_sum),
        bucket_counts=bucket_counts,
        window=window,
        last_sample=None if last_sample is None else to_number(last_sample),
        rejected=_rejected(total["rejected"]) if "rejected" in total else NO_COUNTS,
        overflows=to_count(total["overflows"]) if "overflows" in total else 0,
        value=None if value is None else to_number(value),
        exponential=_exponential(total["exponential"]) if "exponential" in total else {},
    )


def _rejected(counts: Any) -> dict[str, int]:
    """Return the counts of rejected samples by reason."""
    check_size(len(counts), MAX_REASONS, "reasons")
    counts_by_reason: dict[str, int] = _counts(counts)
    for reason in counts_by_reason:
        check_text(reason, MAX_STAT_NAME_CHARACTERS, "a reason")
    return counts_by_reason


def _exponential(value: Any) -> dict[int, int]:
    """Return the counts by exponential bucket, from `[[bucket, ...], [count, ...]]` with lists of the same length."""
    buckets, counts = value
    if {*map(type, buckets), *map(type, counts)} - {int}:
        refuse("exponential buckets or counts are not integers")
    if buckets and not (
        0 <= min(counts) <= max(counts) <= MAX_COUNT
        and LOWEST_BUCKET <= min(buckets) <= max(buckets) <= OVERFLOW_BUCKET
    ):
        refuse("an exponential bucket or a count is out of range")
    return dict(zip(buckets, counts, strict=True))


def _check_times(snapshot: Snapshot) -> None:
    """Check the limit of the times and durations from which the ledger computes sums and dates."""
    times = [snapshot.process.started, snapshot.written, snapshot.flush_seconds]
    training = snapshot.recording.training
    if training is not None:
        times += [
            *(training.phase_since, training.last_progress or 0.0, training.history_until),
            *(training.work_seconds, training.open_seconds, training.failed_seconds),
            *(training.committed_seconds, training.longest_step_seconds or 0.0),
            *training.phases.values(),
            *[segment.seconds for segment in training.segments],
        ]
    if max(map(abs, times)) > MAX_SECONDS:
        refuse(f"a time is out of range; at most {MAX_SECONDS:g} s are allowed")


def _other_bytes(snapshot: Snapshot) -> int:
    """Return the estimated memory of the events, the drop reasons and the training reading of a snapshot, in bytes."""
    events, training = snapshot.recording.events, snapshot.recording.training
    texts = [
        *(
            text
            for pairs in (events.counts, events.last, events.suppressed, events.dropped)
            for text in pairs
        ),
        *((name, "") for names in (events.delivered, snapshot.dropped) for name in names),
    ]
    number_items = 0  # eight history values count as an item
    if training is not None:
        texts += [*training.facts, *((name, "") for name in (*training.phases, *training.history_phases))]
        number_items = len(training.segments) + sum(map(len, training.intervals)) // 8
    text_length = sum([len(first) + len(second) for first, second in texts])
    return ITEM_BYTES * (len(texts) + number_items) + text_length
