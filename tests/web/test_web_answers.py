"""Responses of each path, of servers in this process and in a child process."""

from __future__ import annotations

import gzip
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from waiting import WAIT_LIMIT_SECONDS, wait_until
from web_child import sample_values
from web_support import (
    ServerProcess,
    exchange,
    port_of,
    read_to_end,
    scrape_repeatedly,
    send_request,
    serving,
)

from exporter.errors import ConfigurationError, Problem
from exporter.exposition.compression import compress
from exporter.exposition.negotiation import Format
from exporter.web.endpoints import (
    Content,
    DocumentEndpoint,
    HealthEndpoint,
    MetricsEndpoint,
    ReadinessEndpoint,
    ReloadEndpoint,
)

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


class FakeApplication:
    """Application whose reload can fail and whose readiness can be changed.

    Attributes:
        reloads: Number of successful reloads.
        error: Exception of the next reload, or None.
        reason: Reason why the application is not ready, or None.
    """

    reloads = 0
    error: Exception | None = None
    reason: str | None = None

    def not_ready(self) -> str | None:
        return self.reason

    def reload(self) -> None:
        if self.error is not None:
            raise self.error
        self.reloads += 1


def html_content() -> Content:
    return Content(b"<!doctype html>", "text/html", {"Cache-Control": "no-store"})


def test_metrics_are_served_in_the_requested_format() -> None:
    with serving(MetricsEndpoint(lambda form, _names: form.name.encode())) as server:
        default_reply = send_request(port_of(server))
        openmetrics_reply = send_request(
            port_of(server), headers={"Accept": OPENMETRICS, "Accept-Encoding": "gzip"}
        )

    assert default_reply.headers["content-type"] == Format.TEXT.value
    assert default_reply.body == b"TEXT"
    assert "content-encoding" not in default_reply.headers
    assert openmetrics_reply.headers["content-type"] == Format.OPENMETRICS.value
    assert openmetrics_reply.headers["content-encoding"] == "gzip"
    assert gzip.decompress(openmetrics_reply.body) == b"OPENMETRICS"
    assert default_reply.headers["vary"] == openmetrics_reply.headers["vary"] == "Accept, Accept-Encoding"
    assert default_reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("method", "path", "status", "header", "expected"),
    [
        ("GET", "/", 200, "content-type", "text/html"),
        ("GET", "/", 200, "cache-control", "no-store"),
        ("POST", "/metrics", 405, "allow", "GET, HEAD"),
        ("GET", "/-/reload", 405, "allow", "POST, PUT"),
        ("GET", "/-/reload", 405, "connection", "close"),
        ("GET", "/metric", 404, "content-type", "text/plain; charset=utf-8"),
    ],
)
def test_the_path_and_the_method_decide_status_and_headers(
    method: str, path: str, status: int, header: str, expected: str
) -> None:
    endpoints = (
        DocumentEndpoint("/", html_content),
        MetricsEndpoint(lambda _format, _names: b""),
        ReloadEndpoint(lambda: None, enabled=True),
    )
    with serving(*endpoints) as server:
        reply = send_request(port_of(server), path, method=method)

    assert reply.status == status
    assert reply.headers[header] == expected


def test_a_document_is_compressed_on_a_worker_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def compress_and_note_thread(body: bytes) -> bytes:
        threads.append(threading.current_thread().name)
        return compress(body)

    monkeypatch.setattr("exporter.web.endpoints.compress", compress_and_note_thread)
    with serving(DocumentEndpoint("/", html_content)) as server:
        reply = send_request(port_of(server), "/", headers={"Accept-Encoding": "gzip"})

    assert gzip.decompress(reply.body) == html_content().body
    assert reply.headers["content-encoding"] == "gzip"
    assert threads == ["exporter-document-0"]


