"""The examples of the documentation, run without changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, SAMPLES, SAVES, STEPS, needs, run_job
from places import PROJECT

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("name", "library", "expected"),
    [
        pytest.param("plain.py", "torch", {STEPS: 100, SAMPLES: 3200}, marks=needs("torch")),
        pytest.param("unchanged.py", "torch", {STEPS: 16, SAVES: 1}, marks=needs("torch")),
        pytest.param("lightning_trainer.py", "lightning", {STEPS: 128, SAVES: 2}, marks=needs("lightning")),
        pytest.param(
            "transformers_trainer.py",
            "transformers",
            {STEPS: 10, SAVES: 2},
            marks=needs("transformers", "accelerate"),
        ),
    ],
)
def test_the_example_records_its_steps(
    name: str, library: str, expected: dict[str, float], tmp_path: Path
) -> None:
    program = (PROJECT / "docs/examples" / name).read_text()
    environment = AUTO if name == "unchanged.py" else {}

    assert run_job(tmp_path, program, environment, library=library).differences(expected) == {}
