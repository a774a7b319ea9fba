"""Migration of source files, and the modules that jobs import afterwards."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from one_logger_support import APPLICATION

from exporter.one_logger import migrate
from exporter.one_logger.names import StandardTrainingJobSpanName

IMPORT_FORMS = {
    "from nv_one_logger.core.span import Span": "from exporter.one_logger.core.span import Span",
    "from nv_one_logger.training_telemetry.api import callbacks": (
        "from exporter.one_logger.training_telemetry.api import callbacks"
    ),
    "import nv_one_logger.training_telemetry.api.callbacks as CB": (
        "import exporter.one_logger.training_telemetry.api.callbacks as CB"
    ),
    "import os, nv_one_logger.api.config": (
        "import os, exporter.one_logger.api.config as _api_config, exporter.one_logger as nv_one_logger"
    ),
    "import nv_one_logger": "import exporter.one_logger as nv_one_logger",
    "from nv_one_logger.core.event import (  # é\n    Event,\n)": (
        "from exporter.one_logger.core.event import (  # é\n    Event,\n)"
    ),
    "é = 'é'; from nv_one_logger.core.time import Timer": (
        "é = 'é'; from exporter.one_logger.core.time import Timer"
    ),
    "try:\n    from \\\n nv_one_logger.api import LoggerConfig\nexcept ImportError: pass": (
        "try:\n    from \\\n exporter.one_logger.api import LoggerConfig\nexcept ImportError: pass"
    ),
    "import importlib\nimportlib.import_module('nv_one_logger.api.config')": (
        "import importlib\nimportlib.import_module('exporter.one_logger.api.config')"
    ),
    "from nv_one_logger.wandb.exporter.wandb_exporter import WandBExporterAsync": (
        "from exporter.one_logger.wandb.exporter.wandb_exporter import WandBExporterAsync"
    ),
    "from nv_one_logger.otel.exporter.otel_exporter import OTelExporter": (
        "from exporter.one_logger.otel.exporter.otel_exporter import OTelExporter"
    ),
    "from .nv_one_logger import x": "from .nv_one_logger import x",
    "import nv_one_loggers": "import nv_one_loggers",
}
"""Source text after migration by source text before."""


@pytest.mark.parametrize(("source", "expected"), IMPORT_FORMS.items())
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_imports_of_one_logger_are_rewritten_and_similar_names_are_not(
    source: str, expected: str, line_end: str
) -> None:
    migration = migrate.migrate(source.replace("\n", line_end).encode())

    assert migration.new_source.decode() == expected.replace("\n", line_end)
    assert migration.problems == ()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from nv_one_logger.core.span import Spam", "exporter.one_logger.core.span has no Spam"),
        (
            "import nv_one_logger.core.internal.singleton",
            "exporter.one_logger.core.internal.singleton does not exist",
        ),
        ("level('nv_one_logger')", "the string 'nv_one_logger' is not changed"),
    ],
)
def test_names_without_an_equivalent_and_other_strings_are_listed(source: str, problem: str) -> None:
    assert migrate.migrate(f"\n{source}\n".encode()).problems == ((2, problem),)


JOB = f"""
import nv_one_logger.api.config
import nv_one_logger.training_telemetry.api.callbacks as CB
from nv_one_logger.exporter.file_exporter import FileExporter
from nv_one_logger.training_telemetry.api import callbacks
from nv_one_logger.training_telemetry.api.context import training_iteration
from nv_one_logger.training_telemetry.api.training_telemetry_provider import TrainingTelemetryProvider

exporter = FileExporter(file_path="t.jsonl")
settings = nv_one_logger.api.config.OneLoggerConfig(
    **{APPLICATION!r},
    telemetry_config={{"perf_tag_or_fn": "p", "global_batch_size_or_fn": 4}},
)
TrainingTelemetryProvider.instance().with_base_config(settings).with_exporter(exporter).configure_provider()
CB.on_app_start()
callbacks.on_train_start(train_iterations_start=0)
with training_iteration():
    pass
CB.on_train_end()
CB.on_app_end()
"""


def run_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_command_without_write_prints_a_diff_and_changes_no_file(tmp_path: Path) -> None:
    script = tmp_path / "deep" / "train.py"
    script.parent.mkdir()
    script.write_text(JOB, encoding="utf-8")

    completed = run_command("-m", "exporter.one_logger.migrate", "deep", cwd=tmp_path)

    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
    assert "+import exporter.one_logger.training_telemetry.api.callbacks as CB\n" in completed.stdout
    assert script.read_text(encoding="utf-8") == JOB


def test_a_migrated_job_runs_and_writes_its_records(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(JOB, encoding="utf-8")
    assert (
        run_command("-m", "exporter.one_logger.migrate", "--write", "train.py", cwd=tmp_path).returncode == 0
    )

    completed = run_command("train.py", cwd=tmp_path)

    assert completed.returncode == 0, completed.stderr
    records = (tmp_path / "t.jsonl").read_text(encoding="ascii")
    assert "training_metrics_update" in records
    assert "application" in records


def test_a_file_that_is_not_python_is_listed_and_kept(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("print 'nv_one_logger'", encoding="ascii")

    completed = run_command(
        "-m", "exporter.one_logger.migrate", "--write", "old.py", "missing.py", cwd=tmp_path
    )

    assert completed.returncode == 1
    assert completed.stderr.startswith("old.py: ")
    assert "missing.py: " in completed.stderr


def test_a_module_has_the_same_object_as_the_package() -> None:
    spans = importlib.import_module("exporter.one_logger.training_telemetry.api.spans")

    assert spans.StandardTrainingJobSpanName is StandardTrainingJobSpanName
