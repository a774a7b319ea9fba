"""Totals of events: how the readings of one process follow each other, and how those of several add up.

Runs in the sidecar, on the ledger's collecting thread; pure functions. What a process says is not believed where
it falls; what several have said is bounded, whatever types each of them had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from exporter.recording.values import NO_EVENTS, EventsReading

Key = TypeVar("Key", str, tuple[str, str])

OTHER = "other"
MOST_KEYS = 1024
"""Pairs per mapping and seat over all processes that sat there; what comes later is `other`."""


def continued(old: EventsReading, new: EventsReading) -> EventsReading:
    """Take a newer reading of the same process; a number that is lower than before is not believed."""
    if new is old or new == old:
        return old
    return EventsReading(
        _highest(old.counts, new.counts),
        {**old.last, **new.last},
        _highest(old.suppressed, new.suppressed),
        _highest(old.delivered, new.delivered),
        _highest(old.dropped, new.dropped),
    )


def added_events(before: EventsReading, after: EventsReading) -> EventsReading:
    """Add the reading of a process to the total of those before it."""
    if not before or not after:
        return before or after or NO_EVENTS
    counts = _added(before.counts, after.counts)
    last = {**before.last, **after.last}
    for pair, when in after.last.items():
        if pair not in counts:
            last[OTHER, pair[1]] = max(when, last.get((OTHER, pair[1]), when))
    return EventsReading(
        counts,
        {pair: when for pair, when in last.items() if pair in counts},
        _added(before.suppressed, after.suppressed),
        _added(before.delivered, after.delivered),
        _added(before.dropped, after.dropped),
    )


def _highest(old: Mapping[Key, int], new: Mapping[Key, int]) -> Mapping[Key, int]:
    if not old:
        return new
    return {key: max(old.get(key, 0), new.get(key, 0)) for key in {**old, **new}}


def _added(before: Mapping[Key, int], after: Mapping[Key, int]) -> Mapping[Key, int]:
    if not before or not after:
        return before or after
    total = dict(before)
    for key, number in after.items():
        kept = key if key in total or len(total) < MOST_KEYS else _other(key)
        total[kept] = total.get(kept, 0) + number
    return total


def _other(key: Key) -> Key:
    return OTHER if isinstance(key, str) else (OTHER, key[1])
