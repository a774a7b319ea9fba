"""Status: what is known about one collector, apart from its data: verdict, age, counters.

Used in the sidecar by the scheduler, which calls it under its own lock; no threads here. Outcomes of passes come in;
the `exporter_collector_*` families, statuses for people and one log line per change of state go out. It stays when the
collector's own series are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from exporter.families import Collected, FamilySpec

Problems = Sequence[tuple[str, str]]
"""(reason, message) of what failed."""

MAX_TOLD_PROBLEMS = 5
"""How many problems a log line names."""

SUCCESS = FamilySpec(
    "exporter_collector_success",
    "gauge",
    "Whether the last pass of the collector read all of its sources (1) or not (0). Absent before the first pass has ended.",
    ("collector",),
    source="last pass",
)
LAST_DURATION = FamilySpec(
    "exporter_collector_last_duration_seconds",
    "gauge",
    "How long the last pass took; while one is past its deadline, how long it has been running. Absent before the first pass has ended.",
    ("collector",),
    unit="seconds",
    source="monotonic clock",
)
DURATION = FamilySpec(
    "exporter_collector_duration_seconds_total",
    "counter",
    "Time that all passes of the collector took, late ones included once they return.",
    ("collector",),
    unit="seconds",
    source="monotonic clock",
)
LAST_SUCCESS = FamilySpec(
    "exporter_collector_last_success_timestamp_seconds",
    "gauge",
    "When the last pass that read all of its sources ended. Absent before the first one.",
    ("collector",),
    unit="seconds",
    source="wall clock",
)
FAILED = FamilySpec(
    "exporter_collector_failed_passes_total",
    "counter",
    "Passes that failed in part or as a whole, late ones included; why is in exporter_collector_errors_total.",
    ("collector",),
    source="last pass",
)
ERRORS = FamilySpec(
    "exporter_collector_errors_total",
    "counter",
    "Passes that failed in part or as a whole, by reason. Absent before the first of its reason; what exporter_collector_failed_passes_total counts begins at 0.",
    ("collector", "reason"),
    source="last pass",
)
TIMEOUTS = FamilySpec(
    "exporter_collector_timeouts_total",
    "counter",
    "Passes that had not returned at their deadline; one that hangs for hours counts once.",
    ("collector",),
    source="scheduler",
)
INTERVAL = FamilySpec(
    "exporter_collector_interval_seconds",
    "gauge",
    "Time between two passes of the collector; a scrape interval below it repeats values.",
    ("collector",),
    unit="seconds",
    source="configuration",
)
UNSUPPORTED = FamilySpec(
    "exporter_collector_unsupported_sources",
    "gauge",
    "Sources of the collector that this machine does not offer, so that their families are absent; the log names them. Absent where it offers all, and before the first pass that published.",
    ("collector",),
    source="last pass",
)
SPECS = (SUCCESS, LAST_DURATION, DURATION, LAST_SUCCESS, FAILED, ERRORS, TIMEOUTS, INTERVAL, UNSUPPORTED)


@dataclass(frozen=True, slots=True)
class CollectorStatus:
    """One collector at one moment, for the status page and for readiness.

    Attributes:
        name: The value of the label `collector`.
        success: Verdict of the last pass; None before the first has ended.
        reason: Why the verdict is 0, several joined by a comma; "" otherwise.
        message: The same for people.
        age_seconds: Since the published block was collected; None while nothing is published.
        last_success: Unix time of the last pass without any problem, None before it.
        duration_seconds: Of the last pass, None before it.
        interval_seconds: As scheduled.
        deadline_seconds: As scheduled.
        running: Whether a pass is under way; with `success` False and the reason `timeout` it hangs.
        unsupported: What this machine does not offer.
    """

    name: str
    success: bool | None
    reason: str
    message: str
    age_seconds: float | None
    last_success: float | None
    duration_seconds: float | None
    interval_seconds: float
    deadline_seconds: float
    running: bool
    unsupported: tuple[str, ...]


Notice = tuple[int, str]
"""Level and text of a line for the log; made under a lock, written after it."""


@dataclass(slots=True)
class Totals:
    """The counters of a collector's name; they outlive its removal, as a counter must not step back.

    Attributes:
        duration_seconds: Of all passes that returned.
        timeouts: Passes that missed their deadline.
        failed: Failed passes.
        errors: The same by reason; a pass can have several.
        last_success: Unix time, None before the first.
    """

    duration_seconds: float = 0.0
    timeouts: int = 0
    failed: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    last_success: float | None = None


@dataclass(slots=True)
class Record:
    """Verdict and counters of one scheduled collector.

    Attributes:
        name: Its name.
        totals: Its counters.
        problems: Of the last pass; None before the first has ended.
        duration_seconds: Of the last pass that returned.
        unsupported: What this machine does not offer.
    """

    name: str
    totals: Totals
    problems: Problems | None = None
    duration_seconds: float | None = None
    unsupported: tuple[str, ...] = ()
    _told: set[str] = field(default_factory=set)

    def judge(self, problems: Problems, *, wall: float) -> list[Notice]:
        """Pass the verdict on a pass; none of its problems make it a success.

        A change of state is told once, not per pass: failing in another way is a change, the same reasons with other
        words are none.
        """
        before, self.problems = self.problems, tuple(problems)
        reasons = {reason for reason, _ in problems}
        self.totals.failed += bool(reasons)
        for reason in reasons:
            self.totals.errors[reason] = self.totals.errors.get(reason, 0) + 1
        if not problems:
            self.totals.last_success = wall
            return [(logging.INFO, f"collector {self.name} works again")] if before else []
        if before is not None and {reason for reason, _ in before} == reasons:
            return []
        return [(logging.WARNING, f"collector {self.name} fails: {self.message(MAX_TOLD_PROBLEMS)}")]

    def time_out(self, deadline_seconds: float, *, wall: float) -> list[Notice]:
        """Pass the verdict on a pass that has not returned at its deadline."""
        self.totals.timeouts += 1
        return self.judge([("timeout", f"no result after {deadline_seconds:g} s")], wall=wall)

    def note_unsupported(self, unsupported: Iterable[str]) -> list[Notice]:
        """Take note of what the machine does not offer; each is told once."""
        self.unsupported = tuple(unsupported)
        new = [what for what in self.unsupported if what not in self._told]
        self._told.update(new)
        return [(logging.INFO, f"collector {self.name}: {what}") for what in new]

    def message(self, limit: int) -> str:
        """The problems of the last pass, for people."""
        problems = self.problems or ()
        parts = [f"{message} ({reason})" for reason, message in problems[:limit]]
        if len(problems) > limit:
            parts.append(f"and {len(problems) - limit} more")
        return "; ".join(parts)


def status_families(statuses: Iterable[tuple[CollectorStatus, Totals]]) -> tuple[Metric, ...]:
    """Make the `exporter_collector_*` families."""
    values: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}
    for status, totals in statuses:
        key = (status.name,)
        for spec, value in (
            (SUCCESS, None if status.success is None else float(status.success)),
            (LAST_DURATION, status.duration_seconds),
            (DURATION, totals.duration_seconds),
            (LAST_SUCCESS, totals.last_success),
            (FAILED, totals.failed),
            (TIMEOUTS, totals.timeouts),
            (INTERVAL, status.interval_seconds),
            (UNSUPPORTED, len(status.unsupported) or None),
        ):
            if value is not None:
                values[spec][key] = value
        values[ERRORS].update(
            ((status.name, reason), count) for reason, count in sorted(totals.errors.items())
        )
    made = Collected()
    for spec, samples in values.items():
        made.add_family(spec, dict(samples))
    return tuple(made)
