"""Findings with the time of their start, as the status page lists them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from exporter.status.condition import Finding
from exporter.status.numbers import age, clock, duration
from exporter.status.view import StackGroup


class Onsets:
    """Unix times at which findings began; noted after each pass over the feed."""

    def __init__(self) -> None:
        self._began: dict[tuple[str, ...], float] = {}
        self._at_first: Collection[tuple[str, ...]] | None = None  # found by the first pass

    def note(self, now: float, found: Sequence[Finding]) -> None:
        """Remember the findings that began and forget those that ended."""
        keys = [finding.key for finding in found]
        if self._at_first is None:
            self._at_first = frozenset(keys)
        self._at_first = frozenset(key for key in self._at_first if key in keys)
        # Replaced as a whole: requests read the times on other threads.
        self._began = {key: self._began.get(key, now) for key in keys}

    def text(self, finding: Finding, now: float) -> str:
        """Return since when the finding holds, or when the event happened."""
        at = finding.found.since
        if at is not None:
            if finding.found.event:
                return f"{age(at, now)} ({clock(at)})"
            return f"for {duration(max(0.0, now - at))} (since {clock(at)})"
        if finding.found.event:
            return "before the start of the exporter"
        began = self._began.get(finding.key)
        if began is None:
            return "since now"
        least = "at least " if finding.key in (self._at_first or ()) else ""
        return f"for {least}{duration(max(0.0, now - began))} (since {clock(began)})"


@dataclass(frozen=True, slots=True)
class Concern:
    """A finding as the page shows it."""

    urgent: bool
    text: str
    when: str
    remedy: str
    alert: str  # "" for a condition of the page only
    anchor: str
    stacks: tuple[StackGroup, ...]


def concerns(found: Sequence[Finding], onsets: Onsets, now: float) -> list[Concern]:
    """Return the findings as the page shows them, the urgent first."""
    return [_concern(finding, onsets, now) for finding in found]


def _concern(finding: Finding, onsets: Onsets, now: float) -> Concern:
    described = finding.described
    return Concern(
        urgent=finding.is_urgent,
        text=_sentence(described.found),
        when=onsets.text(finding, now),
        remedy=_sentence(described.remedy),
        alert=finding.condition.alert,
        anchor=finding.condition.anchor,
        stacks=finding.found.stacks,
    )


def _sentence(text: str) -> str:
    """Return a text that begins with a capital and ends with a full stop."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "…")) else f"{text}."
