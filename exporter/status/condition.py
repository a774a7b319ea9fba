"""A condition that needs attention, and a finding: the condition with a subject and a time."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from exporter.diagnoses import Described, Diagnosis
from exporter.status.view import StackGroup, View


class AlertSeverity(enum.Enum):
    """AlertSeverity of a condition; equal to the label of the alert."""

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Found:
    """A subject for which a condition holds.

    Attributes:
        subject: Identifies the subject over time: run, rank, GPU, device.
        facts: Values for the sentence and the remedy.
        since: Unix time of the start, or None if the samples do not contain it.
        event: True for a past event, False for a state that lasts.
        is_past: True for an event that no longer fires the alert.
    """

    subject: tuple[str, ...]
    facts: Mapping[str, object] = field(default_factory=dict)
    since: float | None = None
    event: bool = False
    is_past: bool = False
    stacks: tuple[StackGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition(Diagnosis):
    """A row of the table of conditions.

    Attributes:
        alert: Name of the alert with the same condition; "" for a condition of the page only.
        find: Yields the subjects for which the condition holds.
    """

    alert: str = ""
    severity: AlertSeverity = AlertSeverity.WARNING
    find: Callable[[View], Iterator[Found]]

    @property
    def name(self) -> str:
        """Return the name of the alert, or the sentence of a condition of the page only."""
        return self.alert or self.sentence

    @property
    def anchor(self) -> str:
        """Return the anchor of the alert in the runbook; "" without an alert."""
        return self.alert.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that holds for a subject."""

    condition: Condition
    found: Found

    @property
    def key(self) -> tuple[str, ...]:
        """Return the identity of the finding over time."""
        return (self.condition.name, *self.found.subject)

    @property
    def described(self) -> Described:
        """Return sentence and remedy with the facts filled in."""
        return self.condition.describe(**self.found.facts)

    @property
    def is_urgent(self) -> bool:
        """Return True if the alert is critical and fires now."""
        return self.condition.severity is AlertSeverity.CRITICAL and not self.found.is_past
