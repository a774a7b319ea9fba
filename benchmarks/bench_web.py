"""Cost of scrapes: rendering of the page, and scrapes over HTTP, sequential and by 64 concurrent clients.

The peer is prometheus_client with the same families and the HTTP server of that library. Each server is a separate process, and the
rounds alternate between the servers. The time of a server is its CPU time per scrape. Prints a JSON document, and exits with status
1 if a budget is exceeded.

    python benchmarks/bench_web.py [--quick]
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from report import QUICK, Row, child, process_seconds, report

from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.families import Distribution, Family
from exporter.web.endpoints import MetricsEndpoint
from exporter.web.server import Server

SERIES = 500
FAMILIES = 25  # of 20 series, like an average family of a real page
ROUNDS = 2 if QUICK else 5
SEQUENTIAL_SCRAPES = 50 if QUICK else 300
CLIENTS, SCRAPES_OF_A_CLIENT = 64, 3 if QUICK else 10
TIMEOUT_SECONDS = 10.0  # Prometheus' default
REQUEST = (
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    b"Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5\r\n\r\n"
)


def families(first: float) -> list[Metric]:
    """Return the families of the page. Their values are ascending numbers from *first* on."""
    metrics = []
    for number in range(FAMILIES):
        spec = Family(
            name=f"training_bench_{number}_seconds",
            type="gauge",
            help="Value for the benchmark.",
            labels=("run", "rank", "gpu"),
            unit="seconds",
        )
        samples: dict[tuple[str, ...], float | Distribution] = {
            ("default", str(index % 8), f"GPU-{index:012d}"): first + index
            for index in range(SERIES // FAMILIES)
        }
        metrics.append(spec.family(samples))
    return metrics


class FixedRegistry:
    """Registry that returns the same families at each scrape."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        """Return the families."""
        return self._metrics


def exposition() -> list[Row]:
    """Measure the rendering of an unchanged page, and of a page in which all values have changed."""
    pages = [families(0.1 + number) for number in range(4)]
    unchanged_page, changed_page = Page(), Page()
    unchanged_page.publish("block", pages[0])

    def change(round_number: int) -> bytes:
        changed_page.publish("block", pages[round_number % 4])
        return changed_page.render(Format.TEXT)

    contenders: dict[str, Callable[[int], object]] = {
        "unchanged": lambda _: unchanged_page.render(Format.TEXT),
        "changed": change,
        "prometheus_client": lambda round_number: generate_latest(FixedRegistry(pages[round_number % 4])),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(50 if QUICK else 300):
        for name, render in contenders.items():
            started = time.perf_counter()
            render(round_number)
            times[name].append(time.perf_counter() - started)
    milliseconds = {name: round(statistics.median(seconds) * 1e3, 3) for name, seconds in times.items()}
    peers = {"prometheus_client": milliseconds["prometheus_client"]}
    return [
        Row("Time of rendering 500 series, no value changed", milliseconds["unchanged"], "ms", 1.0, peers),
        Row("Time of rendering 500 series, all values changed", milliseconds["changed"], "ms", 10.0, peers),
    ]


def serve(library: str) -> None:
    """Print the port and serve the page until SIGKILL, for at most an hour, as the main function of a server process."""
    if library == "exporter":
        page = Page()
        page.publish("block", families(0.1))
        server = Server([MetricsEndpoint(page.render)], listen=["127.0.0.1:0"])
        page.watch("web", server.families)
        server.start()
        port = server.urls[0].rpartition(":")[2]
    else:
        import prometheus_client

        registry = prometheus_client.CollectorRegistry()
        registry.register(FixedRegistry(families(0.1)))
        port = str(prometheus_client.start_http_server(0, "127.0.0.1", registry)[0].server_port)
    print(f"port {port}", flush=True)
    time.sleep(3600)


async def scrape(port: int) -> float:
    """Scrape once on a new connection, and return the duration in seconds."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(REQUEST)
    response = await reader.read(-1)
    writer.close()
    if b" 200 " not in response[:20]:
        raise RuntimeError(response[:200])
    return time.perf_counter() - started


async def scrape_sequentially(port: int) -> None:
    """Scrape `SEQUENTIAL_SCRAPES` times, one after the other."""
    for _ in range(SEQUENTIAL_SCRAPES):
        await scrape(port)


async def scrape_concurrently(port: int) -> tuple[list[float], int]:
    """Scrape repeatedly with all clients at once. Return the durations, and the number of failed scrapes."""
    times: list[float] = []
    failures = 0

    async def client() -> None:
        nonlocal failures
        for _ in range(SCRAPES_OF_A_CLIENT):
            attempt = asyncio.wait_for(scrape(port), TIMEOUT_SECONDS)
            (outcome,) = await asyncio.gather(attempt, return_exceptions=True)
            if isinstance(outcome, float):
                times.append(outcome)
            else:
                failures += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return times, failures


def http() -> list[Row]:
    """Measure both servers in alternation."""
    server_ms: dict[str, list[float]] = {"exporter": [], "prometheus_client": []}
    concurrent_seconds: dict[str, list[float]] = {name: [] for name in server_ms}
    failures = dict.fromkeys(server_ms, 0)
    for round_number in range(ROUNDS):
        for name, times in server_ms.items():
            with child([sys.executable, __file__, "serve", name], ready_pattern=r"port \d+") as (
                process,
                port_line,
            ):
                port = int(port_line.split()[1])
                asyncio.run(scrape(port))
                cpu_before = process_seconds(process.pid)
                asyncio.run(scrape_sequentially(port))
                times.append((process_seconds(process.pid) - cpu_before) / SEQUENTIAL_SCRAPES * 1e3)
                # One round of the peer: its backlog of 5 connections delays some clients by half a minute.
                if name == "exporter" or round_number == 0:
                    durations, failed_scrapes = asyncio.run(scrape_concurrently(port))
                    concurrent_seconds[name] += durations
                    failures[name] += failed_scrapes
    cpu = {name: round(statistics.median(times), 3) for name, times in server_ms.items()}
    p99 = {
        name: round(sorted(durations)[int(len(durations) * 0.99)] * 1e3, 1)
        for name, durations in concurrent_seconds.items()
        if durations
    }
    peer = "prometheus_client"
    return [
        Row(
            "CPU time of the server for a scrape of 500 series, no value changed",
            cpu["exporter"],
            "ms",
            1.0,
            {peer: cpu[peer]},
        ),
        Row(
            "99th percentile of the scrape time with 64 concurrent clients",
            p99["exporter"],
            "ms",
            150.0,
            {peer: p99.get(peer, 0.0)},
        ),
        Row(
            "Failed scrapes with 64 concurrent clients",
            float(failures["exporter"]),
            "",
            0.0,
            {peer: float(failures[peer])},
        ),
    ]


def main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    report([*exposition(), *http()])


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        main()
