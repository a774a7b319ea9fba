"""What each path says, to whom, and in which form: a server in this process, asked by http.client and by curl."""

from __future__ import annotations

import errno
import gzip
import logging
import socket
import threading
from collections.abc import Coroutine

import pytest
from web_child import numbers
from web_support import Child, Page, eventually, exchange, fetch, port_of, read_answer, scrapes, serving

from exporter.errors import ConfigurationError, ListenError, Problem
from exporter.exposition.negotiation import Format
from exporter.web.server import Limits, Server

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


class Formats(Page):
    """Says which form was asked for."""

    def metrics(self, form: Format, names: frozenset[str]) -> bytes:
        return form.name.encode()


def test_metrics_are_given_in_the_form_that_is_asked_for() -> None:
    with serving(Formats()) as server:
        plain = fetch(port_of(server))
        openmetrics = fetch(port_of(server), headers={"Accept": OPENMETRICS, "Accept-Encoding": "gzip"})

    assert plain.headers["content-type"] == Format.TEXT.content_type
    assert plain.body == b"TEXT"
    assert "content-encoding" not in plain.headers
    assert openmetrics.headers["content-type"] == Format.OPENMETRICS.content_type
    assert openmetrics.headers["content-encoding"] == "gzip"
    assert gzip.decompress(openmetrics.body) == b"OPENMETRICS"
    assert plain.headers["vary"] == openmetrics.headers["vary"] == "Accept, Accept-Encoding"
    assert plain.headers["x-content-type-options"] == "nosniff"


def test_a_head_on_a_kept_connection_does_not_shift_the_next_answer() -> None:
    with serving() as server, socket.create_connection(("127.0.0.1", port_of(server)), timeout=5) as peer:
        peer.sendall(b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        head = b""
        while b"\r\n\r\n" not in head:
            head += peer.recv(1)
        status, body = read_answer(peer)

    assert b"Content-Length: 5\r\n" in head
    assert (status, body) == (200, b"healthy\n")


def test_a_client_that_closes_its_side_after_the_request_gets_the_answer() -> None:
    with serving() as server, socket.create_connection(("127.0.0.1", port_of(server)), timeout=5) as peer:
        peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        peer.shutdown(socket.SHUT_WR)
        status, body = read_answer(peer)
        end = peer.recv(1)

    assert (status, body, end) == (200, b"up 1\n", b"")


def test_the_status_page_is_sent_with_its_own_policy_and_is_never_kept() -> None:
    with serving() as server:
        reply = fetch(port_of(server), "/")

    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"] == "default-src 'none'"
    assert reply.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/metrics", "GET, HEAD"),
        ("DELETE", "/", "GET, HEAD"),
        ("OPTIONS", "/-/healthy", "GET, HEAD"),
        ("GET", "/-/reload", "POST, PUT"),
        ("HEAD", "/-/reload", "POST, PUT"),
    ],
)
def test_another_method_is_told_what_is_allowed_and_the_connection_ends(
    method: str, path: str, allow: str
) -> None:
    with serving(enable_lifecycle=True) as server:
        reply = fetch(port_of(server), path, method=method)

    assert reply.status == 405
    assert reply.headers["allow"] == allow
    assert reply.headers["connection"] == "close"


def test_other_paths_are_not_found_and_say_where_the_metrics_are() -> None:
    with serving(telemetry_path="/m") as server:
        reply = fetch(port_of(server), "/metrics")
        found = fetch(port_of(server), "/m")
    with serving(telemetry_path="/") as server:
        root = fetch(port_of(server), "/")

    assert (reply.status, reply.body) == (404, b"nothing here; the metrics are at /m\n")
    assert (found.status, root.body) == (200, b"up 1\n")


@pytest.mark.parametrize("path", ["metrics", "/-/healthy", "/a?b", "/a b", "/%41", "/\u00e4", ""])
def test_a_telemetry_path_that_cannot_be_asked_for_is_refused_at_the_start(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"web\.telemetry-path"):
        Server(Page(), listen=["127.0.0.1:0"], web_config=None, telemetry_path=path).start()


