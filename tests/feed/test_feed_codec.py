"""Feed file format: round trips, damaged and hostile files, and future versions."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import is_dataclass
from itertools import pairwise
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from feed_support import new_identity, new_recording
from hypothesis import given, settings
from hypothesis import strategies as st

import exporter.feed.encoder
from exporter.errors import DefinitionError, FeedFormatError
from exporter.feed import decoder
from exporter.feed.decoder import Decoder, decode
from exporter.feed.encoder import CHECKSUM, CHECKSUM_OFFSET, HEADER, Encoder, encode
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.recording.definition import check_definition
from exporter.recording.exponential import LOWEST_BUCKET, OVERFLOW_BUCKET
from exporter.recording.values import (
    Aggregation,
    Recording,
    StatDefinition,
    StatReading,
    TrainingReading,
    WindowReading,
)

text_values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
finite_numbers = st.floats(allow_nan=False, allow_infinity=False)
unix_times = st.floats(-decoder.MAX_SECONDS, decoder.MAX_SECONDS)
counts = st.integers(0, 2**63 - 1)
names = st.from_regex(decoder.STAT_NAME, fullmatch=True).filter(lambda name: len(name) <= 200)
label_names = st.from_regex(decoder.LABEL_NAME, fullmatch=True).filter(
    lambda name: name not in decoder.RESERVED_LABELS and len(name) <= 200
)
labels = st.dictionaries(label_names, text_values, max_size=3).map(
    lambda value_by_name: tuple(sorted(value_by_name.items()))
)


HISTOGRAM = Aggregation.HISTOGRAM


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for all values of a type of the contract."""
    inner, origin = get_args(hint), get_origin(hint)
    if NoneType in inner:
        return st.none() | values_of(next(member for member in inner if member is not NoneType))
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(values_of(inner[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, inner))
    if inner:
        return st.dictionaries(
            values_of(inner[0]), counts if inner[1] is int else values_of(inner[1]), max_size=3
        )
    if is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, tuple)):  # or a NamedTuple
        return class_of(hint)
    if hint is Aggregation:
        return st.sampled_from(Aggregation)
    integers = st.integers(-(2**63) + 1, 2**63 - 1)
    return {str: text_values, int: integers, float: unix_times, bool: st.booleans()}[hint]


def class_of(cls: Any, /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls).items()
    return st.builds(cls, **{name: values_of(hint) for name, hint in hints if name not in fields}, **fields)


definitions = class_of(
    StatDefinition,
    name=names,
    aggregations=st.frozensets(st.sampled_from(Aggregation)),
    labels=labels,
    buckets=st.sets(finite_numbers, max_size=4).map(lambda bounds: tuple(sorted(bounds))),
    kind=st.just("stat"),
    min_samples=st.just(1),
).map(
    lambda definition: (
        definition.replace(aggregations=definition.aggregations | {HISTOGRAM})
        if definition.buckets
        else definition
    )
)
readings = class_of(
    StatReading,
    definition=definitions,
    count=counts,
    sum=st.none() | finite_numbers,
    value=st.none() | finite_numbers,
    bucket_counts=st.lists(counts, min_size=4, max_size=4).map(tuple),
    overflows=counts,
    exponential=st.dictionaries(st.integers(LOWEST_BUCKET, OVERFLOW_BUCKET), counts, max_size=3),
).map(lambda reading: reading.replace(bucket_counts=reading.bucket_counts[: len(reading.definition.buckets)]))
identities = class_of(ProcessIdentity, id=st.binary(min_size=16, max_size=16).map(bytes.hex))
distinct_readings = st.lists(
    readings, max_size=3, unique_by=lambda reading: (reading.definition.name, reading.definition.labels)
)
recordings = class_of(Recording, stats=distinct_readings.map(tuple))
snapshots = class_of(Snapshot, process=identities, sequence=st.integers(1, 2**63 - 1), recording=recordings)


