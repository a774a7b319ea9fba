"""Measures what the real sidecar costs: at rest, beside a job, and for a scrape as Prometheus makes it.

`python -m exporter` runs as a child with its default collectors; the job is one real process per rank, whose Stats
take five samples a second each and whose feed is flushed every second. Each scrape goes over a kept connection,
asks for OpenMetrics and gzip, and is made by itself, every so often as Prometheus would, and in a tight loop. Peers
take turns in the same loops: prometheus_client's own server with as many series, and node_exporter with those that
it has. Server time is the processor time of the server's process from just before the request to just after the
answer; its median leaves out what else the process does every few seconds. Prints one JSON document.

    python benchmarks/bench_sidecar.py [--quick]
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from report import report

QUICK = "--quick" in sys.argv
REPOSITORY = Path(__file__).resolve().parent.parent
SETTLE_SECONDS = 1.0 if QUICK else 6.0  # imports, first passes
STEADY_SECONDS = 1.0 if QUICK else 6.0
SCRAPE_SECONDS = 1.0 if QUICK else 3.0  # between two scrapes; `bench_node` has the usual 15
LOOP_SCRAPES = 10 if QUICK else 100
SPACED_SCRAPES = 2 if QUICK else 6
SPACED_SECONDS = 0.5 if QUICK else 1.0
STATS = 50
HISTOGRAMS = 10  # of them; the others have a mean, a 95th percentile and a maximum
JOBS = {"about 500 series": (1, 20), "about 4000 series": (8, STATS)}  # ranks, Stats of each
HEADERS = {  # what Prometheus 2.42 sends
    "Accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "User-Agent": "Prometheus/2.42.0",
    "X-Prometheus-Scrape-Timeout-Seconds": "10",
}


def be_rank(stats: int, *, trains: bool) -> None:
    """One rank of the job: records, and tells its training if it is to, until it is killed."""
    import exporter
    from exporter import training

    made = []
    for number in range(stats):
        last = "histogram" if number < stats * HISTOGRAMS // STATS else "max"
        name = f"bench.part{number}"
        made.append(exporter.Stat(name, ["mean", "p95", last], unit="seconds", window_seconds=10.0))
    print("ready", flush=True)
    with training.training_loop(train_iterations_start=0) if trains else contextlib.nullcontext():
        while True:
            if trains:
                with training.training_iteration():
                    for phase in (training.model_forward, training.model_backward, training.optimizer_update):
                        with phase():
                            time.sleep(0.06)
                    training.record(loss=2.0, grad_norm=1.0, learning_rate=1e-4, samples=8, tokens=16_384)
            else:
                time.sleep(0.2)
            now = time.time()
            for stat in made:
                stat.add(0.1 + now % 1.0)


def be_peer(series: int) -> None:
    """prometheus_client with as many gauges, until stdin ends."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    for family in range(series // 20):
        gauge = prometheus_client.Gauge(f"bench_{family}", "A made-up number.", ["rank"], registry=registry)
        for rank in range(20):
            gauge.labels(str(rank)).set(0.1 + rank)
    server, _ = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def child(
    command: Sequence[str | Path], *, until: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[int, str]]:
    """Run a process while the block lasts: its pid, and the part of its output that says it is ready."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(until, line):
                # Whoever writes on and is not read, as node_exporter at every failure, stands still in the end.
                threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
                yield process.pid, found.group()
                return
        raise RuntimeError(f"{command} ended before it was ready")
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def sidecar(directory: Path, *flags: str) -> Iterator[Server]:
    """The real one, with default settings but for the flags."""
    command = [
        sys.executable,
        "-m",
        "exporter",
        "--web.listen-address=127.0.0.1:0",
        f"--feed.dir={directory}",
        *flags,
    ]
    with child(command, until=r"http://127\.0\.0\.1:\d+") as (pid, url):
        yield Server(pid, url)


@contextlib.contextmanager
def job(directory: Path, ranks: int, stats: int, *, trains: bool = False) -> Iterator[None]:
    """Ranks that record, and tell their training if they are to."""
    with contextlib.ExitStack() as stack:
        for rank in range(ranks):
            identity = {"EXPORTER_FEED_DIR": str(directory), "EXPORTER_RUN": "bench", "RANK": str(rank)}
            command = [sys.executable, __file__, "trainer" if trains else "rank", str(stats)]
            stack.enter_context(child(command, until="ready", environment=identity))
        yield


@contextlib.contextmanager
def feed_directory() -> Iterator[Path]:
    """An empty directory in memory, as the default one is."""
    shared = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="exporter-bench-", dir=shared if shared.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Server:
    """A process that is scraped."""

    def __init__(self, pid: int, url: str) -> None:
        self.pid = pid
        self._cpu_clock = (~pid << 3) | 2  # what clock_getcpuclockid(3) gives, in nanoseconds
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
        self.body = b""

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        return time.clock_gettime(self._cpu_clock)

    def resident_mib(self) -> float:
        """Its memory, shared libraries included."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)

    def scrape(self) -> tuple[float, float]:
        """One scrape: seconds that the client waited, and processor time of the server."""
        cpu, began = self.cpu_seconds(), time.perf_counter()
        self._connection.request("GET", "/metrics", headers=HEADERS)
        answer = self._connection.getresponse()
        self.body = answer.read()
        waited = time.perf_counter() - began
        time.sleep(0.0005)  # it counts the scrape and waits for the next one
        if answer.status != http.client.OK:
            raise RuntimeError(f"{answer.status}: {self.body[:200]!r}")
        return waited, self.cpu_seconds() - cpu

    def forget(self) -> None:
        """Begin anew after an answer that did not come."""
        self._connection.close()

    def series(self) -> int:
        """How many there are on the page."""
        self.scrape()
        return sum(
            1 for line in gzip.decompress(self.body).splitlines() if line and not line.startswith(b"#")
        )


