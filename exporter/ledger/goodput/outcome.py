"""Outcome of a process's exit."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EvidenceSource(enum.Enum):
    """Evidence that decided how a process ended."""

    PROCESS = "process"
    EXCEPTION = "exception"
    LAUNCH = "launch"
    RESTART = "restart"
    INFERRED = "inferred"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of an exited process."""

    source: EvidenceSource
    completed: bool
    at: float  # Unix time
    status: int | None = (
        None  # exit status, or a signal as a negative number; of the process or of the launch
    )
    exception: str = ""
    failure: str = ""
