"""Small training job for the tests of goodput. The job saves, resumes from its save, and logs its steps.

    goodput_job.py DIRECTORY STEPS [--session S] [--perf P] [--world-size N] [--save-every N] [--from-nothing] [--pause-at N]

Every step is a line of DIRECTORY/log with the process id, the step, and the duration in seconds without and with the entry and exit
of the block, measured by the job. The checkpoint is the file DIRECTORY/saved. With --session, the job configures one-logger.
With --from-nothing, the job ignores the checkpoint. When N steps are complete, --pause-at prints a line and waits to be killed.
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


def parse_arguments() -> argparse.Namespace:
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
    """Return the step of the checkpoint, or 0 without a checkpoint."""
    path = directory / "saved"
    return int(path.read_text()) if path.exists() else 0


def save(directory: Path, step: int) -> None:
    with training.checkpoint_save(global_step=step):
        time.sleep(2 * STEP_SECONDS)
        (directory / "saving").write_text(str(step))
        (directory / "saving").rename(directory / "saved")


def main() -> None:
    options = parse_arguments()
    if options.session is not None:
        base = OneLoggerConfig(
            application_name="goodput", session_tag_or_fn=options.session, world_size_or_fn=options.world_size
        )
        provider = TrainingTelemetryProvider.instance().with_base_config(base)
        provider.configure_provider()
        config = TrainingTelemetryConfig(
            perf_tag_or_fn=options.perf, global_batch_size_or_fn=4, log_every_n_train_iterations=10
        )
    log = (options.directory / "log").open("a", buffering=1)
    with training.application():
        if options.session is not None:
            TrainingTelemetryProvider.instance().set_training_telemetry_config(config)
        first_step = 0
        if not options.from_nothing:
            with training.checkpoint_load():
                time.sleep(STEP_SECONDS)
                first_step = saved_step(options.directory)
        with training.training_loop(train_iterations_start=first_step):
            for step in range(first_step, options.steps):
                start_time = time.monotonic()
                with training.training_iteration():
                    body_start_time = time.monotonic()
                    time.sleep(STEP_SECONDS)
                    body_seconds = time.monotonic() - body_start_time
                log.write(f"{os.getpid()} {step} {body_seconds} {time.monotonic() - start_time}\n")
                if (step + 1) % options.save_every == 0:
                    save(options.directory, step + 1)
                if step + 1 == options.pause_at:
                    exporter.flush()
                    print("paused", flush=True)
                    time.sleep(60)


if __name__ == "__main__":
    main()
