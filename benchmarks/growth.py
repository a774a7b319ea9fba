"""Growth of the costs with the ranks and series of a node, the processes of a job, the runs in a state directory, and iterations.

Measures the real sidecar and real processes with the kernel's accounting. The peers are prometheus_client's multiprocess mode for
series, and nv-one-logger for iterations. Prints a JSON document of curves, with the growth of each figure. With `--pictures`, and
if matplotlib is installed, draws the curves into docs/images.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from report import QUICK, REPOSITORY, child, describe_run, feed_directory, memory_mib, process_seconds

MEASURED_SECONDS = 6.0 if QUICK else 15.0
RANKS = (1, 4, 16) if QUICK else (1, 4, 16, 64)
STATS = (5, 20) if QUICK else (15, 50, 150, 500, 1500)
PROCESSES = (1, 10, 100) if QUICK else (1, 10, 100, 1000, 2000)
RUNS = (10, 20) if QUICK else (50, 200, 500, 1000)
ITERATIONS = (1_000, 10_000) if QUICK else (1_000, 10_000, 100_000, 1_000_000)
RANKS_OF_SERIES = 8
PEER_ITERATIONS = 100_000
"""Maximum number of iterations of nv-one-logger. Their cost grows with the number of earlier iterations."""
FLAT, LINEAR = 0.25, 1.3
"""Maximum exponents of a growth that is called flat or linear."""


def forked(work: Callable[..., None], *arguments: int) -> int:
    """Run a function in a forked child. Return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work(*arguments)
        finally:
            os._exit(0)
    return pid


@contextlib.contextmanager
def children(*calls: Callable[[], None]) -> Iterator[None]:
    """Run forked children during the block, each in a process group of its own."""

    def call_in_group(call: Callable[[], None]) -> None:
        os.setpgid(0, 0)
        call()

    pids = [forked(partial(call_in_group, call)) for call in calls]
    try:
        yield
    finally:
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def be_rank(number: int, ranks: int, stats: int = 0) -> None:
    """Record an iteration, and a value of each Stat, once a second as a rank of a job."""
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(ranks))
    import exporter
    from exporter import training

    all_stats = [
        exporter.Stat(f"growth.part{index}", ["mean", "max"], unit="seconds") for index in range(stats)
    ]
    with training.training_loop(train_iterations_start=0):
        while True:
            with training.training_iteration():
                time.sleep(1.0)
                training.record(loss=2.0, tokens=1024)
            for stat in all_stats:
                stat.add(time.time() % 1.0)


@contextlib.contextmanager
def sidecar(feed: Path, **environment: str) -> Iterator[tuple[int, str]]:
    """Run the sidecar during the block. Yields its process id and the URL of the page."""
    command = [
        sys.executable, "-m", "exporter", "--web.listen-address=127.0.0.1:0", f"--feed.dir={feed}",
        f"--state.dir={feed}", "--gpu.replay=no-gpu", f"--config.file={feed}/config.yaml",
    ]  # fmt: skip
    (feed / "config.yaml").write_text("exposition: {max_series: 100000}\n")
    with child(command, ready_pattern=r"http://127\.0\.0\.1:\d+", **environment) as (process, address):
        yield process.pid, f"{address}/metrics"


def steady_costs(pid: int, url: str) -> dict[str, float]:
    """Return the costs of a sidecar in steady state that is scraped regularly."""
    for _ in range(2):
        page(url)
        time.sleep(MEASURED_SECONDS / 3)
    cpu_before, started, durations = process_seconds(pid), time.monotonic(), []
    while time.monotonic() < started + MEASURED_SECONDS:
        time.sleep(MEASURED_SECONDS / 3)
        request_started = time.perf_counter()
        body = page(url)
        durations.append(time.perf_counter() - request_started)
    percent = (process_seconds(pid) - cpu_before) / (time.monotonic() - started) * 100
    series = sum(not line.startswith(b"#") for line in body.splitlines())
    return {
        "% of a core": round(percent, 2),
        "MiB": memory_mib(pid),
        "series": series,
        "KiB of a scrape": len(body) // 1024,
        "ms of a scrape": round(min(durations) * 1000, 1),
    }


