"""Measures scrapes over HTTP: one after another and 64 at once, beside prometheus_client's own server.

Both serve the same series, each in a process of its own; the client is a third process's event loop, and rounds
of the two alternate. Server time is the processor time of the server's process per scrape. Prints one JSON
document.

    python benchmarks/bench_web.py [--quick]
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from report import report

from exporter.collectors.intake import metrics_of
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.families import Distribution, FamilySpec
from exporter.web.application import Document
from exporter.web.server import Server

QUICK = "--quick" in sys.argv
ROUNDS = 2 if QUICK else 5
SEQUENTIAL = 50 if QUICK else 300
CLIENTS = 64
EACH = 3 if QUICK else 10
ACCEPT = b"application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
SHOWN = ("sequential", "sequential_gzip", "64_at_once", "kept_connection")
TIMEOUT_SECONDS = 10.0  # Prometheus' default
FAMILIES = 25  # a family of a real page has some twenty series


def names(series: int) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Family names with the label values (run, rank, gpu) of each series."""
    per_family = series // FAMILIES
    values = [("default", str(index % 8), f"GPU-{index:012d}") for index in range(per_family)]
    return [(f"training_bench_{number}_seconds", values) for number in range(FAMILIES)]


class Ours:
    """The exporter's page, published once, as between two collections."""

    def __init__(self, series: int) -> None:
        self.page = Page()
        for name, labels in names(series):
            spec = FamilySpec(name, "gauge", "A made-up number.", ("run", "rank", "gpu"), "seconds")
            samples: dict[tuple[str, ...], float | Distribution] = {
                values: 0.1 + index for index, values in enumerate(labels)
            }
            self.page.publish(name, [spec.family(samples)])

    def metrics(self, form: Format, names: frozenset[str]) -> bytes:
        """See `Application`, as for the others."""
        return self.page.render(form, names)

    def not_ready(self) -> str | None:
        """It is."""
        return None

    def landing(self) -> Document:
        """Not asked for."""
        return Document(b"", "")

    def reload(self) -> None:
        """Not asked for."""

    def configuration(self) -> str:
        """Not asked for."""
        return ""


def serve_ours(series: int) -> int:
    application = Ours(series)
    server = Server(application, listen=["127.0.0.1:0"], web_config=None)
    application.page.watch("web", lambda: metrics_of(server.families()))
    server.start()
    return int(server.urls[0].rpartition(":")[2])


def serve_peer(series: int) -> int:
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    for name, labels in names(series):
        gauge = prometheus_client.Gauge(name, "A made-up number.", ["run", "rank", "gpu"], registry=registry)
        for index, values in enumerate(labels):
            gauge.labels(*values).set(0.1 + index)
    server, _ = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    return int(server.server_port)


