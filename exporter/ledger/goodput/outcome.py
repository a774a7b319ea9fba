"""Outcome of a process's exit."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


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

    JSON_KEYS: ClassVar[Mapping[str, str]] = {"is_completed": "completed", "exited_at": "at"}
    source: EvidenceSource
    is_completed: bool
    exited_at: float  # Unix time
    status: int | None = (
        None  # exit status, or a signal as a negative number; of the process or of the launch
    )
    exception: str = ""
    failure: str = ""