def test_metrics_and_readiness_wait_for_the_application_but_health_does_not() -> None:
    page = Page()
    with serving(page) as server:
        page.reason = "the ledger is being read"
        paths = ("/metrics", "/-/ready", "/-/healthy")
        before = [fetch(port_of(server), path) for path in paths]
        page.reason = None
        after = [fetch(port_of(server), path).status for path in paths]

    assert [reply.status for reply in before] == [503, 503, 200]
    assert before[0].body == before[1].body == b"the ledger is being read\n"
    assert before[0].headers["retry-after"] == "1"
    assert after == [200, 200, 200]


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_reload_answers_when_it_is_done_and_says_why_it_failed(method: str) -> None:
    page = Page()
    with serving(page) as server:
        without = fetch(port_of(server), "/-/reload", method=method)
    with serving(page, enable_lifecycle=True) as server:
        good = fetch(port_of(server), "/-/reload", method=method)
        page.error = ConfigurationError([Problem("exporter.yml", 3, 5, "unknown key")])
        bad = fetch(port_of(server), "/-/reload", method=method)

    assert without.status == 403
    assert b"--web.enable-lifecycle" in without.body
    assert (good.status, page.reloads) == (200, 1)
    assert bad.status == 500
    assert b"exporter.yml:3:5: unknown key" in bad.body


def test_a_reload_asked_for_during_another_is_done_after_it() -> None:
    class Slow(Page):
        begun, free = threading.Event(), threading.Event()

        def reload(self) -> None:
            self.begun.set()
            self.free.wait(5)
            self.reloads += 1

    page = Slow()
    with serving(page, enable_lifecycle=True) as server:
        askers = [
            threading.Thread(target=fetch, args=(port_of(server), "/-/reload"), kwargs={"method": "POST"})
            for _ in range(3)
        ]
        askers[0].start()
        page.begun.wait(5)
        for asker in askers[1:]:
            asker.start()
        eventually(lambda: numbers(server)["exporter_http_connections{running}"] == 3)
        page.free.set()
        for asker in askers:
            asker.join()

    assert page.reloads == 3


def test_a_page_that_cannot_be_made_is_an_error_that_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Page):
        def metrics(self, form: Format, names: frozenset[str]) -> bytes:
            raise KeyError("defect")

    with caplog.at_level(logging.ERROR), serving(Broken()) as server:
        statuses = [fetch(port_of(server)).status for _ in range(3)]
        health = fetch(port_of(server), "/-/healthy").status

    assert statuses == [500, 500, 500]
    assert health == 200
    assert len(caplog.records) == 1


