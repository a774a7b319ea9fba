"""Bridge to NVIDIA's one-logger, with the real package."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import (
    AUTO,
    FAILED_SAVES,
    LIGHTNING,
    SAMPLES,
    SAVES,
    STEPS,
    VALIDATION_STEPS,
    Job,
    needs,
    run_job,
)
from places import PROJECT, TESTS

from exporter.cli.run import AUTOLOAD

pytestmark = [needs("nv_one_logger"), pytest.mark.timeout(120)]

PRELUDE = """
import pathlib, time
from nv_one_logger.api.config import OneLoggerConfig
from nv_one_logger.api.timed_span import timed_span
from nv_one_logger.exporter.file_exporter import FileExporter
from nv_one_logger.training_telemetry.api import callbacks
from nv_one_logger.training_telemetry.api.checkpoint import CheckPointStrategy
from nv_one_logger.training_telemetry.api.config import TrainingTelemetryConfig
from nv_one_logger.training_telemetry.api.context import (
    application, checkpoint_load, checkpoint_save, model_init, testing_loop, training_iteration, training_loop,
    validation_iteration, validation_loop)
from nv_one_logger.training_telemetry.api.spans import StandardTrainingJobSpanName as Name
from nv_one_logger.training_telemetry.api.training_telemetry_provider import TrainingTelemetryProvider

def configure(strategy=CheckPointStrategy.SYNC, **options):
    return TrainingTelemetryProvider.instance().with_base_config(OneLoggerConfig(
        application_name="app", session_tag_or_fn="tag", world_size_or_fn=1,
        telemetry_config=TrainingTelemetryConfig(
            perf_tag_or_fn="perf", global_batch_size_or_fn=8, seq_length_or_fn=16, log_every_n_train_iterations=2,
            save_checkpoint_strategy=strategy, train_iterations_target_or_fn=20), **options))
"""
JOB_BODY = """
with application():
    with model_init():
        pass
    with checkpoint_load():
        pass
    with training_loop(train_iterations_start=5):
        for _ in range(4):
            with training_iteration():
                for name in (Name.DATA_LOADING, Name.MODEL_FORWARD, Name.MODEL_BACKWARD):
                    with timed_span(name):
                        pass
        with validation_loop():
            for _ in range(3):
                with validation_iteration():
                    pass
        with checkpoint_save(global_step=9):
            pass
        try:
            with checkpoint_save(global_step=9):
                raise OSError("full")
        except OSError:
            pass
        try:
            with training_iteration():
                raise ZeroDivisionError("amid an iteration")
        except ZeroDivisionError as error:
            print("raised", error)
        print("work", json.dumps(gauges()))
    with testing_loop():
        pass
"""

EXPORTER = "exporter.bridges.one_logger.OneLoggerExporter"
IMPORT_EXPORTER = "from exporter.bridges.one_logger import OneLoggerExporter\n"
INSTALLATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "by the import, in a job of `run` with custom exporters": (
        "configure().with_exporter(FileExporter(pathlib.Path('recorded.json')))",
        {"EXPORTER_AUTO": "1", "PYTHONPATH": f"{AUTOLOAD}:{PROJECT}:{TESTS}"},
    ),
    "by the entry point": (
        "configure().with_export_config()",
        {"EXPORTER_AUTO": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    ),
    "by an exporter object": (f"{IMPORT_EXPORTER}configure().with_exporter(OneLoggerExporter())", {}),
    "by the class name of the exporter": (
        f"configure().with_export_config([{{'class_name': '{EXPORTER}'}}])",
        {},
    ),
}
"""Program and environment of a job, by the way in which the bridge is installed."""


@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_calls_of_one_logger_are_recorded_with_its_configuration(tmp_path: Path, installation: str) -> None:
    program, environment = INSTALLATIONS[installation]
    ended_job = run_job(tmp_path, f"{PRELUDE}{program}.configure_provider(){JOB_BODY}", environment)

    expected: dict[str, float | None] = {
        STEPS: 4,
        "step_duration_seconds_count mode=train": 4,
        VALIDATION_STEPS: 3,
        SAMPLES: 32,
        "tokens_total mode=train": 512,
        SAVES: 1,
        FAILED_SAVES: 1,
        "gauge step": 9,
        "gauge step_target": 20,
        "run_info session_tag=tag perf_tag=perf application=app": 1,
    }
    phases = {"iteration": 5, "forward": 4, "backward": 4, "model_init": 1, "checkpoint_load": 1, "test": 1}
    expected.update({f"phase {phase}": times for phase, times in phases.items()})
    assert ended_job.differences(expected) == {}
    assert "raised amid an iteration" in ended_job.process.stdout
    assert "training_misuse_total" not in ended_job.page
    assert "exporter:" not in ended_job.process.stderr
    assert "a bridge" not in ended_job.process.stderr


def run_configured(tmp_path: Path, program: str, *, check: bool = True, **options: str) -> Job:
    """Run a program after the configuration of one-logger with the bridge's exporter and these options."""
    option_text = ", ".join(f"{name}={value}" for name, value in options.items())
    configuration = (
        f"{IMPORT_EXPORTER}configure({option_text}).with_exporter(OneLoggerExporter()).configure_provider()\n"
    )
    return run_job(tmp_path, PRELUDE + configuration + program, check=check)


