"""docs/training.md: the programs run, and the calls and phases exist."""

from __future__ import annotations

import re

import pytest
from places import PROJECT
from training_support import misuse_counts, publish_and_read, published_value

from exporter import training
from exporter.training.phases import PHASES

DOCUMENT = (PROJECT / "docs" / "training.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.usefixtures("initial_recorder")

GUIDE_PROGRAM, STREAMING_PROGRAM = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)[:2]


def test_the_streaming_example_runs_and_is_recorded() -> None:
    exec(compile(STREAMING_PROGRAM, "docs/training.md", "exec"), {})

    assert published_value("training.steps", mode="train") == 1


def test_the_example_of_the_guide_runs_and_is_recorded() -> None:
    exec(compile(GUIDE_PROGRAM, "docs/training.md", "exec"), {})

    reading = publish_and_read()
    assert published_value("training.steps", mode="train") == 30
    assert published_value("training.steps", mode="validation") == 3
    assert published_value("training.checkpoints", kind="sync", result="ok") == 3
    assert published_value("training.model_flops") == 30 * 4096 * 6e6
    assert (reading.finished, reading.step, reading.segments) == (True, 30, ())
    assert misuse_counts() == {}


def test_every_call_and_phase_of_the_guide_exists_and_every_call_is_in_the_guide() -> None:
    named_functions = set(re.findall(r"(?:`|training\.|exporter\.)([a-z_]+)(?:\(|`)", DOCUMENT))
    called_functions = set(re.findall(r"\btraining\.([a-z_]+)\(", DOCUMENT))
    named_phases = set(re.findall(r'\bphase\("([a-z_]+)"\)', DOCUMENT))
    named_phases -= {"typo"}  # the guide's example of an unknown phase
    documented_names = {
        name
        for name in training.__all__
        if name.islower() and not name.startswith("on_") and not name.startswith("get_")
    } - {"assert_that"}

    assert documented_names <= named_functions
    assert called_functions <= set(training.__all__)
    assert named_phases
    assert named_phases <= set(PHASES)
