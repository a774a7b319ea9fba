"""Jobs that hang until the test releases them, and their ending."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
from places import PROJECT

JOBS = PROJECT / "tests" / "hangs" / "jobs"


def stall_command(directory: Path, place: str) -> tuple[str, ...]:
    """Return the arguments of Python for `stall.py`, which waits at a place for a writer of the FIFO `peer` in a directory."""
    os.mkfifo(directory / "peer")
    return str(JOBS / "stall.py"), place, str(directory / "peer")


def ranks_command(ranks: int, script: str, *arguments: str) -> tuple[str, ...]:
    """Return the arguments of Python for a script of `JOBS` on several ranks, which exchange data with gloo."""
    return str(JOBS / "forked_ranks.py"), str(ranks), str(JOBS / script), *arguments


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants.

    A signal to the process group would miss the workers of torchrun, which have sessions of their own.
    """
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in children:
        if child.is_running():
            child.kill()
    psutil.wait_procs(children, timeout=60)
