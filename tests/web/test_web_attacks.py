"""Hostile and broken clients of a server process: other clients are served, and resources are released.

Most servers run with shortened limits. The attacks are limited in number and duration, and their target is 127.0.0.1.
"""

from __future__ import annotations

import itertools
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import WAIT_LIMIT_SECONDS, wait_until
from web_support import (
    CertificateAuthority,
    ClientCrowd,
    ServerProcess,
    exchange,
    read_response,
    scrape_repeatedly,
    send_request,
)

INCOMPLETE_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
COMPLETE_REQUEST = INCOMPLETE_REQUEST + b"\r\n"


def cpu_seconds_of(process: ServerProcess) -> float:
    seconds: float = process.measure()["cpu_seconds"]
    return seconds


def open_files_of(process: ServerProcess) -> list[Path]:
    return list(Path(f"/proc/{process.pid}/fd").iterdir())


def cpu_time_ratio(process: ServerProcess) -> float:
    """Return the CPU time of a server during a second, divided by that of a thread of this process that computes meanwhile.

    On a busy machine, the thread too gets less than a second.
    """
    server_seconds_at_start, own_seconds_at_start = cpu_seconds_of(process), time.thread_time()
    end_time = time.monotonic() + 1.0
    while time.monotonic() < end_time:
        pass
    own_seconds = time.thread_time() - own_seconds_at_start
    return (cpu_seconds_of(process) - server_seconds_at_start) / own_seconds


def test_a_thousand_silent_half_open_connections_do_not_delay_scrapes() -> None:
    with (
        # No deadline closes a connection during the test.
        ServerProcess(limits={"head_seconds": 4 * WAIT_LIMIT_SECONDS}) as process,
        ClientCrowd(process.port, 1000, INCOMPLETE_REQUEST),
    ):
        scrape_repeatedly(process.port)
        measured = process.measure()

    assert measured["exporter_http_connection_errors_total{evicted}"] >= 1000 - 512
    assert measured["threads"] < 10  # no thread per connection


def test_silent_half_open_connections_are_closed_at_the_deadline_of_the_head() -> None:
    with (
        ServerProcess(limits={"head_seconds": 1}) as process,
        ClientCrowd(process.port, 400, INCOMPLETE_REQUEST),
    ):
        head_timeouts = "exporter_http_connection_errors_total{head_timeout}"
        wait_until(lambda: process.measure()[head_timeouts] == 400)
        open_connections = process.measure()["exporter_http_connections{incomplete}"]
        scrape_repeatedly(process.port, 1)

    assert open_connections == 0


def test_connections_that_trickle_bytes_are_closed_at_the_deadline_of_silent_connections() -> None:
    process = ServerProcess(limits={"head_seconds": 2})
    with process:
        cpu_seconds_at_start = cpu_seconds_of(process)
        for _ in range(200):
            send_request(process.port, "/-/healthy")
        cpu_seconds_per_request = (cpu_seconds_of(process) - cpu_seconds_at_start) / 200
        with ClientCrowd(process.port, 1000) as crowd, ThreadPoolExecutor(1) as executor:
            cpu_seconds_before_trickle = cpu_seconds_of(process)
            executor.submit(crowd.trickle, INCOMPLETE_REQUEST[:20], 0.2)
            scrape_repeatedly(process.port)
            wait_until(lambda: process.measure()["exporter_http_connections{incomplete}"] == 0)
            scrape_repeatedly(process.port, 1)
            cpu_seconds = cpu_seconds_of(process) - cpu_seconds_before_trickle

    # A connection with its bytes, each of which arrives separately, takes about as much CPU time as a request.
    assert cpu_seconds < 1000 * 5 * cpu_seconds_per_request


@pytest.mark.parametrize("uses_tls", [False, True])
def test_half_open_connections_are_harmless_with_few_descriptors(tmp_path: Path, uses_tls: bool) -> None:
    authority = CertificateAuthority(tmp_path)
    context = authority.client_context() if uses_tls else None
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the first bytes of a TLS ClientHello
    web_config = str(authority.write_web_config()) if uses_tls else None
    # No deadline closes a connection during the test.
    limits = {"head_seconds": 4 * WAIT_LIMIT_SECONDS}
    process = ServerProcess(web_config=web_config, max_files=256, limits=limits)
    with process, ClientCrowd(process.port, 400, hello if uses_tls else INCOMPLETE_REQUEST):
        scrape_repeatedly(process.port, tls_context=context)


