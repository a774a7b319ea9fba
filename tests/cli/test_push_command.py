"""`push`: textfile for node_exporter, Pushgateway group and OTLP endpoint, and no output without a page."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from run_support import (
    child_environment,
    fetch_page,
    free_port,
    run_to_completion,
    running_process,
    web_server,
)
from waiting import WAIT_LIMIT_SECONDS, wait_until
from web_support import CertificateAuthority, serving

from exporter.cli.push import Push, TextFile, main, target_of
from exporter.errors import ConfigurationError

PAGE = b"# TYPE train_loss gauge\ntrain_loss 0.5\n"
PROCESS_METRICS = b"# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 5\n"


class Server:
    """Sidecar, Pushgateway and OTLP receiver in one server.

    Attributes:
        page: Page of the sidecar, or None if it is not ready.
        paths: Requested paths of the sidecar.
        groups: Bodies of the Pushgateway groups by path.
        requests: Requests to the OTLP receiver.
        status: Status of responses to pushes.
    """

    def __init__(self) -> None:
        self.url = ""
        self.page: bytes | None = PAGE + PROCESS_METRICS
        self.paths: list[str] = []
        self.groups: dict[str, bytes] = {}
        self.requests: list[Any] = []
        self.status = 200

    def respond(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if method == "GET":
            self.paths.append(path)
            return (503, b"not ready") if self.page is None else (200, self.page)
        if method == "PUT":
            self.groups[path] = body
        elif method == "DELETE":
            self.groups.pop(path, None)
        elif self.status == 200:
            from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2

            assert path == "/v1/metrics"
            self.requests.append(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
        return self.status, b""

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last OTLP request by name."""
        (resource,) = self.requests[-1].resource_metrics
        return {metric.name: metric for metric in resource.scope_metrics[0].metrics}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with web_server(server.respond) as server.url:
        yield server


def push_command(server: Server, target: str, *flags: str) -> list[str]:
    arguments = [f"--from={server.url}/metrics", "--interval=100ms", *flags, target]
    return [sys.executable, "-m", "exporter", "push", *arguments]


@contextlib.contextmanager
def pushing(server: Server, target: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        push_command(server, target), env=child_environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_file_exists_while_the_page_exists_and_until_push_ends(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "training.prom"
    with pushing(server, str(path)) as process:
        wait_until(path.exists)
        file_content = path.read_bytes()
        mode = path.stat().st_mode & 0o777
        server.page = None
        wait_until(lambda: not path.exists())
        server.page = PAGE + PROCESS_METRICS
        wait_until(path.exists)
        process.send_signal(signal.SIGTERM)
        _, message = process.communicate(timeout=WAIT_LIMIT_SECONDS)

    assert (file_content, mode, process.returncode) == (PAGE, 0o644, 0)
    assert list(tmp_path.iterdir()) == []
    assert message.count("cannot be read: HTTP Error 503") == 1
    assert message.count("works again") == 1


def test_a_group_of_a_pushgateway_is_replaced_and_deleted(server: Server) -> None:
    group = "/metrics/job/training/instance/node7"
    with pushing(server, server.url + group) as process:
        wait_until(lambda: server.groups == {group: PAGE})
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_LIMIT_SECONDS)

    assert (process.returncode, server.groups) == (0, {})


def test_once_keeps_the_file_and_removes_it_without_a_page(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "training.prom"
    flags = ["--once", "--name=train_*", "--name=gpu_*"]
    result_with_page = run_to_completion(push_command(server, str(path), *flags))
    file_content = path.read_bytes()
    server.page = None
    result_without_page = run_to_completion(push_command(server, str(path), "--once"))

    assert (result_with_page.returncode, result_without_page.returncode) == (0, 1)
    assert file_content == PAGE
    assert not path.exists()
    assert server.paths[0] == "/metrics?name%5B%5D=train_%2A&name%5B%5D=gpu_%2A"


def test_a_file_of_a_killed_push_is_removed_by_the_next_push_without_a_page(
    server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "training.prom"
    with pushing(server, str(path)) as process:
        wait_until(path.exists)
        process.kill()
        process.wait()
    remained_after_kill = path.exists()
    server.page = None

    with pushing(server, str(path)):
        wait_until(lambda: not path.exists())
    assert remained_after_kill


def test_a_response_that_is_not_metrics_is_refused_and_removes_the_file(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "training.prom"
    push = Push(f"{server.url}/metrics", TextFile(path))
    assert push.push_once()
    server.page = b"<html><body>Sign in</body></html>\n"

    assert not push.push_once()
    assert not path.exists()
    assert "is not in the Prometheus text format (line 1: '<html><body>Sign in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["It works!", "It works 5", "train_loss", 'train_loss{rank="0" 1', "{}", "x 1 2 3"]
)
def test_a_line_other_than_a_sample_is_refused(server: Server, tmp_path: Path, line: str) -> None:
    server.page = PAGE + line.encode() + b"\n"

    assert not Push(f"{server.url}/metrics", TextFile(tmp_path / "x.prom")).push_once()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        'x{a="} # é 1",b="\\""} 1',
        "x +Inf",
        "x NaN 1700000000000",
        "x\t-1.5e-07",
        '{"a.b",c="d"} 1e3',
        "x { } .5",
        "",
    ],
)
def test_each_form_of_a_sample_is_accepted(server: Server, tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.prom"
    server.page = PAGE + line.encode() + b"\n"

    assert Push(f"{server.url}/metrics", TextFile(path)).push_once()
    assert path.read_bytes() == server.page


def test_a_file_that_cannot_be_replaced_is_removed(server: Server, tmp_path: Path) -> None:
    class FullDiskAfterFirstWrite(TextFile):
        is_present = False

        def put(self, page: bytes) -> None:
            if self.is_present:
                raise OSError(28, "No space left on device")
            self.is_present = True

        def remove(self) -> None:
            self.is_present = False

    target = FullDiskAfterFirstWrite(tmp_path / "page.prom")
    push = Push(f"{server.url}/metrics", target)
    results_and_presence = [(push.push_once(), target.is_present) for _ in range(2)]

    assert results_and_presence == [(True, True), (False, False)]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("ftp://x/y", "metrics/job"),
        ("http://gateway:99999/metrics/job/x", "metrics/job"),
        ("http://gateway:9091/", "metrics/job"),
        ("/no/such/x.prom", "metrics/job"),
        ("/tmp", "metrics/job"),
        ("--interval=0s /tmp/x.prom", "--interval"),
        ("--from=foo /tmp/x.prom", "--from"),
        ("--name x.prom", "TARGET"),
        ("a b", "is not a target"),
    ],
)
def test_an_invalid_command_line_is_reported_at_the_start(argument: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        main(argument.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--from=http://user:secret@node:20909/metrics", "x.prom"],
        ["--from=http://user:secret@node:port/metrics", "x.prom"],
        ["http://user:secret@gateway:9091/metrics/job/train"],
    ],
)
def test_a_password_in_a_url_is_refused_and_not_shown(arguments: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="a password in the URL") as error_info:
        main(["--once", *arguments])

    assert "secret" not in str(error_info.value)


