"""The bridge from NVIDIA's one-logger, with the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, LIGHTNING, Job, job, wanted
from places import PROJECT as REPOSITORY

from exporter.cli.run import AUTOLOAD

pytestmark = [wanted("nv_one_logger"), pytest.mark.timeout(120)]

PRELUDE = """
import sys
from nv_one_logger.api.config import OneLoggerConfig
from nv_one_logger.api.timed_span import timed_span
from nv_one_logger.training_telemetry.api import callbacks
from nv_one_logger.training_telemetry.api.checkpoint import CheckPointStrategy
from nv_one_logger.training_telemetry.api.config import TrainingTelemetryConfig
from nv_one_logger.training_telemetry.api.context import (
    application, checkpoint_load, checkpoint_save, model_init, testing_loop, training_iteration, training_loop,
    validation_iteration, validation_loop)
from nv_one_logger.training_telemetry.api.spans import StandardTrainingJobSpanName as Name
from nv_one_logger.training_telemetry.api.training_telemetry_provider import TrainingTelemetryProvider
provider = TrainingTelemetryProvider.instance()

def configure(strategy=CheckPointStrategy.SYNC, **options):
    return provider.with_base_config(OneLoggerConfig(
        application_name="app", session_tag_or_fn="tag", world_size_or_fn=1,
        telemetry_config=TrainingTelemetryConfig(
            perf_tag_or_fn="perf", global_batch_size_or_fn=8, seq_length_or_fn=16, log_every_n_train_iterations=2,
            save_checkpoint_strategy=strategy, train_iterations_target_or_fn=20), **options))

def work():
    with application():
        with model_init():
            pass
        with checkpoint_load():
            pass
        with training_loop(train_iterations_start=5):
            for _ in range(4):
                with training_iteration():
                    with timed_span(Name.DATA_LOADING):
                        pass
                    with timed_span(Name.MODEL_FORWARD):
                        pass
                    with timed_span(Name.MODEL_BACKWARD):
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
            print("gauges", gauges())
        with testing_loop():
            pass
"""

EXPORTER = "exporter.bridges.one_logger.OneLoggerExporter"
GIVEN = """
from exporter.bridges.one_logger import OneLoggerExporter
configure().with_exporter(OneLoggerExporter()).configure_provider()
"""
WAYS = {
    "by the import, in a job of `run` that names exporters of its own": (
        (
            "import nv_one_logger.exporter.file_exporter as there, pathlib;"
            "configure().with_exporter(there.FileExporter(pathlib.Path('told.json'))).configure_provider()"
        ),
        {"EXPORTER_AUTO": "1", "PYTHONPATH": f"{AUTOLOAD}:{REPOSITORY}"},
    ),
    "by the entry point": (
        "configure().with_export_config().configure_provider()",
        {"EXPORTER_AUTO": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    ),
    "by an exporter that is given": (
        GIVEN,
        {},
    ),
    "by an exporter that is named": (
        f"configure().with_export_config([{{'class_name': '{EXPORTER}'}}]).configure_provider()",
        {},
    ),
}
"""How a job comes to be told: its program, and its environment."""


@pytest.fixture(params=WAYS, scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    program, environment = WAYS[request.param]
    return job(tmp_path_factory.mktemp("one_logger"), PRELUDE + program + "\nwork()", environment)


def test_iterations_are_told_though_exporters_are_not_shown_them(told: Job) -> None:
    phases = told.phases()

    assert told.value("training_steps_total", mode="train") == 4
    assert told.value("training_step_duration_seconds_count", mode="train") == 4
    assert (phases["iteration"], phases["forward"], phases["backward"]) == (5, 4, 4)
    assert told.value("training_steps_total", mode="validation") == 3
    assert "raised amid an iteration" in told.done.stdout


def test_what_was_configured_is_taken_over(told: Job) -> None:
    assert 'session_tag="tag"' in told.page
    assert 'perf_tag="perf"' in told.page
    assert 'application="app"' in told.page
    assert told.value("training_samples_total", mode="train") == 32
    assert told.value("training_tokens_total", mode="train") == 512
    assert told.told()["gauges"]["training.step"] == 9
    assert told.told()["gauges"]["training.step_target"] == 20


def test_setting_up_loading_and_testing_are_phases(told: Job) -> None:
    phases = told.phases()

    assert (phases["model_init"], phases["checkpoint_load"], phases["test"]) == (1, 1, 1)


def test_a_failed_save_is_told_from_a_good_one(told: Job) -> None:
    assert told.value("training_checkpoints_total", result="ok") == 1
    assert told.value("training_checkpoints_total", result="failed") == 1


def test_nothing_was_told_out_of_order_and_no_notice_was_given(told: Job) -> None:
    assert "training_misuse_total" not in told.page
    assert "exporter:" not in told.done.stderr
    assert "a bridge" not in told.done.stderr


OTHERS = """
from exporter.bridges.one_logger import OneLoggerExporter
from nv_one_logger.api.one_logger_provider import OneLoggerProvider
import time

def late():
    configure(CheckPointStrategy.ASYNC).with_exporter(OneLoggerExporter()).configure_provider()
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
    print("late", gauges())

def misused():
    configure().with_exporter(OneLoggerExporter()).configure_provider()
    with application():
        with training_loop(train_iterations_start=0):
            for _ in range(2):
                callbacks.on_training_single_iteration_start()
            callbacks.on_training_single_iteration_end()

def disabled():
    configure(enable_for_current_rank=False).with_exporter(OneLoggerExporter()).configure_provider()
    with training_loop(train_iterations_start=0):
        with training_iteration():
            pass

globals()[sys.argv[1]]()
"""


def other(tmp_path: Path, name: str, *, check: bool = True) -> Job:
    return job(tmp_path, f"import sys; sys.argv[1:] = [{name!r}]\n{PRELUDE}{OTHERS}", check=check)


def test_asynchronous_saves_succeed_when_they_say_so_and_late_begins_keep_their_time(tmp_path: Path) -> None:
    told = other(tmp_path, "late")

    assert told.value("training_steps_total", mode="train") == 3
    assert told.value("training_checkpoints_total", kind="async", result="ok") == 2
    assert told.phases()["checkpoint_save_async"] == 3
    assert "training_misuse_total" not in told.page


def test_what_one_logger_raises_into_the_job_it_raises_as_before(tmp_path: Path) -> None:
    told = other(tmp_path, "misused", check=False)

    assert told.done.returncode == 1
    assert "OneLoggerError" in told.done.stderr
    assert "exporter/bridges" not in told.done.stderr.splitlines()[-1]


def test_a_rank_that_one_logger_leaves_out_is_left_out(tmp_path: Path) -> None:
    told = other(tmp_path, "disabled")

    assert "training_steps_total" not in told.page


INSTRUMENTED = """
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
    trainer = pl.Trainer(max_epochs=1, accumulate_grad_batches=2, logger=False, enable_progress_bar=False,
                         enable_model_summary=False, enable_checkpointing=False, accelerator="cpu", devices=1,
                         callbacks=[Instrumented()])
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2))
"""


@wanted("lightning")
def test_a_lightning_job_that_is_instrumented_too_is_told_once_and_by_its_steps(tmp_path: Path) -> None:
    told = job(tmp_path, PRELUDE + LIGHTNING + INSTRUMENTED, AUTO)

    assert told.value("training_steps_total", mode="train") == 4
    assert told.value("training_microbatches_total") == 8
    assert told.phases()["model_init"] == 1
    assert 'session_tag="tag"' in told.page
    assert 'framework="lightning"' in told.page
    assert "training_misuse_total" not in told.page
