"""`push otlp`: OpenTelemetry's own exporter, a small receiver that decodes what comes, and gaps that stay gaps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest

from exporter.cli.push import Push, main, target_of
from exporter.errors import ConfigurationError


class Receiver:
    """A sidecar and an OTLP receiver in one."""

    def __init__(self) -> None:
        self.page: bytes | None = b""
        self.requests: list[Any] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(503 if outer.page is None else 200, outer.page or b"")

            def do_POST(self) -> None:
                from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2

                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert (self.path, self.headers["Content-Type"]) == ("/v1/metrics", "application/x-protobuf")
                if outer.status == 200:
                    outer.requests.append(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
                self.answer(outer.status, b"")

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None: ...

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.source = f"{self.url}/metrics"

    def metrics(self) -> dict[str, Any]:
        """Of the last request, by name."""
        (resource,) = self.requests[-1].resource_metrics
        return {metric.name: metric for metric in resource.scope_metrics[0].metrics}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="pip install 'training-exporter[otlp]'"
    )
    made = Receiver()
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


def labels_of(point: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in point.attributes}


def test_every_type_arrives_with_its_labels_and_values(receiver: Receiver) -> None:
    registry = CollectorRegistry()
    Counter("steps", "Steps.", ["run"], registry=registry).labels("r").inc(7)
    Gauge("loss", "Loss.", registry=registry).set(0.5)
    Summary("batch_seconds", "Batches.", registry=registry).observe(2.5)
    seconds = Histogram("step_seconds", "Time.", ["rank"], buckets=(0.1, 1.0), registry=registry)
    for value in (0.05, 0.5, 0.6, 20.0):
        seconds.labels("0").observe(value)
    receiver.page = generate_latest(registry)

    assert main(["--once", f"--from={receiver.source}", "otlp", receiver.url]) == 0
    found = receiver.metrics()
    (steps,) = found["steps_total"].sum.data_points
    (step,) = found["step_seconds"].histogram.data_points
    assert (labels_of(steps), steps.as_double, found["steps_total"].description) == (
        {"run": "r"},
        7,
        "Steps.",
    )
    assert found["steps_total"].sum.is_monotonic
    assert found["steps_total"].sum.aggregation_temporality == 2  # cumulative
    assert found["loss"].gauge.data_points[0].as_double == 0.5
    assert [found[f"batch_seconds_{each}"].sum.data_points[0].as_double for each in ("count", "sum")] == [
        1,
        2.5,
    ]
    assert (labels_of(step), list(step.explicit_bounds)) == ({"rank": "0"}, [0.1, 1.0])
    assert (list(step.bucket_counts), step.count) == ([1, 2, 1], 4)
    assert step.sum == pytest.approx(21.15)
    assert not step.HasField("min")


def test_what_is_not_on_the_page_is_not_sent(receiver: Receiver) -> None:
    push = Push(receiver.source, target_of(["otlp", receiver.url], receiver.source))
    receiver.page = b'# TYPE loss gauge\nloss{rank="0"} 1.0\nloss{rank="1"} 2.0\n'
    push.step()
    receiver.page = b'# TYPE loss gauge\nloss{rank="1"} 3.0\n'
    push.step()
    (point,) = receiver.metrics()["loss"].gauge.data_points
    receiver.page = None
    failed = push.step()
    push.remove()

    assert (labels_of(point), point.as_double) == ({"rank": "1"}, 3.0)
    assert (failed, len(receiver.requests)) == (False, 2)


def test_a_histogram_whose_sum_is_not_known_has_none(receiver: Receiver) -> None:
    receiver.page = b'# TYPE x histogram\nx_bucket{le="1.0"} 1\nx_bucket{le="+Inf"} 2\nx_count 2\n'

    assert main(["--once", f"--from={receiver.source}", "otlp", receiver.url]) == 0
    (point,) = receiver.metrics()["x"].histogram.data_points
    assert (point.count, list(point.bucket_counts), point.HasField("sum")) == (2, [1, 1], False)


def test_the_resource_names_the_exporter_unless_the_environment_does(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resource() -> dict[str, str]:
        assert main(["--once", f"--from={receiver.source}", "otlp", receiver.url]) == 0
        return labels_of(receiver.requests[-1].resource_metrics[0].resource)

    receiver.page = b"# TYPE x gauge\nx 1\n"
    own = resource()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "cluster=east")
    given = resource()

    assert own["service.name"] == "training-exporter"
    assert own["service.instance.id"].endswith(f":{receiver.http.server_port}")
    assert (given["service.name"], given["cluster"]) == ("mine", "east")


def test_an_endpoint_that_refuses_is_told(receiver: Receiver, capsys: pytest.CaptureFixture[str]) -> None:
    receiver.page, receiver.status = b"# TYPE x gauge\nx 1\n", 400

    assert main(["--once", f"--from={receiver.source}", "otlp", receiver.url]) == 1
    assert "the endpoint did not accept the metrics" in capsys.readouterr().err


def test_without_the_extra_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)

    with pytest.raises(ConfigurationError, match=r"pip install 'training-exporter\[otlp\]'"):
        target_of(["otlp", "http://127.0.0.1:4318"])