@pytest.mark.parametrize(
    "target", ["http//user:secret@gateway:9091", "http://user:secret@gateway:9091 train"]
)
def test_a_password_in_a_mistyped_target_is_not_shown(target: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a target") as error_info:
        main(["--once", *target.split()])

    assert "secret" not in str(error_info.value)


def test_a_password_file_that_is_not_text_is_reported_at_the_start(tmp_path: Path) -> None:
    password_file = tmp_path / "password"
    password_file.write_bytes(b"\xff\xfe")

    with pytest.raises(ConfigurationError, match="cannot load the credentials"):
        main(["--from.user=prometheus", f"--from.password-file={password_file}", "x.prom"])


@pytest.mark.skipif(shutil.which("prometheus-node-exporter") is None, reason="node_exporter is not installed")
def test_node_exporter_shows_the_file_on_its_page(server: Server, tmp_path: Path) -> None:
    run_to_completion(push_command(server, str(tmp_path / "training.prom"), "--once"))
    port = free_port()
    flags = ["--collector.disable-defaults", "--collector.textfile"]
    flags += [f"--collector.textfile.directory={tmp_path}", f"--web.listen-address=127.0.0.1:{port}"]
    with running_process(["prometheus-node-exporter", *flags], tmp_path, stderr=subprocess.DEVNULL):
        wait_until(lambda: "train_loss 0.5" in fetch_page(port))

        assert "process_cpu_seconds_total" in fetch_page(port)


# OTLP -------------------------------------------------------------------------------------------------


@pytest.fixture
def receiver(server: Server) -> Server:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="pip install opentelemetry-exporter-otlp-proto-http"
    )
    server.page = b"# TYPE x gauge\nx 1\n"
    return server


def labels_of(point: Any) -> dict[str, str]:
    return {attribute.key: attribute.value.string_value for attribute in point.attributes}


def push_once(receiver: Server) -> int:
    return main(["--once", f"--from={receiver.url}/metrics", "otlp", receiver.url])


def test_a_response_that_is_not_a_page_of_metrics_is_a_failed_push(receiver: Server) -> None:
    receiver.page = b"<html><body>It works!</body></html>\n"
    push = Push(f"{receiver.url}/metrics", target_of(["otlp", receiver.url]))

    assert push.push_once() is False
    assert receiver.requests == []


