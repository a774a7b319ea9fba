"""OTLP target of `push`: the families of a page as OpenTelemetry metrics, with units and start times."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from exporter.version import __version__

TIMEOUT_SECONDS = 10.0
"""Timeout of a push."""
UNITS: Mapping[str, str] = {
    "bytes": "By",
    "celsius": "Cel",
    "grams": "g",
    "hertz": "Hz",
    "joules": "J",
    "ratio": "1",
    "seconds": "s",
    "volts": "V",
    "watts": "W",
}
"""UCUM unit by the last word of a family's name."""

RETENTION_SECONDS = 86400.0
"""Time after which an absent series is forgotten. A total that is absent for a shorter time, for example because the state file cannot
be written, keeps its start time."""

SampleKey = tuple[str, frozenset[tuple[str, str]]]
"""Name of a sample, and its labels with their values."""


def unit_of(name: str) -> str:
    """Return the UCUM unit of a family, or "" for a family without a unit."""
    return UNITS.get(name.removesuffix("_total").rpartition("_")[2], "")


@dataclass(slots=True)
class _CumulativeSeries:
    """Start time and latest value of a cumulative series."""

    start_ns: int
    value: float  # at the latest push with the series
    pushed_ns: int  # time of that push


class StartTimes:
    """Start times of cumulative series, in nanoseconds since the epoch.

    The true start of a series of the first push is unknown: totals continue after a restart of the exporter, and counters of the kernel
    and of the driver are older than the exporter. Such a series has the time of the push as its start time, as OpenTelemetry's data
    model demands. With an earlier start time, a receiver would count the whole total as an increase since that time.

    A series that is new or was reset starts at the previous push. A series that has been absent for `RETENTION_SECONDS` is forgotten, and
    is new when it returns.
    """

    def __init__(self) -> None:
        self._series: dict[SampleKey, _CumulativeSeries] = {}
        self._push_ns = 0
        self._previous_push_ns: int | None = None  # time of the last successful push

    def begin_push(self, now_ns: int) -> None:
        """Start a push."""
        self._push_ns = now_ns
        if self._previous_push_ns is None:
            self._series.clear()  # no push has succeeded, so this push counts as the first

    def end_push(self) -> None:
        """End a successful push, and forget the series that have been absent for too long."""
        self._previous_push_ns = self._push_ns
        oldest_ns = self._push_ns - int(RETENTION_SECONDS * 1e9)
        forgotten_keys = [key for key, series in self._series.items() if series.pushed_ns < oldest_ns]
        for key in forgotten_keys:
            del self._series[key]

    def start_of(self, name: str, labels: Mapping[str, str], value: float) -> int:
        """Return the start time of a series, and store its current value."""
        key = (name, frozenset(labels.items()))
        series = self._series.get(key)
        if series is None or value < series.value:
            start_ns = self._push_ns if self._previous_push_ns is None else self._previous_push_ns
            series = self._series[key] = _CumulativeSeries(start_ns, value, self._push_ns)
        series.value, series.pushed_ns = value, self._push_ns
        return series.start_ns


