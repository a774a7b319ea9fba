"""Findings of `training-exporter check`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from exporter.diagnoses import Described

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check: "warn" may be intended, "FAIL" prevents metrics from being shown."""

    status: Status
    subject: str
    found: str
    remedy: str = ""


Probe = Callable[[], Iterable[Finding]]


def ok(subject: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding("ok", subject, found)


def warn(subject: str, described: Described) -> Finding:
    """Return a finding that may be intended."""
    return Finding("warn", subject, described.found, described.remedy)


def fail(subject: str, described: Described) -> Finding:
    """Return a finding that prevents metrics from being shown."""
    return Finding("FAIL", subject, described.found, described.remedy)