def page(url: str) -> bytes:
    """Return the page, once the sidecar is ready."""
    while True:
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(url, timeout=60) as response:
            body: bytes = response.read()
            return body
        time.sleep(0.2)


def costs_of_ranks(count: int, stats: int) -> dict[str, float]:
    """Return the costs of the sidecar for a number of ranks with a number of Stats each."""
    with feed_directory() as feed:
        os.environ.update(EXPORTER_FEED_DIR=str(feed), EXPORTER_RUN="growth")
        ranks = (partial(be_rank, rank, count, stats) for rank in range(count))
        with children(*ranks), sidecar(feed) as (pid, url):
            while page(url).count(b"training_process_up{") < count:
                time.sleep(0.5)
            return steady_costs(pid, url)


def ranks() -> dict[str, Any]:
    """Measure the costs for a growing number of ranks."""
    points = [{"ranks": count, **costs_of_ranks(count, 0)} for count in RANKS]
    return {"title": "Ranks of a node", "points": points}


def series() -> dict[str, Any]:
    """Measure the costs for a growing number of series, also of the same series in prometheus_client's multiprocess mode."""
    points = []
    for count in STATS:
        costs = costs_of_ranks(RANKS_OF_SERIES, count)
        peer = multiprocess(RANKS_OF_SERIES, count)
        points.append({"series": costs.pop("series"), **costs, "prometheus_client, ms of a scrape": peer})
    return {
        "title": f"Series of a node with {RANKS_OF_SERIES} ranks and a growing number of Stats",
        "points": points,
    }


def multiprocess(ranks: int, stats: int) -> float:
    """Return the duration in ms of a scrape of prometheus_client's multiprocess mode, with a summary and two gauges per Stat."""
    with feed_directory() as directory:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)

        def be_peer(rank: int) -> None:
            from prometheus_client import Gauge, Summary

            for index in range(stats):
                Summary(f"part{index}_seconds", "").observe(1.0)
                for name in ("mean", "max"):
                    Gauge(f"part{index}_{name}", "", ["rank"]).labels(str(rank)).set(1.0)

        for rank in range(ranks):
            os.waitpid(forked(be_peer, rank), 0)
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # no type information
        durations = []
        for _ in range(3):
            started = time.perf_counter()
            generate_latest(registry)
            durations.append(time.perf_counter() - started)
        return round(min(durations) * 1000, 1)


def processes() -> dict[str, Any]:
    """Measure the costs for a growing number of processes of a job."""
    points = []
    for count in PROCESSES:
        with feed_directory() as feed:
            os.environ.update(EXPORTER_FEED_DIR=str(feed), EXPORTER_RUN="growth")

            def rank_with_children(count: int = count) -> None:
                for _ in range(count - 1):
                    forked(signal.pause)
                be_rank(0, 1)

            with children(rank_with_children), sidecar(feed) as (pid, url):
                while b"training_process_up{" not in page(url):
                    time.sleep(0.5)
                points.append({"processes": count, **steady_costs(pid, url)})
    return {"title": "Processes of a job", "points": points}


def runs() -> dict[str, Any]:
    """Measure the costs for a growing number of ended runs in a state directory."""
    points = []

    def record_run(number: int) -> None:
        os.environ["EXPORTER_RUN"] = f"run-{number}"
        from exporter import flush, training

        with training.training_loop(train_iterations_start=0), training.training_iteration():
            pass
        flush()

    with feed_directory() as feed:
        os.environ["EXPORTER_FEED_DIR"] = str(feed)
        with sidecar(feed) as (pid, url):
            recorded_runs = 0
            for count in RUNS:
                while recorded_runs < count:
                    os.waitpid(forked(record_run, recorded_runs), 0)
                    recorded_runs += 1
                    time.sleep(0.02)
                state = sum(path.stat().st_size for path in (feed / "ledger").iterdir()) // 1024
                points.append({"runs": count, **steady_costs(pid, url), "KiB of state": state})
    return {"title": "Runs started within minutes of each other, in one state file", "points": points}


