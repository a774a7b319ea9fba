"""When a process began, as the kernel has it.

Runs in the sidecar, on the ledger's collecting thread: one small file is read for each new process of rank 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LONGEST_BEFORE_SECONDS = 600.0
"""What began so long before its recording, such as the kernel of a notebook, did something else first."""


def started_at(
    pid: int | None,
    recorded: float,
    *,
    proc: Path = Path("/proc"),
    clock: Callable[[], float] = time.time,
    boottime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
) -> float:
    """Tell when a process began.

    Args:
        pid: As seen from here; None where it cannot be seen.
        recorded: Unix time at which its recording began.
        proc: Where procfs is mounted.
        clock: Unix time.
        boottime: Seconds since the machine began.

    Returns:
        Unix time, at most `recorded`, which it is where nobody knows better.
    """
    if pid is None:
        return recorded
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
        # The name of the program stands in brackets and may have any; the start is the 22nd field, in ticks.
        ticks = int(stat[stat.rindex(b")") + 1 :].split()[19])
    except (OSError, ValueError, IndexError):
        return recorded
    began = clock() - boottime() + ticks / os.sysconf("SC_CLK_TCK")
    return began if recorded - LONGEST_BEFORE_SECONDS <= began <= recorded else recorded
