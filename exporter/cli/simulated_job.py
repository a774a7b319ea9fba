"""Training job of the demo: two synchronous ranks, and a launcher that restarts the ranks like torchrun.

The recorded values, except the memory, are functions of the rank and the step: a restarted rank records the same values again. A rank
exits when its standard input is closed. The rank writes its process id into a file, by which the replayed machine assigns a GPU to
the rank.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn
from urllib.parse import urlsplit

from exporter import Aggregation, Stat, configure, training
from exporter.cli.child import own_command

RANKS = 2
"""Number of ranks of the job."""
CYCLE_STEPS = 200
"""Period of the simulated incidents: about a minute at speed 1."""
PAUSE_STEP = 60
"""Step of a cycle in which all ranks wait for data."""
NONFINITE_STEP = 90
"""Step of a cycle whose loss is NaN."""
VALIDATION_STEP = 110
"""Step of a cycle that a validation follows."""
CRASH_STEP = 140
"""Step of a cycle in which the slow rank crashes."""
PAUSE_SECONDS = 12.0
"""Duration of the wait for data at speed 1."""
RESTART_SECONDS = 3.0
"""Time between a crash and the restart of the ranks at speed 1."""
WINDOW_SECONDS = 2.0
"""Length of the Stats' windows at speed 1."""
MEAN_STEP_SECONDS = 0.22
"""Mean duration of a step at speed 1, without the incidents."""
SLOW_RANK = 1
"""Rank whose steps are slower than those of the other rank."""
CHECKPOINT_STEPS = 25
"""Number of steps between two checkpoints."""
TARGET_STEPS = 100_000
"""Number of steps that the job aims at."""
FLOPS_PER_TOKEN = 6 * 1.3e9
"""Forward and backward pass of a model with 1.3 billion parameters."""
HARDWARE_FLOPS_PER_TOKEN = 8 * 1.3e9
"""The same with a second forward pass, for a job that recomputes the activations."""
# Shares of the phases in the compute time of a step.
DATA_RATIO = 0.05
FORWARD_RATIO = 0.28
BACKWARD_RATIO = 0.52
OPTIMIZER_RATIO = 0.15
STOP_SECONDS = 5.0
"""Maximum wait of the launcher for the exit of the ranks at the end of the demo."""


def crashes(rank: int, step: int, attempt: int) -> bool:
    """Return True if the rank is killed at this step. The step is one cycle later after each restart."""
    return rank == SLOW_RANK and step == CRASH_STEP + attempt * CYCLE_STEPS


def pid_file(directory: Path, rank: int) -> Path:
    """Return the path of the file with the process id of a rank, which the replayed machine reads."""
    return directory / f"pid-{rank}"


