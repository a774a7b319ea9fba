"""Cost of recording in the job: values, events, iterations, the recording thread, imports and the bridge to plain loops.

The peers torch.monitor, prometheus_client, OpenTelemetry, torchelastic and nv-one-logger, if installed, are measured in the same
process, interleaved. Prints a JSON document, and exits with status 1 if a budget is exceeded.

    python benchmarks/bench_recording.py [--quick]
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from report import QUICK, REPOSITORY, Row, feed_directory, report, take_turns, thread_seconds

ROUNDS = 7 if QUICK else 25
LOOPS = 20_000 if QUICK else 100_000
SHARE_SECONDS = 5 if QUICK else 20
MANY_ITERATIONS = 200_000 if QUICK else 1_000_000
THREAD = "exporter-recording"
TURN_STEPS = 20
"""Number of steps of a turn, after which the bridge is switched on or off."""
FIRST_TURNS = 10
"""Number of turns with the bridge that are not measured. In its first 100 steps, the bridge reads every loss."""
BUDGET_OBSERVE_NS = 600.0
"""Time of prometheus_client's `Histogram.observe` on the machine of the budgets."""
TIMESTAMP = dt.datetime.now(dt.timezone.utc).replace(tzinfo=None)
DATA = {"loss": 0.5, "step": 100, "path": "/checkpoints/100"}


