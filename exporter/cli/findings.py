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
    found: str
    remedy: str = ""


Check = Callable[[], Iterable[CheckFinding]]
"""Function that yields the findings of one subject."""


def ok(subject: str, found: str) -> CheckFinding:
    """Return a finding without a problem."""
    return CheckFinding("ok", subject, found)


def warn(subject: str, statement: Statement) -> CheckFinding:
    """Return a finding that is worth a look, and may be intended."""
    return CheckFinding("warn", subject, statement.sentence, statement.remedy)


def fail(subject: str, statement: Statement) -> CheckFinding:
    """Return a finding with which `check` exits with status 1."""
    return CheckFinding("FAIL", subject, statement.sentence, statement.remedy)
