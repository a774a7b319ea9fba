"""The server's own families: what they count, and that promtool and the official parser find nothing wrong."""

from __future__ import annotations

import shutil
import socket
import subprocess

import pytest
from web_child import numbers
from web_support import Page, eventually, exchange, fetch, port_of, serving

from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page as ExpositionPage


def test_promtool_finds_nothing_to_complain_about() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    with serving() as server:
        fetch(port_of(server))
        eventually(lambda: server.scrapes == 1)
        page = ExpositionPage()
        page.publish("web", server.families())
        shown = page.render(Format.TEXT)
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=shown, capture_output=True, check=False)

    assert (done.returncode, done.stderr) == (0, b"")


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