def iterations() -> dict[str, Any]:
    """Measure the cost of an iteration for a growing number of earlier iterations, also with nv-one-logger."""
    points: list[dict[str, float]] = []
    with contextlib.ExitStack() as stack:
        os.environ["EXPORTER_FEED_DIR"] = str(stack.enter_context(feed_directory()))
        from exporter import flush, shutdown, training

        def own_iteration() -> None:
            with training.training_iteration():
                training.record(loss=2.0)

        stack.callback(shutdown)
        stack.enter_context(training.training_loop(train_iterations_start=0))
        for previous_count, count in pairwise((0, *ITERATIONS)):
            spent = microseconds_of_call(own_iteration, count - previous_count, after_batch=flush)
            points.append({"iterations": count, "µs each": spent, "MiB": memory_mib(os.getpid())})
    from bench_recording import peer_iteration

    for name, call in peer_iteration().items():
        for point, (previous_count, count) in zip(points, pairwise((0, *ITERATIONS)), strict=True):
            if count <= PEER_ITERATIONS:
                point[f"{name}, µs each"] = microseconds_of_call(call, count - previous_count)
    return {"title": "Instrumented iterations of a process", "points": points}


def microseconds_of_call(
    call: Callable[[], object], times: int, after_batch: Callable[[], object] = lambda: None
) -> float:
    """Return the CPU time of a call in µs on this thread, as the mean of *times* calls, a multiple of 500.

    *after_batch* is called every 500 calls, outside the measured time.
    """
    cpu_seconds = 0.0
    for _ in range(0, times, 500):
        started = time.thread_time()
        for _ in range(500):
            call()
        cpu_seconds += time.thread_time() - started
        after_batch()
    return round(cpu_seconds / times * 1e6, 2)


def verdicts(points: Sequence[dict[str, float]]) -> dict[str, str]:
    """Return the growth of each figure with the load, which is the first figure of a point.

    The growth is flat, linear at most, or more than linear between certain loads.
    """
    load_name, *names = points[0]
    growths = {}
    for name in names:
        values = [(point[load_name], max(point[name], 1e-9)) for point in points if name in point]
        steep_intervals = [
            f"between {previous_load:,.0f} and {load:,.0f}"
            for (previous_load, previous_value), (load, value) in pairwise(values)
            if math.log(value / previous_value) / math.log(load / previous_load) > LINEAR
        ]
        (first_load, first_value), (last_load, last_value) = values[0], values[-1]
        total_exponent = math.log(last_value / first_value) / math.log(last_load / first_load)
        steep_text = ", and ".join(steep_intervals)
        growth = f"more than linear {steep_text} {load_name}" if steep_intervals else "linear at most"
        growths[name] = "flat" if total_exponent <= FLAT else growth
    return growths


def draw(curves: Sequence[dict[str, Any]]) -> None:
    """Draw a picture of each curve."""
    try:
        import_module("matplotlib").use("svg")
    except ImportError:
        sys.stderr.write("no pictures: pip install matplotlib\n")
        return
    pyplot = import_module("matplotlib.pyplot")
    for curve in curves:
        names = list(curve["points"][0])
        load_name, figures = names[0], [name for name in names[1:] if name != "series"]
        figure, axes = pyplot.subplots(
            1, len(figures), figsize=(3.2 * len(figures), 2.6), layout="constrained"
        )
        for axis, name in zip(axes if len(figures) > 1 else [axes], figures, strict=True):
            points = [point for point in curve["points"] if name in point]
            loads, values = [point[load_name] for point in points], [point[name] for point in points]
            axis.plot(loads, values, marker="o")
            axis.set(xlabel=load_name, title=name, xscale="log", ylim=(0, None))
            axis.grid(alpha=0.3)
        figure.savefig(REPOSITORY / f"docs/images/growth-{load_name}.svg", metadata={"Date": None})


def main() -> None:
    """Measure all curves, or the named curve, and print the report."""
    # A separate process for each curve, so that the imports of one curve do not count in the next.
    if subjects := [argument for argument in sys.argv[1:] if not argument.startswith("-")]:
        curve = globals()[subjects[0]]()
        print(json.dumps({**curve, "verdicts": verdicts(curve["points"])}))
        return
    curves = []
    for subject in ("ranks", "series", "processes", "runs", "iterations"):
        quick = ["--quick"] if QUICK else []
        with os.popen(" ".join([sys.executable, __file__, subject, *quick])) as output:
            curves.append(json.loads(output.read()))
    if "--pictures" in sys.argv:
        draw(curves)
    print(json.dumps({**describe_run(), "curves": curves}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
