"""Two minutes of the soak program on CI, and 20 seconds elsewhere. `make soak` runs it for hours."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from places import PROJECT
from prometheus_support import needs_prometheus


@pytest.mark.slow
@needs_prometheus
@pytest.mark.timeout(360)
def test_short_lived_ranks_are_counted_as_in_their_own_logs() -> None:
    completed = subprocess.run(
        [sys.executable, PROJECT / "benchmarks/soak.py"],
        env={**os.environ, "SOAK": "2m" if os.environ.get("CI") else "20s", "SEED": "11"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "all invariants hold" in completed.stdout
