"""Command `python -m dashboards.scenario.job PLAN`: training loop of a rank, with sleeps in place of computations.

PLAN is a JSON object with the keys of `Rank`. `cluster` starts this program for each rank with the environment of a launcher. The program
uses the public training API. All ranks derive the times of the steps from the wall clock and the plan, and are therefore synchronous
without collectives: a faster rank waits in `grad_sync` for the slowest rank. The process exits when standard input is closed or has input.
"""

from __future__ import annotations

import json
import math
import random
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dashboards.scenario import Timeline
from exporter import log, one_logger, training

COMPUTE_SECONDS, SYNC_SECONDS, DATA_SECONDS = 0.21, 0.025, 0.012
"""Mean durations of the parts of a step of `FAULTY_RUN` without an incident."""
FORWARD_SHARE, BACKWARD_SHARE, OPTIMIZER_SHARE = 0.31, 0.6, 0.09  # of the compute time
VARIATION_FACTOR = 1.04  # upper limit of the random variation of the compute time, except for rare steps
STRAGGLER_FACTOR = 1.42
SAVE_SECONDS = 0.9
VALIDATION_STEPS = 8
STARTUP_SECONDS = 3.0
"""Time from the start of an attempt to its first step: longer than all sleeps of the initialization together."""
STEP_TARGET = 20_000
NAN_STEPS = 3
WORLD_SIZE = 4
SAMPLES_PER_STEP, TOKENS_PER_STEP = 6, 6 * 512  # of a rank
FLOPS_PER_TOKEN = 6 * 6.7e9
H100_FLOPS = 989e12
BASELINE_FACTOR = 1.08  # compute time of the baseline relative to the other run, which is faster


class ScenarioEnded(Exception):  # noqa: N818  # the end of the scenario is not an error
    """End of the scenario: standard input is closed or has input."""


