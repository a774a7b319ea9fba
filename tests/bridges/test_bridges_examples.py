"""The examples of the documentation, run without changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, SAMPLES, SAVED, STEPS, job, needs
from elastic_support import REPOSITORY

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("plain.py", {STEPS: 100, SAMPLES: 3200}, marks=needs("torch")),
        pytest.param("unchanged.py", {STEPS: 16, SAVED: 1}, marks=needs("torch")),
        pytest.param("lightning_trainer.py", {STEPS: 128, SAVED: 2}, marks=needs("lightning")),
        pytest.param(
            "transformers_trainer.py", {STEPS: 10, SAVED: 2}, marks=needs("transformers", "accelerate")
        ),
    ],
)
def test_the_example_records_its_steps(name: str, expected: dict[str, float], tmp_path: Path) -> None:
    program = (REPOSITORY / "docs/examples" / name).read_text()

    assert job(tmp_path, program, AUTO if name == "unchanged.py" else {}).differences(expected) == {}
