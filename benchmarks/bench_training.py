"""Measures what training telemetry costs a job: ours beside nv-one-logger's own context managers, and a real PyTorch loop.

Peers run interleaved with ours in the same process: the bare loop, and nv-one-logger where it is installed. "Processor"
times are of the calling thread alone, so that other programs on the machine count little. Prints one JSON document.

    python benchmarks/bench_training.py [--quick]
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from report import report

# In shared memory where there is some, as the default feed directory is.
SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
os.environ["EXPORTER_FEED_DIR"] = FEED = tempfile.mkdtemp(prefix="exporter-bench-", dir=SHARED)

import exporter  # noqa: E402  # it reads the environment above
from exporter import training  # noqa: E402  # likewise
from exporter.training import (  # noqa: E402  # likewise
    buffers,  # likewise
    data_loading,
    model_backward,
    model_forward,
    optimizer_update,
    record,
    training_iteration,
)
from exporter.training.recording import TRAINING  # noqa: E402  # likewise

QUICK = "--quick" in sys.argv
ROUNDS = 9 if QUICK else 25
LOOPS = 500
Step = Callable[[], None]


def full_iteration() -> None:
    """The budget's: an iteration, four phases, three numbers."""
    with training_iteration():
        with data_loading():
            pass
        with model_forward():
            pass
        with model_backward():
            pass
        with optimizer_update():
            pass
        record(loss=0.5, tokens=4096, grad_norm=1.25)


def bare_iteration() -> None:
    """The iteration's block alone, as nv-one-logger has it."""
    with training_iteration():
        pass


def nothing() -> None:
    """The call that the others have too."""


def peer() -> Step | None:
    """Give nv-one-logger's iteration, in its cheapest setting; None where it is not installed."""
    if importlib.util.find_spec("nv_one_logger") is None:
        return None
    from nv_one_logger.api.config import OneLoggerConfig
    from nv_one_logger.training_telemetry.api.callbacks import on_app_start, on_train_start
    from nv_one_logger.training_telemetry.api.config import TrainingTelemetryConfig
    from nv_one_logger.training_telemetry.api.context import training_iteration as theirs
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
        with theirs():
            pass

    return iteration


def microseconds(step: Step, times: int, clock: Callable[[], float]) -> float:
    """Time one step in a plain loop."""
    began = clock()
    for _ in range(times):
        step()
    return (clock() - began) / times * 1e6


def marking() -> dict[str, object]:
    """Compare one iteration of each contender, interleaved; medians of rounds. What is marked is interpreted between."""
    contenders: dict[str, Step] = {
        "empty call": nothing,
        "ours: iteration, 4 phases, 3 numbers": full_iteration,
        "ours: iteration": bare_iteration,
    }
    theirs = peer()
    if theirs is not None:
        contenders["nv-one-logger: iteration"] = theirs
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, step in contenders.items():
            rounds[name].append(microseconds(step, LOOPS, time.thread_time))
        exporter.flush()
    medians = {name: statistics.median(times) for name, times in rounds.items()}
    result: dict[str, object] = {
        "microseconds of processor time": {name: round(median, 3) for name, median in medians.items()}
    }
    if theirs is not None:
        ours = medians["ours: iteration"] - medians["empty call"]
        result["nv-one-logger's iteration as a multiple of ours"] = round(
            (medians["nv-one-logger: iteration"] - medians["empty call"]) / ours, 1
        )
    return result


