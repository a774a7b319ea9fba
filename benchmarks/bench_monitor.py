"""Measures events and the face of torch.monitor beside torch's own module, interleaved in one process.

`Stat.add`, `log_event` of a prebuilt event, building an event, `exporter.log`, `exporter.events.enabled`, and
torchelastic's `put_metric` (torch's with its Null handler); ours
with the counting for Prometheus active, torch's without and with one handler in C. Prints one JSON document.

    python benchmarks/bench_monitor.py [--quick]
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from report import report

# In shared memory where there is some, as the default feed directory is.
SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
os.environ["EXPORTER_FEED_DIR"] = FEED = tempfile.mkdtemp(prefix="exporter-bench-", dir=SHARED)

import torch.distributed.elastic.metrics as torch_metrics  # noqa: E402  # after the environment
import torch.monitor  # noqa: E402

import exporter  # noqa: E402  # it reads the environment above
import exporter.elastic.metrics as our_metrics  # noqa: E402
import exporter.monitor  # noqa: E402

QUICK = "--quick" in sys.argv
LOOPS = 20_000 if QUICK else 100_000
ROUNDS = 7 if QUICK else 25
NOW = dt.datetime.now(dt.timezone.utc).replace(tzinfo=None)
DATA = {"loss": 0.5, "step": 100, "path": "/checkpoints/100"}

Timed = Callable[[int], float]


def loop(operation: Callable[[], Any]) -> Timed:
    """Time one call without arguments in a plain loop, the loop included; nanoseconds."""

    def timed(loops: int) -> float:
        began = time.perf_counter_ns()
        for _ in range(loops):
            operation()
        return (time.perf_counter_ns() - began) / loops

    return timed


def loop_of(operation: Callable[[Any], Any], argument: Any) -> Timed:
    """The same with one argument."""

    def timed(loops: int) -> float:
        began = time.perf_counter_ns()
        for _ in range(loops):
            operation(argument)
        return (time.perf_counter_ns() - began) / loops

    return timed


def with_c_handler(module: Any, event: Any) -> Timed:
    """`log_event` while a handler that runs no Python is registered."""

    def timed(loops: int) -> float:
        handle = module.register_event_handler(deque(maxlen=16).append)
        try:
            return loop_of(module.log_event, event)(loops)
        finally:
            module.unregister_event_handler(handle)

    return timed


def contenders() -> dict[str, Timed]:
    """Everything that is measured."""
    found: dict[str, Timed] = {"empty call": loop_of(lambda _value: None, 1.0)}
    for name, module in (("torch.monitor", torch.monitor), ("exporter.monitor", exporter.monitor)):
        some = [module.Aggregation.MEAN, module.Aggregation.MAX]
        stat = module.Stat(f"bench.{name}", some, dt.timedelta(seconds=60))
        event = module.Event(f"bench.{name}", NOW, DATA)
        found[f"{name} Stat.add"] = loop_of(stat.add, 0.01)
        found[f"{name} log_event"] = loop_of(module.log_event, event)
        found[f"{name} log_event, one handler in C"] = with_c_handler(module, event)
        found[f"{name} Event"] = loop(partial(module.Event, "bench.made", NOW, DATA))

    for name, metrics in (("torch", torch_metrics), ("exporter.elastic", our_metrics)):
        found[f"{name} put_metric"] = loop_of(partial(metrics.put_metric, "bench_loss"), 0.5)

    def log_with_data() -> None:
        exporter.log("bench.log", "saved", loss=0.5, step=100, path="/checkpoints/100")

    def build_and_log() -> None:
        torch.monitor.log_event(torch.monitor.Event("bench.log", NOW, DATA))

    found["torch.monitor Event and log_event"] = loop(build_and_log)
    found["exporter.log, message and three data"] = loop(log_with_data)
    found["exporter.log, type alone"] = loop_of(exporter.log, "bench.log")
    found["exporter.events.enabled"] = loop_of(exporter.events.enabled, "bench.log")
    return found


def measure() -> dict[str, object]:
    """Interleave them; medians of rounds, and the ratios that are budgets."""
    timed = contenders()
    rounds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, one in timed.items():
            rounds[name].append(one(LOOPS))
        exporter.flush()
    medians = {name: round(statistics.median(times), 1) for name, times in rounds.items()}

    def ratio(ours: str, theirs: str) -> float:
        return round(medians[ours] / medians[theirs], 3)

    return {
        "nanoseconds": medians,
        "ours as a ratio of torch's": {
            "Stat.add (at most 1.5)": ratio("exporter.monitor Stat.add", "torch.monitor Stat.add"),
            "log_event (at most 1), torch with one handler in C": ratio(
                "exporter.monitor log_event", "torch.monitor log_event, one handler in C"
            ),
            "put_metric (at most 1)": ratio("exporter.elastic put_metric", "torch put_metric"),
            "log_event, torch without any handler": ratio(
                "exporter.monitor log_event", "torch.monitor log_event"
            ),
            "log and build (at most 1)": ratio(
                "exporter.log, message and three data", "torch.monitor Event and log_event"
            ),
        },
    }


if __name__ == "__main__":
    report(measure())
    exporter.shutdown()
    shutil.rmtree(FEED)
