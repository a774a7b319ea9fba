"""Command `python -m dashboards.incidents.job PLAN`: training loop of a rank, with sleeps in place of computations.

PLAN is a JSON object with the name of the run and the rank. The process then waits for the start message: a JSON object with
the times and the first step, in a line on standard input, because the session starts only after all processes exist. The process exits
when standard input closes, or has a line after the start message.

The ranks of a run derive the times of the steps from the wall clock and the start message, so they need no collectives. A late
step delays the later steps of its rank.
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

from dashboards.incidents import TIMES, SessionRun
from exporter import log, training

COMPUTE_SECONDS, DATA_SECONDS, SYNC_SECONDS = 1.0, 0.03, 0.05
FORWARD_SHARE, BACKWARD_SHARE, OPTIMIZER_SHARE = 0.31, 0.6, 0.09  # of the compute time
STRAGGLER_RANK = 2  # the rank on the hot GPU
STRAGGLER_FACTOR = 1.45
HANGING_RANK = 1
HANG_SECONDS = TIMES.end_seconds  # longer than the rest of the session
SLOW_DATA_SECONDS = 1.55  # time to load the data of a step of `loader-stall`, instead of `DATA_SECONDS`
SAVE_INTERVAL_SECONDS, SAVE_SECONDS, VALIDATION_SECONDS = 120.0, 2.0, 10.0
VALIDATION_START_SECONDS = (300.0, 1100.0)
STEP_TARGET = 5000
SAMPLES_PER_STEP, TOKENS_PER_STEP = 8, 16_384  # per rank
FLOPS_PER_TOKEN = 6 * 2.6e9


class SessionEnded(Exception):  # noqa: N818  # the end of the session is not an error
    """End of the session: standard input is closed, or has a line after the start message."""


def sleep_or_end(seconds: float) -> None:
    """Sleep for a duration.

    Raises:
        SessionEnded: Standard input is closed, or has a line after the start message.
    """
    if select.select([sys.stdin], [], [], max(0.0, seconds))[0]:
        raise SessionEnded


class Rank:
    """Training loop of a rank.

    Args:
        plan: Mapping with the keys of PLAN,

            - `run`: name of the run, the value of a `SessionRun`
            - `rank`: rank of the process

            and of the start message,

            - `start_time`: Unix time of the start of the session
            - `first_step_offset_seconds`: start of the first step, in seconds since the start of the session
            - `resume_step`: step after which the training resumes; 0 without a checkpoint
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._run = SessionRun(plan["run"])
        self._rank: int = plan["rank"]
        self._start_time: float = plan["start_time"]
        self._first_step_offset_seconds: float = plan["first_step_offset_seconds"]
        self._step: int = plan["resume_step"]
        self._random = random.Random(f"{plan['run']} {plan['rank']} {plan['resume_step']}")  # noqa: S311  # the values are no secrets

    def run(self) -> None:
        """Initialize the job, and train until the end of the session or of the run `finished`."""
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
                sleep_or_end(4.0)
            if self._step:
                with training.checkpoint_load():
                    sleep_or_end(3.0)
            with training.dataloader_init():
                sleep_or_end(self._start_time + self._first_step_offset_seconds - time.time())
            with training.training_loop(train_iterations_start=self._step):
                self._train()

    def _train(self) -> None:
        """Train, save and validate until the end of the run `finished`; other runs train until `SessionEnded` is raised."""
        step_start = self._start_time + self._first_step_offset_seconds
        due_saves = self._due_save_count(self._first_step_offset_seconds)
        due_validations = self._due_validation_count(self._first_step_offset_seconds)
        while not (
            self._run is SessionRun.FINISHED and self._has_reached(step_start, TIMES.finished_run_end_seconds)
        ):
            self._step += 1
            step_end = self._train_step(step_start)
            elapsed_seconds = step_end - self._start_time
            step_start = step_end
            if self._due_save_count(elapsed_seconds) > due_saves:
                due_saves = self._due_save_count(elapsed_seconds)
                step_start += self._save(
                    fails=self._run is SessionRun.FAILING_SAVES
                    and self._has_reached(step_end, TIMES.incident_start_seconds)
                )
            if self._due_validation_count(elapsed_seconds) > due_validations:
                due_validations += 1
                step_start += self._validate()

    @staticmethod
    def _due_save_count(elapsed_seconds: float) -> int:
        """Return the number of saves that are due within a time since the start of the session."""
        return int(elapsed_seconds // SAVE_INTERVAL_SECONDS)

    @staticmethod
    def _due_validation_count(elapsed_seconds: float) -> int:
        """Return the number of validations that are due within a time since the start of the session."""
        return sum(start_seconds <= elapsed_seconds for start_seconds in VALIDATION_START_SECONDS)

    def _has_reached(self, moment: float, offset_seconds: float) -> bool:
        """Return True if a Unix time is at least *offset_seconds* after the start of the session."""
        return moment - self._start_time >= offset_seconds

    def _train_step(self, step_start: float) -> float:
        """Run a step that starts at a Unix time.

        Returns the planned end of the step as a Unix time, or the current time if this rank is late.
        """
        has_incident_started = self._has_reached(step_start, TIMES.incident_start_seconds)
        compute_seconds = slowest_compute_seconds = COMPUTE_SECONDS
        if self._run is SessionRun.STRAGGLER and has_incident_started:
            slowest_compute_seconds *= STRAGGLER_FACTOR
            compute_seconds *= STRAGGLER_FACTOR if self._rank == STRAGGLER_RANK else 1.0
        compute_seconds *= self._random.uniform(0.97, 1.0)
        data_seconds = (
            SLOW_DATA_SECONDS
            if self._run is SessionRun.LOADER_STALL and has_incident_started
            else DATA_SECONDS
        )
        step_end = step_start + data_seconds + slowest_compute_seconds + SYNC_SECONDS
        is_nan = (
            self._run is SessionRun.NAN_LOSS
            and has_incident_started
            and not self._has_reached(step_start, TIMES.nan_end_seconds)
        )
        with training.training_iteration():
            with training.data_loading():
                sleep_or_end(step_start + data_seconds - time.time())
            with training.model_forward():
                if self._run is SessionRun.HANG and self._rank == HANGING_RANK and has_incident_started:
                    sleep_or_end(HANG_SECONDS)
                sleep_or_end(compute_seconds * FORWARD_SHARE)
            with training.model_backward():
                sleep_or_end(compute_seconds * BACKWARD_SHARE)
            with training.phase("grad_sync"):
                if self._run is SessionRun.HANG and has_incident_started:
                    sleep_or_end(HANG_SECONDS)  # the other rank waits for the hanging rank
                sleep_or_end(step_end - compute_seconds * OPTIMIZER_SHARE - time.time())
            with training.optimizer_update():
                sleep_or_end(step_end - time.time())
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
                sleep_or_end(SAVE_SECONDS)
                path.write_text(str(self._step), encoding="ascii")
        except OSError as error:
            log("checkpoint.failed", str(error), severity="error", step=self._step)
        return SAVE_SECONDS

    def _validate(self) -> float:
        """Validate, and return the planned duration in seconds."""
        with training.validation_loop():
            for _ in range(5):
                with training.validation_iteration():
                    sleep_or_end(VALIDATION_SECONDS / 5)
                    training.record(loss=self._loss() + 0.1, mode="validation")
        return VALIDATION_SECONDS


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    start_message = sys.stdin.readline()
    if start_message:
        try:
            Rank(plan | json.loads(start_message)).run()
        except SessionEnded:
            sys.exit(0)
