"""A filesystem that really hangs: the kernel's FUSE, with a daemon that never answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import TESTS
from waiting import PATIENCE

CHILD = TESTS / "fuse_child.py"
CANNOT = 77


pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or not Path("/dev/fuse").exists(),
    reason="mounting needs root, unshare and /dev/fuse",
)


def beside_a_dead_filesystem(what: str, directory: Path) -> Any:
    """What the child tells of it."""
    ended = subprocess.run(
        ["unshare", "--mount", "--propagation=private", sys.executable, CHILD, what, directory],
        env={**os.environ, "PYTHONPATH": str(CHILD.parent.parent)},
        capture_output=True,
        text=True,
        timeout=18 * PATIENCE,
        check=False,
    )
    if ended.returncode == CANNOT or "unshare failed" in ended.stderr:
        pytest.skip("this machine does not let us mount")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_filesystem_that_really_hangs_is_asked_once_and_costs_itself_alone(tmp_path: Path) -> None:
    told = beside_a_dead_filesystem("collect", tmp_path)

    assert told["asked"] == 1
    for each in told["passes"]:
        assert each["errors"] == {"/": 0.0, str(tmp_path): 1.0}
        assert each["reasons"] == ["hanging"]
        assert each["seconds"] < 5


def test_a_sidecar_that_no_signal_can_end_does_not_keep_the_job(tmp_path: Path) -> None:
    told = beside_a_dead_filesystem("run", tmp_path)

    assert told["status"] == 3, told["log"]
    assert "the sidecar cannot be ended" in told["log"]
    assert told["seconds"] < 10 * PATIENCE
