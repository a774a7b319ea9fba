"""`training-exporter push otlp ENDPOINT`: the page as OTLP metrics, through OpenTelemetry's own exporter over HTTP.

Used by `push`; needs the extra `training-exporter[otlp]`. A page comes in, one request goes out. Names stay as Prometheus
shows them. What is not on the page is not sent: a gap stays a gap. Start times are 0, OTLP's word for unknown: totals go
on over restarts of the exporter. Retries, compression, certificates and headers are OpenTelemetry's, by its variables
(`OTEL_EXPORTER_OTLP_HEADERS`, ...), and so is the resource (`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from exporter.version import __version__

_PATH = "/v1/metrics"
_CUMULATIVE = otel.AggregationTemporality.CUMULATIVE


class Otlp:
    """An OTLP endpoint: `http://HOST:4318`, or with a path of its own.

    Args:
        endpoint: Its address.
        source: Address of the page, which names this instance.
        timeout_seconds: How long a request may take, its retries included.
    """

    def __init__(self, endpoint: str, source: str, timeout_seconds: float) -> None:
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH
        self._exporter = OTLPMetricExporter(endpoint=url, timeout=timeout_seconds)
        page = urlsplit(source)
        here = page.hostname in {"127.0.0.1", "::1", "localhost"}
        instance = f"{socket.gethostname()}:{page.port}" if here else page.netloc
        about = {"service.name": "training-exporter", "service.instance.id": instance}
        if "OTEL_SERVICE_NAME" in os.environ:
            del about["service.name"]
        self._resource = Resource.create(about)

    def put(self, page: bytes) -> None:
        """Send a page; raises OSError, after OpenTelemetry has logged why."""
        now = time.time_ns()
        metrics = [
            made for family in text_string_to_metric_families(page.decode()) for made in _metrics(family, now)
        ]
        scope = otel.ScopeMetrics(InstrumentationScope("training-exporter", __version__), metrics, "")
        data = otel.MetricsData([otel.ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is not otel.MetricExportResult.SUCCESS:
            raise OSError("the endpoint has not taken it")

    def remove(self) -> None:
        """Nothing: what is not sent is a gap."""


def _metrics(family: Metric, now: int) -> Iterator[otel.Metric]:
    """A family of the page as metrics; a summary becomes two sums, as the SDK has none."""
    if family.type == "histogram":
        points = [_histogram_point(samples, now) for samples in _series(family)]
        yield otel.Metric(family.name, family.documentation, "", otel.Histogram(points, _CUMULATIVE))
        return
    by_name: dict[str, list[otel.NumberDataPoint]] = {}
    for sample in family.samples:
        point = otel.NumberDataPoint(sample.labels, 0, now, sample.value)
        by_name.setdefault(sample.name, []).append(point)
    for name, points in by_name.items():
        counts = family.type in {"counter", "summary"}
        data = otel.Sum(points, _CUMULATIVE, is_monotonic=True) if counts else otel.Gauge(points)
        yield otel.Metric(name, family.documentation, "", data)


def _series(family: Metric) -> Iterator[Sequence[Sample]]:
    """The samples of a histogram by series."""
    found: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in family.samples:
        labels = sorted((name, value) for name, value in sample.labels.items() if name != "le")
        found.setdefault(tuple(labels), []).append(sample)
    yield from found.values()


def _histogram_point(samples: Sequence[Sample], now: int) -> otel.HistogramDataPoint:
    """Cumulative buckets up to a bound become counts between bounds; the last is beyond all bounds."""
    buckets = sorted((float(each.labels["le"]), each.value) for each in samples if "le" in each.labels)
    totals = {each.name.rpartition("_")[2]: each.value for each in samples if "le" not in each.labels}
    below = [0.0, *(count for _, count in buckets)]
    return otel.HistogramDataPoint(
        attributes={name: value for name, value in samples[0].labels.items() if name != "le"},
        start_time_unix_nano=0,
        time_unix_nano=now,
        count=int(totals["count"]),
        sum=totals.get("sum"),
        bucket_counts=[int(high - low) for low, high in pairwise(below)],
        explicit_bounds=[bound for bound, _ in buckets[:-1]],
        min=None,
        max=None,
    )
