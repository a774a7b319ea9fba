"""Rank of an incident's run: `python -m dashboards.incidents.job PLAN`, a training loop that only waits.

The process waits for a line on standard input, because the sidecar needs the process id first, and exits when standard
input closes. All steps follow from the wall clock, so that the ranks are synchronous without collectives.
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

STEP_SECONDS, DATA_SECONDS, SYNC_SECONDS = 1.0, 0.03, 0.05
SLOWER = 1.45
LOADER_SECONDS = 1.55
SAVE_EVERY, SAVE_SECONDS, VALIDATION_SECONDS = 120.0, 2.0, 10.0
VALIDATIONS = (300.0, 1100.0)
STEPS_TARGET = 5000
SAMPLES, TOKENS = 8, 16_384
FLOPS_PER_TOKEN = 6 * 2.6e9


class LifeEnded(Exception):  # noqa: N818  # an end in order, no error
    """Standard input was closed."""


def wait(seconds: float) -> None:
    """Wait; raises LifeEnded at the end of standard input."""
    if select.select([sys.stdin], [], [], max(0.0, seconds))[0]:
        raise LifeEnded


class Rank:
    """Training loop of a rank."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._incident = Incident(plan["incident"])
        self._rank: int = plan["rank"]
        self._begin: float = plan["begin"]
        self._first: float = plan["first"]  # seconds since the start of the scenario at which training starts
        self._step: int = plan["step"]
        self._chance = random.Random(f"{plan['incident']} {plan['rank']} {plan['step']}")  # noqa: S311  # no secret

    def run(self) -> None:
        """Train until the end of the scenario."""
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
                wait(self._begin + self._first - time.time())
            with training.training_loop(train_iterations_start=self._step):
                self._train()

    def _train(self) -> None:
        planned, saved, validations = self._begin + self._first, 0, 0
        while not (self._incident is Incident.FINISHED and self._struck(planned, TIMES.finished)):
            self._step += 1
            planned = self._iteration(planned)
            at = planned - self._begin
            if at // SAVE_EVERY > saved:
                saved = int(at // SAVE_EVERY)
                planned += self._save(failing=self._incident is Incident.SAVES and self._struck(planned))
            if validations < len(VALIDATIONS) and at >= VALIDATIONS[validations]:
                validations += 1
                planned += self._validate()

    def _struck(self, planned: float, seconds: float = TIMES.incident) -> bool:
        return planned - self._begin >= seconds

    def _iteration(self, planned: float) -> float:
        """Return the time at which all ranks end the step."""
        struck = self._struck(planned)
        own = slowest = STEP_SECONDS
        if self._incident is Incident.STRAGGLER and struck:
            slowest *= SLOWER
            own *= SLOWER if self._rank == 2 else 1.0  # the rank on the hot GPU
        own *= self._chance.uniform(0.97, 1.0)
        data = LOADER_SECONDS if self._incident is Incident.LOADER and struck else DATA_SECONDS
        ends = planned + data + slowest + SYNC_SECONDS
        is_nan = self._incident is Incident.NAN and struck and not self._struck(planned, TIMES.nan_end)
        with training.training_iteration():
            with training.data_loading():
                wait(planned + data - time.time())
            with training.model_forward():
                if self._incident is Incident.HANG and self._rank == 1 and struck:
                    wait(TIMES.end)
                wait(own * 0.31)
            with training.model_backward():
                wait(own * 0.6)
            with training.phase("grad_sync"):
                if self._incident is Incident.HANG and struck:
                    wait(TIMES.end)
                wait(ends - own * 0.09 - time.time())
            with training.optimizer_update():
                wait(ends - time.time())
            training.record(
                loss=math.nan if is_nan else self._loss(),
                grad_norm=math.nan
                if is_nan
                else 0.4 + 2.0 / (1.0 + self._step / 50) + self._chance.random() * 0.1,
                learning_rate=3e-4 * min(1.0, self._step / 200),
                samples=SAMPLES,
                tokens=TOKENS,
            )
        return max(ends, time.time())

    def _loss(self) -> float:
        return 1.9 + 6.5 / (1.0 + self._step / 60) + self._chance.gauss(0.0, 0.02)

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
    given = json.loads(sys.argv[1])
    start = sys.stdin.readline()
    if start:
        try:
            Rank(given | json.loads(start)).run()
        except LifeEnded:
            sys.exit(0)
