"""Command `python -m dashboards.incidents.job PLAN`: training loop of a rank, with sleeps in place of computations.

The process waits for a line on standard input before it trains: the machine description of the exporter contains the process
id, so the process must exist before the exporter starts. When standard input closes, the process exits. The ranks of a run
derive the times of the steps from the wall clock and the plan, so they need no collectives. A late step delays the later steps
of its rank.
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

from dashboards.incidents import TIMES, Incident
from exporter import log, training

COMPUTE_SECONDS, DATA_SECONDS, SYNC_SECONDS = 1.0, 0.03, 0.05
FORWARD_SHARE, BACKWARD_SHARE, OPTIMIZER_SHARE = 0.31, 0.6, 0.09  # of the compute time
STRAGGLER_RANK = 2  # the rank on the hot GPU
STRAGGLER_FACTOR = 1.45
HANGING_RANK = 1
HANG_SECONDS = TIMES.end  # longer than the rest of the scenario
SLOW_DATA_SECONDS = 1.55
SAVE_INTERVAL_SECONDS, SAVE_SECONDS, VALIDATION_SECONDS = 120.0, 2.0, 10.0
VALIDATION_STARTS = (300.0, 1100.0)
STEP_TARGET = 5000
SAMPLES_PER_STEP, TOKENS_PER_STEP = 8, 16_384  # per rank
FLOPS_PER_TOKEN = 6 * 2.6e9


class ScenarioEnded(Exception):  # noqa: N818  # the end of the scenario is not an error
    """End of the scenario: standard input is closed, or has further input."""


def wait(seconds: float) -> None:
    """Sleep for a duration. Raises ScenarioEnded if standard input is closed or has further input."""
    if select.select([sys.stdin], [], [], max(0.0, seconds))[0]:
        raise ScenarioEnded


class Rank:
    """Training loop of a rank.

    Args:
        plan: Mapping with the keys

            - `incident`: value of an Incident
            - `rank`: rank of the process
            - `scenario_start`: Unix time
            - `first_step_seconds`: start of the first step, in seconds since the start of the scenario
            - `completed_steps`: number of steps before the first step; not 0 after a restart
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._incident = Incident(plan["incident"])
        self._rank: int = plan["rank"]
        self._scenario_start: float = plan["scenario_start"]
        self._first_step_seconds: float = plan["first_step_seconds"]
        self._step: int = plan["completed_steps"]
        self._random = random.Random(f"{plan['incident']} {plan['rank']} {plan['completed_steps']}")  # noqa: S311  # the values are no secrets

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
            step_target=STEP_TARGET,
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
        last_save_index = int(self._first_step_seconds // SAVE_INTERVAL_SECONDS)
        completed_validations = self._due_validations(self._first_step_seconds)
        while not (
            self._incident is Incident.FINISHED and self._is_after(step_start, TIMES.finished_run_end)
        ):
            self._step += 1
            step_start = self._iteration(step_start)
            elapsed_seconds = step_start - self._scenario_start
            save_interval = int(elapsed_seconds // SAVE_INTERVAL_SECONDS)
            if save_interval > last_save_index:
                last_save_index = save_interval
                step_start += self._save(
                    fails=self._incident is Incident.FAILING_SAVES
                    and self._is_after(step_start, TIMES.incident_start)
                )
            if self._due_validations(elapsed_seconds) > completed_validations:
                completed_validations += 1
                step_start += self._validate()

    @staticmethod
    def _due_validations(elapsed_seconds: float) -> int:
        """Return the number of validations that are due at a time since the start of the scenario."""
        return sum(start_seconds <= elapsed_seconds for start_seconds in VALIDATION_STARTS)

    def _is_after(self, step_start: float, offset_seconds: float) -> bool:
        """Return True if a step starts at least *offset_seconds* after the start of the scenario."""
        return step_start - self._scenario_start >= offset_seconds

    def _iteration(self, step_start: float) -> float:
        """Run a step that starts at a Unix time.

        Returns the planned end of the step in Unix time, or the current time if this rank is late.
        """
        is_after_incident_start = self._is_after(step_start, TIMES.incident_start)
        compute_seconds = slowest_compute_seconds = COMPUTE_SECONDS
        if self._incident is Incident.STRAGGLER and is_after_incident_start:
            slowest_compute_seconds *= STRAGGLER_FACTOR
            compute_seconds *= STRAGGLER_FACTOR if self._rank == STRAGGLER_RANK else 1.0
        compute_seconds *= self._random.uniform(0.97, 1.0)
        data_seconds = (
            SLOW_DATA_SECONDS
            if self._incident is Incident.LOADER_STALL and is_after_incident_start
            else DATA_SECONDS
        )
        step_end = step_start + data_seconds + slowest_compute_seconds + SYNC_SECONDS
        is_nan = (
            self._incident is Incident.NAN_LOSS
            and is_after_incident_start
            and not self._is_after(step_start, TIMES.nan_end)
        )
        with training.training_iteration():
            with training.data_loading():
                wait(step_start + data_seconds - time.time())
            with training.model_forward():
                if self._incident is Incident.HANG and self._rank == HANGING_RANK and is_after_incident_start:
                    wait(HANG_SECONDS)
                wait(compute_seconds * FORWARD_SHARE)
            with training.model_backward():
                wait(compute_seconds * BACKWARD_SHARE)
            with training.phase("grad_sync"):
                if self._incident is Incident.HANG and is_after_incident_start:
                    wait(HANG_SECONDS)
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
    start_message = sys.stdin.readline()
    if start_message:
        try:
            Rank(plan | json.loads(start_message)).run()
        except ScenarioEnded:
            sys.exit(0)
