"""Families of events.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Visible slots come in, families go out.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import Metric

from exporter.families import FamilySpec
from exporter.ledger.families.training import IDENTITY_LABELS
from exporter.ledger.totals import added_events
from exporter.ledger.visible import VisibleSlot
from exporter.recording.values import NO_EVENTS

EVENTS = FamilySpec(
    "training_events_total",
    "counter",
    "Events that were logged, over all processes that were this rank; types beyond the first 100 of a process, or not"
    " on its list, are `other`; absent before the first, and when the rank's totals are.",
    (*IDENTITY_LABELS, "type", "severity"),
    source="exporter.log, exporter.monitor.log_event and the bridges",
)
LAST = FamilySpec(
    "training_event_last_timestamp_seconds",
    "gauge",
    "Unix time at which the event that was logged last happened; absent before the first, and when the rank's totals no"
    " longer linger.",
    (*IDENTITY_LABELS, "type", "severity"),
    "seconds",
    "Event.timestamp",
)
SUPPRESSED = FamilySpec(
    "training_events_suppressed_total",
    "counter",
    "Events that were counted, but not handed to the handlers, since only a share of them is (sampled) or since there"
    " were too many of their kind in one second (rate_limit); payload counts those that went to the handlers without"
    " their payload, which could not be made; absent while there are none.",
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
    "Events that a handler missed: its queue was full (queue_full), it raised (error), could not write (write), or had"
    " not taken them when it was unregistered or its process ended (unregistered, exit); 0 from the start for"
    " queue_full and error, absent for the others while there are none.",
    (*IDENTITY_LABELS, "handler", "reason"),
    source="exporter.events.register",
)

SPECS = (EVENTS, LAST, SUPPRESSED, DELIVERED, DROPPED)

_FROM_THE_START = ("queue_full", "error")


def event_families(slots: Sequence[VisibleSlot]) -> list[Metric]:
    """Fill the families for one pass."""
    samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}
    for each in slots:
        total = NO_EVENTS
        for part in each.slot.parts():
            total = added_events(total, part.events)
        if not total:
            continue
        samples[LAST].update({(*each.labels, *pair): when for pair, when in total.last.items()})
        if not each.counted:
            continue
        for spec, counts in (
            (EVENTS, total.counts),
            (SUPPRESSED, total.suppressed),
            (DROPPED, total.dropped),
        ):
            samples[spec].update({(*each.labels, *pair): count for pair, count in counts.items()})
        for handler, count in total.delivered.items():
            key = *each.labels, handler
            samples[DELIVERED][key] = count
            for reason in _FROM_THE_START:
                samples[DROPPED].setdefault((*key, reason), 0)
    return [spec.family(found) for spec, found in samples.items() if found]
