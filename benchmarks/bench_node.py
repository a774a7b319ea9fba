"""Cost of the sidecar and the NVML child on a node with eight GPUs and a job of eight ranks with 50 Stats each.

The sidecar with default settings replays the machine `h100` through the real child. The job has a real process for each rank.
Scrapes have Prometheus' headers and follow every 15 s. CPU time and memory come from the kernel. node_exporter, if installed, is
the peer: for the CPU time of a scrape, and for the time that a client waits for about 800 series. Shares of a core are scaled to a
machine on which prometheus_client's `Histogram.observe` takes 600 ns; its time is measured in the same run. Prints a JSON document,
and exits with status 1 if a budget is exceeded.

    python benchmarks/bench_node.py [--quick]    quick: a scrape every 5 s, which costs more
"""

from __future__ import annotations

import gzip
import re
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from prometheus_client import Histogram
from report import QUICK, Row, child, feed_directory, memory_mib, process_seconds, report, take_turns

RANKS, STATS, GPUS = 8, 50, 8
SCRAPE_SECONDS = 5.0 if QUICK else 15.0
SCRAPES_BEFORE, SCRAPES = 3, 2 if QUICK else 6
BUDGET_OBSERVE_NS = 600.0
CHANGED_SECONDS, CLIENT_SCRAPES = 10.1, 5 if QUICK else 12
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def run_rank() -> None:
    """Record steps and Stats as a rank of the job, until SIGKILL."""
    import exporter
    from exporter import training

    stats = [
        exporter.Stat(
            f"bench.part{number}",
            ["mean", "p95", "histogram" if number % 5 == 0 else "max"],
            unit="seconds",
            window_seconds=10.0,
        )
        for number in range(STATS)
    ]
    print("ready", flush=True)
    with training.training_loop(train_iterations_start=0):
        while True:
            with training.training_iteration():
                for phase in (training.model_forward, training.model_backward, training.optimizer_update):
                    with phase():
                        time.sleep(0.06)
                training.record(loss=2.0, grad_norm=1.0, learning_rate=1e-4, samples=8, tokens=16_384)
            unix_seconds = time.time()
            for stat in stats:
                stat.add(0.1 + unix_seconds % 1.0)


def scrape(url: str) -> bytes:
    """Return the page, requested with the headers of Prometheus."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Accept": ACCEPT, "Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=10) as response:
        body: bytes = response.read()
        return gzip.decompress(body) if response.headers.get("Content-Encoding") == "gzip" else body


def scrape_regularly(url: str, count: int) -> bytes:
    """Scrape at even intervals and return the last page."""
    due, page = time.monotonic(), b""
    for _ in range(count):
        due += SCRAPE_SECONDS
        time.sleep(max(0.0, due - time.monotonic()))
        page = scrape(url)
    return page


def scrape_ms(url: str, pid: int) -> float:
    """Return the median CPU time of a server for a scrape. Scrapes in quick succession leave no time for background work."""
    times = []
    for _ in range(20):
        cpu_before = process_seconds(pid)
        scrape(url)
        times.append(process_seconds(pid) - cpu_before)
    return round(statistics.median(times) * 1e3, 2)


def node_exporter_ms() -> dict[str, float]:
    """Return the CPU time of node_exporter for a scrape, or an empty mapping if node_exporter is not installed."""
    program = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
    if program is None:
        return {}
    with child([program, "--web.listen-address=127.0.0.1:29100"], ready_pattern="[Ll]istening") as (
        process,
        _,
    ):
        time.sleep(0.5)
        return {"node_exporter, fewer series": scrape_ms("http://127.0.0.1:29100", process.pid)}


def client_seconds(url: str) -> float:
    """Return the time that a client waits for the page."""
    started = time.perf_counter()
    scrape(url)
    return time.perf_counter() - started


def series_count(page: bytes) -> int:
    """Return the number of series of a page."""
    return sum(line[:1] not in {b"", b"#"} for line in page.splitlines())


def client_rows(directory: Path) -> list[Row]:
    """Compare the time that a client waits for about 800 changed series with node_exporter. The scrapes alternate.

    The textfile collector adds to the page of node_exporter as many series as it has fewer. The collectors of node_exporter run in
    parallel, so a busy machine delays node_exporter more than the sidecar. Compare figures of quiet machines only.
    """
    program = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
    if program is None:
        return []
    flags = ["--web.listen-address=127.0.0.1:0", f"--feed.dir={directory}", "--gpu.replay=h100"]
    peer_url = "http://127.0.0.1:29101"
    with (
        tempfile.TemporaryDirectory() as textfiles,
        child([sys.executable, "-m", "exporter", *flags], ready_pattern=r"http://127\.0\.0\.1:\d+") as (
            _,
            url,
        ),
        child(
            [
                program,
                f"--web.listen-address={peer_url.removeprefix('http://')}",
                f"--collector.textfile.directory={textfiles}",
            ],
            ready_pattern="[Ll]istening",
        ),
    ):
        time.sleep(CHANGED_SECONDS)
        padding_count = series_count(scrape(url)) - series_count(scrape(peer_url))
        lines = [f'benchmark_padding{{number="{number}"}} {number}.5\n' for number in range(padding_count)]
        Path(textfiles, "padding.prom").write_text("".join(lines), encoding="ascii")
        own_seconds, peer_seconds = [], []
        for _ in range(CLIENT_SCRAPES):
            time.sleep(CHANGED_SECONDS)  # all blocks have changed
            own_seconds.append(client_seconds(url))
            peer_seconds.append(client_seconds(peer_url))
        counts = series_count(scrape(url)), series_count(scrape(peer_url))
    ratio = statistics.median(own_seconds) / statistics.median(peer_seconds)
    notes = [
        f"{name} {statistics.median(seconds) * 1e3:.2f} ms for {count} series"
        for name, seconds, count in zip(
            ("training-exporter", "node_exporter"), (own_seconds, peer_seconds), counts, strict=True
        )
    ]
    return [
        Row(
            "Scrape time seen by a client, 800 series, relative to node_exporter (ratio)",
            round(ratio, 2),
            budget=0.35,
            notes=notes,
        )
    ]


def observe_ns() -> float:
    """Return the CPU time of prometheus_client's `Histogram.observe`, as a measure of the speed of the machine."""
    histogram = Histogram("bench_observe", "Speed of the machine.", registry=None)
    times = take_turns({"observe": lambda: histogram.observe(0.3)}, rounds=15, loops=20_000)
    return times["observe"]


