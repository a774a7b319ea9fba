"""docs/migrating.md: every line of code runs with the result of its row."""

from __future__ import annotations

import re
from pathlib import Path

import places
from bridges_support import needs
from program_support import page_of_feed, run_program

from exporter.one_logger import StandardTrainingJobSpanName

DOCUMENT = (places.PROJECT / "docs" / "migrating.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*) \| `(.*?)` \|(.*)\|$", DOCUMENT, flags=re.MULTILINE)


@needs("torch")
def test_every_line_of_the_migration_tables_runs_with_the_stated_result(tmp_path: Path) -> None:
    (preamble,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    program = "\n".join([preamble, *(line for _, line, _ in ROWS), "exporter.flush(timeout_seconds=60)"])
    completed = run_program(tmp_path / "feed", program, library="torch")

    records = (tmp_path / "telemetry.jsonl").read_text(encoding="ascii")
    output = "\n".join([completed.stdout, records, page_of_feed(tmp_path / "feed")])
    missing = {
        (feature, name)
        for feature, _, outcome in ROWS
        for name in re.findall("`(.*?)`", outcome)
        if name not in output
    }
    assert missing == set(), output
    assert completed.stderr == ""


def test_every_row_has_code_and_every_span_has_a_row() -> None:
    features = "\n".join(feature for feature, _, _ in ROWS)

    assert len(ROWS) == len([line for line in DOCUMENT.splitlines() if re.match(r"\| (?!feature)", line)])
    assert {member for member in StandardTrainingJobSpanName.__members__ if member not in features} == {
        "CHECKPOINT_SAVE_FINALIZATION",  # declared by one-logger, but never created
        "ZERO_GRAD",  # not in its README
    }
