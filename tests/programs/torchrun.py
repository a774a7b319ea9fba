"""Programs that use torch.distributed and torchelastic, such as ranks of torchrun.

The programs do not use the exporter, as jobs that are recorded without a change.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import monitor
from torch.distributed.elastic import events, metrics


def train_with_two_failures(directory: str) -> None:
    """Train three steps on two ranks. In each of two attempts, rank 1 fails, with status 7 and 3, while rank 0 waits for SIGTERM."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # A store for each attempt: in torch 2.13, a second attempt may find addresses of the first attempt in torchrun's store.
    store = f"file://{directory}/store-{os.getppid()}-{attempt}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
        metrics.put_metric("train.step_ms", 12)
    events.record(events.Event("worker.evt", events.EventSource.WORKER, metadata={"rank": rank}))
    sys.stdout.write(f"rank {rank} attempt {attempt}\n")
    sys.stdout.flush()
    dist.barrier()
    time.sleep(1)  # output that a rank has not written yet is lost when torchrun sends SIGTERM
    if rank == 1:
        sys.exit(3 if attempt else 7)
    time.sleep(60)


class PrintingHandler(metrics.MetricHandler):  # type: ignore[misc]  # torch has no types here
    def emit(self, metric_data: Any) -> None:
        print("sink", metric_data.group_name, metric_data.name, metric_data.value)


class RaisingHandler(metrics.MetricHandler):  # type: ignore[misc]  # torch has no types here
    def emit(self, metric_data: Any) -> None:
        raise KeyError("the job's own")


def use_events_metrics_and_monitor() -> None:
    """Record with torch's metrics, events and monitor. At last, print whether the exporter is imported, and its threads."""
    metrics.configure(PrintingHandler(), "my_app")
    metrics.put_metric("train.step_ms", 12)
    metrics.put_metric("loss", 0.5, "my_app")
    metrics.configure(RaisingHandler(), "raising")
    try:
        metrics.put_metric("x", 1, "raising")
    except KeyError as error:
        print("raised", error)
    events.record(events.Event("my.event", events.EventSource.WORKER, metadata={"a": 1}))
    events.record(events.Event("on.console", events.EventSource.WORKER), "console")
    stat = monitor.Stat("train.batch_ms", [monitor.Aggregation.MEAN, monitor.Aggregation.COUNT], 3600.0, 2)
    stat.add(10.0)
    stat.add(20.0)
    now = dt.datetime.now()  # noqa: DTZ005  # torch's events have naive datetimes
    monitor.log_event(monitor.Event("my.monitor.event", now, {"a": 1}))
    exporter_threads = [thread.name for thread in threading.enumerate() if "exporter" in thread.name]
    print("exporter" in sys.modules, exporter_threads)