def test_every_type_arrives_with_its_labels_and_values(receiver: Server) -> None:
    registry = CollectorRegistry()
    Counter("steps", "Steps.", ["run"], registry=registry).labels("r").inc(7)
    Gauge("loss", "Loss.", registry=registry).set(0.5)
    Summary("batch_seconds", "Batches.", registry=registry).observe(2.5)
    durations = Histogram("step_seconds", "Time.", ["rank"], buckets=(0.1, 1.0), registry=registry)
    for seconds in (0.05, 0.5, 0.6, 20.0):
        durations.labels("0").observe(seconds)
    receiver.page = generate_latest(registry)

    assert push_once(receiver) == 0
    metrics = receiver.metrics()
    (steps_point,) = metrics["steps_total"].sum.data_points
    (duration_point,) = metrics["step_seconds"].histogram.data_points
    batch_values = [
        metrics[f"batch_seconds_{suffix}"].sum.data_points[0].as_double for suffix in ("count", "sum")
    ]
    assert (labels_of(steps_point), steps_point.as_double) == ({"run": "r"}, 7)
    assert metrics["steps_total"].description == "Steps."
    assert metrics["steps_total"].sum.is_monotonic
    assert metrics["steps_total"].sum.aggregation_temporality == 2  # cumulative
    assert (metrics["loss"].gauge.data_points[0].as_double, batch_values) == (0.5, [1, 2.5])
    assert (labels_of(duration_point), list(duration_point.explicit_bounds)) == ({"rank": "0"}, [0.1, 1.0])
    assert (list(duration_point.bucket_counts), duration_point.count) == ([1, 2, 1], 4)
    assert duration_point.sum == pytest.approx(21.15)
    assert not duration_point.HasField("min")


def test_only_series_of_the_page_are_sent(receiver: Server) -> None:
    source = f"{receiver.url}/metrics"
    push = Push(source, target_of(["otlp", receiver.url], source))
    receiver.page = b'# TYPE loss gauge\nloss{rank="0"} 1.0\nloss{rank="1"} 2.0\n'
    push.push_once()
    receiver.page = b'# TYPE loss gauge\nloss{rank="1"} 3.0\n'
    push.push_once()
    (point,) = receiver.metrics()["loss"].gauge.data_points
    receiver.page = None
    is_pushed = push.push_once()
    push.remove()

    assert (labels_of(point), point.as_double) == ({"rank": "1"}, 3.0)
    assert (is_pushed, len(receiver.requests)) == (False, 2)


def test_units_and_start_times_are_sent(receiver: Server) -> None:
    source = f"{receiver.url}/metrics"
    push = Push(source, target_of(["otlp", receiver.url], source))
    for status, sent_bytes in ((400, 4), (200, 5), (200, 7), (200, 2)):
        receiver.status = status
        receiver.page = b"# TYPE sent_bytes_total counter\nsent_bytes_total %d\n" % sent_bytes
        assert push.push_once() == (status == 200)

    metrics = [request.resource_metrics[0].scope_metrics[0].metrics[0] for request in receiver.requests]
    start_times = [metric.sum.data_points[0].start_time_unix_nano for metric in metrics]
    times = [metric.sum.data_points[0].time_unix_nano for metric in metrics]
    assert {metric.unit for metric in metrics} == {"By"}
    # The start of the counter is unknown, and the last value is below the value before.
    assert start_times == [times[0], times[0], times[1]]


def counter_page(**totals: int) -> bytes:
    lines = "".join(f'steps_total{{run="{run}"}} {total}\n' for run, total in totals.items())
    return f"# TYPE steps_total counter\n{lines}".encode()


