"""Findings of the status page by GPU, run or node, with their start times and remedies, and the headline of the page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from exporter.status.condition import Finding
from exporter.status.formatting import age, clock, duration
from exporter.status.view import StackGroup, View


class FindingStarts:
    """Start times of the findings, as Unix times, updated after each pass over the feed.

    A finding without a known start time starts with the first pass that finds it. An event keeps its last known time.
    """

    def __init__(self) -> None:
        self._start_times: dict[tuple[str, ...], float] = {}
        self._event_times: dict[tuple[str, ...], float] = {}
        # Findings of the first pass that still hold; None before the first pass.
        self._initial_keys: Collection[tuple[str, ...]] | None = None

    def record(self, now: float, findings: Sequence[Finding]) -> None:
        """Record the start of new findings, and discard findings that no longer hold."""
        keys = [finding.key for finding in findings]
        if self._initial_keys is None:
            self._initial_keys = frozenset(keys)
        self._initial_keys = frozenset(key for key in self._initial_keys if key in keys)
        # Each mapping is replaced as a whole: requests read the times on other threads.
        self._start_times = {key: self._start_times.get(key, now) for key in keys}
        event_times = {
            finding.key: self._event_time(finding) for finding in findings if finding.match.is_event
        }
        self._event_times = {key: time for key, time in event_times.items() if time is not None}

    def start(self, finding: Finding) -> float | None:
        """Return the Unix time of the start of a finding or of an event, or None if the time is unknown."""
        known_times = self._event_times if finding.match.is_event else self._start_times
        return known_times.get(finding.key) if finding.match.start is None else finding.match.start

    def headline_start(self, finding: Finding) -> float | None:
        """Return the start of a finding for the headline, or None for a past event and for an unknown start.

        A finding of the first pass may be older than the exporter. Its start is unknown, unless the finding has a start time.
        """
        may_be_older = finding.match.start is None and finding.key in (self._initial_keys or ())
        return None if finding.match.is_past or may_be_older else self.start(finding)

    def time_text(self, finding: Finding, now: float) -> str:
        """Return the duration of the finding, or the time of the event, as text."""
        is_initial = finding.key in (self._initial_keys or ())
        if finding.match.is_event:
            event_time = self._event_time(finding)
            if event_time is None:
                return "before the start of the exporter" if is_initial else "at an unknown time"
            return f"{age(event_time, now)} ({clock(event_time)})"
        start = self.start(finding)
        if start is None:
            return "just now"
        at_least = "at least " if is_initial and finding.match.start is None else ""
        return f"for {at_least}{_elapsed(start, now)} (since {clock(start)})"

    def _event_time(self, finding: Finding) -> float | None:
        """Return the time of the last event, or the last known time if the event is older than the history."""
        match = finding.match
        event_time = match.start if match.last_event_at is None else match.last_event_at
        return self._event_times.get(finding.key) if event_time is None else event_time


@dataclass(frozen=True, slots=True)
class FindingView:
    """Finding as the status page displays it."""

    is_urgent: bool
    text: str
    time_text: str  # such as "for 60 s (since 14:03:12 UTC)"
    remedy: str
    alert_name: str  # "" for a condition without an alert
    runbook_alert: str  # alert whose runbook entry also applies to a condition without an alert; "" for none
    anchor: str
    stacks: tuple[StackGroup, ...]


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """Findings about a GPU, a run, or the node. Findings that explain other findings come first."""

    title: str
    findings: tuple[FindingView, ...]

    @property
    def is_urgent(self) -> bool:
        """True if any finding is urgent."""
        return any(finding.is_urgent for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Headline:
    """Summary of the findings."""

    text: str  # number and start of the findings
    details: str  # subjects of the findings, and cost of the affected runs
    is_urgent: bool


@dataclass(frozen=True, slots=True)
class Subject:
    """GPU, run or node that findings are about."""

    title: str
    runs: frozenset[str]  # runs that the findings affect


def finding_views(findings: Sequence[Finding], starts: FindingStarts, now: float) -> list[FindingView]:
    """Return the findings as the status page displays them, in the same order."""
    return [_finding_view(finding, starts, now) for finding in findings]


def finding_groups(view: View, findings: Sequence[Finding], starts: FindingStarts) -> list[FindingGroup]:
    """Return the findings by subject. The subjects have the order of their first finding."""
    now = view.exporter.now

    def finding_view(finding: Finding) -> FindingView:
        shown = _finding_view(finding, starts, now)
        return replace(shown, time_text=shown.time_text + _lost_hours_text(view, finding, starts))

    return [
        FindingGroup(subject.title, tuple(map(finding_view, _causes_first(own_findings))))
        for subject, own_findings in _by_subject(view, findings).items()
    ]


def _lost_hours_text(view: View, finding: Finding, starts: FindingStarts) -> str:
    """Return the GPU hours, or without GPUs the rank hours, that a run at a standstill has lost on this node.

    Returns "" for other findings, and for a run with a price, whose cost is in the headline.
    """
    name = finding.match.subject[0] if finding.match.subject else ""
    start = starts.start(finding)
    if name not in view.runs or not finding.condition.stops_run or start is None or total_costs(view, {name}):
        return ""
    if view.runs[name].is_ended:
        return ""
    ranks = [rank for rank in view.ranks if rank.run == name and rank.rank and rank.alive]
    gpu_count = len({rank.uuid for rank in ranks if rank.uuid})
    hours = (gpu_count or len({rank.rank for rank in ranks})) * max(0.0, view.exporter.now - start) / 3600
    return f", {hours:,.2f} {'GPU' if gpu_count else 'rank'} hours lost on this node" if hours else ""


def _causes_first(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that explain other findings, then the rest, each in the same order."""
    return sorted(findings, key=lambda finding: not finding.condition.is_cause)


