"""The frame of every benchmark's output: one JSON document with the machine, the Python and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def report(results: Mapping[str, object]) -> None:
    """Print the results with what one must know to compare them."""
    root = Path(__file__).resolve().parent
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    machine = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": described.stdout.strip() or "unknown",
        "benchmark": Path(sys.argv[0]).name,
    }
    print(json.dumps({**machine, **results}, indent=1))
