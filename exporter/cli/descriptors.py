"""What a child must not inherit: every descriptor that a shell left open for the job.

Used where `run` starts processes of its own. A pipe that such a process keeps open would hide the job's end
from whoever reads the job's output.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

Action = tuple[int, ...] | tuple[int, int, str, int, int]
"""One file action of `os.posix_spawn`."""


def closing_all_but(kept: Collection[int] = ()) -> list[Action]:
    """File actions that give a child /dev/null as its three standard streams, and nothing else.

    Args:
        kept: Left open, for actions that follow; those that Python made close themselves.
    """
    opened = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    actions: list[Action] = [
        (os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in opened if descriptor not in kept
    ]
    actions += [
        (os.POSIX_SPAWN_OPEN, standard, os.devnull, os.O_RDWR, 0)
        for standard in range(3)
        if standard not in kept
    ]
    return actions
