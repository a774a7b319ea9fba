"""Command `python -m dashboards.incidents.job PLAN`: training loop of a rank, with sleeps in place of computations.

The process waits for a line on standard input before the training, because the machine description of the exporter contains
the process id. The process exits when standard input closes. The times of all steps depend only on the wall clock and the
plan: the ranks are synchronous without collectives.
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

STEP_SECONDS, DATA_SECONDS, SYNC_SECONDS = 1.0, 0.03, 0.05
STRAGGLER_FACTOR = 1.45
SLOW_DATA_SECONDS = 1.55
SAVE_INTERVAL_SECONDS, SAVE_SECONDS, VALIDATION_SECONDS = 120.0, 2.0, 10.0
VALIDATION_STARTS = (300.0, 1100.0)
STEPS_TARGET = 5000
SAMPLES, TOKENS = 8, 16_384
FLOPS_PER_TOKEN = 6 * 2.6e9


class ScenarioEnded(Exception):  # noqa: N818  # the end of the scenario is not an error
    """End of the scenario: standard input is closed."""


def wait(seconds: float) -> None:
    """Sleep for a duration, and raise ScenarioEnded if standard input closes."""
    if select.select([sys.stdin], [], [], max(0.0, seconds))[0]:
        raise ScenarioEnded


class Rank:
    """Training loop of a rank.

    Args:
        plan: Scenario and rank, and from standard input the start of the scenario, and the time and the number of the first step.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._scenario = RunScenario(plan["scenario"])
        self._rank: int = plan["rank"]
        self._scenario_start: float = plan["start"]
        self._first_step_seconds: float = plan["first"]  # since the start of the scenario
        self._step: int = plan["step"]
        self._random = random.Random(f"{plan['scenario']} {plan['rank']} {plan['step']}")  # noqa: S311  # the values are no secrets

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
        step_start, completed_saves, validations = self._scenario_start + self._first_step_seconds, 0, 0
        while not (
            self._scenario is RunScenario.FINISHED and self._has_reached(step_start, TIMES.finished_run_end)
        ):
            self._step += 1
            step_start = self._iteration(step_start)
            elapsed_seconds = step_start - self._scenario_start
            if elapsed_seconds // SAVE_INTERVAL_SECONDS > completed_saves:
                completed_saves = int(elapsed_seconds // SAVE_INTERVAL_SECONDS)
                step_start += self._save(
                    failing=self._scenario is RunScenario.FAILING_SAVES and self._has_reached(step_start)
                )
            if validations < len(VALIDATION_STARTS) and elapsed_seconds >= VALIDATION_STARTS[validations]:
                validations += 1
                step_start += self._validate()

    def _has_reached(self, step_start: float, seconds: float = TIMES.incident) -> bool:
        return step_start - self._scenario_start >= seconds

    def _iteration(self, step_start: float) -> float:
        """Run a step that starts at a Unix time, and return the Unix time at which all ranks end the step."""
        has_incident = self._has_reached(step_start)
        compute_seconds = slowest_compute_seconds = STEP_SECONDS
        if self._scenario is RunScenario.STRAGGLER and has_incident:
            slowest_compute_seconds *= STRAGGLER_FACTOR
            compute_seconds *= STRAGGLER_FACTOR if self._rank == 2 else 1.0  # the rank on the hot GPU
        compute_seconds *= self._random.uniform(0.97, 1.0)
        data_seconds = (
            SLOW_DATA_SECONDS if self._scenario is RunScenario.LOADER_STALL and has_incident else DATA_SECONDS
        )
        step_end = step_start + data_seconds + slowest_compute_seconds + SYNC_SECONDS
        is_nan = (
            self._scenario is RunScenario.NAN_LOSS
            and has_incident
            and not self._has_reached(step_start, TIMES.nan_end)
        )
        with training.training_iteration():
            with training.data_loading():
                wait(step_start + data_seconds - time.time())
            with training.model_forward():
                if self._scenario is RunScenario.HANG and self._rank == 1 and has_incident:
                    wait(TIMES.end)
                wait(compute_seconds * 0.31)
            with training.model_backward():
                wait(compute_seconds * 0.6)
            with training.phase("grad_sync"):
                if self._scenario is RunScenario.HANG and has_incident:
                    wait(TIMES.end)
                wait(step_end - compute_seconds * 0.09 - time.time())
            with training.optimizer_update():
                wait(step_end - time.time())
            training.record(
                loss=math.nan if is_nan else self._loss(),
                grad_norm=math.nan
                if is_nan
                else 0.4 + 2.0 / (1.0 + self._step / 50) + self._random.random() * 0.1,
                learning_rate=3e-4 * min(1.0, self._step / 200),
                samples=SAMPLES,
                tokens=TOKENS,
            )
        return max(step_end, time.time())

    def _loss(self) -> float:
        return 1.9 + 6.5 / (1.0 + self._step / 60) + self._random.gauss(0.0, 0.02)

    def _save(self, *, failing: bool) -> float:
        path = Path("/dev/full" if failing else os.devnull)
        try:
            with training.checkpoint_save(self._step):
                wait(SAVE_SECONDS)
                path.write_text(str(self._step), encoding="ascii")
        except OSError as error:
            log("checkpoint.failed", str(error), severity="error", step=self._step)
        return SAVE_SECONDS

    def _validate(self) -> float:
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
