"""The examples of the documentation, run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, QUIET, Job, job, wanted
from elastic_support import REPOSITORY

pytestmark = pytest.mark.timeout(180)

EXAMPLES = REPOSITORY / "docs/examples"


def run(name: str, tmp_path: Path, *, auto: bool = False) -> Job:
    program = (EXAMPLES / name).read_text()
    return job(tmp_path, program, AUTO if auto else QUIET)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_fits_a_readme(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line]

    assert len(lines) <= 12
    assert max(map(len, lines)) <= 100


@wanted("torch")
def test_the_plain_example_tells_its_steps(tmp_path: Path) -> None:
    told = run("plain.py", tmp_path)

    assert told.value("training_steps_total", mode="train") == 100
    assert told.value("training_samples_total", mode="train") == 3200


@wanted("torch")
def test_the_example_that_is_not_changed_is_told(tmp_path: Path) -> None:
    told = run("unchanged.py", tmp_path, auto=True)

    assert told.value("training_steps_total", mode="train") == 16
    assert told.value("training_checkpoints_total", result="ok") == 1


@wanted("lightning")
def test_the_lightning_example_tells_its_steps(tmp_path: Path) -> None:
    told = run("lightning_trainer.py", tmp_path)

    assert told.value("training_steps_total", mode="train") == 128
    assert told.value("training_checkpoints_total", result="ok") == 2


@wanted("transformers", "accelerate")
def test_the_transformers_example_tells_its_steps(tmp_path: Path) -> None:
    told = run("transformers_trainer.py", tmp_path)

    assert told.value("training_steps_total", mode="train") == 10
    assert told.value("training_checkpoints_total", result="ok") == 2
