"""Measures `put_metric`, streams, `prof` and `record` of exporter.elastic beside torchelastic's, in one run.

Ours record to Prometheus; torch's go to its Null handlers. Also what the bridges add to torch's own calls. Prints one
JSON document.

    python benchmarks/bench_elastic.py [--quick]
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping

from report import report

SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
os.environ["EXPORTER_FEED_DIR"] = FEED = tempfile.mkdtemp(prefix="exporter-bench-", dir=SHARED)
warnings.simplefilter("ignore")

import torch.distributed.elastic.events as torch_events  # noqa: E402  # after the environment
import torch.distributed.elastic.metrics as torch_metrics  # noqa: E402
import torch.monitor  # noqa: E402

import exporter  # noqa: E402
from exporter import bridges  # noqa: E402
from exporter.elastic import events, metrics  # noqa: E402

QUICK = "--quick" in sys.argv
LOOPS = 5_000 if QUICK else 20_000
ROUNDS = 7 if QUICK else 25


def nothing() -> None:
    """What `prof` wraps."""


def operations() -> dict[str, Callable[[], object]]:
    """One callable per contender."""
    ours, theirs = metrics.getStream("bench"), torch_metrics.getStream("bench")
    our_prof = metrics.prof(nothing, group="bench.prof")
    their_prof = torch_metrics.prof(nothing, group="bench.prof")
    our_event = events.Event("bench", events.EventSource.WORKER, metadata={"a": 1})
    their_event = torch_events.Event("bench", torch_events.EventSource.WORKER, metadata={"a": 1})
    return {
        "empty call": nothing,
        "exporter put_metric": lambda: metrics.put_metric("loss", 0.5, "bench"),
        "torch put_metric": lambda: torch_metrics.put_metric("loss", 0.5, "bench"),
        "exporter put_metric, milliseconds": lambda: metrics.put_metric("step_ms", 12, "bench"),
        "exporter add_value": lambda: ours.add_value("loss", 0.5),
        "torch add_value": lambda: theirs.add_value("loss", 0.5),
        "exporter prof": our_prof,
        "torch prof": their_prof,
        "exporter events.record": lambda: events.record(our_event),
        "torch events.record": lambda: torch_events.record(their_event),
    }


def watched() -> dict[str, Callable[[], object]]:
    """Torch's own calls, which the bridges watch or not."""
    event = torch.monitor.Event("bench", dt.datetime.now(), {"a": 1})  # noqa: DTZ005  # torch wants a naive one
    their_event = torch_events.Event("bench", torch_events.EventSource.WORKER, metadata={"a": 1})
    return {
        "torch put_metric": lambda: torch_metrics.put_metric("loss", 0.5, "watched"),
        "torch events.record": lambda: torch_events.record(their_event),
        "torch log_event": lambda: torch.monitor.log_event(event),
    }


def measured(found: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Nanoseconds of one call, the median of interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(ROUNDS):
        for name, operation in found.items():
            began = time.perf_counter()
            for _ in range(LOOPS):
                operation()
            times[name].append((time.perf_counter() - began) / LOOPS * 1e9)
    return {name: round(statistics.median(each), 1) for name, each in times.items()}


def main() -> None:
    """Measure and report."""
    try:
        nanoseconds = measured(operations())
        before = measured(watched())
        bridges.install()
        after = measured(watched())
        report(
            {
                "nanoseconds": nanoseconds,
                "torch's own calls, nanoseconds": {"without bridges": before, "with bridges": after},
                "put_metric, share of torch's": round(
                    nanoseconds["exporter put_metric"] / nanoseconds["torch put_metric"], 2
                ),
            }
        )
    finally:
        exporter.shutdown()
        shutil.rmtree(FEED, ignore_errors=True)


if __name__ == "__main__":
    main()
