"""Protobuf format: the series of the text format, native and classic histograms, and a real Prometheus."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exposition_support import page_of, parse, valid_families
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_support import Prometheus, needs_prometheus
from serve_support import recording, sidecar
from waiting import wait_until

from exporter.exposition.negotiation import Format
from exporter.families import Distribution, Family
from exporter.recording.exponential import count_into

FIELD = descriptor_pb2.FieldDescriptorProto
COUNTER, GAUGE, HISTOGRAM = 0, 1, 4
"""Values of `MetricType` in metrics.proto."""
SCHEMA: dict[str, list[tuple[int, str, str]]] = {
    "LabelPair": [(1, "name", "string"), (2, "value", "string")],
    **{key: [(1, "value", "double")] for key in ("Gauge", "Counter", "Untyped")},
    "BucketSpan": [(1, "offset", "sint32"), (2, "length", "uint32")],
    "Histogram": [
        (1, "sample_count", "uint64"),
        (2, "sample_sum", "double"),
        (5, "schema", "sint32"),
        (6, "zero_threshold", "double"),
        (7, "zero_count", "uint64"),
        (12, "positive_span", "*BucketSpan"),
        (13, "positive_delta", "*sint64"),
    ],
    "Metric": [
        (1, "label", "*LabelPair"),
        (2, "gauge", "Gauge"),
        (3, "counter", "Counter"),
        (5, "untyped", "Untyped"),
        (7, "histogram", "Histogram"),
    ],
    "MetricFamily": [
        (1, "name", "string"),
        (2, "help", "string"),
        (3, "type", "int32"),
        (4, "metric", "*Metric"),
    ],
}
"""Messages of metrics.proto (io.prometheus.client) that the exporter sends; `*` marks a repeated field."""


def _family_class() -> Any:
    """Return the message class MetricFamily, built from SCHEMA."""
    file = descriptor_pb2.FileDescriptorProto(name="metrics.proto", package="test", syntax="proto3")
    for message, fields in SCHEMA.items():
        message_type = file.message_type.add(name=message)
        for field_number, name, field_type in fields:
            base_type = field_type.lstrip("*")
            field = message_type.field.add(name=name, number=field_number)
            field.label = FIELD.LABEL_REPEATED if field_type.startswith("*") else FIELD.LABEL_OPTIONAL
            if base_type in SCHEMA:
                field.type, field.type_name = FIELD.TYPE_MESSAGE, f".test.{base_type}"
            else:
                field.type = getattr(FIELD, f"TYPE_{base_type.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.MetricFamily"))


FAMILY = _family_class()


def families(body: bytes) -> Iterator[Any]:
    """Parse a body and yield its metric families."""
    offset = 0
    while offset < len(body):
        length = shift = 0
        while True:
            length |= (body[offset] & 0x7F) << shift
            offset, shift = offset + 1, shift + 7
            if body[offset - 1] < 0x80:
                break
        yield FAMILY.FromString(body[offset : offset + length])
        offset += length


def labels(metric: Any) -> tuple[tuple[str, str], ...]:
    return tuple((label.name, label.value) for label in metric.label)


@given(metrics=valid_families())
def test_protobuf_has_the_series_of_plain_text(metrics: list[Metric]) -> None:
    page = page_of(*metrics)
    series = {
        (family.name, labels(metric)): getattr(
            metric, {COUNTER: "counter", GAUGE: "gauge"}[family.type]
        ).value
        for family in families(page.render(Format.PROTOBUF))
        if family.type != HISTOGRAM
        for metric in family.metric
    }

    assert series == parse(page.render(Format.TEXT), Format.TEXT)


SPEC = Family(
    name="training_step_duration_seconds",
    type="histogram",
    help="Time of a step.",
    labels=("rank",),
    unit="seconds",
)
SAMPLES = st.lists(
    st.floats(0.0, 2.0**64) | st.sampled_from([0.0, 1e-300, 2.0**-40, 1.0, 2.0, 2**0.125, 2.0**64]),
    max_size=60,
)


@given(first_batch=SAMPLES, second_batch=SAMPLES)
def test_a_native_histogram_holds_each_sample_in_its_bucket(
    first_batch: list[float], second_batch: list[float]
) -> None:
    counts: dict[int, int] = {}
    for batch in (first_batch, second_batch):
        count_into(counts, sorted(batch))
    samples = sorted([*first_batch, *second_batch])
    page = page_of(SPEC.family({("0",): Distribution(len(samples), sum(samples), ((1.0, 0),), counts)}))

    *classic, native = families(page.render(Format.PROTOBUF))

    assert native.type == HISTOGRAM
    assert {bucket.type for bucket in classic} == {COUNTER}
    (metric,) = native.metric
    assert native.name == SPEC.name
    assert native.help == SPEC.help
    assert labels(metric) == (("rank", "0"),)
    histogram = metric.histogram
    assert histogram.sample_count == len(samples)
    assert histogram.sample_sum == sum(samples)
    assert histogram.schema == 3
    assert histogram.zero_count == sum(sample <= histogram.zero_threshold for sample in samples)
    buckets: list[int] = []
    next_bucket = 0
    for span in histogram.positive_span:
        buckets += range(next_bucket + span.offset, next_bucket + span.offset + span.length)
        next_bucket += span.offset + span.length
    counts_by_bucket = dict(zip(buckets, itertools.accumulate(histogram.positive_delta), strict=True))
    remaining_samples = [sample for sample in samples if sample > histogram.zero_threshold]
    assert sum(counts_by_bucket.values()) == len(remaining_samples)
    for bucket, count in counts_by_bucket.items():
        in_bucket, remaining_samples = remaining_samples[:count], remaining_samples[count:]
        # Bounds are rounded, so that a value within the precision of a float may be in either bucket.
        assert all(
            2 ** ((bucket - 1) / 8) * (1 - 1e-12) < sample <= 2 ** (bucket / 8) * (1 + 1e-12)
            for sample in in_bucket
        )


@pytest.mark.parametrize(
    "distribution",
    [
        Distribution(3, None, ((1.0, 3),), {0: 3}),  # a sample below zero
        Distribution(3, 4.0, ((1.0, 3),), {0: 2}),  # written by another library
        Distribution(3, 4e30, ((1.0, 3),), {0: 2, 513: 1}),  # beyond 2^64
        Distribution(1 << 64, 4.0, ((1.0, 3),), {0: 1 << 64}),  # a count of more than 64 bits
    ],
)
def test_a_histogram_that_protobuf_cannot_hold_stays_classic(distribution: Distribution) -> None:
    body = page_of(SPEC.family({("0",): distribution})).render(Format.PROTOBUF)

    names = {family.name.removeprefix(SPEC.name) for family in families(body)}
    assert {"_bucket", "_count"} <= names <= {"_bucket", "_count", "_sum"}


JOB = """
import sys
from exporter import Stat
latency = Stat("fetch.latency", ["histogram"], unit="seconds", buckets=[0.1, 1.0])
for _ in range(SAMPLES):
    latency.add(0.25)