def milliseconds(seconds: Sequence[float]) -> dict[str, float | None]:
    """Median and tail; None for what never ended."""
    ordered = sorted(seconds)
    found = {"p50_ms": statistics.median(ordered), "p90_ms": ordered[int(len(ordered) * 0.9)]}
    return {name: None if math.isinf(each) else round(1000 * each, 3) for name, each in found.items()}


def steady(server: Server, *, scrape_every: float | None) -> dict[str, float]:
    """Processor time and memory over a while in which nothing but scrapes happens, after two of them."""
    if scrape_every is not None:
        for _ in range(2):
            server.scrape()
            time.sleep(scrape_every)
    before, end = server.cpu_seconds(), time.monotonic() + STEADY_SECONDS
    while (left := end - time.monotonic()) > 0:
        if scrape_every is not None:
            server.scrape()
        time.sleep(min(left, scrape_every or left))
    share = (server.cpu_seconds() - before) / STEADY_SECONDS
    return {"percent_of_a_core": round(100 * share, 3), "resident_mib": server.resident_mib()}


def steadily(server: Server) -> dict[str, object]:
    """The same without scrapes, and with."""
    return {
        "never scraped": steady(server, scrape_every=None),
        f"scraped every {SCRAPE_SECONDS:g} s": steady(server, scrape_every=SCRAPE_SECONDS),
    }


def take_turns(servers: dict[str, Server], count: int, pause: Callable[[], None]) -> dict[str, object]:
    """Scrape all of them again and again."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in servers}
    for server in servers.values():
        server.scrape()
    for _ in range(count):
        pause()
        for name, server in servers.items():
            try:
                waited, cpu = server.scrape()
            except TimeoutError:  # node_exporter waits for every filesystem there is
                server.forget()
                waited = cpu = math.inf
            found[name][0].append(waited)
            found[name][1].append(cpu)
    return {
        name: {"server_cpu": milliseconds(cpu), "waited": milliseconds(waited)}
        for name, (waited, cpu) in found.items()
    }


def measure_rest() -> dict[str, object]:
    """A sidecar without a job."""
    with feed_directory() as directory, sidecar(directory) as ours:
        time.sleep(SETTLE_SECONDS)
        return steadily(ours)


def measure_job(ranks: int, stats: int) -> dict[str, object]:
    """A sidecar beside a job, and scrapes of it and of its peers."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(feed_directory())
        ours = stack.enter_context(sidecar(directory))
        stack.enter_context(job(directory, ranks, stats))
        time.sleep(SETTLE_SECONDS)
        found: dict[str, object] = {"ranks": ranks, "stats of each": stats}
        if stats == STATS:
            found |= steadily(ours)
        found["series"] = series = ours.series()
        servers = {"exporter": ours}
        peer = stack.enter_context(child([sys.executable, __file__, "peer", str(series)], until="http.*"))
        servers["prometheus_client"] = Server(*peer)
        if node_exporter := shutil.which("prometheus-node-exporter"):
            command = [node_exporter, "--web.listen-address=127.0.0.1:0"]
            pid, found_address = stack.enter_context(child(command, until=r"127\.0\.0\.1:[1-9]\d*"))
            servers["node_exporter"] = Server(pid, found_address)
            found["series of node_exporter"] = servers["node_exporter"].series()
        found["a scrape a second"] = take_turns(servers, SPACED_SCRAPES, lambda: time.sleep(SPACED_SECONDS))
        found["a tight loop"] = take_turns(servers, LOOP_SCRAPES, lambda: None)
        return found


def main() -> None:
    report(
        {
            "at rest": measure_rest(),
            "beside a job": {name: measure_job(*size) for name, size in JOBS.items()},
        }
    )


if __name__ == "__main__":
    if sys.argv[1:2] in (["rank"], ["trainer"]):
        be_rank(int(sys.argv[2]), trains=sys.argv[1] == "trainer")
    elif sys.argv[1:2] == ["peer"]:
        be_peer(int(sys.argv[2]))
    else:
        main()
