"""Status: what is known about one collector, apart from its data: verdict, age, counters.

Used in the sidecar by the scheduler and the status page. Values only. It stays when the collector's own series are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from exporter.families import Collected, table


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


SPECS = table("""
exporter_collector_success{collector}: Whether the last pass of the collector read all of its sources (1) or
    not (0). Absent before the first pass has ended. <- last pass
exporter_collector_last_duration_seconds{collector}: How long the last pass took; while one is past its
    deadline, how long it has been running. Absent before the first pass has ended. <- monotonic clock
exporter_collector_duration_seconds_total{collector}: Time that all passes of the collector took, late ones
    included once they return. <- monotonic clock
exporter_collector_last_success_timestamp_seconds{collector}: When the last pass that read all of its
    sources ended. Absent before the first one. <- wall clock
exporter_collector_timeouts_total{collector}: Passes that had not returned at their deadline; one that hangs
    for hours counts once. <- scheduler
exporter_collector_interval_seconds{collector}: Time between two passes of the collector; a scrape interval
    below it repeats values. <- configuration
exporter_collector_unsupported_sources{collector}: Sources of the collector that this machine does not
    offer, so that their families are absent; the log names them. Absent where it offers all, and before the
    first pass that published. <- last pass
exporter_collector_errors_total{collector,reason}: Passes that failed in part or as a whole, late ones
    included, by reason. Absent before the first of its reason. <- last pass
""")
(SUCCESS, LAST_DURATION, DURATION, LAST_SUCCESS, TIMEOUTS, INTERVAL, UNSUPPORTED, ERRORS) = SPECS


def status_families(statuses: Iterable[tuple[CollectorStatus, Totals]]) -> Collected:
    """Make the `exporter_collector_*` families."""
    made = Collected()
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
            made.add(spec, value, status.name)
        for reason, count in sorted(totals.errors.items()):
            made.add(ERRORS, count, status.name, reason)
    return made
