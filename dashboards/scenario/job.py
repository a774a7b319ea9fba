"""A rank of the scenario's job: `python -m dashboards.scenario.job PLAN`, a training loop that only waits.

`cluster` starts this program for each rank with the environment of a launcher. The program uses the public API.
All ranks follow the wall clock and the plan, so that they are as synchronous as with collectives, without
communication: a faster rank waits in its `grad_sync` for the slowest rank. The process exits
when its standard input closes.
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

STEP_SECONDS, SYNC_SECONDS, DATA_SECONDS = 0.21, 0.025, 0.012
STRAGGLE = 1.42
SAVE_SECONDS, VALIDATION_STEPS = 0.9, 8
STARTUP_SECONDS = 3.0
STEPS_TARGET = 20_000
BROKEN_STEPS = 3
SAMPLES, TOKENS = 6, 6 * 512
FLOPS_PER_TOKEN = 6 * 6.7e9
H100_FLOPS = 989e12
BASELINE_SLOWER = 1.08


class LifeEnded(Exception):  # noqa: N818  # an end in order, no error
    """The scenario is over."""


class Rank:
    """Training of one rank.

    Args:
        plan: Plan of the rank, from `cluster`.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._begin: float = plan["begin"]
        self._timeline = Timeline(seconds=plan["seconds"])
        self._baseline: bool = plan["baseline"]
        self._straggler: bool = plan["straggler"]
        self._attempt: int = plan["attempt"]
        self._checkpoint = Path(plan["checkpoint"])
        self._chance = random.Random(f"{plan['straggler']} {plan['crashes']} {plan['attempt']}")  # noqa: S311  # no secret
        self._saves = [self._timeline.at(share) for share in self._timeline.saves]
        self._broken = 0 if self._baseline or self._attempt else BROKEN_STEPS

    def run(self) -> None:
        """Start up, and train until the end of the scenario."""
        self._configure()
        with training.application():
            with training.distributed_init():
                self._pass(0.3)
            with training.model_init():
                self._pass(0.8)
            with training.dataloader_init():
                self._pass(0.3)
            with training.optimizer_init():
                self._pass(0.2)
            step = 0
            if self._attempt and self._checkpoint.exists():
                with training.checkpoint_load():
                    self._pass(0.7)
                    step = int(self._checkpoint.read_text(encoding="ascii"))
            self._train(step)

    def _configure(self) -> None:
        one_logger.TrainingTelemetryProvider.instance().with_base_config(
            one_logger.OneLoggerConfig(
                application_name="llama-7b",
                session_tag_or_fn="llama-7b-a" if self._baseline else "llama-7b-b",
                world_size_or_fn=4,
                is_baseline_run_or_fn=self._baseline,
                telemetry_config=one_logger.TrainingTelemetryConfig(
                    perf_tag_or_fn="llama-7b-bf16",
                    global_batch_size_or_fn=SAMPLES * 4,
                    train_iterations_target_or_fn=STEPS_TARGET,
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
        # All ranks of an attempt begin their steps at the same moments.
        started = self._begin + self._timeline.at(
            self._timeline.crash + self._timeline.restart if self._attempt else 0.0
        )
        planned = started + STARTUP_SECONDS
        self._pass(planned - time.time())
        validated = time.time() - self._begin > self._timeline.at(self._timeline.validation)
        self._saves = [at for at in self._saves if at > time.time() - self._begin]
        with training.training_loop(train_iterations_start=step, train_iterations_target_or_fn=STEPS_TARGET):
            while True:
                now = planned - self._begin
                step += 1
                planned = self._iteration(step, planned)
                if self._saves and now >= self._saves[0]:
                    planned += self._save(
                        step, fails=self._saves.pop(0) == self._timeline.at(self._timeline.failing)
                    )
                if not validated and now >= self._timeline.at(self._timeline.validation):
                    validated = True
                    planned += self._validate()

    def _iteration(self, step: int, planned: float) -> float:
        """Run one step.

        Args:
            step: Number of the step.
            planned: When all ranks begin it.

        Returns:
            When they end it.
        """
        at = planned - self._begin
        own = (
            STEP_SECONDS
            * self._chance.lognormvariate(0.0, 0.012)
            * (BASELINE_SLOWER if self._baseline else 1.0)
        )
        slowest = STEP_SECONDS * (STRAGGLE if self._timeline.hot(at) else 1.04)
        if self._baseline:
            slowest = STEP_SECONDS * BASELINE_SLOWER * 1.04
        elif self._straggler and self._timeline.hot(at):
            own *= STRAGGLE
        waits = DATA_SECONDS
        if self._timeline.paused(at) and not self._baseline:
            waits = self._begin + self._timeline.at(self._timeline.pause[1]) - planned
        ends = planned + waits + slowest + SYNC_SECONDS
        broken = self._broken > 0 and at >= self._timeline.at(self._timeline.nan)
        self._broken -= broken
        with training.training_iteration():
            with training.data_loading():
                self._pass(planned + waits - time.time())
            with training.model_forward():
                self._pass(own * 0.31)
            with training.model_backward():
                self._pass(own * 0.60)
            with training.phase("grad_sync"):
                self._pass(ends - own * 0.09 - time.time())
            with training.optimizer_update():
                self._pass(ends - time.time())
            progress = step * TOKENS * 4
            training.record(
                loss=1.9
                + 6.5 / (1.0 + progress / 4e5)
                + self._chance.gauss(0.0, 0.02)
                + 0.05 * self._baseline,
                grad_norm=math.nan
                if broken
                else 0.5 + 1.4 / (1.0 + progress / 6e5) + self._chance.random() * 0.12,
                learning_rate=3e-4 * min(1.0, step / 300) * (1 - step / (2 * STEPS_TARGET)),
                samples=SAMPLES,
                tokens=TOKENS - self._chance.randrange(128),
            )
            if broken:
                training.skipped_step("nonfinite")
        return max(ends, time.time())

    def _save(self, step: int, *, fails: bool) -> float:
        try:
            with training.checkpoint_save(step):
                self._pass(SAVE_SECONDS)
                # Save into a directory that is not writable, like a full disk.
                path = self._checkpoint.parent if fails and not self._baseline else self._checkpoint
                path.write_text(str(step), encoding="ascii")
        except OSError as error:
            log("checkpoint.failed", str(error), severity="error", step=step)
        else:
            log("checkpoint.saved", f"step {step}", step=step)
            threading.Thread(target=self._upload, daemon=True).start()
        return SAVE_SECONDS

    def _upload(self) -> None:
        with training.background("checkpoint_upload"):
            time.sleep(self._timeline.at(0.02))

    def _validate(self) -> float:
        with training.validation_loop():
            for _ in range(VALIDATION_STEPS):
                with training.validation_iteration():
                    self._pass(STEP_SECONDS)
                    training.record(loss=3.4 + self._chance.gauss(0.0, 0.02), mode="validation")
        return VALIDATION_STEPS * STEP_SECONDS

    @staticmethod
    def _pass(seconds: float) -> None:
        """Pass the time.

        Raises:
            LifeEnded: Standard input has closed.
        """
        if select.select([sys.stdin], [], [], max(0.0, seconds))[0]:
            raise LifeEnded


if __name__ == "__main__":
    try:
        Rank(json.loads(sys.argv[1])).run()
    except LifeEnded:
        sys.exit(0)
