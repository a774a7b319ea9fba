"""One-logger's own suites, with only its imports changed: they pass, but for what a list names with its reason.

They need a checkout of its repository, which no package of a registry carries (`ONE_LOGGER_CHECKOUT`); what is adapted of
them is in `one_logger_suite_plugin`. The rest of this folder says the same in words of our own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import places
import pytest

LIST = places.DATA / "one-logger-suites.json"
LISTED = json.loads(LIST.read_text(encoding="utf-8"))
CHECKOUT = os.environ.get("ONE_LOGGER_CHECKOUT")


@pytest.mark.parametrize("suite", LISTED["suites"])
def test_every_test_that_may_fail_has_a_reason_and_most_pass(suite: str) -> None:
    listed = LISTED["suites"][suite]
    names = [name for names in listed["fail"].values() for name in names]

    assert len(names) == len(set(names))
    assert all(reason.strip() for reason in listed["fail"])
    assert listed["tests"] - len(names) >= listed["asked"]


@pytest.mark.skipif(
    CHECKOUT is None,
    reason=f"no ONE_LOGGER_CHECKOUT: git clone {LISTED['repository']}, and check out {LISTED['commit']}",
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("suite", LISTED["suites"])
def test_one_loggers_own_suite_passes_but_for_what_is_listed(suite: str, tmp_path: Path) -> None:
    listed = LISTED["suites"][suite]
    shutil.copytree(Path(CHECKOUT or "") / listed["folder"], tmp_path / "tests")
    outcome = tmp_path / "outcome.json"
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path / "tests")]
    command += ["-p", "one_logger_suite_plugin", "-p", "no:cacheprovider", "--timeout=60"]
    command += ["-o", "python_files=test_*.py integration_test.py"]
    command += [f"--ignore-glob=*/{name}" for name in listed["left_out"]]
    done = subprocess.run(
        [*command, str(tmp_path / "tests")],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": f"{places.PROJECT}:{places.TESTS}", "SUITE_OUTCOME": str(outcome)}
        | {"EXPORTER_FEED_DIR": str(tmp_path / "feed")},
        capture_output=True,
        text=True,
        check=False,
    )

    found = json.loads(outcome.read_text(encoding="utf-8"))
    failed = {name.removeprefix(listed["prefix"]) for name in found["failed"]}
    expected = {name for names in listed["fail"].values() for name in names}
    assert failed == expected, done.stdout[-5000:]
    assert len(found["passed"]) + len(failed) == listed["tests"]
