"""Training job of two ranks under torchrun that are killed, for the goodput of a whole run."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import exporter
from exporter import training

STEPS, SAVE_EVERY_STEPS = 50, 10
KILLS = {(0, 1, 25), (1, 0, 37)}
"""Attempt, rank and finished steps at which a rank kills itself."""


class Log:
    """Log of a rank: a line of JSON with attempt and time for each event."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._file, self._attempt = path.open("a", buffering=1), attempt

    def write(self, event: str, **fields: Any) -> None:
        record = {"attempt": self._attempt, "at": time.time(), "event": event, **fields}
        self._file.write(json.dumps(record) + "\n")


def start_time_of_process() -> float:
    """Return the start of this process as Unix time."""
    fields_after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    seconds_after_boot = int(fields_after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + seconds_after_boot


def train_and_kill_ranks(directory: str) -> None:
    """Train, save every ten steps and resume from the save. Log steps, kills and the end to `log-<rank>`."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log, saved_file = Log(Path(directory) / f"log-{rank}", attempt), Path(directory) / "saved"
    log.write("start", start=start_time_of_process())
    with training.application():
        with training.distributed_init():
            # A separate store per attempt: in torchrun's store, gloo finds addresses of the previous attempt.
            store = f"file://{directory}/store-{attempt}"
            world_size = int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        with training.checkpoint_load():
            first_step = int(saved_file.read_text()) if saved_file.exists() else 0
            dist.barrier()  # no rank saves before all have read
        with training.training_loop(train_iterations_start=first_step):
            log.write("loop")
            for step in range(first_step, STEPS):
                _train_step(step, rank, log)
                if (step + 1) % SAVE_EVERY_STEPS == 0:
                    _save(step + 1, rank, saved_file)
                exporter.flush()
                if (attempt, rank, step + 1) in KILLS:
                    time.sleep(0.2)  # by then, the other rank has started the next step
                    log.write("killed")
                    os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        dist.destroy_process_group()
    log.write("end")


def _train_step(step: int, rank: int, log: Log) -> None:
    start_seconds = time.monotonic()
    try:
        with training.training_iteration():
            time.sleep(0.02 + 0.01 * rank)
            with training.phase("grad_sync"):
                dist.all_reduce(torch.ones(1))
    except BaseException:
        log.write("failed", seconds=time.monotonic() - start_seconds)
        raise
    log.write("step", step=step, seconds=time.monotonic() - start_seconds)


def _save(finished_steps: int, rank: int, saved_file: Path) -> None:
    with training.checkpoint_save(global_step=finished_steps):
        if rank == 0:
            new_file = saved_file.with_suffix(".new")
            new_file.write_text(str(finished_steps))
            new_file.rename(saved_file)
        dist.barrier()
