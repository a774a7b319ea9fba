"""Status: what is known about one collector, apart from its data: verdict, age, counters.

Used in the sidecar by the scheduler and the status page. Values only. It stays when the collector's own series are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from exporter.families import Collected, FamilySpec, family


def _of_collector(name: str, help_text: str, where: str, *labels: str) -> FamilySpec:
    return family(f"exporter_collector_{name}", help_text, where, "collector", *labels)


@dataclass(frozen=True, slots=True)
class CollectorStatus:
    """One collector at one moment, for the status page."""

    name: str
    success: bool | None  # verdict of the last pass; None before the first has ended
    reason: str  # why the verdict is 0, several joined by a comma; "" otherwise
    message: str  # the same for people
    age_seconds: float | None  # of the published block; None while nothing is published
    last_success: float | None  # Unix time of the last pass without any problem
    duration_seconds: float | None  # of the last pass
    interval_seconds: float
    deadline_seconds: float
    running: bool  # a pass is under way; with the reason `timeout` it hangs
    unsupported: tuple[str, ...]  # what this machine does not offer


@dataclass(slots=True)
class Totals:
    """The counters of a collector's name; they outlive its removal, as a counter must not step back."""

    duration_seconds: float = 0.0
    timeouts: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    last_success: float | None = None


OF_STATUS: dict[FamilySpec, Callable[[CollectorStatus, Totals], float | None]] = {
    _of_collector(
        "success",
        "Whether the last pass of the collector read all of its sources (1) or not (0). Absent before the first pass has ended.",
        "last pass",
    ): lambda status, _: None if status.success is None else int(status.success),
    _of_collector(
        "last_duration_seconds",
        "How long the last pass took; while one is past its deadline, how long it has been running. Absent before the first pass has ended.",
        "monotonic clock",
    ): lambda status, _: status.duration_seconds,
    _of_collector(
        "duration_seconds_total",
        "Time that all passes of the collector took, late ones included once they return.",
        "monotonic clock",
    ): lambda _, totals: totals.duration_seconds,
    _of_collector(
        "last_success_timestamp_seconds",
        "When the last pass that read all of its sources ended. Absent before the first one.",
        "wall clock",
    ): lambda _, totals: totals.last_success,
    _of_collector(
        "timeouts_total",
        "Passes that had not returned at their deadline; one that hangs for hours counts once.",
        "scheduler",
    ): lambda _, totals: totals.timeouts,
    _of_collector(
        "interval_seconds",
        "Time between two passes of the collector; a scrape interval below it repeats values.",
        "configuration",
    ): lambda status, _: status.interval_seconds,
    _of_collector(
        "unsupported_sources",
        "Sources of the collector that this machine does not offer, so that their families are absent; the log names them. Absent where it offers all, and before the first pass that published.",
        "last pass",
    ): lambda status, _: len(status.unsupported) or None,
}
ERRORS = _of_collector(
    "errors_total",
    "Passes that failed in part or as a whole, late ones included, by reason. Absent before the first of its reason.",
    "last pass",
    "reason",
)
SPECS = (*OF_STATUS, ERRORS)


def status_families(statuses: Iterable[tuple[CollectorStatus, Totals]]) -> Collected:
    """Make the `exporter_collector_*` families."""
    made = Collected()
    for status, totals in statuses:
        for spec, value in OF_STATUS.items():
            made.add(spec, value(status, totals), status.name)
        for reason, count in sorted(totals.errors.items()):
            made.add(ERRORS, count, status.name, reason)
    return made