class Rank:
    """Training loop of a rank.

    Args:
        plan: Role of the rank in the scenario, from `Cluster`, with the keys

            - `start`: Unix time of the start of the scenario
            - `duration_seconds`: duration of the scenario
            - `baseline`: whether the run is the baseline, which has no incidents
            - `rank`: rank of the process
            - `straggler`: whether the rank is the straggler
            - `attempt`: 0, or 1 after the restart
            - `checkpoint_path`: path of the file with the last saved step
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._scenario_start: float = plan["start"]
        self._timeline = Timeline(duration_seconds=plan["duration_seconds"])
        self._is_baseline: bool = plan["baseline"]
        self._is_straggler: bool = plan["straggler"]
        self._attempt: int = plan["attempt"]
        self._checkpoint_path = Path(plan["checkpoint_path"])
        self._random = random.Random(f"{plan['baseline']} {plan['rank']} {plan['attempt']}")  # noqa: S311  # the values are no secrets
        self._save_offsets = [self._timeline.to_seconds(fraction) for fraction in self._timeline.save_times]
        self._nan_steps_left = 0 if self._is_baseline or self._attempt else NAN_STEPS

    def run(self) -> None:
        """Initialize the job and train until the end of the scenario."""
        self._configure()
        with training.application():
            with training.distributed_init():
                self._sleep_or_end(0.3)
            with training.model_init():
                self._sleep_or_end(0.8)
            with training.dataloader_init():
                self._sleep_or_end(0.3)
            with training.optimizer_init():
                self._sleep_or_end(0.2)
            step = 0
            if self._attempt and self._checkpoint_path.exists():
                with training.checkpoint_load():
                    self._sleep_or_end(0.7)
                    step = int(self._checkpoint_path.read_text(encoding="ascii"))
            self._train(step)

    def _configure(self) -> None:
        one_logger.TrainingTelemetryProvider.instance().with_base_config(
            one_logger.OneLoggerConfig(
                application_name="llama-7b",
                session_tag_or_fn="llama-7b-a" if self._is_baseline else "llama-7b-b",
                world_size_or_fn=WORLD_SIZE,
                is_baseline_run_or_fn=self._is_baseline,
                telemetry_config=one_logger.TrainingTelemetryConfig(
                    perf_tag_or_fn="llama-7b-bf16",
                    global_batch_size_or_fn=SAMPLES_PER_STEP * WORLD_SIZE,
                    train_iterations_target_or_fn=STEP_TARGET,
                ),
            )
        ).configure_provider()
        training.describe(
            job_name="pretrain",
            framework="torch",
            model="llama-7b",
            precision="bf16",
            flops_method="6N",
            flops_per_token=FLOPS_PER_TOKEN,
            hardware_flops_per_token=FLOPS_PER_TOKEN * 4 / 3,
            peak_flops=H100_FLOPS,
        )

    def _train(self, step: int) -> None:
        """Train from the step after *step* until the end of the scenario, with saves and a validation."""
        # All ranks of an attempt start each step at the same time.
        attempt_start = self._scenario_start + self._timeline.to_seconds(
            self._timeline.crash_time + self._timeline.downtime if self._attempt else 0.0
        )
        step_start = attempt_start + STARTUP_SECONDS
        self._sleep_or_end(step_start - time.time())
        first_step_offset = step_start - self._scenario_start
        validation_offset = self._timeline.to_seconds(self._timeline.validation_start)
        failing_save_offset = self._timeline.to_seconds(self._timeline.failing_save_time)
        has_validated = first_step_offset > validation_offset
        self._save_offsets = [offset for offset in self._save_offsets if offset > first_step_offset]
        with training.training_loop(train_iterations_start=step, train_iterations_target_or_fn=STEP_TARGET):
            while True:
                elapsed_seconds = step_start - self._scenario_start
                step += 1
                step_start = self._train_step(step, step_start)
                if self._save_offsets and elapsed_seconds >= self._save_offsets[0]:
                    save_offset = self._save_offsets.pop(0)
                    fails = save_offset == failing_save_offset and not self._is_baseline
                    step_start += self._save(step, fails=fails)
                if not has_validated and elapsed_seconds >= validation_offset:
                    has_validated = True
                    step_start += self._validate()

    def _train_step(self, step: int, step_start: float) -> float:
        """Run a step.

        Args:
            step: Number of the step.
            step_start: Unix time at which all ranks start the step.

        Returns:
            The planned end of the step in Unix time, or the current time if this rank is late.
        """
        elapsed_seconds = step_start - self._scenario_start
        mean_compute_seconds = COMPUTE_SECONDS * (BASELINE_FACTOR if self._is_baseline else 1.0)
        compute_seconds = mean_compute_seconds * self._random.lognormvariate(0.0, 0.012)
        slowest_compute_seconds = mean_compute_seconds * VARIATION_FACTOR
        if self._timeline.has_straggler(elapsed_seconds) and not self._is_baseline:
            slowest_compute_seconds = mean_compute_seconds * STRAGGLER_FACTOR
            compute_seconds *= STRAGGLER_FACTOR if self._is_straggler else 1.0
        data_seconds = DATA_SECONDS
        if self._timeline.is_paused(elapsed_seconds) and not self._is_baseline:
            data_seconds = self._timeline.to_seconds(self._timeline.pause_range[1]) - elapsed_seconds
        step_end = step_start + data_seconds + slowest_compute_seconds + SYNC_SECONDS
        has_nan_gradient = self._nan_steps_left > 0 and elapsed_seconds >= self._timeline.to_seconds(
            self._timeline.nan_start
        )
        self._nan_steps_left -= has_nan_gradient
        with training.training_iteration():
            with training.data_loading():
                self._sleep_or_end(step_start + data_seconds - time.time())
            with training.model_forward():
                self._sleep_or_end(compute_seconds * FORWARD_SHARE)
            with training.model_backward():
                self._sleep_or_end(compute_seconds * BACKWARD_SHARE)
            with training.phase("grad_sync"):
                self._sleep_or_end(step_end - compute_seconds * OPTIMIZER_SHARE - time.time())
            with training.optimizer_update():
                self._sleep_or_end(step_end - time.time())
            training.record(
                loss=self._loss(step),
                grad_norm=math.nan if has_nan_gradient else self._gradient_norm(step),
                learning_rate=3e-4 * min(1.0, step / 300) * (1 - step / (2 * STEP_TARGET)),
                samples=SAMPLES_PER_STEP,
                tokens=TOKENS_PER_STEP - self._random.randrange(128),
            )
            if has_nan_gradient:
                training.skipped_step("nonfinite")
        return max(step_end, time.time())

    def _loss(self, step: int) -> float:
        trained_tokens = step * TOKENS_PER_STEP * WORLD_SIZE
        baseline_excess = 0.05 * self._is_baseline
        return 1.9 + 6.5 / (1.0 + trained_tokens / 4e5) + self._random.gauss(0.0, 0.02) + baseline_excess

    def _gradient_norm(self, step: int) -> float:
        trained_tokens = step * TOKENS_PER_STEP * WORLD_SIZE
        return 0.5 + 1.4 / (1.0 + trained_tokens / 6e5) + self._random.random() * 0.12

    def _save(self, step: int, *, fails: bool) -> float:
        """Save a checkpoint, which fails if *fails* is true, and return the planned duration in seconds."""
        try:
            with training.checkpoint_save(step):
                self._sleep_or_end(SAVE_SECONDS)
                # Writing to the path of a directory fails with OSError, like writing to a full disk.
                path = self._checkpoint_path.parent if fails else self._checkpoint_path
                path.write_text(str(step), encoding="ascii")
        except OSError as error:
            log("checkpoint.failed", str(error), severity="error", step=step)
        else:
            log("checkpoint.saved", f"step {step}", step=step)
            threading.Thread(target=self._upload, daemon=True).start()
        return SAVE_SECONDS

    def _upload(self) -> None:
        with training.background("checkpoint_upload"):
            time.sleep(self._timeline.to_seconds(0.02))

    def _validate(self) -> float:
        """Validate, and return the planned duration in seconds."""
        with training.validation_loop():
            for _ in range(VALIDATION_STEPS):
                with training.validation_iteration():
                    self._sleep_or_end(COMPUTE_SECONDS)
                    training.record(loss=3.4 + self._random.gauss(0.0, 0.02), mode="validation")
        return VALIDATION_STEPS * COMPUTE_SECONDS

    @staticmethod
    def _sleep_or_end(seconds: float) -> None:
        """Sleep for a duration.

        Raises:
            ScenarioEnded: Standard input is closed or has input.
        """
        if select.select([sys.stdin], [], [], max(0.0, seconds))[0]:
            raise ScenarioEnded


if __name__ == "__main__":
    try:
        Rank(json.loads(sys.argv[1])).run()
    except ScenarioEnded:
        sys.exit(0)
