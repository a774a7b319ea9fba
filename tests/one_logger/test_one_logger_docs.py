"""docs/one-logger.md: names, defects with their tests, and code examples."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from places import DATA, PROJECT
from training_support import run_python

from exporter.one_logger.config import (
    LoggerConfig,
    OneLoggerConfig,
    Settings,
    TrainingTelemetryConfig,
)

DOCUMENT = (PROJECT / "docs" / "one-logger.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
DEFECT_ROWS = {
    defect: (description, correction, evidence)
    for defect, description, correction, evidence in re.findall(
        r"^\| (D\d+) \| (.*) \| (.*) \| (.*) \|$", DOCUMENT, flags=re.MULTILINE
    )
}
TEST_NAMES = {
    name
    for path in PROJECT.glob("tests/*/test_*.py")
    for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
}
VECTOR_IDS = {
    vector["id"] for vector in json.loads((DATA / "one-logger-golden.json").read_text("utf-8"))["vectors"]
}


def test_every_module_of_the_table_exists() -> None:
    table = DOCUMENT.split("## Modules")[1].split("## Exporters")[0]
    modules = re.findall(r"`(exporter\.[a-z_.]+)`", table)

    assert len(modules) >= 5
    assert [module for module in modules if not find_spec(module)] == []


@pytest.mark.parametrize("config_class", [OneLoggerConfig, TrainingTelemetryConfig, LoggerConfig])
def test_every_field_is_in_the_tables_of_settings(config_class: type[Settings]) -> None:
    tables = DOCUMENT.split("## Settings")[1].split("## Beyond")[0]
    documented_names = set(re.findall(r"\w+", tables))

    assert {name for name, _ in config_class.fields()} <= documented_names


def test_each_of_the_fifty_defects_is_shown_by_tests_that_exist() -> None:
    assert list(DEFECT_ROWS) == [f"D{number}" for number in range(1, 51)]
    for defect, (_, _, evidence) in DEFECT_ROWS.items():
        tests, vectors = re.findall(r"`(test_\w+)`", evidence), re.findall(r"vector `([\w-]+)`", evidence)

        assert tests or vectors, defect
        assert set(tests) <= TEST_NAMES, defect
        assert set(vectors) <= VECTOR_IDS, defect


@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_the_code_of_the_document_runs(index: int, tmp_path: Path) -> None:
    completed = run_python(PROGRAMS[index], tmp_path)

    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
    for path in tmp_path.glob("telemetry.jsonl"):
        records = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
        names = [record.get("name") or record["event"]["name"] for record in records]
        assert names.count("training_metrics_update") == 3
        assert names[-1] == "application"