def test_sixty_four_clients_at_once_share_a_few_renders() -> None:
    with Child() as child:
        child.command("slow 0.05")
        errors: list[BaseException] = []

        def client() -> None:
            try:
                scrapes(child.port, 10)
            except BaseException as error:
                errors.append(error)

        clients = [threading.Thread(target=client) for _ in range(64)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        counted = eventually(lambda: child.command()["exporter_scrapes_total"] == 640)
        stats = child.command()

    assert errors == []
    assert counted  # the last one is counted just after its client has it
    assert stats["renders"] < 128


def test_a_hung_render_costs_its_scrapes_and_nothing_else() -> None:
    with Child(limits={"render_seconds": 0.5, "drain_seconds": 1}) as child:
        child.command("hang")
        late = [fetch(child.port) for _ in range(3)]
        health = fetch(child.port, "/-/healthy")
        other = fetch(child.port, "/config")
        stats = child.command("release")
        after = eventually(lambda: fetch(child.port).status == 200)
        child.command("hang")
        fetch(child.port)
        child.terminate()
        ended, _ = child.wait()

    assert [reply.status for reply in late] == [503] * 3
    assert late[0].headers["retry-after"] == "1"
    assert (health.status, other.status) == (200, 200)
    assert stats["renders"] == 1  # later scrapes joined it instead of hanging the other worker
    assert stats["exporter_http_requests_total{/metrics,503}"] == 3
    assert after
    assert ended == 0


def test_a_scrape_is_answered_before_prometheus_gives_up() -> None:
    with Child(limits={"render_seconds": 6}) as child:
        child.command("hang")
        replies = [
            fetch(child.port, headers={"X-Prometheus-Scrape-Timeout-Seconds": text}) for text in ("1", "0.2")
        ]
        child.command("release")
        odd = [
            fetch(child.port, headers={"X-Prometheus-Scrape-Timeout-Seconds": text}).status
            for text in ("nan", "-1", "soon", "inf", "1e999")
        ]

    assert [reply.status for reply in replies] == [503, 503]
    assert replies[0].seconds < 3
    assert replies[1].seconds < 2
    assert odd == [200] * 5


def test_a_scrape_in_flight_is_answered_although_the_server_stops() -> None:
    with Child() as child:
        child.command("slow 1")
        peer = socket.create_connection(("127.0.0.1", child.port), timeout=10)
        idle = socket.create_connection(("127.0.0.1", child.port), timeout=10)
        peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        running = eventually(lambda: child.command()["exporter_http_connections{running}"] == 1)
        child.terminate()
        idle_end = idle.recv(1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", child.port), timeout=10)
        received = b""
        while data := peer.recv(65536):
            received += data
        status, _ = child.wait()
        peer.close()
        idle.close()

    assert running
    assert idle_end == b""
    assert received.startswith(b"HTTP/1.1 200")
    assert b"\r\nConnection: close\r\n" in received
    assert received.endswith(b'load{unit="1999"} 1999\n')
    assert status == 0


def test_an_evicted_client_does_not_cancel_the_render_for_the_others() -> None:
    page, begun, free = Page(), threading.Event(), threading.Event()

    class Slow(Page):
        def metrics(self, form: Format, names: frozenset[str]) -> bytes:
            begun.set()
            free.wait(5)
            return page.body

    with serving(Slow(), limits=Limits(render_seconds=5)) as server:
        first = socket.create_connection(("127.0.0.1", port_of(server)))
        first.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Prometheus-Scrape-Timeout-Seconds: 1\r\n\r\n")
        begun.wait(5)
        first.close()
        timer = threading.Timer(1.0, free.set)  # the first is answered 503 after half a second
        timer.start()
        reply = fetch(port_of(server))
        timer.join()

    assert (reply.status, reply.body) == (200, b"up 1\n")


def test_a_server_can_be_stopped_twice_and_before_it_was_started() -> None:
    server = Server(Page(), listen=["127.0.0.1:0"], web_config=None)
    server.stop()
    server.start()
    server.stop()
    server.stop()

    with pytest.raises(ConnectionRefusedError):
        fetch(port_of(server))


def test_a_server_without_descriptors_for_its_loop_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(coroutine: Coroutine[object, object, None]) -> None:
        coroutine.close()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("asyncio.run", fail)
    with pytest.raises(ListenError, match="Too many open files"):
        Server(Page(), listen=["127.0.0.1:0"], web_config=None).start()


def test_scrapes_are_counted_when_they_were_sent_and_nothing_else_is() -> None:
    page = Page()
    with serving(page) as server:
        port = port_of(server)
        for path, method in (("/metrics", "GET"), ("/metrics", "HEAD"), ("/", "GET"), ("/metrics", "GET")):
            fetch(port, path, method=method)
        page.reason = "not yet"
        fetch(port)
        counted = eventually(lambda: numbers(server)["exporter_scrapes_total"] == 2)
        found = numbers(server)

    assert counted
    assert server.scrapes == 2
    assert 0 < found["exporter_scrape_duration_seconds_total"] < 5
    assert found["exporter_http_requests_total{/metrics,200}"] == 3
    assert found["exporter_http_requests_total{/metrics,503}"] == 1


def test_made_up_paths_make_one_series() -> None:
    with serving() as server:
        for index in range(20):
            fetch(port_of(server), f"/random/{index}")
        exchange(port_of(server), b"nonsense\r\n\r\n")
        found = [name for name in numbers(server) if name.startswith("exporter_http_requests_total")]

    assert found == ["exporter_http_requests_total{malformed,400}", "exporter_http_requests_total{other,404}"]


def test_peers_that_break_off_are_counted_by_reason() -> None:
    with serving() as server:
        with socket.create_connection(("127.0.0.1", port_of(server))) as peer:
            peer.sendall(b"GET / HT")
        counted = eventually(lambda: numbers(server)["exporter_http_connection_errors_total{truncated}"] == 1)

    assert counted
