"""Small training for the tests of goodput: saves, resumes from its save, and logs its steps.

    goodput_job.py DIRECTORY STEPS [--session S] [--perf P] [--save-every N] [--from-nothing] [--pause-at STEP]

Every step is a line of DIRECTORY/log: process, step, seconds, as the job itself has measured them. The checkpoint is the
file DIRECTORY/saved. At STEP it prints a line and waits for a kill.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import exporter
from exporter import training
from exporter.one_logger.config import OneLoggerConfig, TrainingTelemetryConfig
from exporter.one_logger.provider import TrainingTelemetryProvider

STEP_SECONDS = 0.01


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--session", default=None)
    parser.add_argument("--perf", default="perf")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--from-nothing", action="store_true")
    parser.add_argument("--pause-at", type=int, default=-1)
    parser.add_argument("--world-size", type=int, default=1)
    return parser.parse_args()


def saved_step(directory: Path) -> int:
    path = directory / "saved"
    return int(path.read_text()) if path.exists() else 0


def save(directory: Path, step: int) -> None:
    with training.checkpoint_save(global_step=step):
        time.sleep(2 * STEP_SECONDS)
        (directory / "saving").write_text(str(step))
        (directory / "saving").rename(directory / "saved")


def main() -> None:
    given = parse()
    if given.session is not None:
        base = OneLoggerConfig(
            application_name="goodput", session_tag_or_fn=given.session, world_size_or_fn=given.world_size
        )
        provider = TrainingTelemetryProvider.instance().with_base_config(base)
        provider.configure_provider()
        config = TrainingTelemetryConfig(
            perf_tag_or_fn=given.perf, global_batch_size_or_fn=4, log_every_n_train_iterations=10
        )
    log = (given.directory / "log").open("a", buffering=1)
    with training.application():
        if given.session is not None:
            TrainingTelemetryProvider.instance().set_training_telemetry_config(config)
        start = 0
        if not given.from_nothing:
            with training.checkpoint_load():
                time.sleep(STEP_SECONDS)
                start = saved_step(given.directory)
        with training.training_loop(train_iterations_start=start):
            for step in range(start, given.steps):
                began = time.monotonic()
                with training.training_iteration():
                    time.sleep(STEP_SECONDS)
                log.write(f"{os.getpid()} {step} {time.monotonic() - began}\n")
                if (step + 1) % given.save_every == 0:
                    save(given.directory, step + 1)
                if step + 1 == given.pause_at:
                    exporter.flush()
                    print("paused", flush=True)
                    time.sleep(60)


if __name__ == "__main__":
    main()