def test_accepting_continues_when_descriptors_run_out_below_the_cap() -> None:
    # The cap is 40 connections, but only about 25 of the 40 descriptors are free.
    with (
        ServerProcess(
            max_files=40, limits={"spare_files": 0, "head_seconds": 4 * WAIT_LIMIT_SECONDS}
        ) as process,
        ClientCrowd(process.port, 60, INCOMPLETE_REQUEST),
    ):
        replies = [send_request(process.port, "/-/healthy") for _ in range(3)]
        measured = process.measure()

    assert [reply.status for reply in replies] == [200] * 3
    assert measured["exporter_http_connection_errors_total{accept}"] > 0


def test_accepting_without_a_free_descriptor_does_not_keep_a_core_busy() -> None:
    with ServerProcess(max_files=40) as process:
        process.send_command("exhaust")
        with ClientCrowd(process.port, 1, COMPLETE_REQUEST):
            wait_until(lambda: process.measure()["exporter_http_connection_errors_total{accept}"] > 0)

            assert cpu_time_ratio(process) < 0.25


def test_accepting_above_the_cap_does_not_keep_a_core_busy_while_no_connection_can_be_closed() -> None:
    process = ServerProcess(limits={"connections": 16, "room_seconds": 4 * WAIT_LIMIT_SECONDS})
    with process:
        process.send_command("hang")  # the connection of a response that is being rendered is not closed
        with ClientCrowd(process.port, 16, COMPLETE_REQUEST):
            wait_until(lambda: process.measure()["exporter_http_connections{running}"] == 16)
            file_count = len(open_files_of(process))
            with ClientCrowd(process.port, 1, COMPLETE_REQUEST) as crowd:
                # The server has accepted the connection when it has one more open file.
                wait_until(lambda: len(open_files_of(process)) == file_count + 1)

                assert cpu_time_ratio(process) < 0.25
                assert process.measure()["exporter_http_connections{running}"] == 16
                process.send_command("release")
                assert read_response(crowd.connections[0])[0] == 200


def test_a_client_that_does_not_read_is_closed_at_the_deadline_of_the_response() -> None:
    process = ServerProcess(series=200_000, limits={"write_seconds": 1, "render_seconds": WAIT_LIMIT_SECONDS})
    with process, ClientCrowd(process.port, 1, COMPLETE_REQUEST, receive_buffer_bytes=4096):
        wait_until(lambda: process.measure()["exporter_http_connection_errors_total{write_timeout}"] == 1)

        assert process.measure()["exporter_http_connections{writing}"] == 0


def test_an_idle_connection_is_closed_at_its_deadline() -> None:
    process = ServerProcess(limits={"idle_seconds": 1})
    with process, socket.create_connection(("127.0.0.1", process.port), timeout=WAIT_LIMIT_SECONDS) as peer:
        peer.sendall(COMPLETE_REQUEST)
        status, _ = read_response(peer)

        assert (status, peer.recv(1)) == (200, b"")


def test_clients_that_never_read_displace_only_each_other() -> None:
    process = ServerProcess(
        series=200_000, max_files=80, limits={"stalled_seconds": 0.2, "render_seconds": 60}
    )
    with process, ClientCrowd(process.port, 30, COMPLETE_REQUEST, receive_buffer_bytes=4096):
        wait_until(lambda: process.measure()["exporter_http_connections{writing}"] == 16)
        time.sleep(0.3)
        replies = [send_request(process.port, "/-/healthy") for _ in range(3)]

    assert [reply.status for reply in replies] == [200] * 3


def test_a_scraper_behind_many_clients_that_do_not_read_is_answered() -> None:
    process = ServerProcess(series=60_000, limits={"connections": 64, "write_seconds": 60})
    with process, ClientCrowd(process.port, 250, COMPLETE_REQUEST, receive_buffer_bytes=4096):
        replies = [send_request(process.port, "/-/healthy") for _ in range(20)]
        refused_connections = process.measure()["exporter_http_connection_errors_total{full}"]

    assert [reply.status for reply in replies] == [200] * 20
    assert refused_connections == 0