def headline(view: View, findings: Sequence[Finding], starts: FindingStarts) -> Headline | None:
    """Return the headline of the page, or None without findings. The findings of a subject count as one problem."""
    if not findings:
        return None
    urgent_findings = [finding for finding in findings if finding.is_urgent]
    counted_findings = urgent_findings or findings
    start_times = [
        start for finding in counted_findings if (start := starts.headline_start(finding)) is not None
    ]
    since = f" since {clock(min(start_times))}" if start_times else ""
    subjects = _by_subject(view, counted_findings)
    count = len(subjects)
    noun = ("urgent problem" if urgent_findings else "warning") + ("s" if count > 1 else "")
    warning_count = len(_by_subject(view, findings)) - count
    warnings = ""
    if urgent_findings and warning_count:
        warnings = f", and {warning_count} warning{'s' if warning_count > 1 else ''}"
    runs = frozenset().union(*(subject.runs for subject in subjects))
    details = [f"affected: {', '.join(subject.title for subject in subjects)}"]
    details += [f"the affected runs cost {amount} on this node" for amount in hourly_cost_texts(view, runs)]
    return Headline(f"{count} {noun}{since}{warnings}", _sentence("; ".join(details)), bool(urgent_findings))


def hourly_cost_texts(view: View, runs: Collection[str]) -> list[str]:
    """Return the cost per hour of runs on this node over the last minute, as a text for each currency."""
    amounts: dict[str, float] = {}
    for run, currency in view.history.list_owners("cost"):
        rate = view.history.compute_last_rate("cost", run, currency) if run in runs else None
        if rate:
            amounts[currency] = amounts.get(currency, 0.0) + 3600 * rate
    return [f"{amount:,.2f} {currency} per hour" for currency, amount in amounts.items()]


def total_costs(view: View, runs: Collection[str]) -> dict[str, float]:
    """Return the cost of runs on this node so far, by currency."""
    amounts: dict[str, float] = {}
    for labels, amount in view.samples.select("training_cost_total"):
        if labels["run"] in runs:
            amounts[labels["currency"]] = amounts.get(labels["currency"], 0.0) + amount
    return amounts


def node_cost_text(view: View) -> str:
    """Return the cost of all runs on this node, per hour and so far, as text; "" without a price."""
    totals = [f"{amount:,.2f} {currency} so far" for currency, amount in total_costs(view, view.runs).items()]
    return ", ".join([*hourly_cost_texts(view, view.runs), *totals])


def _by_subject(view: View, findings: Sequence[Finding]) -> Mapping[Subject, list[Finding]]:
    """Return the findings by subject (GPU, run or node), in the order of the first finding of each subject."""
    gpus = {gpu.uuid: Subject(gpu.title, frozenset(run for run, _ in gpu.last_holders)) for gpu in view.gpus}
    node = Subject(f"node {view.exporter.node}", frozenset(view.runs))
    groups: dict[Subject, list[Finding]] = {}
    for finding in findings:
        name = finding.match.subject[0] if finding.match.subject else ""
        subject = gpus.get(finding.match.gpu_uuid) or gpus.get(name, node)
        if subject is node and name in view.runs:
            subject = Subject(f"run {name}", frozenset({name}))
        groups.setdefault(subject, []).append(finding)
    return groups


def _finding_view(finding: Finding, starts: FindingStarts, now: float) -> FindingView:
    """Return a finding with the texts that the page displays."""
    statement = finding.statement
    return FindingView(
        is_urgent=finding.is_urgent,
        text=_sentence(statement.sentence),
        time_text=starts.time_text(finding, now),
        remedy=_sentence(statement.remedy),
        alert_name=finding.condition.alert_name,
        runbook_alert=finding.condition.runbook_alert,
        anchor=finding.condition.anchor,
        stacks=finding.match.stacks,
    )


def _elapsed(start: float, now: float) -> str:
    """Return the time since a start, at least a tenth of a second."""
    return duration(max(0.1, round(now - start, 1)))


def _sentence(text: str) -> str:
    """Return a text as a sentence: with a capital letter at its start, and a full stop or an ellipsis at its end."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "…")) else f"{text}."
