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
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
import urllib.parse
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
CHANGED_SECONDS, CLIENT_SCRAPES = 10.0, 6 if QUICK else 15
PEER_ADDRESS, PROMETHEUS_ADDRESS = "127.0.0.1:29101", "127.0.0.1:29090"
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


def node_exporter() -> str | None:
    """Return the path of node_exporter, or None if it is not installed."""
    return shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")


def node_exporter_ms() -> dict[str, float]:
    """Return the CPU time of a scrape of node_exporter, where installed, by a name with its number of series."""
    program = node_exporter()
    if program is None:
        return {}
    command = [program, f"--web.listen-address={PEER_ADDRESS}"]
    with child(command, ready_pattern="[Ll]istening") as (process, _):
        time.sleep(0.5)
        series = series_count(scrape(f"http://{PEER_ADDRESS}"))
        return {f"node_exporter ({series:,} series)": scrape_ms(f"http://{PEER_ADDRESS}", process.pid)}


def series_count(page: bytes) -> int:
    """Return the number of series of a page."""
    return sum(line[:1] not in {b"", b"#"} for line in page.splitlines())


def prometheus_rows(directory: Path) -> list[Row]:
    """Compare the scrape times that a Prometheus server measures for about 800 changed series of each exporter.

    The textfile collector of node_exporter adds the series that the page of node_exporter lacks. The collectors of node_exporter run in
    parallel, so that a busy machine delays node_exporter more than the sidecar: compare figures of quiet machines only.
    """
    program = node_exporter()
    if program is None or shutil.which("prometheus") is None:
        return []
    flags = ["--web.listen-address=127.0.0.1:0", f"--feed.dir={directory}", "--gpu.replay=h100"]
    with (
        tempfile.TemporaryDirectory() as scratch,
        child([sys.executable, "-m", "exporter", *flags], ready_pattern=r"http://127\.0\.0\.1:\d+") as (
            _,
            url,
        ),
        child(
            [
                program,
                f"--web.listen-address={PEER_ADDRESS}",
                f"--collector.textfile.directory={scratch}",
            ],
            ready_pattern="[Ll]istening",
        ),
    ):
        time.sleep(CHANGED_SECONDS)
        missing = series_count(scrape(url)) - series_count(scrape(f"http://{PEER_ADDRESS}"))
        lines = [f'benchmark_padding{{number="{number}"}} {number}.5\n' for number in range(missing)]
        Path(scratch, "padding.prom").write_text("".join(lines), encoding="ascii")
        targets = {"training-exporter": url.removeprefix("http://"), "node_exporter": PEER_ADDRESS}
        scrape_seconds, series = measured_scrapes(targets, Path(scratch))
    median_ms = {name: statistics.median(seconds) * 1e3 for name, seconds in scrape_seconds.items()}
    return [
        Row(
            "Scrape time that Prometheus measures, about 800 series, relative to node_exporter (ratio)",
            round(median_ms["training-exporter"] / median_ms["node_exporter"], 2),
            budget=0.35,
            notes=[f"{name} {median_ms[name]:.2f} ms for {series[name]} series" for name in targets],
        )
    ]


def measured_scrapes(
    targets: dict[str, str], directory: Path
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the scrape times of a new Prometheus server in seconds, and the number of series of the last scrape, by target."""
    scrape_configs = [
        {"job_name": name, "static_configs": [{"targets": [address]}]} for name, address in targets.items()
    ]
    interval = f"{CHANGED_SECONDS:.0f}s"  # all blocks of the sidecar change between two scrapes
    configuration = {
        "global": {"scrape_interval": interval, "scrape_timeout": "5s"},
        "scrape_configs": scrape_configs,
    }
    file = directory / "prometheus.yml"
    file.write_text(json.dumps(configuration), encoding="utf-8")
    flags = [f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"]
    with child(
        ["prometheus", *flags, f"--web.listen-address={PROMETHEUS_ADDRESS}"], ready_pattern="ready to receive"
    ):
        time.sleep(CHANGED_SECONDS * (CLIENT_SCRAPES + 1))
        seconds = {
            name: [
                float(value) for _, value in prometheus_series(f'scrape_duration_seconds{{job="{name}"}}[1h]')
            ]
            for name in targets
        }
        series = {
            name: int(prometheus_series(f'scrape_samples_scraped{{job="{name}"}}[1h]')[-1][1])
            for name in targets
        }
    # The first scrape opens the connection.
    return {name: values[1:] for name, values in seconds.items()}, series


def prometheus_series(selector: str) -> list[tuple[float, str]]:
    """Return the times and values of the only series of a range selector."""
    query = urllib.parse.urlencode({"query": selector})
    with urllib.request.urlopen(f"http://{PROMETHEUS_ADDRESS}/api/v1/query?{query}", timeout=10) as answer:
        values: list[tuple[float, str]] = json.load(answer)["data"]["result"][0]["values"]
        return values


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
        Row(
            "Number of series with 8 GPUs and 8 ranks, without the user's Stats",
            float(len(own_lines)),
            budget=1800.0,
        ),
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
        rows += prometheus_rows(directory)
    report(rows, series_by_prefix=prefixes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank()
    else:
        main()