latency.add(3.0)
print("recording", flush=True)
sys.stdin.readline()
"""


@needs_prometheus
@pytest.mark.timeout(120)
def test_prometheus_stores_native_and_classic_histograms_which_continue_over_a_kill(tmp_path: Path) -> None:
    native, classic = "histogram_count(fetch_latency_seconds)", "fetch_latency_seconds_count"
    with (
        sidecar(tmp_path) as running,
        Prometheus(
            tmp_path / "prometheus", {"training": running.address}, features="native-histograms"
        ) as prometheus,
    ):
        for repeated_samples, total_samples in ((9, 10), (29, 40)):
            with recording(tmp_path, JOB.replace("SAMPLES", str(repeated_samples)), rank=0) as job:
                for query in (native, classic):
                    wait_until(lambda query=query, total=total_samples: prometheus.value(query) == total, 30)  # type: ignore[misc]  # defaults
                job.kill()
        quantile = "histogram_quantile(0.5, fetch_latency_seconds)"
        assert prometheus.value(quantile) == pytest.approx(0.25, rel=0.05)
        assert prometheus.value("histogram_sum(fetch_latency_seconds)") == pytest.approx(38 * 0.25 + 2 * 3.0)
        assert prometheus.value('fetch_latency_seconds_bucket{le="1.0"}') == 38
        assert prometheus.value("exporter_series_limit") is not None
