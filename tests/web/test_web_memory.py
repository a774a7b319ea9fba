"""Hostile clients: the server's memory is bounded, and abandoned requests are not rendered.

The memory tests cap the address space of the server at 256 MiB.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_LIMIT_SECONDS, wait_until
from web_support import (
    CertificateAuthority,
    ClientCrowd,
    ServerProcess,
    port_of,
    scrape_repeatedly,
    send_request,
    serving,
)

from exporter.exposition.negotiation import Format
from exporter.web.endpoints import MetricsEndpoint
from exporter.web.http import Limits

MEMORY_LIMIT_OPTIONS = {"max_memory_bytes": 256 << 20}
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
MAX_RETAINED_BYTES = 64 << 20
"""Permitted growth after the clients have left: free memory that the allocator keeps."""
NOISE_BYTES = 8 << 20
"""Permitted difference between two measurements of a server whose memory does not grow."""


def test_requests_for_unique_names_do_not_grow_memory() -> None:
    with ServerProcess(series=50, **MEMORY_LIMIT_OPTIONS) as process:
        send_request(process.port)
        initial_bytes = process.measure()["resident_bytes"]
        long_name_statuses = set()
        for number in range(400):
            names = "&".join(f"name[]=*{number}x{index}{'[a-z]*' * 20}" for index in range(90))
            long_name_statuses.add(send_request(process.port, f"/metrics?{names}").status)
        short_name_statuses = {
            send_request(process.port, f"/metrics?name[]=x{number}*").status for number in range(400)
        }
        final_bytes = process.measure()["resident_bytes"]

    assert long_name_statuses | short_name_statuses == {200}
    assert final_bytes < initial_bytes + NOISE_BYTES


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("uses_tls", "client_count", "max_crowd_bytes"),
    [
        # A copy of the body for each client would take 180 MB.
        (False, 120, 96 << 20),
        # The buffers of TLS take about 25 MB, and a copy of the body for each client would take a further 60 MB.
        (True, 40, 56 << 20),
    ],
    ids=["plain", "TLS"],
)
def test_memory_is_bounded_with_rounds_of_clients_that_do_not_read(
    tmp_path: Path, uses_tls: bool, client_count: int, max_crowd_bytes: int
) -> None:
    authority = CertificateAuthority(tmp_path)
    options: dict[str, Any] = {"web_config": str(authority.write_web_config())} if uses_tls else {}
    context = authority.client_context() if uses_tls else None
    limits = {"write_seconds": 60, "render_seconds": 30}
    # A body of 60,000 series takes 1.5 MB.
    with ServerProcess(series=60_000, limits=limits, **options, **MEMORY_LIMIT_OPTIONS) as process:
        send_request(process.port, tls_context=context)
        initial_bytes = process.measure()["resident_bytes"]
        resident_bytes_with_crowd: list[float] = []
        resident_bytes_by_round: list[float] = []
        for _ in range(3):
            with ClientCrowd(
                process.port, client_count, REQUEST, receive_buffer_bytes=4096, tls_context=context
            ):
                scrape_repeatedly(process.port, 1, tls_context=context)
                resident_bytes_with_crowd.append(process.measure()["resident_bytes"])
            wait_until(lambda: process.measure()["exporter_http_connections{writing}"] == 0)
            resident_bytes_by_round.append(process.measure()["resident_bytes"])

    assert max(resident_bytes_with_crowd) < initial_bytes + max_crowd_bytes
    assert resident_bytes_by_round[-1] < max(resident_bytes_with_crowd) + NOISE_BYTES
    assert resident_bytes_by_round[-1] < initial_bytes + MAX_RETAINED_BYTES


def test_silent_tls_connections_do_not_grow_memory_round_by_round(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    with ServerProcess(
        series=50,
        web_config=str(authority.write_web_config()),
        limits={"head_seconds": 1},
        **MEMORY_LIMIT_OPTIONS,
    ) as process:
        resident_bytes_by_round = []
        for _ in range(4):
            with ClientCrowd(process.port, 1000):
                scrape_repeatedly(process.port, 1, tls_context=authority.client_context())
            wait_until(lambda: process.measure()["exporter_http_connections{incomplete}"] == 0)
            resident_bytes_by_round.append(process.measure()["resident_bytes"])

    # On a busy machine, fewer connections overlap in a round and the round uses less memory, so the baseline is the maximum of the
    # earlier rounds.
    assert resident_bytes_by_round[-1] < max(resident_bytes_by_round[:-1]) + NOISE_BYTES


def test_abandoned_requests_are_not_rendered() -> None:
    rendered_names: list[str] = []
    may_finish = threading.Event()

    def render(_format: Format, names: frozenset[str]) -> bytes:
        rendered_names.extend(names)
        may_finish.wait(WAIT_LIMIT_SECONDS)
        return b"up 1\n"

    def request(name: str, **headers: str) -> int:
        return send_request(port, f"/metrics?name[]={name}", headers=headers).status

    def request_with_tiny_timeout(number: int) -> int:
        return request(f"x{number}", **{"X-Prometheus-Scrape-Timeout-Seconds": "0.02"})

    limits = Limits(render_seconds=WAIT_LIMIT_SECONDS)
    with serving(MetricsEndpoint(render), limits=limits) as server, ThreadPoolExecutor(16) as clients:
        port = port_of(server)
        slow_request = clients.submit(request, "slow")
        wait_until(lambda: rendered_names == ["slow"])
        statuses = set(clients.map(request_with_tiny_timeout, range(64)))
        # A request without names is rendered on a worker thread other than that of the slow request.
        full_request = clients.submit(lambda: send_request(port).status)
        may_finish.set()
        later_status = request("later")

        assert statuses == {503}
        assert (slow_request.result(), later_status, full_request.result()) == (200, 200, 200)
        assert rendered_names == ["slow", "later"]
