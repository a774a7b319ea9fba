"""Families of the exporters of spans: what each of them took, and what it missed.

Filled by Stats of the same name that `exporter.training.delivery` makes in each process that has such an exporter.
"""

from __future__ import annotations

from exporter.collectors.family import FamilySpec
from exporter.ledger.identity_labels import IDENTITY_LABELS

_ABSENT = (
    "; absent where the job has no exporter of spans, when its totals no longer linger, and while the ledger's state cannot be"
    " written."
)

RECORDS = FamilySpec(
    "training_span_exporter_records_total",
    "counter",
    "Records (starts, stops, events and errors of spans) that an exporter of the job has taken" + _ABSENT,
    (*IDENTITY_LABELS, "exporter"),
    source="exporter.training.delivery; `exporter` is the class, with -2 and so on for more of the same",
)
DROPPED = FamilySpec(
    "training_span_exporter_dropped_total",
    "counter",
    "Records that an exporter of the job missed: its queue was full (queue_full), it raised every time it was asked"
    " (failed), or the process ended first (exit)" + _ABSENT,
    (*IDENTITY_LABELS, "exporter", "reason"),
    source="exporter.training.delivery",
)
ERRORS = FamilySpec(
    "training_span_exporter_errors_total",
    "counter",
    "Calls of an exporter of the job that raised; each is tried again, so most cost no record" + _ABSENT,
    (*IDENTITY_LABELS, "exporter"),
    source="exporter.training.delivery",
)

SPECS = (RECORDS, DROPPED, ERRORS)
