"""Conditions that need attention, and findings: conditions that hold for a subject."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from exporter.diagnoses import Diagnosis, Statement
from exporter.status.view import StackGroup, View


class AlertSeverity(enum.Enum):
    """Severity of a condition; the value is the label `severity` of the alert."""

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Match:
    """Occurrence of a condition, which its `find_matches` yields.

    Attributes:
        subject: Identity of the subject, such as run, rank, GPU or device; () for the node. Equal in every evaluation.
        facts: Values of the placeholders in the sentence and the remedy.
        start: Unix time of the start of a state or of the first event; for an Xid, of the last event. None if unknown.
        last_event_at: Unix time of the last of several events; None for a single event or for a state.
        is_event: True for an event, False for a state that lasts.
        is_past: True for an event whose alert no longer fires.
        stacks: Stacks of the ranks of a hang.
        gpu_uuid: UUID of the GPU under which the page lists the finding; "" for the subject itself.
    """

    subject: tuple[str, ...]
    facts: Mapping[str, object] = field(default_factory=dict)
    start: float | None = None
    last_event_at: float | None = None
    is_event: bool = False
    is_past: bool = False
    stacks: tuple[StackGroup, ...] = ()
    gpu_uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition(Diagnosis):
    """Row of the table of conditions.

    Attributes:
        alert_name: Name of the alert with the same condition; "" for a condition without an alert.
        severity: Severity of the alert, or of the condition without an alert.
        runbook_alert: Name of an alert whose runbook entry applies to a condition without an alert; "" for none.
        stops_run: True if the run makes no steps while the condition holds. The page lists such findings before others of the same urgency.
        is_cause: True if the condition explains other findings about its subject. The page lists such findings first.
        find_matches: Yields a match for each subject for which the condition holds.
    """

    alert_name: str = ""
    severity: AlertSeverity = AlertSeverity.WARNING
    runbook_alert: str = ""
    stops_run: bool = False
    is_cause: bool = False
    find_matches: Callable[[View], Iterator[Match]]

    @property
    def name(self) -> str:
        """Name of the alert, or the sentence of a condition without an alert."""
        return self.alert_name or self.sentence

    @property
    def anchor(self) -> str:
        """Anchor of the runbook entry; "" without an entry."""
        return (self.alert_name or self.runbook_alert).lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """A match together with its condition, for display."""

    condition: Condition
    match: Match

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the finding, equal in every evaluation."""
        return (self.condition.name, *self.match.subject)

    @property
    def statement(self) -> Statement:
        """Sentence and remedy, with the facts filled in."""
        return self.condition.describe(**self.match.facts)

    @property
    def is_urgent(self) -> bool:
        """True if the severity is critical and the event is not past."""
        return self.condition.severity is AlertSeverity.CRITICAL and not self.match.is_past