def has(module: str) -> bool:
    """Return True if a package is installed."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def values() -> list[Row]:
    """Measure the recording of a value, with peers."""
    import prometheus_client

    import exporter

    stat = exporter.Stat("bench.add", ["mean", "p99", "histogram"], unit="seconds")
    histogram = prometheus_client.Histogram("b", "b", registry=prometheus_client.CollectorRegistry())
    adds: dict[str, Callable[[float], object]] = {
        "Stat.add": stat.add,
        "prometheus_client": histogram.observe,
    }
    if has("torch"):
        import torch.monitor

        aggregations = [torch.monitor.Aggregation.MEAN, torch.monitor.Aggregation.MAX]
        adds["torch.monitor"] = torch.monitor.Stat("bench", aggregations, dt.timedelta(seconds=60)).add
    if importlib.util.find_spec("opentelemetry") and importlib.util.find_spec("opentelemetry.sdk"):
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        meter = MeterProvider(metric_readers=[InMemoryMetricReader()]).get_meter("bench")
        adds["OpenTelemetry"] = meter.create_histogram("b").record
    nanoseconds = timed_calls(adds, after_round=exporter.flush)
    own_nanoseconds = nanoseconds.pop("Stat.add")
    rows = [
        Row(
            "`Stat.add` relative to `Histogram.observe` of prometheus_client (ratio)",
            share(own_nanoseconds, nanoseconds["prometheus_client"]),
            budget=0.05,
        )
    ]
    if "torch.monitor" in nanoseconds:
        rows.append(
            Row(
                "`Stat.add` relative to `Stat.add` of torch.monitor (ratio)",
                share(own_nanoseconds, nanoseconds["torch.monitor"]),
                budget=0.2,
            )
        )
    return [Row("CPU time of a call of `Stat.add`", own_nanoseconds, "ns", peers=nanoseconds), *rows]


def timed_calls(
    calls: dict[str, Callable[[float], object]], after_round: Callable[[], object]
) -> dict[str, float]:
    """Return the median CPU time of a call with 0.01 of each function in nanoseconds, without the loop. Rounds are interleaved."""
    times_by_name: dict[str, list[float]] = {name: [] for name in ("", *calls)}
    for _ in range(ROUNDS):
        for name, times in times_by_name.items():
            statement = "call(0.01)" if name else "pass"
            timer = timeit.Timer(statement, globals={"call": calls.get(name)}, timer=time.thread_time)
            times.append(timer.timeit(LOOPS) / LOOPS * 1e9)
        after_round()
    medians = {name: statistics.median(times) for name, times in times_by_name.items()}
    empty = medians.pop("")
    return {name: round(median - empty, 1) for name, median in medians.items()}


def share(own: float, peer: float) -> float:
    """Return a time divided by the time of a peer."""
    return round(own / peer, 3) if peer else 0.0


def compatibility_modules() -> list[Row]:
    """Measure events, and the compatibility modules beside torch.monitor and torchelastic."""
    if not has("torch"):
        return []
    import torch.distributed.elastic.metrics as torch_metrics
    import torch.monitor

    import exporter
    import exporter.elastic.metrics as our_metrics
    import exporter.monitor

    peer_event, own_event = (
        module.Event("bench.event", TIMESTAMP, DATA) for module in (torch.monitor, exporter.monitor)
    )
    handler = torch.monitor.register_event_handler(deque(maxlen=16).append)
    contenders: dict[str, Callable[[], object]] = {
        "exporter.monitor.log_event": partial(exporter.monitor.log_event, own_event),
        "torch.monitor.log_event": partial(torch.monitor.log_event, peer_event),
        "exporter put_metric": partial(our_metrics.put_metric, "bench_loss", 0.5),
        "torchelastic put_metric": partial(torch_metrics.put_metric, "bench_loss", 0.5),
        "exporter.log": partial(
            exporter.log, "bench.log", "saved", loss=0.5, step=100, path="/checkpoints/100"
        ),
        "exporter.events.enabled": partial(exporter.events.enabled, "bench.log"),
    }
    for number in range(500):  # the cost of `enabled` must not depend on the number of rules
        exporter.events.limit(f"bench.rule{number}.*", sample=0.5)
    nanoseconds = take_turns(contenders, rounds=ROUNDS, loops=LOOPS // 10, after_round=exporter.flush)
    torch.monitor.unregister_event_handler(handler)
    return [
        Row(
            "CPU time of a call of `exporter.monitor.log_event`",
            nanoseconds["exporter.monitor.log_event"],
            "ns",
            peers={"torch.monitor with `deque.append` as handler": nanoseconds["torch.monitor.log_event"]},
        ),
        Row(
            "CPU time of a call of `exporter.elastic.metrics.put_metric`",
            nanoseconds["exporter put_metric"],
            "ns",
            peers={"torchelastic": nanoseconds["torchelastic put_metric"]},
        ),
        Row("CPU time of a call of `exporter.log` with three values", nanoseconds["exporter.log"], "ns"),
        Row(
            "CPU time of a call of `exporter.events.enabled`, with 500 rules of `exporter.events.limit`",
            nanoseconds["exporter.events.enabled"],
            "ns",
            100.0,
        ),
    ]


def our_iterations() -> dict[str, Callable[[], object]]:
    """Return functions that run an iteration without blocks inside, and an iteration with four phases and three values."""
    from exporter import training

    def bare() -> None:
        with training.training_iteration():
            pass

    def full() -> None:
        with training.training_iteration():
            with training.data_loading():
                pass
            with training.model_forward():
                pass
            with training.model_backward():
                pass
            with training.optimizer_update():
                pass
            training.record(loss=0.5, tokens=4096, grad_norm=1.25)

    return {"bare": bare, "full": full}


def peer_iteration() -> dict[str, Callable[[], object]]:
    """Return the iteration of nv-one-logger with its cheapest settings, or an empty mapping if it is not installed."""
    if not has("nv_one_logger"):
        return {}
    from nv_one_logger.api.config import OneLoggerConfig
    from nv_one_logger.training_telemetry.api.callbacks import on_app_start, on_train_start
    from nv_one_logger.training_telemetry.api.config import TrainingTelemetryConfig
    from nv_one_logger.training_telemetry.api.context import training_iteration
    from nv_one_logger.training_telemetry.api.training_telemetry_provider import TrainingTelemetryProvider

    telemetry = TrainingTelemetryConfig(
        perf_tag_or_fn="bench", global_batch_size_or_fn=4, log_every_n_train_iterations=10**9
    )
    config = OneLoggerConfig(
        application_name="bench", session_tag_or_fn="bench", world_size_or_fn=1, telemetry_config=telemetry
    )
    TrainingTelemetryProvider.instance().with_base_config(config).configure_provider()
    on_app_start()
    on_train_start(train_iterations_start=0)

    def iteration() -> None:
        with training_iteration():
            pass

    return {"nv-one-logger (iteration span only)": iteration}


PEER_LOOPS = 300
"""Number of iterations of nv-one-logger in a round. Their cost grows with the number of earlier iterations."""


def cpu_microseconds(
    contenders: Mapping[str, Callable[[], object]], loops: Mapping[str, int]
) -> dict[str, float]:
    """Return the CPU time of a call in µs, including the recording thread: the median of interleaved rounds."""
    import exporter

    microseconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            exporter.flush()
            started = time.process_time()
            loop_count = loops.get(name, PEER_LOOPS)
            for _ in range(loop_count):
                call()
            exporter.flush()
            microseconds[name].append((time.process_time() - started) / loop_count * 1e6)
    return {name: round(statistics.median(times), 2) for name, times in microseconds.items()}


def iterations() -> list[Row]:
    """Measure a bare and a fully instrumented iteration, and the growth of the cost over a million iterations."""
    peers, ours = peer_iteration(), our_iterations()
    full_iteration = ours["full"]
    loops = dict.fromkeys(ours, 10_000)  # many, because the flush costs as much as 1,000 iterations
    microseconds = cpu_microseconds(ours | peers, loops)
    bare, full = microseconds.pop("bare"), microseconds.pop("full")
    peer = next(iter(microseconds.values()), None)
    tenths, tenth = [], MANY_ITERATIONS // 10
    for _ in range(10):
        started = time.thread_time()
        for _ in range(tenth):
            full_iteration()
        tenths.append(time.thread_time() - started)
    return [
        Row(
            "CPU time of an iteration without phases and values",
            bare,
            "µs",
            None if peer is None else round(peer / 20, 2),
            microseconds,
        ),
        Row(
            "CPU time of an iteration with 4 phases and 3 values",
            full,
            "µs",
            None if peer is None else round(peer * 0.15, 2),
            microseconds,
        ),
        Row(
            f"Time of the last {tenth:,} of {MANY_ITERATIONS:,} iterations, relative to the first {tenth:,} (ratio)",
            round(tenths[-1] / tenths[0], 2),
            budget=1.3,
        ),
    ]


def recording_thread() -> list[Row]:
    """Measure the share of a core of the recording thread, including the feed, at the rates of the budgets."""
    import exporter

    stats = [exporter.Stat(f"bench.many{index}", unit="seconds") for index in range(50)]

    def record_all() -> None:
        for stat in stats:
            stat.add(0.01)

    def row(rate: str, call: Callable[[], object], per_second: int) -> Row:
        timer = ObserveTimer()
        exporter.flush()
        started, cpu_before, number = time.perf_counter(), thread_seconds(THREAD), 0
        while time.perf_counter() - started < SHARE_SECONDS:
            call()
            number += 1
            if number % per_second == 0:
                timer.run()
            time.sleep(max(started + number / per_second - time.perf_counter(), 0))
        percent = (thread_seconds(THREAD) - cpu_before) / (time.perf_counter() - started) * 100
        nanoseconds = timer.nanoseconds()
        notes = [f"not scaled {percent:.3g} % of a core", f"Histogram.observe {nanoseconds:.0f} ns"]
        return Row(
            f"CPU time of the recording thread at {rate} (scaled)",
            round(percent * BUDGET_OBSERVE_NS / nanoseconds, 3),
            "% of a core",
            0.2,
            notes=notes,
        )

    full = our_iterations()["full"]
    return [row("1,000 samples/s", record_all, 20), row("100 iterations/s", full, 100)]


STACK_RUNS = 10
STACK_SECONDS = 1 if QUICK else 5


def stacks() -> list[Row]:
    """Compare the CPU time of a job with and without the responder to stack requests, while there is no request.

    A run alternates between both every second, so that a slow moment of the machine affects both.
    """
    import exporter
    from exporter.recorder import RECORDER
    from exporter.responder import StackResponder

    full_iteration = our_iterations()["full"]
    tasks_with_responder = RECORDER._tasks
    tasks_without_responder = tuple(
        task for task in tasks_with_responder if not isinstance(task, StackResponder)
    )
    ratios, without_responder = [], []
    for _ in range(STACK_RUNS):
        cpu_seconds, iterations_of = {True: 0.0, False: 0.0}, {True: 0, False: 0}
        for second in range(2 * STACK_SECONDS):
            is_with_responder = second % 2 == 0
            RECORDER._tasks = tasks_with_responder if is_with_responder else tasks_without_responder
            exporter.flush()
            started, cpu_before, number = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - started < 1.0:
                full_iteration()
                number += 1
                time.sleep(max(started + number / 100.0 - time.perf_counter(), 0))
            cpu_seconds[is_with_responder] += time.process_time() - cpu_before
            iterations_of[is_with_responder] += number
        per_iteration = {
            is_with_responder: cpu_seconds[is_with_responder] / iterations_of[is_with_responder] * 1e6
            for is_with_responder in cpu_seconds
        }
        ratios.append(per_iteration[True] / per_iteration[False])
        without_responder.append(per_iteration[False])
    RECORDER._tasks = tasks_with_responder
    title = (
        "CPU time of a job that can answer stack requests of the sidecar, relative to a job that cannot,"
        " at 100 iterations/s (ratio)"
    )
    notes = [f"job that cannot {statistics.median(without_responder):.1f} µs per iteration"]
    return [Row(title, round(statistics.median(ratios), 3), budget=1.02, notes=notes)]


def lossless() -> list[Row]:
    """Count the lost values of a Stat to which a million values are added per second."""
    import exporter

    stat = exporter.Stat("bench.million", ["mean", "max", "p50", "p99", "histogram"], unit="seconds")
    added, started = 0, time.perf_counter()
    while added < 3_000_000:
        time.sleep(max(started + added / 1e6 - time.perf_counter(), 0))
        for _ in range(1_000):
            stat.add(0.01)
        added += 1_000
    exporter.flush()
    return [
        Row("Lost values of 3 million, added at a million per second", float(added - stat.count), budget=0.0)
    ]


IMPORT = """
import json, collections, dataclasses, datetime, enum, logging
import os, sys, time
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
before, began = resident(), time.process_time()
for name in sys.argv[1:]:
    __import__(name)