class SimulatedRank:
    """Training loop of a rank. Its checkpoint is a file with the number of completed steps."""

    def __init__(self, settings: SimpleNamespace) -> None:
        self._settings = settings
        directory = Path(settings.directory)
        self._checkpoint = directory / f"checkpoint-{settings.rank}"
        _replace(pid_file(directory, settings.rank), str(os.getpid()))
        window = WINDOW_SECONDS / settings.speed
        self._step_time = Stat(
            "demo.step.duration",
            {Aggregation.MEAN, Aggregation.P50, Aggregation.P99, Aggregation.HISTOGRAM},
            window_seconds=window,
            unit="seconds",
            buckets=(0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0),
            help="Time of one step of the simulated job.",
        )
        self._loss = Stat(
            "demo.loss",
            {Aggregation.VALUE, Aggregation.MEAN},
            window_seconds=window,
            help="Loss of the simulated job.",
        )
        self._memory = Stat.passive(
            "demo.memory.resident",
            _resident_bytes,
            window_seconds=5.0,
            unit="bytes",
            help="Memory of a process of the simulated job.",
        )
        training.describe(
            job_name="demo",
            framework="simulated",
            model="demo-1.3b",
            precision="bf16",
            flops_method="6N",
            flops_per_token=FLOPS_PER_TOKEN,
            hardware_flops_per_token=HARDWARE_FLOPS_PER_TOKEN,
            step_target=TARGET_STEPS,
            world_size=RANKS,
        )

    def run(self) -> None:
        """Initialize and train until standard input is closed."""
        preparations = (
            *((training.distributed_init, 0.4), (training.model_init, 0.8)),
            *((training.optimizer_init, 0.1), (training.dataloader_init, 0.3)),
        )
        with training.application():
            for phase, seconds in preparations:
                with phase():
                    self._wait(seconds)
            completed_steps = 0
            if self._checkpoint.exists():
                with training.checkpoint_load():
                    self._wait(0.6)
                    completed_steps = int(self._checkpoint.read_text())
            with training.training_loop(train_iterations_start=completed_steps):
                for step in itertools.count(completed_steps + 1):
                    self._step(step)

    def _step(self, step: int) -> None:
        """Simulate a step, with the incidents of its position in the cycle, and the validation and the save after it."""
        cycle_step, rank = step % CYCLE_STEPS, self._settings.rank
        own_seconds = self._compute_seconds(rank, step)
        # The ranks are synchronous, so a step is as slow as the slowest rank.
        slowest_seconds = max(self._compute_seconds(any_rank, step) for any_rank in range(RANKS))
        with training.data_loading():
            self._wait(own_seconds * DATA_RATIO + (PAUSE_SECONDS if cycle_step == PAUSE_STEP else 0.0))
        with training.training_iteration():
            if crashes(rank, step, self._settings.attempt):
                os.kill(os.getpid(), signal.SIGKILL)
            with training.model_forward():
                self._wait(own_seconds * FORWARD_RATIO)
            with training.model_backward():
                self._wait(own_seconds * BACKWARD_RATIO)
            with training.phase("grad_sync"):
                self._wait(slowest_seconds - own_seconds)
            with training.optimizer_update():
                self._wait(own_seconds * OPTIMIZER_RATIO)
            loss = 1.8 + 8.0 / (1.0 + step / 30.0) + self._random("loss", rank, step).gauss(0.0, 0.05)
            gradient = self._random("gradient", 0, step).gauss(0.0, 0.1)
            decay = 0.1 + 0.45 * (1.0 + math.cos(math.pi * step / TARGET_STEPS))
            training.record(
                loss=math.nan if cycle_step == NONFINITE_STEP else loss,
                grad_norm=0.6 + 2.0 / (1.0 + step / 50.0) + abs(gradient),
                learning_rate=3e-4 * min(step / 200, 1.0) * decay,
                samples=4,
                tokens=8192 - self._random("tokens", rank, step).randrange(512),  # packed unevenly
            )
        self._step_time.add(slowest_seconds)
        self._loss.add(loss)
        if cycle_step == VALIDATION_STEP:
            with training.validation_loop():
                for _ in range(8):
                    with training.validation_iteration():
                        self._wait(0.15)
        if step % CHECKPOINT_STEPS == 0:
            with training.checkpoint_save(step):
                self._wait(0.3)
                _replace(self._checkpoint, str(step))

    def _compute_seconds(self, rank: int, step: int) -> float:
        """Return the compute time of a rank in a step: about 0.19 s, 0.21 s on the slow rank, 2.5 times as long in 3 % of steps."""
        generator = self._random("step", rank, step)
        slowdown = 2.5 if generator.random() < 0.03 else 1.0
        mean_seconds = 0.21 if rank == SLOW_RANK else 0.19
        return mean_seconds * generator.lognormvariate(0.0, 0.08) * slowdown

    def _random(self, purpose: str, rank: int, step: int) -> random.Random:
        """Return a generator that is seeded with the purpose, the rank and the step."""
        return random.Random(f"{purpose} {rank} {step}")  # noqa: S311  # a simulation needs no secure random numbers

    def _wait(self, seconds: float) -> None:
        """Wait for simulated seconds. At the end of the demo, exit the process."""
        if select.select([sys.stdin], [], [], seconds / self._settings.speed)[0]:
            sys.exit()


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _resident_bytes() -> int:
    """Return the resident memory of this process, the second field of `statm`."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Launcher:
    """Launcher that starts all ranks and restarts them after a crash, until a signal or the end of the demo."""

    def __init__(self, settings: SimpleNamespace) -> None:
        self._settings = settings
        self._is_ended = False
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signal_number, self._end)

    def run(self) -> None:
        """Run the ranks until a signal, or until the parent process ends. Print the introduction once the sidecar listens."""
        parent = os.getppid()
        attempt, processes, is_announced = 0, self._start(0), False
        while not self._is_ended and os.getppid() == parent:
            if not is_announced and self._is_sidecar_listening():
                is_announced = True
                with contextlib.suppress(OSError):  # standard output is closed
                    print(self._introduction(), flush=True)
            exited_process = next((process for process in processes if process.poll() is not None), None)
            if exited_process is not None:
                delay = RESTART_SECONDS / self._settings.speed
                message = f"exporter: rank {processes.index(exited_process)} exited; all ranks restart in {delay:g} s"
                print(message, file=sys.stderr, flush=True)
                self._stop(processes, 0.0)
                restart_time = time.monotonic() + delay
                while not self._is_ended and time.monotonic() < restart_time:
                    time.sleep(0.05)
                attempt += 1
                processes = self._start(attempt)
            time.sleep(0.05)
        self._stop(processes, STOP_SECONDS)

    def _end(self, _signal_number: int, _frame: object) -> None:
        self._is_ended = True

    def _start(self, attempt: int) -> list[subprocess.Popen[bytes]]:
        """Start the ranks. Standard input of a rank is a pipe from this process, which the kernel closes if this process ends."""
        processes = []
        for rank in range(RANKS):
            rank_settings = json.dumps(vars(self._settings) | {"attempt": attempt, "rank": rank})
            command = own_command("-m", "exporter.cli.simulated_job", rank_settings)
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | environment))
        return processes

    def _stop(self, processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
        """Request the exit of the ranks, and kill the ranks that still run after *seconds*. With 0 seconds, kill the ranks at once."""
        deadline = time.monotonic() + seconds
        for process in processes:
            if process.stdin is not None and seconds:
                process.stdin.close()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()  # without effect on a reaped rank
            process.wait()

    def _is_sidecar_listening(self) -> bool:
        """Return True if the sidecar accepts connections."""
        address = urlsplit(self._settings.url)
        with contextlib.suppress(OSError):
            socket.create_connection((address.hostname, address.port or 0), timeout=0.5).close()
            return True
        return False

    def _introduction(self) -> str:
        """Return the text with the addresses, and with the times of the incidents of the first cycle."""
        settings = self._settings
        step, pause = MEAN_STEP_SECONDS / settings.speed, PAUSE_SECONDS / settings.speed
        metrics = f"{settings.url}/metrics"
        curl = f"curl -s{'k' if metrics.startswith('https') else ''} {metrics}"
        prices = "Prices and carbon intensity are examples. " if settings.has_example_prices else ""
        gpus = f"\n  {curl} | grep '^gpu_'        # GPUs of the replayed machine {settings.replay}"
        return f"""