def test_a_counter_that_appears_after_the_first_push_starts_at_the_last_successful_push(
    receiver: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = f"{receiver.url}/metrics", target_of(["otlp", receiver.url])
    push, start_times = Push(source, target), []
    for second, status in ((10, 200), (20, 400), (30, 200), (40, 200)):
        monkeypatch.setattr("exporter.cli.otlp.time.time_ns", lambda second=second: second * 10**9)
        receiver.status = status
        receiver.page = counter_page(other=1) if second < 30 else counter_page(late=7, other=1)
        assert push.push_once() == (status == 200)
        start_times += [
            point.start_time_unix_nano // 10**9
            for point in receiver.metrics()["steps_total"].sum.data_points
            if labels_of(point)["run"] == "late"
        ]

    assert start_times == [10, 10]  # all of its value is an increase since that push


@pytest.mark.parametrize("absent_hours", [23, 25])
def test_an_absent_counter_keeps_its_start_for_a_day_and_is_then_forgotten(
    receiver: Server, monkeypatch: pytest.MonkeyPatch, absent_hours: int
) -> None:
    source, target = f"{receiver.url}/metrics", target_of(["otlp", receiver.url])
    push, start_times = Push(source, target), set()
    for hour in (0, 1, 1 + absent_hours, 2 + absent_hours):
        monkeypatch.setattr("exporter.cli.otlp.time.time_ns", lambda hour=hour: hour * 3600 * 10**9)
        is_absent = 0 < hour < 2 + absent_hours
        receiver.page = counter_page(other=1) if is_absent else counter_page(first=1000, other=1)
        assert push.push_once()
        points = receiver.metrics()["steps_total"].sum.data_points
        start_times |= {
            p.start_time_unix_nano // (3600 * 10**9) for p in points if labels_of(p)["run"] == "first"
        }

    assert start_times == ({0} if absent_hours < 24 else {0, 1 + absent_hours})


def test_a_comment_of_one_word_is_accepted(server: Server, tmp_path: Path) -> None:
    server.page = b"#\n# EOF\n# TYPE x gauge\nx 1\n"
    file = tmp_path / "page.prom"

    assert main(["--once", f"--from={server.url}/metrics", str(file)]) == 0
    assert b"x 1" in file.read_bytes()


def test_an_exporter_with_a_password_and_client_certificates_is_read(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    password_hash = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    client_settings = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
    config = authority.write_web_config(
        f"{client_settings}basic_auth_users: {{prometheus: '{password_hash}'}}\n"
    )
    client_certificate = authority.ca.issue_cert("client")
    client_certificate.private_key_pem.write_to_path(str(tmp_path / "client-key.pem"))
    client_certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "client.pem"))
    (tmp_path / "password").write_text("secret\n")
    names = {"ca": "ca.pem", "cert": "client.pem", "key": "client-key.pem", "password": "password"}
    flags = [f"--from.{name}-file={tmp_path / file}" for name, file in names.items()]
    with serving(web_config=config) as exporter:
        source = f"--from={exporter.urls[0]}/metrics"
        status = main(["--once", source, "--from.user=prometheus", *flags, str(tmp_path / "page.prom")])

    assert (status, (tmp_path / "page.prom").read_bytes()) == (0, b"up 1\n")


def test_a_histogram_without_a_known_sum_is_sent_without_a_sum(receiver: Server) -> None:
    receiver.page = b'# TYPE x histogram\nx_bucket{le="1.0"} 1\nx_bucket{le="+Inf"} 2\nx_count 2\n'

    assert push_once(receiver) == 0
    (point,) = receiver.metrics()["x"].histogram.data_points
    assert (point.count, list(point.bucket_counts), point.HasField("sum")) == (2, [1, 1], False)


def test_the_count_of_a_histogram_without_a_count_is_the_last_bucket(receiver: Server) -> None:
    receiver.page = b'# TYPE x histogram\nx_bucket{le="1.0"} 1\nx_bucket{le="+Inf"} 2\n'

    assert push_once(receiver) == 0
    (point,) = receiver.metrics()["x"].histogram.data_points
    assert (point.count, list(point.bucket_counts)) == (2, [1, 1])


def test_a_page_with_an_infinite_bucket_count_is_a_failed_push(receiver: Server) -> None:
    receiver.page = b'# TYPE x histogram\nx_bucket{le="+Inf"} +Inf\nx_count 2\n'

    assert push_once(receiver) == 1


def test_the_resource_names_the_exporter_unless_the_environment_does(
    receiver: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def push_and_read_resource() -> dict[str, str]:
        push_once(receiver)
        return labels_of(receiver.requests[-1].resource_metrics[0].resource)

    default_resource = push_and_read_resource()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "cluster=east")
    configured_resource = push_and_read_resource()

    assert default_resource["service.name"] == "training-exporter"
    assert default_resource["service.instance.id"].endswith(
        receiver.url.rpartition("/")[2].replace("127.0.0.1", "")
    )
    assert (configured_resource["service.name"], configured_resource["cluster"]) == ("mine", "east")


def test_a_refusing_endpoint_is_reported(receiver: Server, capsys: pytest.CaptureFixture[str]) -> None:
    receiver.status = 400

    assert push_once(receiver) == 1
    assert "the endpoint did not accept the metrics" in capsys.readouterr().err


def test_without_the_extra_the_install_command_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)

    with pytest.raises(ConfigurationError, match=r"pip install opentelemetry-exporter-otlp-proto-http"):
        target_of(["otlp", "http://127.0.0.1:4318"])
