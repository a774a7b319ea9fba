"""Measures what recording costs a training process: `Stat.add` beside its peers, the recording thread, the import.

Peers run interleaved with ours in the same process: the bare loop, `torch.monitor.Stat.add`, prometheus_client's
`Histogram.observe`, OpenTelemetry's histogram. Prints one JSON document.

    python benchmarks/bench_recording.py [--quick]
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import report

# In shared memory where there is some, as the default feed directory is.
SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
os.environ["EXPORTER_FEED_DIR"] = FEED = tempfile.mkdtemp(prefix="exporter-bench-", dir=SHARED)

import exporter  # noqa: E402  # it reads the environment above

QUICK = "--quick" in sys.argv
LOOPS = 20_000 if QUICK else 100_000
ROUNDS = 7 if QUICK else 25


def operations() -> dict[str, Callable[[float], object]]:
    """One callable per contender; each takes the number to record."""
    found: dict[str, Callable[[float], object]] = {"empty call": lambda _value: None}
    stat = exporter.Stat("bench.add", ["mean", "p99", "histogram"], unit="seconds")
    found["exporter Stat.add"] = stat.add
    try:
        import torch.monitor
    except ImportError:
        pass
    else:
        some = [torch.monitor.Aggregation.MEAN, torch.monitor.Aggregation.MAX]
        found["torch.monitor Stat.add"] = torch.monitor.Stat("bench", some, dt.timedelta(seconds=60)).add
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    found["prometheus_client Histogram.observe"] = prometheus_client.Histogram(
        "b", "b", registry=registry
    ).observe
    if importlib.util.find_spec("opentelemetry.sdk") is not None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        provider = MeterProvider(metric_readers=[InMemoryMetricReader()])
        found["OpenTelemetry Histogram.record"] = provider.get_meter("bench").create_histogram("b").record
    return found


def nanoseconds(operation: Callable[[float], object]) -> float:
    """Time one call in a plain loop, the loop included."""
    began = time.perf_counter_ns()
    for _ in range(LOOPS):
        operation(0.01)
    return (time.perf_counter_ns() - began) / LOOPS


def adds() -> dict[str, object]:
    """Compare one add of each contender, interleaved; medians of rounds."""
    contenders = operations()
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, operation in contenders.items():
            rounds[name].append(nanoseconds(operation))
        exporter.flush()
    medians = {name: round(statistics.median(times), 1) for name, times in rounds.items()}
    ours = medians["exporter Stat.add"]
    ratios = {name: round(ours / median, 3) for name, median in medians.items()}
    return {"nanoseconds": medians, "ours as a ratio of": ratios}


def thread_seconds(name: str) -> float:
    """Processor time of one of this process's threads, from the kernel (nanosecond resolution)."""
    for thread in threading.enumerate():
        if thread.name == name:
            fields = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii").split()
            return int(fields[0]) / 1e9
    raise RuntimeError(f"no thread {name}")


def resident_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def million_a_second() -> dict[str, object]:
    """Add a million a second to one Stat for ten seconds and count what arrived."""
    stat = exporter.Stat("bench.million", ["mean", "max", "p50", "p99", "histogram"], unit="seconds")
    seconds, portion = (3 if QUICK else 10), 1_000
    before, sent, began = resident_mib(), 0, time.perf_counter()
    peak = before
    while sent < seconds * 1_000_000:
        due = began + sent / 1e6
        time.sleep(max(due - time.perf_counter(), 0))
        for _ in range(portion):
            stat.add(0.01)
        sent += portion
        if sent % 250_000 == 0:
            peak = max(peak, resident_mib())
    took = time.perf_counter() - began
    exporter.flush()
    overflows = stat._tally.reading().overflows
    return {
        "added": sent,
        "counted": stat.count,
        "overflows": overflows,
        "adds per second": round(sent / took),
        "MiB grown at most": round(peak - before, 1),
    }