def test_a_connection_that_trickles_bytes_after_a_request_is_closed() -> None:
    trickled_bytes = itertools.cycle(INCOMPLETE_REQUEST)

    def is_closed_after_another_byte() -> bool:
        try:
            peer.sendall(bytes([next(trickled_bytes)]))
            is_readable = bool(select.select([peer], [], [], 0)[0])
            return is_readable and peer.recv(1) == b""
        except OSError:
            return True

    # Only the deadline of the head can close the connection during the test.
    process = ServerProcess(limits={"head_seconds": 1, "idle_seconds": 3600})
    with process, socket.create_connection(("127.0.0.1", process.port), timeout=WAIT_LIMIT_SECONDS) as peer:
        peer.sendall(COMPLETE_REQUEST)
        status, _ = read_response(peer)
        wait_until(is_closed_after_another_byte)
        scrape_repeatedly(process.port)

    assert status == 200


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        pytest.param(INCOMPLETE_REQUEST + b"X: " + b"a" * 65536 + b"\r\n\r\n", 431, id="line of 64 KB"),
        pytest.param(
            INCOMPLETE_REQUEST + b"".join(b"X%d: %s\r\n" % (index, b"a" * 1000) for index in range(1000)),
            431,
            id="1 MB",
        ),
        pytest.param(INCOMPLETE_REQUEST + b"X: a\r\n" * 1000 + b"\r\n", 431, id="1000 headers"),
        pytest.param(b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, id="70 KB URI"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500, 400, id="TLS"),
        pytest.param(b"\0" * 100_000, 400, id="zeros"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, id="HTTP/2"),
        pytest.param(
            INCOMPLETE_REQUEST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            413,
            id="both",
        ),
        pytest.param(INCOMPLETE_REQUEST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 413, id="encoded"),
        pytest.param(INCOMPLETE_REQUEST + b"Content-Length: 3\r\n\r\nabc", 413, id="body"),
        pytest.param(
            INCOMPLETE_REQUEST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n", 400, id="two lengths"
        ),
        pytest.param(INCOMPLETE_REQUEST + b"Content-Length: -1\r\n\r\n", 400, id="negative length"),
        pytest.param(INCOMPLETE_REQUEST + b"no colon\r\n\r\n", 400, id="no colon"),
        pytest.param(INCOMPLETE_REQUEST + b"X : a\r\n\r\n", 400, id="space before the colon"),
        pytest.param(b"GET  /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="two spaces"),
        pytest.param(b"GET /metrics\r\n\r\n", 400, id="HTTP/0.9"),
        pytest.param(b"GET /metrics HTTP/1.1\r\n\r\n", 400, id="no host"),
    ],
)
def test_a_malformed_or_oversized_request_gets_an_error_status_and_the_connection_closes(
    process: ServerProcess, payload: bytes, status: int
) -> None:
    received = exchange(process.port, payload)

    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nConnection: close\r\n" in received
    assert received.count(b"Content-Length:") == 1
    assert send_request(process.port).status == 200


@pytest.fixture(scope="module")
def process() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running


def test_a_client_can_send_a_megabyte_before_reading_the_error_response() -> None:
    process = ServerProcess(limits={"linger_seconds": 10})
    with process, socket.create_connection(("127.0.0.1", process.port), timeout=WAIT_LIMIT_SECONDS) as peer:
        peer.sendall(INCOMPLETE_REQUEST + b"X: " + b"a" * 20_000)
        time.sleep(0.2)  # the response has arrived, and the server has closed its side
        for _ in range(100):
            peer.sendall(b"a" * 10_000)  # fails if the server has reset the connection
        status, body = read_response(peer)

    assert status == 431
    assert body == b"the header has more than 16384 bytes\n"


def test_behavior_of_peers_is_not_logged() -> None:
    with ServerProcess(limits={"head_seconds": 0.3}) as process:
        for payload in (b"\0" * 10, INCOMPLETE_REQUEST, b"", COMPLETE_REQUEST):
            with socket.create_connection(("127.0.0.1", process.port)) as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                peer.sendall(payload)
        exchange(process.port, INCOMPLETE_REQUEST)
        process.terminate()
        status, log = process.wait()

    assert status == 0
    assert len(log.splitlines()) == 1
    assert "listening" in log
