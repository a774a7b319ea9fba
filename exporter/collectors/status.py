"""Status families of the collectors: verdict, duration and counters.

These families remain when the series of a collector disappear.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from exporter.families import FamilyCache, FamilySpec


@dataclass(frozen=True, slots=True)
class CollectorStatus:
    """Status of a collector at a point in time."""

    name: str
    success: bool | None  # verdict of the last pass; None before the first
    reason: str  # reasons of the failure, joined by commas; "" after a success
    message: str  # the problems as text
    age_seconds: float | None  # of the published block; None if nothing is published
    last_success: float | None  # Unix time of the last pass without any problem
    duration_seconds: float | None  # of the last pass, or of a running pass that has exceeded the deadline
    interval_seconds: float
    deadline_seconds: float
    is_running: bool  # a pass is in progress; it hangs if the reason is `timeout`
    unsupported: tuple[str, ...]  # sources that this machine does not offer


@dataclass(slots=True)
class CollectorTotals:
    """Counters of a collector name, which continue after the collector is removed and added again."""

    duration_seconds: float = 0.0
    timeouts: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    last_success: float | None = None


SUCCESS = FamilySpec(
    name="exporter_collector_success",
    type="gauge",
    labels=("collector",),
    help="1 if the last pass of the collector read all sources that the machine offers, otherwise 0.",
    absent="before the end of the first pass",
    source="last pass",
)
LAST_DURATION = FamilySpec(
    name="exporter_collector_last_duration_seconds",
    type="gauge",
    unit="seconds",
    labels=("collector",),
    help="Duration of the last pass, or the duration so far of a running pass that has exceeded the deadline.",
    absent="before the end of the first pass",
    source="monotonic clock",
)
DURATION = FamilySpec(
    name="exporter_collector_duration_seconds_total",
    type="counter",
    unit="seconds",
    labels=("collector",),
    help="Sum of the durations of all passes; a pass is added when it returns.",
    source="monotonic clock",
)
LAST_SUCCESS = FamilySpec(
    name="exporter_collector_last_success_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=("collector",),
    help="Unix time of the end of the last pass that read all sources that the machine offers.",
    absent="before the first such pass",
    source="wall clock",
)
TIMEOUTS = FamilySpec(
    name="exporter_collector_timeouts_total",
    type="counter",
    labels=("collector",),
    help="Passes that exceeded the deadline; a pass that hangs for hours counts once.",
    source="scheduler",
)
INTERVAL = FamilySpec(
    name="exporter_collector_interval_seconds",
    type="gauge",
    unit="seconds",
    labels=("collector",),
    help="Time between two passes of the collector; with a shorter scrape interval, scrapes return the same value again.",
    source="configuration",
)
UNSUPPORTED = FamilySpec(
    name="exporter_collector_unsupported_sources",
    type="gauge",
    labels=("collector",),
    help="Number of sources that this machine does not offer; the log names them.",
    absent="if the machine offers all sources or before the end of the first pass",
    source="last pass",
)
ERRORS = FamilySpec(
    name="exporter_collector_errors_total",
    type="counter",
    labels=("collector", "reason"),
    help="Passes that failed partially or completely, by reason.",
    absent="before the first error of a reason",
    source="last pass",
    details=(
        "`timeout`: the pass exceeded the deadline.",
        "`internal`: the collector raised an unexpected exception, or the system refused a new thread.",
        "Other reasons, such as `permission`, come from the collector. The log has the message.",
    ),
)
SPECS = (SUCCESS, LAST_DURATION, DURATION, LAST_SUCCESS, TIMEOUTS, INTERVAL, UNSUPPORTED, ERRORS)


class StatusFamilies:
    """Families `exporter_collector_*`, cached from scrape to scrape."""

    def __init__(self) -> None:
        self._cache = FamilyCache()

    def families(self, statuses: Iterable[tuple[CollectorStatus, CollectorTotals]]) -> list[Metric]:
        """Return the families, with a series for each collector."""
        values: dict[str, dict[tuple[str, ...], float]] = {spec.name: {} for spec in SPECS}
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
                if value is not None:
                    values[spec.name][(status.name,)] = value
            for reason, count in sorted(totals.errors.items()):
                values[ERRORS.name][status.name, reason] = count
        families = (self._cache.family(spec, values[spec.name]) for spec in SPECS)
        return [family for family in families if family is not None]