def test_asynchronous_saves_succeed_when_the_job_confirms_them(tmp_path: Path) -> None:
    program = """
callbacks.on_app_start(start_time_msec=(time.time() - 5) * 1000)
callbacks.on_train_start(train_iterations_start=0)
for step in range(3):
    callbacks.on_training_single_iteration_start()
    callbacks.on_training_single_iteration_end()
    callbacks.on_save_checkpoint_start(global_step=step + 1)
    callbacks.on_save_checkpoint_end()
callbacks.on_save_checkpoint_success(global_step=2)
callbacks.on_save_checkpoint_success(global_step=1)
with timed_span(Name.OPTIMIZER_UPDATE):
    pass
callbacks.on_train_end()
callbacks.on_app_end()
"""
    ended_job = run_configured(tmp_path, program, strategy="CheckPointStrategy.ASYNC")

    checkpoints = {"checkpoints_total kind=async result=ok": 2, "phase checkpoint_save_async": 3}
    assert ended_job.differences({STEPS: 3, **checkpoints, "misuse_total": None}) == {}


def test_exceptions_of_one_logger_reach_the_job_unchanged(tmp_path: Path) -> None:
    program = """
with application():
    with training_loop(train_iterations_start=0):
        for _ in range(2):
            callbacks.on_training_single_iteration_start()
"""
    ended_job = run_configured(tmp_path, program, check=False)

    assert ended_job.process.returncode == 1
    assert "OneLoggerError" in ended_job.process.stderr
    assert "exporter/bridges" not in ended_job.process.stderr.splitlines()[-1]


def test_a_rank_that_one_logger_disables_is_not_recorded(tmp_path: Path) -> None:
    program = """
with training_loop(train_iterations_start=0):
    with training_iteration():
        pass
"""
    ended_job = run_configured(tmp_path, program, enable_for_current_rank="False")

    assert "training_steps_total" not in ended_job.page


INSTRUMENTED_LIGHTNING = """
class Instrumented(pl.Callback):
    def on_train_start(self, trainer, module):
        callbacks.on_train_start(train_iterations_start=trainer.global_step)
    def on_train_end(self, trainer, module):
        callbacks.on_train_end()
    def on_train_batch_start(self, *batch):
        callbacks.on_training_single_iteration_start()
    def on_train_batch_end(self, *batch):
        callbacks.on_training_single_iteration_end()

configure().configure_provider()
with application():
    with model_init():
        module = Module()
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=2, enable_checkpointing=False,
                            callbacks=[Instrumented()])
    trainer.fit(module, loader(16, 2))
"""


@needs("lightning")
def test_a_lightning_job_with_own_instrumentation_counts_each_step_once(tmp_path: Path) -> None:
    ended_job = run_job(tmp_path, PRELUDE + LIGHTNING + INSTRUMENTED_LIGHTNING, AUTO)

    descriptions = {"run_info framework=lightning session_tag=tag": 1, "misuse_total": None}
    counts = {STEPS: 4, "microbatches_total": 8, "phase model_init": 1}
    assert ended_job.differences({**counts, **descriptions}) == {}