def example_snapshot() -> Snapshot:
    return Snapshot(
        process=new_identity(id="0a" * 16, labels=(("team", "vision"),)),
        sequence=7,
        written=1_700_000_061.0,
        flush_seconds=1.0,
        recording=new_recording(3),
        dropped={"write_failed": 2},
    )


def with_checksum(header: list[Any], *sections: bytes) -> bytes:
    """Return a feed file with a valid checksum."""
    feed_file = bytearray(HEADER.pack(*header) + b"".join(sections))
    CHECKSUM.pack_into(feed_file, CHECKSUM_OFFSET, 0)  # the checksum covers a field of zeros
    CHECKSUM.pack_into(feed_file, CHECKSUM_OFFSET, zlib.crc32(feed_file))
    return bytes(feed_file)


def change_json(change: Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], object]) -> bytes:
    """Return a feed file with a valid checksum whose three JSON sections *change* has modified."""
    feed_file = encode(example_snapshot())
    header = list(HEADER.unpack_from(feed_file))
    ends = [HEADER.size]
    for length in header[-3:]:
        ends.append(ends[-1] + length)
    bodies = [json.loads(feed_file[start:end]) for start, end in pairwise(ends)]
    change(*bodies)
    sections = [json.dumps(body).encode() for body in bodies]
    return with_checksum([*header[:-3], *map(len, sections)], *sections)


def with_totals(section: bytes) -> bytes:
    """Return a feed file with a valid checksum and a different last section."""
    feed_file = encode(example_snapshot())
    header = list(HEADER.unpack_from(feed_file))
    earlier_sections = feed_file[HEADER.size : len(feed_file) - header[-1]]
    return with_checksum([*header[:-1], len(section)], earlier_sections, section)


def reason_of(feed_file: bytes) -> str:
    """Return the reason for which a file is refused."""
    with pytest.raises(FeedFormatError) as error_info:
        decode(feed_file)
    return error_info.value.reason


def snapshot_or_reason(feed_file: bytes) -> Snapshot | str:
    try:
        return decode(feed_file)
    except FeedFormatError as error:
        return error.reason


@given(snapshots, recordings)
def test_decoding_returns_the_encoded_snapshot_also_with_caches(
    snapshot_before: Snapshot, other_recording: Recording
) -> None:
    encoder, decoder_with_cache = Encoder(), Decoder()
    for snapshot in (snapshot_before, snapshot_before.replace(recording=other_recording), snapshot_before):
        feed_file = encoder.encode(snapshot)

        assert feed_file == encode(snapshot)
        assert decoder_with_cache.decode(feed_file) == decode(feed_file) == snapshot


def test_the_worked_example_in_the_documentation_is_true() -> None:
    mean = frozenset({Aggregation.MEAN})
    window = WindowReading(1700000000.0, 1700000060.0, 2, {Aggregation.MEAN: 1.25})
    reading = StatReading(StatDefinition("loss", mean), 3, 4.5, window=window, last_sample=1700000061.25)
    identity = new_identity(id=bytes(range(16)).hex(), pid=7, run="r")
    snapshot = Snapshot(identity, 2, 1700000061.5, 1.0, Recording((reading,)), {"write_failed": 1})
    documentation = str(exporter.feed.encoder.__doc__)

    feed_file = encode(snapshot)

    assert "392 bytes" in documentation
    assert len(feed_file) == 392
    for start in range(0, HEADER.size, 8):
        assert f"    {start:2d}  {feed_file[start : min(start + 8, HEADER.size)].hex(' ')}" in documentation
    assert feed_file[HEADER.size :].decode() in documentation.replace("\n    ", "")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_written_as_absent(number: float) -> None:
    window = WindowReading(1.0, 2.0, 3, {Aggregation.MEAN: number, Aggregation.MAX: 1.0})
    reading = StatReading(StatDefinition("loss", frozenset()), sum=number, window=window, last_sample=number)
    training = TrainingReading(work_seconds=number, last_progress=number, step=3)

    decoded_recording = decode(
        encode(example_snapshot().replace(recording=Recording((reading,), training=training)))
    ).recording

    window = window.replace(values={Aggregation.MAX: 1.0})
    assert decoded_recording.stats == (reading.replace(sum=None, window=window, last_sample=None),)
    assert decoded_recording.training == TrainingReading(step=3)


