"""Command `python -m dashboards.incidents.job PLAN`: training loop of a rank, with sleeps in place of computations.

The process waits for a line on standard input before the training, because the machine description of the exporter contains
the process id. The process exits when standard input closes. The ranks of a run compute the same schedule of steps from the
wall clock and the plan, so they stay synchronous without collectives. A late step delays the later steps of its rank.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import sys
import time
from pathlib import Path
from typing import Any

from dashboards.incidents import TIMES, RunScenario
from exporter import log, training

COMPUTE_SECONDS, DATA_SECONDS, SYNC_SECONDS = 1.0, 0.03, 0.05
FORWARD_SHARE, BACKWARD_SHARE, OPTIMIZER_SHARE = 0.31, 0.6, 0.09  # of the compute time
STRAGGLER_RANK = 2  # the rank on the hot GPU
STRAGGLER_FACTOR = 1.45
HANGING_RANK = 1
SLOW_DATA_SECONDS = 1.55
SAVE_INTERVAL_SECONDS, SAVE_SECONDS, VALIDATION_SECONDS = 120.0, 2.0, 10.0
VALIDATION_STARTS = (300.0, 1100.0)
STEPS_TARGET = 5000
SAMPLES_PER_STEP, TOKENS_PER_STEP = 8, 16_384  # of a rank
FLOPS_PER_TOKEN = 6 * 2.6e9


class ScenarioEnded(Exception):  # noqa: N818  # the end of the scenario is not an error
    """End of the scenario: standard input is closed."""


def wait(seconds: float) -> None:
    """Sleep for a duration. Raises ScenarioEnded if standard input is closed or has further input."""
    if select.select([sys.stdin], [], [], max(0.0, seconds))[0]:
        raise ScenarioEnded


class Rank:
    """Training loop of a rank.

    Args:
        plan: Mapping with the keys

            - `scenario`: name of a RunScenario
            - `rank`: rank of the process
            - `scenario_start`: Unix time
            - `first_step_seconds`: start of the first step, in seconds since the start of the scenario
            - `completed_steps`: number of steps before the first step; not 0 after a restart
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._scenario = RunScenario(plan["scenario"])
        self._rank: int = plan["rank"]
        self._scenario_start: float = plan["scenario_start"]
        self._first_step_seconds: float = plan["first_step_seconds"]
        self._step: int = plan["completed_steps"]
        self._random = random.Random(f"{plan['scenario']} {plan['rank']} {plan['completed_steps']}")  # noqa: S311  # the values are no secrets

    def run(self) -> None:
        """Initialize the job and train until the end of the scenario."""
        training.describe(
            job_name="pretrain",
            framework="torch",
            model="gpt-2.6b",
            precision="bf16",
            flops_method="6N",
            flops_per_token=FLOPS_PER_TOKEN,
            peak_flops=989e12,
            step_target=STEPS_TARGET,
        )
        with training.application():
            with training.model_init():
                wait(4.0)
            if self._step:
                with training.checkpoint_load():
                    wait(3.0)
            with training.dataloader_init():
                wait(self._scenario_start + self._first_step_seconds - time.time())
            with training.training_loop(train_iterations_start=self._step):
                self._train()

    def _train(self) -> None:
        step_start = self._scenario_start + self._first_step_seconds
        last_save_interval = completed_validations = 0
        while not (
            self._scenario is RunScenario.FINISHED and self._is_after(step_start, TIMES.finished_run_end)
        ):
            self._step += 1
            step_start = self._iteration(step_start)
            elapsed_seconds = step_start - self._scenario_start
            save_interval = int(elapsed_seconds // SAVE_INTERVAL_SECONDS)
            if save_interval > last_save_interval:
                last_save_interval = save_interval
                step_start += self._save(
                    fails=self._scenario is RunScenario.FAILING_SAVES
                    and self._is_after(step_start, TIMES.incident)
                )
            due_validations = sum(start_seconds <= elapsed_seconds for start_seconds in VALIDATION_STARTS)
            if due_validations > completed_validations:
                completed_validations += 1
                step_start += self._validate()

    def _is_after(self, step_start: float, offset_seconds: float) -> bool:
        """Return True if a step starts at least *offset_seconds* after the start of the scenario."""
        return step_start - self._scenario_start >= offset_seconds

    def _iteration(self, step_start: float) -> float:
        """Run a step that starts at a Unix time, and return the Unix time at which all ranks end the step."""
        incidents_began = self._is_after(step_start, TIMES.incident)
        compute_seconds = slowest_compute_seconds = COMPUTE_SECONDS
        if self._scenario is RunScenario.STRAGGLER and incidents_began:
            slowest_compute_seconds *= STRAGGLER_FACTOR
            compute_seconds *= STRAGGLER_FACTOR if self._rank == STRAGGLER_RANK else 1.0
        compute_seconds *= self._random.uniform(0.97, 1.0)
        data_seconds = (
            SLOW_DATA_SECONDS
            if self._scenario is RunScenario.LOADER_STALL and incidents_began
            else DATA_SECONDS
        )
        step_end = step_start + data_seconds + slowest_compute_seconds + SYNC_SECONDS
        is_nan = (
            self._scenario is RunScenario.NAN_LOSS
            and incidents_began
            and not self._is_after(step_start, TIMES.nan_end)
        )
        with training.training_iteration():
            with training.data_loading():
                wait(step_start + data_seconds - time.time())
            with training.model_forward():
                if self._scenario is RunScenario.HANG and self._rank == HANGING_RANK and incidents_began:
                    wait(TIMES.end)
                wait(compute_seconds * FORWARD_SHARE)
            with training.model_backward():
                wait(compute_seconds * BACKWARD_SHARE)
            with training.phase("grad_sync"):
                if self._scenario is RunScenario.HANG and incidents_began:
                    wait(TIMES.end)
                wait(step_end - compute_seconds * OPTIMIZER_SHARE - time.time())
            with training.optimizer_update():
                wait(step_end - time.time())
            training.record(
                loss=math.nan if is_nan else self._loss(),
                grad_norm=math.nan if is_nan else self._gradient_norm(),
                learning_rate=3e-4 * min(1.0, self._step / 200),
                samples=SAMPLES_PER_STEP,
                tokens=TOKENS_PER_STEP,
            )
        return max(step_end, time.time())

    def _loss(self) -> float:
        return 1.9 + 6.5 / (1.0 + self._step / 60) + self._random.gauss(0.0, 0.02)

    def _gradient_norm(self) -> float:
        return 0.4 + 2.0 / (1.0 + self._step / 50) + self._random.random() * 0.1

    def _save(self, *, fails: bool) -> float:
        """Save a checkpoint, which fails if *fails* is true, and return the planned duration in seconds."""
        path = Path("/dev/full" if fails else os.devnull)
        try:
            with training.checkpoint_save(self._step):
                wait(SAVE_SECONDS)
                path.write_text(str(self._step), encoding="ascii")
        except OSError as error:
            log("checkpoint.failed", str(error), severity="error", step=self._step)
        return SAVE_SECONDS

    def _validate(self) -> float:
        """Validate, and return the planned duration in seconds."""
        with training.validation_loop():
            for _ in range(5):
                with training.validation_iteration():
                    wait(VALIDATION_SECONDS / 5)
                    training.record(loss=self._loss() + 0.1, mode="validation")
        return VALIDATION_SECONDS


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    message = sys.stdin.readline()
    if message:
        try:
            Rank(plan | json.loads(message)).run()
        except ScenarioEnded:
            sys.exit(0)