class Otlp:
    """OTLP endpoint over HTTP: `http://HOST:4318`, or a URL with a path.

    Series that are not on the page are not sent, so gaps remain gaps. `source`, the URL of the page, identifies the instance.
    """

    def __init__(self, endpoint: str, source: str) -> None:
        from opentelemetry.exporter.otlp.proto.http import metric_exporter  # noqa: PLC0415  # OpenTelemetry is an optional dependency
        from opentelemetry.sdk.metrics import export  # noqa: PLC0415  # OpenTelemetry is an optional dependency
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  # OpenTelemetry is an optional dependency
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415  # OpenTelemetry is an optional dependency

        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/metrics"
        self._exporter = metric_exporter.OTLPMetricExporter(endpoint=url, timeout=TIMEOUT_SECONDS)
        page = urlsplit(source)
        is_local = page.hostname in {"127.0.0.1", "::1", "localhost"}
        attributes = {
            "service.instance.id": f"{socket.gethostname()}:{page.port}" if is_local else page.netloc
        }
        if "OTEL_SERVICE_NAME" not in os.environ:
            attributes["service.name"] = "training-exporter"
        self._resource = Resource.create(attributes)
        self._scope = InstrumentationScope("training-exporter", __version__)
        self._sdk = export
        self._cumulative = export.AggregationTemporality.CUMULATIVE
        self._starts = StartTimes()

    def put(self, page: bytes) -> None:
        """Send a page.

        Raises:
            OSError: The endpoint does not accept the page. OpenTelemetry logs the reason.
            ValueError: The page is not in the text format, or a count is not finite.
        """
        sdk, now_ns = self._sdk, time.time_ns()
        self._starts.begin_push(now_ns)
        families = text_string_to_metric_families(page.decode())
        try:
            metrics = [metric for family in families for metric in self._metrics(family, now_ns)]
        except OverflowError as error:
            raise ValueError(f"a histogram has an infinite count: {error}") from error
        scope = sdk.ScopeMetrics(self._scope, metrics, "")
        data = sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is not sdk.MetricExportResult.SUCCESS:
            raise OSError("the endpoint did not accept the metrics")
        self._starts.end_push()

    def remove(self) -> None:
        """Do nothing, because a series ends once it is no longer pushed."""

    def _metrics(self, family: Metric, now_ns: int) -> Iterator[Any]:
        """Convert a family. A summary becomes two sums, because the SDK has no summaries."""
        sdk, unit = self._sdk, unit_of(family.name)
        if family.type == "histogram":
            samples_by_labels: dict[frozenset[tuple[str, str]], list[Sample]] = {}
            for sample in family.samples:
                labels = frozenset((name, value) for name, value in sample.labels.items() if name != "le")
                samples_by_labels.setdefault(labels, []).append(sample)
            points = [
                self._histogram_point(family.name, dict(labels), samples, now_ns)
                for labels, samples in samples_by_labels.items()
            ]
            data = sdk.Histogram(points, self._cumulative)
            yield sdk.Metric(family.name, family.documentation, unit, data)
            return
        is_cumulative = family.type in {"counter", "summary"}
        points_by_name: dict[str, list[Any]] = {}
        for sample in family.samples:
            start = self._starts.start_of(sample.name, sample.labels, sample.value) if is_cumulative else 0
            point = sdk.NumberDataPoint(sample.labels, start, now_ns, sample.value)
            points_by_name.setdefault(sample.name, []).append(point)
        for name, points_of_name in points_by_name.items():
            data = (
                sdk.Sum(points_of_name, self._cumulative, is_monotonic=True)
                if is_cumulative
                else sdk.Gauge(points_of_name)
            )
            yield sdk.Metric(name, family.documentation, "" if name.endswith("_count") else unit, data)

    def _histogram_point(
        self, family: str, labels: Mapping[str, str], samples: Sequence[Sample], now_ns: int
    ) -> Any:
        """Convert the cumulative buckets of a histogram to counts per bucket. The last bucket has no upper bound."""
        buckets = sorted(
            (float(sample.labels["le"]), sample.value) for sample in samples if "le" in sample.labels
        )
        total_by_suffix = {
            sample.name.rpartition("_")[2]: sample.value for sample in samples if "le" not in sample.labels
        }
        cumulative_counts = [0.0, *(count for _, count in buckets)]
        total_count = total_by_suffix.get("count", cumulative_counts[-1])
        return self._sdk.HistogramDataPoint(
            attributes=labels,
            start_time_unix_nano=self._starts.start_of(family, labels, total_count),
            time_unix_nano=now_ns,
            count=int(total_count),
            sum=total_by_suffix.get("sum"),
            bucket_counts=[int(high - low) for low, high in pairwise(cumulative_counts)],
            explicit_bounds=[bound for bound, _ in buckets[:-1]],
            min=None,
            max=None,
        )
