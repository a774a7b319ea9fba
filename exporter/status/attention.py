"""Findings of the status page, with their start times and remedies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from exporter.status.condition import Finding
from exporter.status.numbers import age, clock, duration
from exporter.status.view import StackGroup


class Onsets:
    """Unix start times of findings; updated after each pass over the feed."""

    def __init__(self) -> None:
        self._start_times: dict[tuple[str, ...], float] = {}
        self._initial_keys: Collection[tuple[str, ...]] | None = None  # found by the first pass

    def record(self, now: float, current: Sequence[Finding]) -> None:
        """Record the start of new findings, and discard findings that no longer hold."""
        keys = [finding.key for finding in current]
        if self._initial_keys is None:
            self._initial_keys = frozenset(keys)
        self._initial_keys = frozenset(key for key in self._initial_keys if key in keys)
        # Replaced as a whole: requests read the times on other threads.
        self._start_times = {key: self._start_times.get(key, now) for key in keys}

    def text(self, finding: Finding, now: float) -> str:
        """Return since when the finding holds, or when the event happened."""
        since = finding.match.since
        if since is not None:
            if finding.match.event:
                return f"{age(since, now)} ({clock(since)})"
            return f"for {duration(max(0.0, now - since))} (since {clock(since)})"
        if finding.match.event:
            return "before the start of the exporter"
        start = self._start_times.get(finding.key)
        if start is None:
            return "since now"
        at_least = "at least " if finding.key in (self._initial_keys or ()) else ""
        return f"for {at_least}{duration(max(0.0, now - start))} (since {clock(start)})"


@dataclass(frozen=True, slots=True)
class Concern:
    """Finding as the status page displays it."""

    urgent: bool
    text: str
    when: str
    remedy: str
    alert: str  # "" for a condition without an alert
    anchor: str
    stacks: tuple[StackGroup, ...]


def concerns(current: Sequence[Finding], onsets: Onsets, now: float) -> list[Concern]:
    """Return the findings as the status page displays them, urgent findings first."""
    return [_concern(finding, onsets, now) for finding in current]


def _concern(finding: Finding, onsets: Onsets, now: float) -> Concern:
    described = finding.described
    return Concern(
        urgent=finding.is_urgent,
        text=_sentence(described.found),
        when=onsets.text(finding, now),
        remedy=_sentence(described.remedy),
        alert=finding.condition.alert,
        anchor=finding.condition.anchor,
        stacks=finding.match.stacks,
    )


def _sentence(text: str) -> str:
    """Return a text that begins with a capital and ends with a full stop."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "…")) else f"{text}."
