"""Standing: what is known about one collector, apart from its data: verdict, age, counters.

Used in the sidecar by the scheduler, which calls it under its own lock; no threads here. Outcomes of passes
come in; the `exporter_collector_*` families, statuses for people and one log line per change of state go out.
It stays when the collector's own series are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from exporter.collectors.family import Family, FamilySpec, Sample

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


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for the log; made under a lock, written after it."""

    level: int
    text: str
    error: BaseException | None = None


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


class Standing:
    """Verdict and counters of one scheduled collector."""

    def __init__(
        self,
        name: str,
        *,
        interval_seconds: float,
        deadline_seconds: float,
        totals: Totals,
    ) -> None:
        self.name = name
        self.interval_seconds = interval_seconds
        self.deadline_seconds = deadline_seconds
        self.totals = totals
        self._problems: tuple[tuple[str, str], ...] | None = None
        self._duration: float | None = None
        self._unsupported: tuple[str, ...] = ()
        self._told: set[str] = set()
        self._samples: tuple[Sequence[Sample], ...] | None = None

    def reschedule(self, interval_seconds: float, deadline_seconds: float) -> None:
        """Note other times."""
        self.interval_seconds, self.deadline_seconds = interval_seconds, deadline_seconds
        self._samples = None

    def spend(self, seconds: float) -> None:
        """Account for the time of a pass that returned, late or not."""
        self._samples = None
        self._duration = seconds
        self.totals.duration_seconds += seconds

    def judge(
        self, problems: Sequence[tuple[str, str]], *, wall: float, error: BaseException | None = None
    ) -> list[Notice]:
        """Pass the verdict on a pass; none of its problems make it a success.

        A change of state is told once, not per pass: failing in another way is a change, the same reasons
        with other words are none.
        """
        self._samples = None
        before = self._problems
        self._problems = tuple(problems)
        reasons = {reason for reason, _ in problems}
        self.totals.failed += bool(reasons)
        for reason in reasons:
            self.totals.errors[reason] = self.totals.errors.get(reason, 0) + 1
        if not problems:
            self.totals.last_success = wall
            if not before:
                return []
            return [Notice(logging.INFO, f"collector {self.name} works again")]
        if before is not None and {reason for reason, _ in before} == reasons:
            return []
        return [Notice(logging.WARNING, f"collector {self.name} fails: {self._message(limit=5)}", error)]

    def time_out(self, message: str, *, wall: float) -> list[Notice]:
        """Pass the verdict on a pass that has not returned at its deadline."""
        self.totals.timeouts += 1
        return self.judge((("timeout", message),), wall=wall)

    def wait_for_predecessor(self) -> None:
        """Start with the verdict 0: a collector of this name still hangs, and was counted when it began to."""
        self._samples = None
        self._problems = (("timeout", "a previous pass has not returned"),)

    def lack(self, unsupported: tuple[str, ...]) -> list[Notice]:
        """Take note of what the machine does not offer; each is told once."""
        self._samples = None
        self._unsupported = unsupported
        new = [what for what in unsupported if what not in self._told]
        self._told.update(new)
        return [Notice(logging.INFO, f"collector {self.name}: {what}") for what in new]

    def status(self, *, age_seconds: float | None, running_seconds: float | None) -> CollectorStatus:
        """Describe it for people."""
        problems = self._problems or ()
        return CollectorStatus(
            name=self.name,
            success=None if self._problems is None else not problems,
            reason=",".join(sorted({reason for reason, _ in problems})),
            message=self._message(limit=len(problems)),
            age_seconds=age_seconds,
            last_success=self.totals.last_success,
            duration_seconds=self.duration(running_seconds),
            interval_seconds=self.interval_seconds,
            deadline_seconds=self.deadline_seconds,
            running=running_seconds is not None,
            unsupported=self._unsupported,
        )

    def duration(self, running_seconds: float | None) -> float | None:
        """Tell the last pass's duration, or that of a pass which has been running for longer than it may."""
        if running_seconds is not None and running_seconds >= self.deadline_seconds:
            return running_seconds
        return self._duration

    def samples(self, running_seconds: float | None) -> tuple[Sequence[Sample], ...]:
        """Make its samples of each of `SPECS`, in their order; the same objects until something changes."""
        hangs = running_seconds is not None and running_seconds >= self.deadline_seconds
        if self._samples is not None and not hangs:
            return self._samples
        name, totals = (self.name,), self.totals
        made = (
            _sample(name, None if self._problems is None else float(not self._problems)),
            _sample(name, self.duration(running_seconds)),
            _sample(name, totals.duration_seconds),
            _sample(name, totals.last_success),
            _sample(name, totals.failed),
            tuple(Sample((self.name, reason), count) for reason, count in sorted(totals.errors.items())),
            _sample(name, totals.timeouts),
            _sample(name, self.interval_seconds),
            _sample(name, len(self._unsupported) or None),
        )
        self._samples = None if hangs else made
        return made

    def _message(self, *, limit: int) -> str:
        problems = self._problems or ()
        parts = [f"{message} ({reason})" for reason, message in problems[:limit]]
        if len(problems) > limit:
            parts.append(f"and {len(problems) - limit} more")
        return "; ".join(parts)


def _sample(labels: tuple[str, ...], value: float | None) -> tuple[Sample, ...]:
    return () if value is None else (Sample(labels, value),)


def standing_families(
    standings: Iterable[tuple[Standing, float | None]], before: Sequence[Family] = ()
) -> tuple[Family, ...]:
    """Make the `exporter_collector_*` families.

    Args:
        standings: Each with how long its present pass has been running, None when there is none.
        before: What this gave last; families in which nothing has changed are given again.
    """
    found: tuple[list[Sample], ...] = tuple([] for _ in SPECS)
    for standing, running_seconds in standings:
        for samples, own in zip(found, standing.samples(running_seconds), strict=True):
            samples.extend(own)
    known = {family.spec: family for family in before}
    families = []
    for spec, samples in zip(SPECS, found, strict=True):
        family = known.get(spec)
        if family is None or family.samples != tuple(samples):
            family = Family(spec, tuple(samples))
        if samples:
            families.append(family)
    return tuple(families)