class Contender:
    """A server in a child process."""

    def __init__(self, kind: str, series: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", kind, str(series)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._ask())

    def cpu_seconds(self) -> float:
        """Processor time of the server's process so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._ask())

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()

    def _ask(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def serve(kind: str, series: int) -> None:
    """The child's part: the port, then the processor time for every line on stdin."""
    port = {"exporter": serve_ours, "prometheus_client": serve_peer}[kind](series)
    print(port, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


async def scrape(port: int, *, compress: bool) -> tuple[float, int]:
    """One scrape on a connection of its own: seconds, and bytes of the body."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    encoding = b"Accept-Encoding: gzip\r\n" if compress else b""
    head = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAccept: " + ACCEPT + b"\r\n" + encoding
    writer.write(head + b"\r\n")
    received = await reader.read(-1)
    seconds = time.perf_counter() - began
    writer.close()
    header, _, body = received.partition(b"\r\n\r\n")
    if b" 200 " not in header.splitlines()[0]:
        raise RuntimeError(header[:200])
    return seconds, len(body)


async def kept(port: int, count: int) -> list[float]:
    """Scrapes one after another on one connection; HTTP/1.1 servers only."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    times = []
    for _ in range(count):
        began = time.perf_counter()
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: " + ACCEPT + b"\r\n\r\n")
        header = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in header.splitlines() if line.startswith(b"Content-Length"))
        await reader.readexactly(length)
        times.append(time.perf_counter() - began)
    writer.close()
    return times


async def crowd(port: int) -> tuple[list[float], int]:
    """Every client scrapes again as soon as it has its answer: the times, and how many scrapes failed."""
    times: list[float] = []
    failed = 0

    async def client() -> None:
        nonlocal failed
        for _ in range(EACH):
            attempt = asyncio.wait_for(scrape(port, compress=False), TIMEOUT_SECONDS)
            (outcome,) = await asyncio.gather(attempt, return_exceptions=True)
            if isinstance(outcome, tuple):
                times.append(outcome[0])
            else:
                failed += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return times, failed


def spread(times: Sequence[float]) -> dict[str, float]:
    """Milliseconds at the median and the 99th percentile."""
    ordered = sorted(times)
    return {
        "p50_ms": round(1000 * statistics.median(ordered), 3),
        "p99_ms": round(1000 * ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 3),
    }


def compare(series: int) -> dict[str, object]:
    """Both contenders with a page of so many series."""
    contenders = {kind: Contender(kind, series) for kind in ("exporter", "prometheus_client")}
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in contenders}
    sizes: dict[str, int] = {}
    try:
        for _ in range(ROUNDS):
            for kind, contender in contenders.items():
                measure(kind, contender, found[kind], sizes)
    finally:
        for contender in contenders.values():
            contender.end()
    results: dict[str, object] = {}
    for kind, measured in found.items():
        shown: dict[str, object] = {name: spread(measured[name]) for name in SHOWN if name in measured}
        for name in ("server_cpu_sequential", "server_cpu_64_at_once", "server_cpu_kept"):
            if name in measured:
                shown[f"{name}_ms"] = round(1000 * statistics.median(measured[name]), 3)
        failures = {
            "64_at_once_failed": sum(measured["failed"]),
            "64_at_once_scrapes": len(measured["64_at_once"]),
        }
        results[kind] = {**shown, **failures, "body_bytes": sizes[kind]}
    return results


def measure(kind: str, contender: Contender, measured: dict[str, list[float]], sizes: dict[str, int]) -> None:
    """One round against one contender."""

    async def sequential(count: int, *, compress: bool) -> list[float]:
        times = []
        for _ in range(count):
            seconds, sizes[kind] = await scrape(contender.port, compress=compress)
            times.append(seconds)
        return times

    def timed(name: str, cpu: str, times: list[float], before: float) -> None:
        measured.setdefault(name, []).extend(times)
        measured.setdefault(cpu, []).append((contender.cpu_seconds() - before) / len(times))

    asyncio.run(sequential(5, compress=True))
    measured.setdefault("sequential_gzip", []).extend(asyncio.run(sequential(SEQUENTIAL // 5, compress=True)))
    before = contender.cpu_seconds()
    timed("sequential", "server_cpu_sequential", asyncio.run(sequential(SEQUENTIAL, compress=False)), before)
    if kind == "prometheus_client" and "64_at_once" in measured:
        return  # once is enough: its backlog of 5 makes clients wait for half a minute
    before = contender.cpu_seconds()
    times, failed = asyncio.run(crowd(contender.port))
    timed("64_at_once", "server_cpu_64_at_once", times, before)
    measured.setdefault("failed", []).append(failed)
    if kind == "exporter":  # prometheus_client speaks HTTP/1.0 and closes after each answer
        before = contender.cpu_seconds()
        timed("kept_connection", "server_cpu_kept", asyncio.run(kept(contender.port, SEQUENTIAL)), before)


def main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    report({f"{series}_series": compare(series) for series in (500, 2000)})


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        main()
