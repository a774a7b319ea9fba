"""Unchanged jobs of `benchmarks/foreign` under `run` without a name, compared with the log that each job keeps.

The tests run the jobs whose framework is a dependency of the tests. `benchmarks/foreign_jobs.py` runs all jobs, and
docs/bridges.md has the table of results.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from bridges_support import needs
from foreign_jobs import JOBS, table_row
from foreign_run import Comparison, ForeignJob, JobResult, Numbers, Verdict, measure
from fork_server import forked_interpreter
from places import PROJECT

LIBRARIES = {
    "failing": "torch",
    "ddp": "torch",
    "elastic": "torch",
    "two_pythons": "torch",  # contains the job amp_accumulation
    "fabric": "lightning",
    "ignite": "ignite",
    "keras": "keras",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(LIBRARIES[name])) for name in LIBRARIES])
def test_the_page_agrees_with_the_log_of_the_job(name: str, tmp_path: Path) -> None:
    job = next(foreign_job for foreign_job in JOBS if foreign_job.name == name)
    if name == "two_pythons":
        python = sys.executable  # a new interpreter, which starts as that of a user
    else:
        python = forked_interpreter("lightning" if name == "fabric" else "torch")
    result = measure(job, python, tmp_path)

    verdicts = {comparison.verdict for comparison in result.comparisons().values()}
    assert Verdict.WRONG not in verdicts, table_row(result, "")
    assert Verdict.EQUAL in verdicts


def test_the_table_separates_equal_quantities_from_those_within_a_tolerance() -> None:
    log = Numbers(
        state="finished",
        steps=10,
        loss=2.0,
        samples=40,
        epochs=2,
        checkpoints=1,
        productive=5.0,
        interruptions=0,
    )
    page = dataclasses.replace(log, steps=11, loss=2.0001, epochs=None, productive=6.0)
    result = JobResult(
        job=ForeignJob(name="x", command=(), absent={"epochs": "no loader"}),
        log_numbers=log,
        page_numbers=page,
        states={"running", "finished"},
        runs={"x"},
        output="",
        page="",
    )

    assert result.comparisons() == {
        "state": Comparison(Verdict.EQUAL),
        "steps": Comparison(Verdict.WRONG, "11, log 10"),
        "loss": Comparison(Verdict.WITHIN_TOLERANCE),
        "samples": Comparison(Verdict.EQUAL),
        "epochs": Comparison(Verdict.ABSENT),
        "checkpoints": Comparison(Verdict.EQUAL),
        "productive": Comparison(Verdict.WITHIN_TOLERANCE),
        "interruptions": Comparison(Verdict.EQUAL),
    }
    assert table_row(result, "v 1") == (
        "| x | v 1 | state, samples, checkpoints, interruptions | loss, productive | epochs | steps (11, log 10) |"
    )


def test_the_document_lists_every_job() -> None:
    listed_names = re.findall(r"^\| `(\w+)` \|", (PROJECT / "docs/bridges.md").read_text(), re.MULTILINE)

    assert {job.name for job in JOBS} <= set(listed_names)
