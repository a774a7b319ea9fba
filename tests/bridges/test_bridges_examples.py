"""The examples of the documentation, run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, job, wanted
from elastic_support import REPOSITORY

pytestmark = pytest.mark.timeout(180)

STEPS, SAVED = "steps_total mode=train", "checkpoints_total result=ok"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        pytest.param("plain.py", {STEPS: 100, "samples_total mode=train": 3200}, marks=wanted("torch")),
        pytest.param("unchanged.py", {STEPS: 16, SAVED: 1}, marks=wanted("torch")),
        pytest.param("lightning_trainer.py", {STEPS: 128, SAVED: 2}, marks=wanted("lightning")),
        pytest.param(
            "transformers_trainer.py", {STEPS: 10, SAVED: 2}, marks=wanted("transformers", "accelerate")
        ),
    ],
)
def test_the_example_tells_its_steps(name: str, told: dict[str, float], tmp_path: Path) -> None:
    program = (REPOSITORY / "docs/examples" / name).read_text()
    found = job(tmp_path, program, AUTO if name == "unchanged.py" else {})

    assert {what: found.number(None, what) for what in told} == told
