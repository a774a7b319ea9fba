"""Bridge to NVIDIA's one-logger, with the real package."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import (
    AUTO,
    FAILED_SAVES,
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
import pathlib
from nv_one_logger.exporter.file_exporter import FileExporter
from programs import nv_one_logger
from programs.nv_one_logger import provider_with_base_config
"""
TRAIN = """
nv_one_logger.train_validate_save_and_test(lambda: print("work", json.dumps(gauges())))
"""

EXPORTER = "exporter.bridges.one_logger.OneLoggerExporter"
IMPORT_EXPORTER = "from exporter.bridges.one_logger import OneLoggerExporter\n"
INSTALLATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "by the import, in a job of `run` with custom exporters": (
        "provider_with_base_config().with_exporter(FileExporter(pathlib.Path('recorded.json')))",
        {"EXPORTER_AUTO": "1", "PYTHONPATH": f"{AUTOLOAD}:{PROJECT}:{TESTS}"},
    ),
    "by the entry point": (
        "provider_with_base_config().with_export_config()",
        {"EXPORTER_AUTO": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    ),
    "by an exporter object": (
        f"{IMPORT_EXPORTER}provider_with_base_config().with_exporter(OneLoggerExporter())",
        {},
    ),
    "by the class name of the exporter": (
        f"provider_with_base_config().with_export_config([{{'class_name': '{EXPORTER}'}}])",
        {},
    ),
}
"""Program and environment of a job, by the way in which the bridge is installed."""


@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_calls_of_one_logger_are_recorded_with_its_configuration(tmp_path: Path, installation: str) -> None:
    program, environment = INSTALLATIONS[installation]
    ended_job = run_job(tmp_path, f"{PRELUDE}{program}.configure_provider(){TRAIN}", environment)

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


def run_configured(tmp_path: Path, function: str, *, check: bool = True, **options: object) -> Job:
    """Run a function of `programs.nv_one_logger` after the configuration of one-logger with the bridge's exporter.

    *options* are arguments of `provider_with_base_config`.
    """
    option_text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    configuration = (
        f"{IMPORT_EXPORTER}provider_with_base_config({option_text})"
        ".with_exporter(OneLoggerExporter()).configure_provider()\n"
    )
    return run_job(tmp_path, f"{PRELUDE}{configuration}nv_one_logger.{function}()", check=check)


def test_asynchronous_saves_succeed_when_the_job_confirms_them(tmp_path: Path) -> None:
    ended_job = run_configured(tmp_path, "save_asynchronously", saves_asynchronously=True)

    checkpoints = {"checkpoints_total kind=async result=ok": 2, "phase checkpoint_save_async": 3}
    assert ended_job.differences({STEPS: 3, **checkpoints, "misuse_total": None}) == {}


def test_exceptions_of_one_logger_reach_the_job_unchanged(tmp_path: Path) -> None:
    ended_job = run_configured(tmp_path, "start_a_second_iteration_in_an_iteration", check=False)

    assert ended_job.process.returncode == 1
    assert "OneLoggerError" in ended_job.process.stderr
    assert "exporter/bridges" not in ended_job.process.stderr.splitlines()[-1]


def test_a_rank_that_one_logger_disables_is_not_recorded(tmp_path: Path) -> None:
    ended_job = run_configured(tmp_path, "train_one_iteration", enable_for_current_rank=False)

    assert "training_steps_total" not in ended_job.page


@needs("lightning")
def test_a_lightning_job_with_own_instrumentation_counts_each_step_once(tmp_path: Path) -> None:
    configuration = "provider_with_base_config().configure_provider()\n"
    program = f"{PRELUDE}{configuration}nv_one_logger.train_with_lightning()"
    ended_job = run_job(tmp_path, program, AUTO, library="lightning")

    descriptions = {"run_info framework=lightning session_tag=tag": 1, "misuse_total": None}
    counts = {STEPS: 4, "microbatches_total": 8, "phase model_init": 1}
    assert ended_job.differences({**counts, **descriptions}) == {}
