"""Verdict, age and counters of a collector.

The families of this module remain when the collector's own series disappear.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from exporter.families import Collected, FamilySpec


@dataclass(frozen=True, slots=True)
class CollectorStatus:
    """State of a collector at one time."""

    name: str
    success: bool | None  # verdict of the last pass; None before the first
    reason: str  # reasons of the failure, joined by commas; "" after a success
    message: str  # the problems in words
    age_seconds: float | None  # of the published block; None if nothing is published
    last_success: float | None  # Unix time of the last pass without any problem
    duration_seconds: float | None  # of the last pass
    interval_seconds: float
    deadline_seconds: float
    running: bool  # a pass is in progress; with the reason `timeout` it hangs
    unsupported: tuple[str, ...]  # sources that this machine does not offer


@dataclass(slots=True)
class CollectorTotals:
    """Counters of a collector name, which continue after a removal: a counter must not step back."""

    duration_seconds: float = 0.0
    timeouts: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    last_success: float | None = None


SUCCESS = FamilySpec(
    name="exporter_collector_success",
    type="gauge",
    labels=("collector",),
    help=(
        "1 if the last pass of the collector read all sources, 0 after a problem. Absent before the end of the first pass."
    ),
    source="last pass",
)
LAST_DURATION = FamilySpec(
    name="exporter_collector_last_duration_seconds",
    type="gauge",
    unit="seconds",
    labels=("collector",),
    help=(
        "Duration of the last pass, or of a pass that is past the deadline. Absent before the end of the first pass."
    ),
    source="monotonic clock",
)
DURATION = FamilySpec(
    name="exporter_collector_duration_seconds_total",
    type="counter",
    unit="seconds",
    labels=("collector",),
    help="Duration of all passes of the collector; a late pass counts when it returns.",
    source="monotonic clock",
)
LAST_SUCCESS = FamilySpec(
    name="exporter_collector_last_success_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=("collector",),
    help="Unix time of the end of the last pass that read all sources. Absent before the first such pass.",
    source="wall clock",
)
TIMEOUTS = FamilySpec(
    name="exporter_collector_timeouts_total",
    type="counter",
    labels=("collector",),
    help="Passes that had not returned at the deadline; a pass that hangs for hours counts once.",
    source="scheduler",
)
INTERVAL = FamilySpec(
    name="exporter_collector_interval_seconds",
    type="gauge",
    unit="seconds",
    labels=("collector",),
    help="Time between two passes of the collector; a shorter scrape interval repeats values.",
    source="configuration",
)
UNSUPPORTED = FamilySpec(
    name="exporter_collector_unsupported_sources",
    type="gauge",
    labels=("collector",),
    help=(
        "Sources of the collector that this machine does not offer; the log names them. Absent where the machine offers"
        " all, and before the first published pass."
    ),
    source="last pass",
)
ERRORS = FamilySpec(
    name="exporter_collector_errors_total",
    type="counter",
    labels=("collector", "reason"),
    help=(
        "Passes that failed in part or as a whole, late passes included, by reason. The reason internal is an error of the"
        " exporter. Absent before the first error of a reason."
    ),
    source="last pass",
)
SPECS = (SUCCESS, LAST_DURATION, DURATION, LAST_SUCCESS, TIMEOUTS, INTERVAL, UNSUPPORTED, ERRORS)


def status_families(statuses: Iterable[tuple[CollectorStatus, CollectorTotals]]) -> Collected:
    """Return the `exporter_collector_*` families."""
    collected = Collected()
    for status, totals in statuses:
        for spec, value in (
            (SUCCESS, None if status.success is None else int(status.success)),
            (LAST_DURATION, status.duration_seconds),
            (DURATION, totals.duration_seconds),
            (LAST_SUCCESS, totals.last_success),
            (TIMEOUTS, totals.timeouts),
            (INTERVAL, status.interval_seconds),
            (UNSUPPORTED, len(status.unsupported) or None),
        ):
            collected.add(spec, value, status.name)
        for reason, count in sorted(totals.errors.items()):
            collected.add(ERRORS, count, status.name, reason)
    return collected
