"""Cost of the sidecar and the NVML child on a node with eight GPUs and a job of eight ranks with 50 Stats each.

The sidecar with default settings replays the machine `h100` through the real child; the job is a real process per rank. Scrapes
follow Prometheus' headers, every 15 s. Processor time and memory come from the kernel. node_exporter, where installed, is the
peer: the processor time of a scrape, and the time that a client waits for about 800 series of each exporter. Shares of a core are scaled to the
machine of the budgets, on which prometheus_client's `Histogram.observe` takes 600 ns; it is measured meanwhile. Prints a JSON
document; the exit status is 1 if a budget does not hold.

    python benchmarks/bench_node.py [--quick]    quick: scrapes every 5 s, which costs more
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
    with urllib.request.urlopen(request, timeout=10) as answer:
        body: bytes = answer.read()
        return gzip.decompress(body) if answer.headers.get("Content-Encoding") == "gzip" else body


def scrape_regularly(url: str, count: int) -> bytes:
    """Scrape at even intervals and return the last page."""
    due, page = time.monotonic(), b""
    for _ in range(count):
        due += SCRAPE_SECONDS
        time.sleep(max(0.0, due - time.monotonic()))
        page = scrape(url)
    return page


def scrape_ms(url: str, pid: int) -> float:
    """Return the median processor time of a server for a scrape, without the server's background work."""
    times = []
    for _ in range(20):
        cpu_before = process_seconds(pid)
        scrape(url)
        times.append(process_seconds(pid) - cpu_before)
    return round(statistics.median(times) * 1e3, 2)


def node_exporter_ms() -> dict[str, float]:
    """Return the processor time of node_exporter, where installed."""
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
    """Return the time in which a client receives the page."""
    started = time.perf_counter()
    scrape(url)
    return time.perf_counter() - started


def series_count(page: bytes) -> int:
    """Return the number of series of a page."""
    return sum(line[:1] not in {b"", b"#"} for line in page.splitlines())


def client_rows(directory: Path) -> list[Row]:
    """Compare the time that a client waits for about 800 changed series with node_exporter, scraped alternately.

    The textfile collector of node_exporter adds the series that its page has less. Its collectors run in parallel, so that a
    busy machine delays them more than the sidecar: compare figures of quiet machines only.
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
        missing = series_count(scrape(url)) - series_count(scrape(peer_url))
        lines = [f'benchmark_padding{{number="{number}"}} {number}.5\n' for number in range(missing)]
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
    """Return the processor time of prometheus_client's `Histogram.observe`, the measure of a machine's speed."""
    histogram = Histogram("bench_observe", "Speed of the machine.", registry=None)
    times = take_turns({"observe": lambda: histogram.observe(0.3)}, rounds=15, loops=20_000)
    return times["observe"]


def nvml_child(parent: int) -> int:
    """Return the process id of the sidecar's child."""
    children = Path(f"/proc/{parent}/task").glob("*/children")
    return next(int(pid) for path in children for pid in path.read_text(encoding="ascii").split())


def measure(directory: Path, stack: ExitStack) -> tuple[list[Row], dict[str, int]]:
    """Start the job and the sidecar, and measure during regular scrapes."""
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
    speed = observe_ns()
    page = scrape_regularly(url, SCRAPES - SCRAPES // 2).decode()
    wall = time.monotonic() - started
    percent = {
        name: round((process_seconds(pid) - cpu_before[name]) / wall * 100, 3) for name, pid in pids.items()
    }
    lines = [line for line in page.splitlines() if line and not line.startswith("#")]
    fixed = [line for line in lines if not line.startswith("bench_")]
    prefixes = Counter(re.split("[_{ ]", line)[0] for line in fixed)
    scale = BUDGET_OBSERVE_NS / speed
    notes = [f"not scaled {percent['sidecar']:.3g} % of a core", f"Histogram.observe {speed:.0f} ns"]
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
        Row("Number of series without the user's Stats", float(len(fixed)), budget=1800.0),
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
