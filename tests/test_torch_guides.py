"""docs/torch-monitor.md and docs/torchelastic.md: the examples run, and the rows name existing tests and families."""

from __future__ import annotations

import re
from pathlib import Path

import places
import pytest
from elastic_support import run_program

from exporter.ledger.family_owners import TRAINING_FAMILIES

MONITOR, ELASTIC = (
    (places.PROJECT / "docs" / name).read_text(encoding="utf-8")
    for name in ("torch-monitor.md", "torchelastic.md")
)
TESTS = "".join(path.read_text(encoding="utf-8") for path in places.TESTS.glob("*/test_*.py"))


def code_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document, re.DOTALL)


def test_every_row_of_the_rfc_is_complete_and_its_example_runs(tmp_path: Path) -> None:
    rows = [f"R{number}" for number in range(1, 16)] + [f"V{number}" for number in range(1, 29)]
    cells = {
        row[1].strip(): row for line in MONITOR.splitlines() if len(row := re.split(r"(?<!\\)\|", line)) == 6
    }
    examples = [cells[row][4].strip().strip("`") for row in rows]
    program = "\n".join([*code_blocks(MONITOR), *examples]).replace("/tmp/exporter-doc", str(tmp_path))

    assert set(rows) == {row for row in cells if re.fullmatch(r"[RV]\d+", row)}
    assert all(cell.strip() for row in rows for cell in cells[row][1:5])
    assert run_program(tmp_path / "feed", program).stderr == ""


@pytest.mark.parametrize("example", code_blocks(ELASTIC), ids=["0", "1", "2"])
def test_the_examples_of_the_torchelastic_guide_run(example: str, tmp_path: Path) -> None:
    assert run_program(tmp_path / "feed", example).stderr == ""


def test_every_row_of_the_torchelastic_guide_names_an_existing_test() -> None:
    rows = dict(re.findall(r"^\| (E\d) \|.*`(test_\w+)` \|$", ELASTIC, re.MULTILINE))

    assert [*rows] == [f"E{number}" for number in range(1, 8)]
    assert [name for name in rows.values() if f"def {name}(" not in TESTS] == []


def test_every_family_of_the_guide_exists_and_every_agent_family_is_in_it() -> None:
    documented_families = set(re.findall(r"\btraining_(?:elastic|torch)_\w+", ELASTIC))
    families = set(TRAINING_FAMILIES) | {
        f"{name}_{part}" for name in TRAINING_FAMILIES for part in ("sum", "count")
    }

    assert documented_families <= families
    assert {name for name in TRAINING_FAMILIES if name.startswith("training_elastic_")} <= documented_families
