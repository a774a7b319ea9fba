"""A metric family in Prometheus' protobuf format, which scrapers ask for that store native histograms.

Used in the sidecar. The format is a `io.prometheus.client.MetricFamily` after its length, one after another. A histogram
is there twice. As a native histogram it has the family's name. Its classic series are counters of their own, for
Prometheus drops them where both are one family, and rules and dashboards read them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from exporter.families import Distribution, DistributionSample
from exporter.recording.exponential import BEYOND, LEAST, SCHEMA, upper_bound

_COUNTER, _GAUGE, _UNTYPED, _HISTOGRAM = (0, 3), (1, 2), (3, 5), (4, 7)
"""A type's number in MetricFamily, and the number of its field in Metric."""


def encode(metric: Metric, samples: Iterable[Sample]) -> bytes:
    """Write those samples of a family that `text.write` has let pass."""
    series: dict[str, list[bytes]] = {}
    native: list[bytes] = []
    for sample in samples:
        labels = _labels(sample)
        _, field = _type(metric, sample.name)
        value = _bytes(field, _double(1, sample.value))
        series.setdefault(sample.name, []).append(_bytes(4, labels + value))
        if isinstance(sample, DistributionSample) and metric.type == "histogram":
            histogram = _native(sample.distribution)
            native += [_bytes(4, labels + _bytes(_HISTOGRAM[1], histogram))] if histogram else []
    families = [_family(metric, name, _type(metric, name), lines) for name, lines in series.items()]
    if native:
        families.append(_family(metric, metric.name, _HISTOGRAM, native))
    return b"".join(families)


def _type(metric: Metric, name: str) -> tuple[int, int]:
    if metric.type in ("histogram", "summary"):
        return _GAUGE if name == metric.name else _COUNTER  # a summary's quantiles have its name
    return {"counter": _COUNTER, "unknown": _UNTYPED}.get(metric.type, _GAUGE)


def _family(metric: Metric, name: str, type_: tuple[int, int], lines: Sequence[bytes]) -> bytes:
    told = _bytes(1, name.encode()) + _bytes(2, metric.documentation.encode("utf-8", "replace"))
    message = told + _integer(3, type_[0]) + b"".join(lines)
    return _varint(len(message)) + message


def _labels(sample: Sample) -> bytes:
    pairs = [(name, text) for name, text in sorted(sample.labels.items()) if text != ""]
    return b"".join([_bytes(1, _bytes(1, name.encode()) + _bytes(2, text.encode())) for name, text in pairs])


def _native(distribution: Distribution) -> bytes:
    """Make the message Histogram; empty where the buckets do not hold all observations, which Prometheus refuses."""
    counts = distribution.exponential
    if distribution.sum is None or sum(counts.values()) != distribution.count or BEYOND in counts:
        return b""
    spans: list[list[int]] = []  # offset from the end of the one before, length
    deltas = []
    end, before = 0, 0
    for bucket, count in sorted(counts.items()):
        if bucket > LEAST:
            if not spans or bucket != end:
                spans.append([bucket - end, 0])
            spans[-1][1] += 1
            deltas.append(_varint(_zigzag(count - before)))
            end, before = bucket + 1, count
    return b"".join(
        [
            _integer(1, distribution.count),
            _double(2, distribution.sum),
            _integer(5, _zigzag(SCHEMA)),
            _double(6, upper_bound(LEAST)),
            _integer(7, counts.get(LEAST, 0)),
            # A span of no length tells a native histogram that is still empty from a classic one.
            *[_bytes(12, _integer(1, _zigzag(at)) + _integer(2, length)) for at, length in spans or [[0, 0]]],
            _bytes(13, b"".join(deltas)),
        ]
    )


def _integer(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _double(field: int, number: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", number)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _zigzag(number: int) -> int:
    return 2 * number if number >= 0 else -2 * number - 1
