"""Foreign jobs of `benchmarks/foreign`, unnamed and unchanged under `run`, compared with the log that each job keeps.

Here are the jobs whose framework the tests install; `benchmarks/foreign_jobs.py` runs all. docs/bridges.md has the table.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from bridges_support import needs
from foreign_jobs import JOBS, table_row
from foreign_run import measure
from places import PROJECT

LIBRARIES = {
    "amp_accumulation": "torch",
    "failing": "torch",
    "ddp": "torch",
    "elastic": "torch",
    "two_pythons": "torch",
    "fabric": "lightning",
    "ignite": "ignite",
    "keras": "keras",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(LIBRARIES[name])) for name in LIBRARIES])
def test_the_page_has_the_numbers_of_the_job_s_own_log(name: str, tmp_path: Path) -> None:
    job = next(each for each in JOBS if each.name == name)
    result = measure(job, sys.executable, tmp_path)

    assert set(result.verdicts().values()) <= {"exact", "absent"}, table_row(result, "")


def test_the_document_lists_every_job() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (PROJECT / "docs/bridges.md").read_text(), re.MULTILINE)

    assert {job.name for job in JOBS} <= set(listed)
