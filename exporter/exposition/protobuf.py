"""Prometheus' protobuf format, for scrapers that store native histograms.

The format is a sequence of `io.prometheus.client.MetricFamily` messages, each with its length as a prefix. A histogram appears
twice: as a native histogram with the name of the family, and as classic series in separate counter families. If a family had
both, Prometheus would drop the classic series, which rules and dashboards read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from exporter.families import Distribution, DistributionSample
from exporter.recording.exponential import LOWEST_BUCKET, OVERFLOW_BUCKET, SCHEMA, upper_bound

_MAX_COUNT = (1 << 63) - 1
"""Maximum count of a native histogram, whose buckets are signed differences of 64 bits. Counts of a feed file may be larger."""


@dataclass(frozen=True, slots=True)
class ProtobufType:
    """Number of a type in MetricFamily, and number of its field in Metric."""

    number: int
    field: int


_COUNTER = ProtobufType(number=0, field=3)
_GAUGE = ProtobufType(number=1, field=2)
_UNTYPED = ProtobufType(number=3, field=5)
_HISTOGRAM = ProtobufType(number=4, field=7)


@dataclass(slots=True)
class BucketSpan:
    """Consecutive buckets. For example, the buckets 2, 3 and 7 are two spans, with offset 2 and length 2, and offset 3 and length 1."""

    offset: int  # number of buckets between the previous span and this span; index of the first bucket for the first span
    length: int  # number of buckets


def encode(metric: Metric, samples: Iterable[Sample]) -> bytes:
    """Return the protobuf messages of a family for the samples that `text.write` has accepted."""
    series_by_name: dict[str, list[bytes]] = {}
    native_series: list[bytes] = []
    for sample in samples:
        labels = _labels(sample)
        value = _bytes(_type(metric, sample.name).field, _double(1, sample.value))
        series_by_name.setdefault(sample.name, []).append(_bytes(4, labels + value))
        if isinstance(sample, DistributionSample) and metric.type == "histogram":
            histogram = _native_histogram(sample.distribution)
            if histogram:
                native_series.append(_bytes(4, labels + _bytes(_HISTOGRAM.field, histogram)))
    families = [_family(metric, name, _type(metric, name), series) for name, series in series_by_name.items()]
    if native_series:
        families.append(_family(metric, metric.name, _HISTOGRAM, native_series))
    return b"".join(families)


def _type(metric: Metric, name: str) -> ProtobufType:
    """Return the type of the family that contains the samples with a name. Count, sum and buckets are counters."""
    if metric.type in ("histogram", "summary"):
        # A sample with the name of the family is a quantile of a summary.
        return _GAUGE if name == metric.name else _COUNTER
    return {"counter": _COUNTER, "unknown": _UNTYPED}.get(metric.type, _GAUGE)


def _family(metric: Metric, name: str, type_: ProtobufType, series: Sequence[bytes]) -> bytes:
    """Return the message MetricFamily, preceded by its length. *series* contains encoded fields `metric`."""
    header = _bytes(1, name.encode()) + _bytes(2, metric.documentation.encode("utf-8", "replace"))
    message = header + _integer(3, type_.number) + b"".join(series)
    return _varint(len(message)) + message


def _labels(sample: Sample) -> bytes:
    """Return the fields `label` of a message Metric, sorted by name. A label with an empty value is omitted."""
    labels = [(name, value) for name, value in sorted(sample.labels.items()) if value != ""]
    pairs = [_bytes(1, name.encode()) + _bytes(2, value.encode()) for name, value in labels]
    return b"".join([_bytes(1, pair) for pair in pairs])


def _native_histogram(distribution: Distribution) -> bytes:
    """Return the message Histogram, or no bytes if the distribution cannot be a native histogram.

    Such a distribution has no sum, lacks observations in its buckets, has observations above the largest bucket, or has a
    count of more than 63 bits. Prometheus refuses these histograms.
    """
    counts = distribution.exponential
    if distribution.sum is None or sum(counts.values()) != distribution.count or OVERFLOW_BUCKET in counts:
        return b""
    if distribution.count > _MAX_COUNT:
        return b""
    spans: list[BucketSpan] = []
    deltas = []  # each count minus the count of the bucket before it
    end, previous_count = 0, 0  # end of the last span
    for bucket, count in sorted(counts.items()):
        if bucket > LOWEST_BUCKET:
            if not spans or bucket != end:
                spans.append(BucketSpan(offset=bucket - end, length=0))
            spans[-1].length += 1
            deltas.append(_varint(_zigzag(count - previous_count)))
            end, previous_count = bucket + 1, count
    return b"".join(
        [
            _integer(1, distribution.count),  # sample_count
            _double(2, distribution.sum),  # sample_sum
            _integer(5, _zigzag(SCHEMA)),  # schema
            _double(6, upper_bound(LOWEST_BUCKET)),  # zero_threshold
            _integer(7, counts.get(LOWEST_BUCKET, 0)),  # zero_count
            # positive_span. A span without buckets distinguishes an empty native histogram from a classic histogram.
            *[
                _bytes(12, _integer(1, _zigzag(span.offset)) + _integer(2, span.length))
                for span in spans or [BucketSpan(offset=0, length=0)]
            ],
            _bytes(13, b"".join(deltas)),  # positive_delta
        ]
    )


# Encoding of fields: a varint of (field number << 3 | wire type), and the value. The wire type is 0 for a varint, 1 for 64 bits and
# 2 for bytes after their length.


def _integer(field: int, number: int) -> bytes:
    """Return a field with a number that is not negative. For signed fields, *number* is the result of `_zigzag`."""
    return _varint(field << 3) + _varint(number)


def _double(field: int, number: float) -> bytes:
    """Return a field with a float."""
    return _varint(field << 3 | 1) + struct.pack("<d", number)


def _bytes(field: int, content: bytes) -> bytes:
    """Return a field with a text, a message or packed numbers."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Return a number in groups of 7 bits, lowest first; the top bit marks all bytes but the last: 300 is `ac 02`."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _zigzag(number: int) -> int:
    """Return a signed number as a small unsigned number: 0, -1, 1, -2 become 0, 1, 2, 3."""
    return 2 * number if number >= 0 else -2 * number - 1