A simulated job of {RANKS} ranks. Its status page:

  {settings.url}/

and its metrics, for Prometheus:

  {metrics}

  {curl} | grep '^training_'   # steps, phases, goodput
  {curl} | grep '^demo_'       # Stats of the job{gpus if settings.replay else ""}

About {PAUSE_STEP * step:.0f} s after the start all ranks wait {pause:.0f} s for data: window gauges are absent, totals remain.
About {NONFINITE_STEP * step + pause:.0f} s after the start a loss is NaN: the NaN is counted and excluded from the loss.
About {CRASH_STEP * step + pause:.0f} s after the start rank {SLOW_RANK} is killed; all ranks restart, and {(CRASH_STEP - 1) % CHECKPOINT_STEPS} steps are lost.
Then the cycle repeats. {prices}Ctrl-C ends the demo.
"""


def main(arguments: Sequence[str]) -> int:
    """Run a rank, or the launcher if the settings name no rank, until the demo ends. The argument is the settings as JSON."""
    settings = SimpleNamespace(**json.loads(arguments[0]))
    if not hasattr(settings, "rank"):
        Launcher(settings).run()
        return 0
    # The launcher handles Ctrl-C; SIGTERM ends the rank normally.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_normally)
    configure(rank=settings.rank)
    SimulatedRank(settings).run()
    return 0


def _exit_normally(signal_number: int, _frame: object) -> NoReturn:
    sys.exit(128 + signal_number)
