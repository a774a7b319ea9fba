"""Findings of `training-exporter check`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from exporter.diagnoses import Statement

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """Result of a check.

    "warn" is worth a look, and may be intended. With a "FAIL", `check` exits with status 1.
    """

    status: Status
    subject: str
    message: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the object that `check --check.format=json` prints for the finding."""
        return {
            "status": self.status,
            "subject": self.subject,
            "found": self.message,
            "remedy": self.remedy,
        }


Check = Callable[[], Iterable[CheckFinding]]
"""Function that yields the findings of one subject."""


def ok(subject: str, message: str) -> CheckFinding:
    """Return a finding without a problem."""
    return CheckFinding("ok", subject, message)


def warning(subject: str, statement: Statement) -> CheckFinding:
    """Return a finding that is worth a look, and may be intended."""
    return CheckFinding("warn", subject, statement.sentence, statement.remedy)


def failure(subject: str, statement: Statement) -> CheckFinding:
    """Return a finding with which `check` exits with status 1."""
    return CheckFinding("FAIL", subject, statement.sentence, statement.remedy)
