"""docs/torch-monitor.md and docs/torchelastic.md: the examples run, and the rows name existing tests and families."""

from __future__ import annotations

import re
from pathlib import Path

import places
import pytest
from program_support import run_program

from exporter.ledger.family_owners import TRAINING_FAMILIES

MONITOR_GUIDE, ELASTIC_GUIDE = (
    (places.PROJECT / "docs" / name).read_text(encoding="utf-8")
    for name in ("torch-monitor.md", "torchelastic.md")
)
TEST_SOURCES = "".join(path.read_text(encoding="utf-8") for path in places.TESTS.glob("*/test_*.py"))


def code_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document, re.DOTALL)


def test_every_row_of_the_rfc_is_complete_and_its_example_runs(tmp_path: Path) -> None:
    row_ids = [f"R{number}" for number in range(1, 16)] + [f"V{number}" for number in range(1, 29)]
    rows = (re.split(r"(?<!\\)\|", line) for line in MONITOR_GUIDE.splitlines())
    cells_by_id = {cells[1].strip(): cells for cells in rows if len(cells) == 6}
    examples = [cells_by_id[row_id][4].strip().strip("`") for row_id in row_ids]
    program = "\n".join([*code_blocks(MONITOR_GUIDE), *examples]).replace("/tmp/exporter-doc", str(tmp_path))

    assert set(row_ids) == {row_id for row_id in cells_by_id if re.fullmatch(r"[RV]\d+", row_id)}
    assert all(cell.strip() for row_id in row_ids for cell in cells_by_id[row_id][1:5])
    assert run_program(tmp_path / "feed", program).stderr == ""


@pytest.mark.parametrize("example", code_blocks(ELASTIC_GUIDE), ids=["0", "1", "2"])
def test_the_examples_of_the_torchelastic_guide_run(example: str, tmp_path: Path) -> None:
    assert run_program(tmp_path / "feed", example).stderr == ""


def test_every_row_of_the_torchelastic_guide_names_an_existing_test() -> None:
    test_by_row = dict(re.findall(r"^\| (E\d) \|.*`(test_\w+)` \|$", ELASTIC_GUIDE, re.MULTILINE))

    assert [*test_by_row] == [f"E{number}" for number in range(1, 8)]
    assert [name for name in test_by_row.values() if f"def {name}(" not in TEST_SOURCES] == []


def test_the_torchelastic_guide_names_existing_families_and_all_families_of_torchelastic() -> None:
    documented_families = set(re.findall(r"\btraining_(?:elastic|torch)_\w+", ELASTIC_GUIDE))
    families = set(TRAINING_FAMILIES) | {
        f"{name}_{part}" for name in TRAINING_FAMILIES for part in ("sum", "count")
    }

    assert documented_families <= families
    assert {name for name in TRAINING_FAMILIES if name.startswith("training_elastic_")} <= documented_families