def nvml_child(sidecar_pid: int) -> int:
    """Return the process id of the NVML child of a sidecar."""
    children = Path(f"/proc/{sidecar_pid}/task").glob("*/children")
    return next(int(pid) for path in children for pid in path.read_text(encoding="ascii").split())


def measure(directory: Path, stack: ExitStack) -> tuple[list[Row], dict[str, int]]:
    """Start the job and the sidecar, and measure during regular scrapes. Return the rows, and the series by prefix."""
    feed = {"EXPORTER_FEED_DIR": str(directory), "EXPORTER_RUN": "bench"}
    for rank in range(RANKS):
        stack.enter_context(
            child(
                [sys.executable, __file__, "rank"],
                ready_pattern="ready",
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                **feed,
            )
        )
    flags = ["--web.listen-address=127.0.0.1:0", f"--feed.dir={directory}", "--gpu.replay=h100"]
    server, url = stack.enter_context(
        child([sys.executable, "-m", "exporter", *flags], ready_pattern=r"http://127\.0\.0\.1:\d+")
    )
    time.sleep(SCRAPE_SECONDS)
    scrape_regularly(url, SCRAPES_BEFORE)
    pids = {"sidecar": server.pid, "child": nvml_child(server.pid)}
    cpu_before, started = {name: process_seconds(pid) for name, pid in pids.items()}, time.monotonic()
    scrape_regularly(url, SCRAPES // 2)
    nanoseconds = observe_ns()
    page = scrape_regularly(url, SCRAPES - SCRAPES // 2).decode()
    elapsed_seconds = time.monotonic() - started
    percent = {
        name: round((process_seconds(pid) - cpu_before[name]) / elapsed_seconds * 100, 3)
        for name, pid in pids.items()
    }
    lines = [line for line in page.splitlines() if line and not line.startswith("#")]
    own_lines = [line for line in lines if not line.startswith("bench_")]  # without the Stats
    prefixes = Counter(re.split("[_{ ]", line)[0] for line in own_lines)
    scale = BUDGET_OBSERVE_NS / nanoseconds
    notes = [f"not scaled {percent['sidecar']:.3g} % of a core", f"Histogram.observe {nanoseconds:.0f} ns"]
    return [
        Row(
            "CPU time of the sidecar with 8 GPUs and 8 ranks (scaled)",
            round(percent["sidecar"] * scale, 3),
            "% of a core",
            1.5,
            notes=notes,
        ),
        Row("Memory of the sidecar with 8 GPUs and 8 ranks", memory_mib(pids["sidecar"]), "MiB", 64.0),
        Row(
            "CPU time of the NVML child per GPU (scaled)",
            round(percent["child"] * scale / GPUS, 3),
            "% of a core",
            0.25,
        ),
        Row("Memory of the NVML child", memory_mib(pids["child"]), "MiB", 48.0),
        Row("Number of series without the user's Stats", float(len(own_lines)), budget=1800.0),
        Row(
            f"CPU time of the server for a scrape of {len(lines):,} series",
            scrape_ms(url, server.pid),
            "ms",
            peers=node_exporter_ms(),
        ),
    ], dict(prefixes)


def main() -> None:
    with feed_directory() as directory, ExitStack() as stack:
        rows, prefixes = measure(directory, stack)
    with feed_directory() as directory:
        rows += client_rows(directory)
    report(rows, series_by_prefix=prefixes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank()
    else:
        main()