@pytest.mark.parametrize(
    "recording",
    [
        Recording((StatReading(StatDefinition("loss", frozenset(), help="half a pair: \ud800")),)),
        Recording((), training=TrainingReading(facts=(("application", "half a pair: \ud800"),))),
    ],
)
def test_invalid_values_raise_one_error_and_leave_no_state(recording: Recording) -> None:
    encoder = Encoder()

    with pytest.raises(FeedFormatError) as error_info:
        encoder.encode(example_snapshot().replace(recording=recording))

    assert error_info.value.reason == "content"
    assert decode(encoder.encode(example_snapshot())).recording == example_snapshot().recording


@given(
    st.text(max_size=20), st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=2), st.text()
)
def test_every_definition_that_recording_accepts_is_read(
    name: str, labels: dict[str, str], help_text: str
) -> None:
    try:
        definition = check_definition(name, help=help_text, labels=labels)
    except DefinitionError:
        definition = check_definition("loss")
    snapshot = example_snapshot().replace(recording=Recording((StatReading(definition),)))

    assert decode(encode(snapshot)) == snapshot


@settings(max_examples=100)
@given(st.data())
def test_any_changed_byte_gives_the_documented_error(data: st.DataObject) -> None:
    encoded_file = encode(example_snapshot())
    position = data.draw(st.integers(0, len(encoded_file) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != encoded_file[position]))

    damaged_file = encoded_file[:position] + bytes([byte]) + encoded_file[position + 1 :]

    assert reason_of(damaged_file) in {"magic", "version", "truncated", "checksum", "content"}


def test_every_truncation_gives_the_documented_error() -> None:
    encoded_file = encode(example_snapshot())

    assert {reason_of(encoded_file[:length]) for length in range(len(encoded_file))} == {"truncated"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100)
@given(st.data(), json_values)
def test_any_value_in_any_field_is_read_or_gives_the_documented_error(
    data: st.DataObject, replacement: object
) -> None:
    def replace(*bodies: dict[str, Any]) -> None:
        container: Any = data.draw(st.sampled_from(bodies))
        while True:
            key = data.draw(
                st.sampled_from(sorted(container) if isinstance(container, dict) else range(len(container)))
            )
            if not container[key] or not isinstance(container[key], dict | list) or data.draw(st.booleans()):
                container[key] = replacement
                return
            container = container[key]

    outcome = snapshot_or_reason(change_json(replace))

    if isinstance(outcome, Snapshot):
        assert decode(encode(outcome)) == outcome
    else:
        assert outcome == "content"


def test_a_future_version_is_refused() -> None:
    feed_file = bytearray(encode(example_snapshot()))
    struct.pack_into("<H", feed_file, 8, 99)  # the version follows the magic of 8 bytes

    assert reason_of(bytes(feed_file)) == "version"
    assert reason_of(bytes(feed_file) + b"more") == "version"


def test_a_future_key_is_ignored() -> None:
    def add(header: Any, windows: Any, totals: Any) -> None:
        totals["training"] = {}
        for container in (
            header,
            header["process"],
            header["stats"][0],
            windows,
            windows["windows"][0],
            totals,
            totals["training"],
        ):
            container["later"] = {"deep": [1]}
        totals["stats"][0]["later"] = "x"

    assert decode(change_json(add)) == example_snapshot().replace(
        recording=new_recording(3).replace(training=TrainingReading())
    )