def test_metrics_and_readiness_wait_for_the_application_but_health_does_not() -> None:
    application = FakeApplication()
    endpoints = (
        MetricsEndpoint(lambda _format, _names: b"", application.not_ready),
        ReadinessEndpoint(application.not_ready),
        HealthEndpoint(),
    )
    with serving(*endpoints) as server:
        application.reason = "the ledger is being read"
        paths = ("/metrics", "/-/ready", "/-/healthy")
        replies = [send_request(port_of(server), path) for path in paths]
        application.reason = None
        later_statuses = [send_request(port_of(server), path).status for path in paths]

    assert [reply.status for reply in replies] == [503, 503, 200]
    assert replies[0].body == replies[1].body == b"the ledger is being read\n"
    assert replies[0].headers["retry-after"] == "1"
    assert later_statuses == [200, 200, 200]


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_reload_responds_when_finished_with_the_reason_of_a_failure(method: str) -> None:
    application = FakeApplication()
    with serving(ReloadEndpoint(application.reload, enabled=False)) as server:
        reply_if_disabled = send_request(port_of(server), "/-/reload", method=method)
    with serving(ReloadEndpoint(application.reload, enabled=True)) as server:
        reply_to_success = send_request(port_of(server), "/-/reload", method=method)
        application.error = ConfigurationError([Problem("exporter.yml", 3, 5, "unknown key")])
        reply_to_failure = send_request(port_of(server), "/-/reload", method=method)

    assert reply_if_disabled.status == 403
    assert b"--web.enable-lifecycle" in reply_if_disabled.body
    assert reply_to_success.status == 200
    assert application.reloads == 1
    assert reply_to_failure.status == 500
    assert b"exporter.yml:3:5: unknown key" in reply_to_failure.body


def test_a_page_that_fails_is_a_server_error_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_format: Format, _names: frozenset[str]) -> bytes:
        raise KeyError("defect")

    endpoints = (MetricsEndpoint(fail), HealthEndpoint())
    with caplog.at_level(logging.ERROR), serving(*endpoints) as server:
        statuses = [send_request(port_of(server)).status for _ in range(3)]
        health_status = send_request(port_of(server), "/-/healthy").status

    assert statuses == [500, 500, 500]
    assert health_status == 200
    assert len(caplog.records) == 1


def test_sixty_four_clients_at_once_share_a_few_renders() -> None:
    with ServerProcess() as process, ThreadPoolExecutor(64) as clients:
        process.send_command("slow 0.05")
        list(clients.map(lambda _: scrape_repeatedly(process.port, 10), range(64)))
        # The server counts a scrape shortly after the client has received the response.
        wait_until(lambda: process.measure()["exporter_scrapes_total"] == 640)

        # A render answers all clients that wait for it: ten renders if all 64 clients always wait, 640 if none is shared.
        assert process.measure()["renders"] < 128


def test_a_hanging_render_affects_only_its_scrapes() -> None:
    with ServerProcess(limits={"render_seconds": 0.5, "drain_seconds": 1}) as process:
        process.send_command("hang")
        replies = [send_request(process.port) for _ in range(3)]
        statuses = [send_request(process.port, path).status for path in ("/-/healthy", "/-/ready")]
        measured = process.send_command("release")
        wait_until(lambda: send_request(process.port).status == 200)
        process.send_command("hang")
        send_request(process.port)
        process.terminate()
        exit_status, _ = process.wait()

    assert [reply.status for reply in replies] == [503] * 3
    assert replies[0].headers["retry-after"] == "1"
    assert statuses == [200, 200]
    # Later scrapes wait for the hanging render instead of occupying the second worker.
    assert measured["renders"] == 1
    assert measured["exporter_http_requests_total{/metrics,503}"] == 3
    assert exit_status == 0


def test_the_timeout_of_a_scrape_limits_its_wait_for_a_hanging_render() -> None:
    def scrape(timeout: str) -> tuple[int, float]:
        reply = send_request(process.port, headers={"X-Prometheus-Scrape-Timeout-Seconds": timeout})
        return reply.status, reply.seconds

    with ServerProcess(limits={"render_seconds": WAIT_LIMIT_SECONDS}) as process:
        process.send_command("hang")
        (status_at_1_s, seconds_at_1_s), (status_at_200_ms, seconds_at_200_ms) = scrape("1"), scrape("0.2")
        process.send_command("release")
        statuses = [scrape(timeout)[0] for timeout in ("nan", "-1", "soon", "inf", "1e999")]

    assert status_at_1_s == 503
    assert status_at_200_ms == 503
    # On a busy machine, a response is late.
    assert max(seconds_at_1_s, seconds_at_200_ms) < WAIT_LIMIT_SECONDS / 2
    assert statuses == [200] * 5


