"""OOM kills: how many processes the kernel has killed for memory since the machine began.

Used in the sidecar, to tell why a process of the job is gone. The machine's own count is read, since a container's
cannot be seen from the next one: a kill elsewhere in the same seconds would be mistaken for the job's.
"""

from __future__ import annotations

from pathlib import Path


def oom_kills(proc: Path = Path("/proc")) -> float | None:
    """Read the count; None where there is none."""
    try:
        for line in (proc / "vmstat").read_bytes().splitlines():
            if line.startswith(b"oom_kill "):
                return float(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None
