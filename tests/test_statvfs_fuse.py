"""A filesystem that really hangs: the kernel's FUSE, with a daemon that never answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).parent / "fuse_child.py"
CANNOT = 77


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or not Path("/dev/fuse").exists(),
    reason="mounting needs root, unshare and /dev/fuse",
)
def test_a_filesystem_that_really_hangs_is_asked_once_and_costs_itself_alone(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["unshare", "--mount", "--propagation=private", sys.executable, CHILD, tmp_path],
        env={**os.environ, "PYTHONPATH": str(CHILD.parent.parent)},
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )
    if ended.returncode == CANNOT or "unshare failed" in ended.stderr:
        pytest.skip("this machine does not let us mount")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)

    assert told["asked"] == 1
    for each in told["passes"]:
        assert each["errors"] == {"/": 0.0, str(tmp_path): 1.0}
        assert each["reasons"] == ["hanging"]
        assert each["seconds"] < 5
