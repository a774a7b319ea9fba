"""Families of events, each beside the code that fills it.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Views of seats come in, families go out. The
samples of a seat of which nothing has changed are those of the last pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from exporter.collectors.family import Family, FamilySpec, Sample
from exporter.ledger.event_totals import added_events
from exporter.ledger.identity_labels import IDENTITY_LABELS
from exporter.ledger.seats import Seat
from exporter.ledger.views import SeatView
from exporter.recording.values import NO_EVENTS, EventsReading

EVENTS = FamilySpec(
    "training_events_total",
    "counter",
    "Events that were logged, over all processes that were this rank; types beyond the first 100 of a process, or"
    " not on its list, are `other`; absent before the first, and when the rank's totals are.",
    (*IDENTITY_LABELS, "type", "severity"),
    source="exporter.log, exporter.monitor.log_event and the bridges",
)
LAST = FamilySpec(
    "training_event_last_timestamp_seconds",
    "gauge",
    "Unix time at which the event that was logged last happened; absent before the first, and when the rank's"
    " totals no longer linger.",
    (*IDENTITY_LABELS, "type", "severity"),
    "seconds",
    "Event.timestamp",
)
SUPPRESSED = FamilySpec(
    "training_events_suppressed_total",
    "counter",
    "Events that were counted, but not handed to the handlers, since only a share of them is (sampled) or since"
    " there were too many of their kind in one second (rate_limit); payload counts those that went to the handlers"
    " without their payload, which could not be made; absent while there are none.",
    (*IDENTITY_LABELS, "type", "reason"),
    source="exporter.events.limit and the configuration's rules",
)
DELIVERED = FamilySpec(
    "training_event_handler_events_total",
    "counter",
    "Events that a handler took; absent where none is registered.",
    (*IDENTITY_LABELS, "handler"),
    source="exporter.events.register",
)
DROPPED = FamilySpec(
    "training_event_handler_dropped_total",
    "counter",
    "Events that a handler missed: its queue was full (queue_full), it raised (error), could not write (write), or"
    " had not taken them when it was unregistered or its process ended (unregistered, exit); 0 from the start for"
    " queue_full and error, absent for the others while there are none.",
    (*IDENTITY_LABELS, "handler", "reason"),
    source="exporter.events.register",
)

SPECS = (EVENTS, LAST, SUPPRESSED, DELIVERED, DROPPED)

_REASONS = ("queue_full", "error")


class EventBlock:
    """Makes the families about events."""

    def __init__(self) -> None:
        self._known: dict[
            Seat, tuple[list[EventsReading], tuple[str, ...], dict[FamilySpec, list[Sample]]]
        ] = {}

    def families(self, views: Sequence[SeatView]) -> list[Family]:
        """Fill the families for one pass."""
        out: dict[FamilySpec, list[Sample]] = {spec: [] for spec in SPECS}
        kept = {}
        for view in views:
            parts = [part.events for part in view.seat.parts() if part.events]
            if not parts:
                continue
            known = self._known.get(view.seat)
            if known is None or known[1] != view.labels or not _same(known[0], parts):
                known = parts, view.labels, _samples(view.labels, parts)
            kept[view.seat] = known
            for spec, samples in known[2].items():
                if view.counted or spec is LAST:
                    out[spec] += samples
        self._known = kept
        return [Family(spec, tuple(samples)) for spec, samples in out.items() if samples]


def _samples(labels: tuple[str, ...], parts: Sequence[EventsReading]) -> dict[FamilySpec, list[Sample]]:
    total = NO_EVENTS
    for part in parts:
        total = added_events(total, part)
    dropped = {(handler, reason): 0 for handler in total.delivered for reason in _REASONS} | dict(
        total.dropped
    )
    return {
        EVENTS: [Sample((*labels, *pair), count) for pair, count in total.counts.items()],
        LAST: [Sample((*labels, *pair), when) for pair, when in total.last.items()],
        SUPPRESSED: [Sample((*labels, *pair), count) for pair, count in total.suppressed.items()],
        DELIVERED: [Sample((*labels, handler), count) for handler, count in total.delivered.items()],
        DROPPED: [Sample((*labels, *pair), count) for pair, count in dropped.items()],
    }


def _same(first: Sequence[EventsReading], second: Sequence[EventsReading]) -> bool:
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))
