"""docs/torchelastic.md: its examples run, its families exist, and each row E1 to E7 names a test that is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import places
import pytest
from elastic_support import REPOSITORY

from exporter.ledger.admission import OWN

DOCUMENT = (REPOSITORY / "docs" / "torchelastic.md").read_text(encoding="utf-8")
TESTS = "".join(path.read_text(encoding="utf-8") for path in places.TESTS.glob("*/test_*.py"))


@pytest.mark.parametrize("row", [f"E{number}" for number in range(1, 8)])
def test_every_row_is_answered_by_a_test_that_is_there(row: str) -> None:
    (line,) = [line for line in DOCUMENT.splitlines() if line.startswith(f"| {row} |")]
    (name,) = re.findall(r"`(test_\w+)` \|$", line)

    assert f"def {name}(" in TESTS


def test_every_family_of_the_page_exists_and_every_one_of_the_agent_is_on_it() -> None:
    named = set(re.findall(r"\btraining_(?:elastic|torch)_\w+", DOCUMENT))
    known = set(OWN) | {f"{name}_{part}" for name in OWN for part in ("sum", "count")}

    assert named <= known
    assert {name for name in OWN if name.startswith("training_elastic_")} <= named


@pytest.mark.parametrize("number", range(3))
def test_the_examples_run(number: int, tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)[number]

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        env={"PYTHONPATH": str(REPOSITORY), "EXPORTER_FEED_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
