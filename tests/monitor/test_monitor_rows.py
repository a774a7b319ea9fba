"""docs/torch-monitor.md: every row of the RFC and of its reviewers is answered, and every example runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import exporter

DOCUMENT = (Path(exporter.__file__).parent.parent / "docs" / "torch-monitor.md").read_text(encoding="utf-8")
ROWS = [f"r{number}" for number in range(1, 16)] + [f"v{number}" for number in range(1, 29)]
CELLS = {
    cells[1].strip().lower(): cells
    for line in DOCUMENT.splitlines()
    if len(cells := re.split(r"(?<!\\)\|", line)) == 6
}


def test_every_row_is_answered() -> None:
    assert set(ROWS) == {row for row in CELLS if re.fullmatch(r"[rv]\d+", row)}
    assert all(cell.strip() for row in ROWS for cell in CELLS[row][1:5])


def test_the_examples_of_the_document_run_as_they_stand(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    examples = [CELLS[row][4].strip().strip("`") for row in ROWS]
    program = "\n".join([*blocks, *examples]).replace("/tmp/exporter-doc", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert (len(blocks), len(examples)) == (2, 43)
