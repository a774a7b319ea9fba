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
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from exporter.version import __version__

_PATH = "/v1/metrics"


class Otlp:
    """An OTLP endpoint: `http://HOST:4318`, or with a path of its own.

    Args:
        endpoint: Its address.
        source: Address of the page, which names this instance.
        timeout_seconds: How long a request may take, its retries included.
    """

    def __init__(self, endpoint: str, source: str, timeout_seconds: float) -> None:
        from opentelemetry.exporter.otlp.proto.http import metric_exporter  # noqa: PLC0415  (an extra)
        from opentelemetry.sdk.metrics import export  # noqa: PLC0415  (likewise)
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  (likewise)
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415  (likewise)

        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH
        self._exporter = metric_exporter.OTLPMetricExporter(endpoint=url, timeout=timeout_seconds)
        page = urlsplit(source)
        here = page.hostname in {"127.0.0.1", "::1", "localhost"}
        instance = f"{socket.gethostname()}:{page.port}" if here else page.netloc
        about = {"service.name": "training-exporter", "service.instance.id": instance}
        if "OTEL_SERVICE_NAME" in os.environ:
            del about["service.name"]
        self._resource = Resource.create(about)
        self._scope = InstrumentationScope("training-exporter", __version__)
        self._sdk = export
        self._cumulative = export.AggregationTemporality.CUMULATIVE

    def put(self, page: bytes) -> None:
        """Send a page; raises OSError, after OpenTelemetry has logged why."""
        sdk, now = self._sdk, time.time_ns()
        families = text_string_to_metric_families(page.decode())
        metrics = [metric for family in families for metric in self._metrics(family, now)]
        scope = sdk.ScopeMetrics(self._scope, metrics, "")
        data = sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is not sdk.MetricExportResult.SUCCESS:
            raise OSError("the endpoint has not taken it")

    def remove(self) -> None:
        """Nothing: what is not sent is a gap."""

    def _metrics(self, family: Metric, now: int) -> Iterator[Any]:
        """A family of the page as metrics; a summary becomes two sums, as the SDK has none."""
        sdk = self._sdk
        if family.type == "histogram":
            points = [self._histogram_point(samples, now) for samples in _series(family)]
            data = sdk.Histogram(points, self._cumulative)
            yield sdk.Metric(family.name, family.documentation, "", data)
            return
        by_name: dict[str, list[Any]] = {}
        for sample in family.samples:
            point = sdk.NumberDataPoint(sample.labels, 0, now, sample.value)
            by_name.setdefault(sample.name, []).append(point)
        for name, points in by_name.items():
            counts = family.type in {"counter", "summary"}
            data = sdk.Sum(points, self._cumulative, is_monotonic=True) if counts else sdk.Gauge(points)
            yield sdk.Metric(name, family.documentation, "", data)

    def _histogram_point(self, samples: Sequence[Sample], now: int) -> Any:
        """Cumulative buckets up to a bound become counts between bounds; the last is beyond all bounds."""
        buckets = sorted((float(each.labels["le"]), each.value) for each in samples if "le" in each.labels)
        totals = {each.name.rpartition("_")[2]: each.value for each in samples if "le" not in each.labels}
        below = [0.0, *(count for _, count in buckets)]
        return self._sdk.HistogramDataPoint(
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


def _series(family: Metric) -> Iterator[Sequence[Sample]]:
    """The samples of a histogram by series."""
    found: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in family.samples:
        labels = sorted((name, value) for name, value in sample.labels.items() if name != "le")
        found.setdefault(tuple(labels), []).append(sample)
    yield from found.values()