def test_a_future_aggregation_is_dropped_and_the_file_is_read() -> None:
    def add(header: Any, windows: Any, totals: Any) -> None:
        header["stats"][0]["aggregations"].append("median")
        windows["windows"][0]["values"]["median"] = 1.0

    assert decode(change_json(add)) == example_snapshot()


@pytest.mark.parametrize(
    "change",
    [
        lambda header, windows, totals: header["stats"][0].update(name="no name"),
        lambda header, windows, totals: header["stats"][0].update(name=header["stats"][1]["name"]),
        lambda header, windows, totals: header["stats"][0].update(labels=[["0bad", "x"]]),
        lambda header, windows, totals: header["stats"][0].update(labels=[["rank", "0"]]),
        lambda header, windows, totals: header["stats"][0].update(labels=[["b", "x"], ["a", "y"]]),
        lambda header, windows, totals: header["stats"][0].update(labels=[["a", "\ud800"]]),
        lambda header, windows, totals: header["stats"][0].update(buckets=[1.0, 0.1]),
        lambda header, windows, totals: header["stats"][0].update(aggregations=["mean"]),
        lambda header, windows, totals: header["stats"][0].update(window_samples=True),
        lambda header, windows, totals: header["stats"][0].update(help="h" * 4097),
        lambda header, windows, totals: header["stats"].pop(),
        lambda header, windows, totals: windows["windows"].pop(),
        lambda header, windows, totals: windows["windows"][0]["values"].update(mean="1"),
        lambda header, windows, totals: totals.update(final=0),
        lambda header, windows, totals: totals["stats"][0].update(count=-1),
        lambda header, windows, totals: totals["stats"][0].update(count=2**63),
        lambda header, windows, totals: totals["stats"][0].update(bucket_counts=[0]),
        lambda header, windows, totals: totals["stats"][0].update(exponential=[[LOWEST_BUCKET - 1], [1]]),
        lambda header, windows, totals: totals["stats"][0].update(exponential=[[0], [2**63]]),
        lambda header, windows, totals: totals.update(events={"counts": [["a", 1]]}),
        lambda header, windows, totals: totals.update(events={"counts": [["a", "info", 1.5]]}),
        lambda header, windows, totals: header["process"].update(started=1e300),
        lambda header, windows, totals: totals.update(written=-1e300),
        lambda header, windows, totals: totals.update(training={"last_progress": -1e300}),
        lambda header, windows, totals: totals.update(training={"phases": {"init": 1e300}}),
        lambda header, windows, totals: totals.update(training=[]),
        lambda header, windows, totals: totals.update(training={"step": 1.5}),
        lambda header, windows, totals: totals.update(training={"segments": [[1, 1, 2]]}),
    ],
)
def test_content_that_could_not_be_published_is_refused(change: Callable[..., object]) -> None:
    assert reason_of(change_json(change)) == "content"


def test_exponential_buckets_beyond_the_limit_of_a_process_are_dropped() -> None:
    reading_with_500_buckets = StatReading(
        StatDefinition("a", frozenset()), 1, exponential=dict.fromkeys(range(500), 1)
    )
    readings = [
        reading_with_500_buckets.replace(
            definition=reading_with_500_buckets.definition.replace(name=f"a{index}")
        )
        for index in range(81)
    ]
    decoded_stats = decode(
        encode(example_snapshot().replace(recording=Recording(tuple(readings))))
    ).recording.stats

    assert [len(reading.exponential) for reading in decoded_stats] == [500] * 80 + [0]


@pytest.mark.parametrize(
    "section",
    [
        b"[" * 100_000,
        b'{"written":' + b"9" * 100_000 + b"}",
        b'{"written":NaN}',
        b'{"written":"\xff"}',
        b"null",
        b" " * (16 << 20),
    ],
)
def test_hostile_and_oversized_json_is_refused(section: bytes) -> None:
    assert reason_of(with_totals(section)) == "content"