def million() -> dict[str, object]:
    """Run a million full iterations without a body, everything on; is it flat, is anything lost, what does it keep?"""
    total, part = (200_000, 20_000) if QUICK else (1_000_000, 100_000)
    microseconds(full_iteration, part, time.perf_counter)
    exporter.flush()
    before, steps = resident_mib(), steps_counted()
    wall, processor = [], []
    for _ in range(total // part):
        began = time.thread_time()
        wall.append(microseconds(full_iteration, part, time.perf_counter))
        processor.append((time.thread_time() - began) / part * 1e6)
    grown = resident_mib() - before
    exporter.flush()
    return {
        "iterations": total,
        "counted": round(steps_counted() - steps),
        "microseconds by part": [round(each, 2) for each in wall],
        "of processor time, its own interpreting included": [round(each, 2) for each in processor],
        "last part as a multiple of the first": round(processor[-1] / processor[0], 2),
        "MiB grown": round(grown, 1),
    }


def interpreting() -> dict[str, object]:
    """Measure what the recording thread spends on what the job has marked, at once and mark by mark."""
    buffers.limit = 1 << 40
    alike, each = [], []
    for _ in range(ROUNDS):
        microseconds(full_iteration, 1000, time.thread_time)
        began = time.thread_time()
        TRAINING.drain()
        alike.append((time.thread_time() - began) / 1000 * 1e6)
        for number in range(300):
            with training_iteration(), data_loading():
                pass
            with training.phase("compile" if number % 2 else "logging"):  # no two alike
                record(loss=0.5)
        began = time.thread_time()
        TRAINING.drain()
        each.append((time.thread_time() - began) / (300 * 7) * 1e6)
    buffers.raise_misuse(on=False)
    return {
        "microseconds per iteration of 13 marks, alike": round(statistics.median(alike), 2),
        "microseconds per mark, no two iterations alike": round(statistics.median(each), 2),
    }


def share() -> dict[str, object]:
    """Run 100 iterations a second; the recording thread's share of a core, the feed included."""
    seconds = 5 if QUICK else 20
    exporter.flush()
    began, used = time.perf_counter(), thread_seconds("exporter-recording")
    number = 0
    while time.perf_counter() - began < seconds:
        full_iteration()
        number += 1
        time.sleep(max(began + number * 0.01 - time.perf_counter(), 0))
    took = time.perf_counter() - began
    return {
        "iterations per second": round(number / took),
        "recording thread, percent of a core": round(
            (thread_seconds("exporter-recording") - used) / took * 100, 3
        ),
    }


def transformer() -> dict[str, object]:
    """Train a small transformer on the CPU, everything on against everything off, interleaved."""
    if importlib.util.find_spec("torch") is None:
        return {"skipped": "torch is not installed"}
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 64), torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(64, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randint(0, 256, (64, 8, 33))

    def train(number: int, telemetry: dict[str, Any]) -> None:
        """One step; the same code on and off, so that only telemetry differs."""
        with telemetry["iteration"]():
            with telemetry["data"]():
                batch = data[number % 64]
            with telemetry["forward"]():
                logits = model(batch[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            with telemetry["zero"]():
                optimizer.zero_grad()
            with telemetry["backward"]():
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with telemetry["optimizer"]():
                optimizer.step()
            telemetry["record"](
                loss=loss, grad_norm=norm, tokens=batch.numel(), samples=8, learning_rate=1e-3
            )

    blocks = ("iteration", "data", "forward", "zero", "backward", "optimizer")
    off: dict[str, Any] = {**dict.fromkeys(blocks, nullcontext), "record": lambda **_: None}
    on: dict[str, Any] = {
        "iteration": training_iteration,
        "data": data_loading,
        "forward": model_forward,
        "zero": training.zero_grad,
        "backward": model_backward,
        "optimizer": optimizer_update,
        "record": record,
    }
    for number in range(20):
        train(number, off)
        train(number, on)
    times: dict[str, list[float]] = {"off": [], "on": []}
    processor: dict[str, list[float]] = {"off": [], "on": []}
    for number in range(150 if QUICK else 1500):
        pair = (("off", off), ("on", on))
        for name, telemetry in pair if number % 2 else pair[::-1]:
            began, used = time.perf_counter(), time.thread_time()
            train(number, telemetry)
            times[name].append(time.perf_counter() - began)
            processor[name].append(time.thread_time() - used)
    medians = {name: statistics.median(each) for name, each in times.items()}
    halves = {
        name: statistics.median(each[::2]) / statistics.median(each[1::2]) for name, each in times.items()
    }
    return {
        "milliseconds of a step": {name: round(median * 1e3, 3) for name, median in medians.items()},
        "on as a ratio of off": round(medians["on"] / medians["off"], 4),
        "the same of processor time": round(
            statistics.median(processor["on"]) / statistics.median(processor["off"]), 4
        ),
        "noise: one half of the same steps as a ratio of the other": {
            name: round(ratio, 4) for name, ratio in halves.items()
        },
    }


def steps_counted() -> float:
    """What the recording has counted by now."""
    found = [each.sum for each in TRAINING.series() if each.definition.name == "training.steps"]
    return sum(value or 0.0 for value in found)


def resident_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def thread_seconds(name: str) -> float:
    """Processor time of one of this process's threads, from the kernel (nanosecond resolution)."""
    for thread in threading.enumerate():
        if thread.name == name:
            fields = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii").split()
            return int(fields[0]) / 1e9
    raise RuntimeError(f"no thread {name}")


if __name__ == "__main__":
    report(
        {
            "one iteration": marking(),
            "a million iterations": million(),
            "interpreting": interpreting(),
            "100 iterations a second": share(),
            "a small transformer on the CPU": transformer(),
        }
    )
    exporter.shutdown()
    shutil.rmtree(FEED)
