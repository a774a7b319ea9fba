"""Outcome of an exited process."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


class EvidenceSource(enum.Enum):
    """Evidence that decided the outcome of a process; see the rules in `endings`."""

    PROCESS = "process"  # exit status of the process itself
    EXCEPTION = "exception"  # uncaught exception, or a failure that the process reported
    LAUNCH = "launch"  # exit status of the launch
    RESTART = "restart"  # restart of the process by torchrun's agent
    INFERRED = "inferred"  # last snapshot of the process


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of an exited process: whether the training was completed, and how the process ended."""

    JSON_KEYS: ClassVar[Mapping[str, str]] = {"is_completed": "completed", "exited_at": "at"}
    source: EvidenceSource
    is_completed: bool  # True if the training was completed
    exited_at: float  # Unix time
    # exit status of the process or of the launch, or a signal as a negative number; None if unknown
    status: int | None = None
    exception: str = ""  # type of the uncaught exception
    failure: str = ""  # reason that the process reported
