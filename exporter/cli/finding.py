"""What a question of `check` is answered with, and where it may look.

Pure values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question.

    Attributes:
        status: `ok`, `warn` for what may be meant so, `FAIL` for what keeps numbers from showing up.
        subject: What was asked about.
        found: What is the case.
        remedy: What the user can do; "" where nothing needs doing.
    """

    status: Status
    subject: str
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where probes look; other places in tests.

    Attributes:
        proc: The kernel's /proc.
        sys: The kernel's /sys.
        shm: Shared memory.
        environ: The environment.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")  # noqa: S108  # looked at only
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


def bytes_text(count: float) -> str:
    """A size for people: `64 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