def is_refused(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=WAIT_LIMIT_SECONDS).close()
    except OSError:
        return True
    return False


def test_a_scrape_in_flight_is_answered_while_the_server_stops() -> None:
    with ServerProcess() as process, ExitStack() as stack:
        address = ("127.0.0.1", process.port)
        process.send_command("finish")
        peer, idle = (
            stack.enter_context(socket.create_connection(address, timeout=WAIT_LIMIT_SECONDS))
            for _ in range(2)
        )
        peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: process.measure()["exporter_http_connections{running}"] == 1)
        process.terminate()
        idle_end = idle.recv(1)
        wait_until(lambda: is_refused(address))
        response = read_to_end(peer)
        status, _ = process.wait()

    assert idle_end == b""
    assert status == 0
    assert response.startswith(b"HTTP/1.1 200")
    assert b"\r\nConnection: close\r\n" in response
    assert response.endswith(b'load{unit="1999"} 1999\n')


def test_sent_scrapes_are_counted_and_unknown_paths_share_one_series() -> None:
    application = FakeApplication()
    endpoints = (
        DocumentEndpoint("/", html_content),
        MetricsEndpoint(lambda _format, _names: b"", application.not_ready),
    )
    with serving(*endpoints) as server:
        port = port_of(server)
        for _ in range(2):  # as regular as a scraper
            send_request(port, "/")
            time.sleep(0.5)
        next_expected_scrape = server.next_expected_scrape()
        for path, method in (("/metrics", "GET"), ("/metrics", "HEAD"), ("/", "GET"), ("/metrics", "GET")):
            send_request(port, path, method=method)
        application.reason = "not yet"
        send_request(port)
        for index in range(20):
            send_request(port, f"/random/{index}")
        exchange(port, b"nonsense\r\n\r\n")
        wait_until(lambda: sample_values(server)["exporter_scrapes_total"] == 2)
        samples = sample_values(server)

    request_counts = {
        name.partition("{")[2]: count
        for name, count in samples.items()
        if name.startswith("exporter_http_requests_total")
    }
    assert next_expected_scrape is None  # requests of other paths are no scrapes
    assert 0 < samples["exporter_scrape_duration_seconds_total"] < 5
    assert request_counts == {
        "/,200}": 3,
        "/metrics,200}": 3,
        "/metrics,503}": 1,
        "malformed,400}": 1,
        "other,404}": 20,
    }


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("collect[]=cpu", "unknown parameter 'collect[]'; name[]="),
        ("name=x", "unknown parameter 'name'"),
        ("&".join(["name[]=x"] * 101), "at most 100"),
        ("name[]=" + "x" * 201, "of at most 200 characters"),
    ],
)
def test_an_unknown_or_oversized_query_is_refused_with_a_helpful_message(query: str, message: str) -> None:
    with serving() as server:
        reply = send_request(port_of(server), f"/metrics?{query}")

    assert reply.status == 400
    assert message in reply.body.decode()


def test_empty_parameters_of_a_query_are_ignored() -> None:
    endpoint = MetricsEndpoint(lambda _format, names: " ".join(sorted(names)).encode())

    with serving(endpoint) as server:
        reply = send_request(port_of(server), "/metrics?&name[]=x&&name[]=y&")

    assert reply.status == 200
    assert reply.body == b"x y"


def test_a_request_that_matches_no_family_is_not_counted_as_a_scrape() -> None:
    endpoint = MetricsEndpoint(lambda _format, names: b"" if names else b"up 1\n")

    with serving(endpoint) as server:
        statuses = [
            send_request(port_of(server), path).status for path in ("/metrics?name[]=none", "/metrics")
        ]
        # The server counts a scrape after it has sent the reply.
        wait_until(lambda: sample_values(server)["exporter_scrapes_total"] == 1)

    assert statuses == [200, 200]