def thousand_a_second() -> dict[str, object]:
    """Record 1,000 samples a second over 50 Stats; the thread's share of a core, and how long it keeps the GIL."""
    stats = [exporter.Stat(f"bench.many{index}", unit="seconds") for index in range(50)]
    seconds = 5 if QUICK else 20
    exporter.flush()
    began, used = time.perf_counter(), thread_seconds("exporter-recording")
    tick = 0
    while time.perf_counter() - began < seconds:
        for stat in stats:
            stat.add(0.01)
        tick += 1
        time.sleep(max(began + tick * 0.05 - time.perf_counter(), 0))
    took = time.perf_counter() - began
    share = (thread_seconds("exporter-recording") - used) / took
    return {
        "recording thread, percent of a core": round(share * 100, 3),
        "samples per second": round(tick * 50 / took),
    }


def longest_slices() -> dict[str, object]:
    """Run the recording thread's flushes here, one by one: how long is a slice between two offers of the GIL?

    Measured in processor time, so that other programs on the machine do not count. Every `sleep(0)` of ours is such
    an offer; the system calls of the feed's writer, which are offers too, are not counted as such.
    """
    from exporter.feed import encoder
    from exporter.process import RECORDER
    from exporter.recording import recorder

    stats = [exporter.Stat(f"bench.many{index}", unit="seconds") for index in range(50)]
    slices: list[float] = []
    began = 0.0

    def offer(_seconds: float) -> None:
        nonlocal began
        if threading.current_thread() is not threading.main_thread():
            return  # the recording thread itself, which ticks on
        slices.append(time.thread_time() - began)
        began = time.thread_time()

    modules: tuple[Any, ...] = (recorder, encoder)
    for module in modules:
        module.sleep = offer
    try:
        for _ in range(50 if QUICK else 300):
            for stat in stats:
                for _ in range(20):
                    stat.add(0.01)
            for clock in RECORDER._clocks.values():
                clock.due = 0.0  # the costliest flush: every window closes
            began = time.thread_time()
            RECORDER.flush()
            offer(0)
    finally:
        for module in modules:
            module.sleep = time.sleep
    slices.sort()
    return {
        "slices": len(slices),
        "median ms": round(statistics.median(slices) * 1e3, 3),
        "p99 ms": round(slices[int(len(slices) * 0.99)] * 1e3, 3),
        "longest ms": round(slices[-1] * 1e3, 3),
    }


IMPORT = """
import sys, time
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
before, began = resident(), time.perf_counter()
__import__(sys.argv[1])
print((time.perf_counter() - began) * 1e3, resident() - before)
"""


def imports() -> dict[str, object]:
    """Import each contender in fresh interpreters without site-packages of their own, from compiled bytecode."""
    found: dict[str, object] = {}
    home = tempfile.mkdtemp(prefix="exporter-bench-")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPYCACHEPREFIX"] = f"{home}/bytecode"
    path = [str(Path(exporter.__file__).parents[1]), *sys.path[1:]]
    for module in ("exporter", "prometheus_client", "opentelemetry.sdk.metrics"):
        if importlib.util.find_spec(module.split(".")[0]) is None:
            continue
        command = [f"{home}/bin/python", "-c", f"import sys; sys.path += {path}\n{IMPORT}", module]
        results = []
        for _ in range(5 if QUICK else 11):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            results.append([float(word) for word in done.stdout.split()])
        found[module] = {  # the first one compiled
            "milliseconds": round(statistics.median(result[0] for result in results[1:]), 1),
            "MiB": round(statistics.median(result[1] for result in results[1:]), 2),
        }
    shutil.rmtree(home)
    return found


if __name__ == "__main__":
    report(
        {
            "add": adds(),
            "a million adds a second": million_a_second(),
            "a thousand samples a second over 50 Stats": thousand_a_second(),
            "GIL slices of a flush, 1,000 samples over 50 Stats": longest_slices(),
            "import above a bare interpreter": imports(),
        }
    )
    exporter.shutdown()
    shutil.rmtree(FEED)