print((time.process_time() - began) * 1e3, resident() - before)
"""
IMPORTED_MODULES = ("training", "monitor", "elastic.metrics", "elastic.events", "one_logger")


def imports() -> list[Row]:
    """Measure CPU time and memory of imports from compiled bytecode, in new interpreters."""
    import exporter

    modules = [f"exporter.{name}" for name in IMPORTED_MODULES]
    names = {"ours": [exporter.__name__, *modules], "prometheus_client": ["prometheus_client"]}
    figures: dict[str, list[list[float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {"PYTHONPATH": str(REPOSITORY), "PYTHONPYCACHEPREFIX": bytecode}
        for _ in range(5 if QUICK else 10):
            for name, modules in names.items():
                process = subprocess.run(
                    [sys.executable, "-c", IMPORT, *modules],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                figures[name].append([float(field) for field in process.stdout.split()])
    # The first run compiles.
    times = {name: statistics.median(run[0] for run in runs[1:]) for name, runs in figures.items()}
    sizes = {name: round(statistics.median(run[1] for run in runs[1:]), 1) for name, runs in figures.items()}
    ratio = round(times["ours"] / times["prometheus_client"], 2)
    notes = [f"prometheus_client {times['prometheus_client']:.1f} ms"]
    return [
        Row(
            "CPU time of the import of the API and the compatibility modules, relative to prometheus_client (ratio)",
            ratio,
            budget=1.5,
            notes=notes,
        ),
        Row(
            "Memory of the import of the API and the compatibility modules",
            sizes.pop("ours"),
            "MiB",
            8.0,
            sizes,
        ),
    ]


class Hooks:
    """Hooks of the bridge to plain loops, which can be removed and restored."""

    def __init__(self) -> None:
        import torch
        from torch.optim import optimizer

        import exporter.bridges

        exporter.bridges.install()
        loaders = torch.utils.data.dataloader
        patched = [(loaders._BaseDataLoaderIter, "__next__"), (torch.autograd, "backward")]
        self._patched_functions = [(owner, name, getattr(owner, name)) for owner, name in patched]
        self._registries = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
        self._registered_hooks = [dict(registry) for registry in self._registries]

    def switch(self, *, enabled: bool) -> None:
        """Install the hooks, or restore torch without hooks."""
        for owner, name, function in self._patched_functions:
            setattr(owner, name, function if enabled else function.__wrapped__)
        for registry, hooks in zip(self._registries, self._registered_hooks, strict=True):
            registry.clear()
            registry.update(hooks if enabled else {})


def loop(modules: int) -> None:
    """Train a model with a number of modules in a plain loop, in turns with and without the bridge.

    Prints the median CPU time of a step without the bridge, the median difference of consecutive turns, and the median time of
    `Histogram.observe` between the turns, so that a slow moment of the machine affects all of them.

    All modules but the last are empty, because the steps of a larger model vary by more than the cost of the bridge.
    """
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    empty = [torch.nn.Identity() for _ in range(modules - 1)]
    model = torch.nn.Sequential(*empty, torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = 1_000 if QUICK else 6_000
    data = torch.utils.data.DataLoader(torch.randn(8 * batches, 32, 64), batch_size=8)
    hooks = Hooks()
    observe_timer = ObserveTimer()
    turn_medians: dict[bool, list[float]] = {True: [], False: []}
    step_seconds: list[float] = []
    started, is_bridged = 0.0, True
    for number, batch in enumerate(data):
        if number % TURN_STEPS > 1:  # without the first step after a switch
            step_seconds.append(time.thread_time() - started)
        if number % TURN_STEPS == 0:
            if step_seconds:
                turn_medians[is_bridged].append(statistics.median(step_seconds))
                step_seconds.clear()
            observe_timer.run()
            is_bridged = not is_bridged
            hooks.switch(enabled=is_bridged)
        started = time.thread_time()
        model.train()
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    bare, bridged = (turn_medians[is_bridged][FIRST_TURNS:] for is_bridged in (False, True))
    added = [bridged_step - bare_step for bare_step, bridged_step in zip(bare, bridged, strict=False)]
    print(statistics.median(bare) * 1e6, statistics.median(added) * 1e6, observe_timer.nanoseconds())


class ObserveTimer:
    """CPU time of prometheus_client's `Histogram.observe`, by which the values of rows marked *scaled* are scaled.

    The calls are spread over a measurement, because the speed of a shared machine changes within seconds.
    """

    CALLS = 1_000

    def __init__(self) -> None:
        import prometheus_client

        self._observe = prometheus_client.Histogram("scale", "scale", registry=None).observe
        self._nanoseconds: list[float] = []

    def run(self) -> None:
        """Time some calls."""
        observe = self._observe
        started = time.thread_time()
        for _ in range(self.CALLS):
            observe(0.1)
        self._nanoseconds.append((time.thread_time() - started) / self.CALLS * 1e9)

    def nanoseconds(self) -> float:
        """Return the median time of a call."""
        return statistics.median(self._nanoseconds)


def bridges() -> list[Row]:
    """Measure the CPU time that the bridge to plain loops adds to a step, in separate processes."""
    if not has("torch"):
        return []
    rows = []
    for modules in (1, 200):
        bare_microseconds, added_microseconds, scaled_microseconds, observe_nanoseconds = [], [], [], []
        for _ in range(3 if QUICK else 7):
            process = subprocess.run(
                [sys.executable, __file__, "loop", str(modules), *(["--quick"] if QUICK else [])],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                capture_output=True,
                text=True,
                check=True,
            )
            bare, added, nanoseconds = map(float, process.stdout.split()[-3:])
            bare_microseconds.append(bare)
            added_microseconds.append(added)
            observe_nanoseconds.append(nanoseconds)
            scaled_microseconds.append(added * BUDGET_OBSERVE_NS / nanoseconds)
        peers = {"step without the bridge": round(statistics.median(bare_microseconds), 1)}
        models = f"model of {modules} module{'s' * (modules > 1)}"
        title = f"CPU time that the bridge to plain loops adds to a step, {models} (scaled)"
        notes = [
            f"not scaled {statistics.median(added_microseconds):.1f} µs",
            f"Histogram.observe {statistics.median(observe_nanoseconds):.0f} ns",
        ]
        rows.append(Row(title, round(statistics.median(scaled_microseconds), 1), "µs", 25.0, peers, notes))
    return rows


def main() -> None:
    with feed_directory() as directory:
        os.environ["EXPORTER_FEED_DIR"] = str(directory)
        parts = (
            values,
            compatibility_modules,
            iterations,
            recording_thread,
            stacks,
            lossless,
            imports,
            bridges,
        )
        rows = [row for part in parts for row in part()]
        import exporter

        exporter.shutdown()
        with contextlib.suppress(OSError):
            Path(directory).rmdir()
    report(rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["loop"]:
        loop(int(sys.argv[2]))
    else:
        main()
