"""Families of the bridge to torch.monitor and of span exporters, filled by Stats of the job's processes.

The names are reserved, as in exporter.ledger.families.training.
"""

from __future__ import annotations

from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.families.training_family import TOTAL_ABSENT, TrainingFamily

TORCH_MONITOR_OVERFLOWS = TrainingFamily(
    name="training_torch_monitor_overflows_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help=(
        "Reads that found the bridge's queue of torch.monitor events full; the number of lost "
        f"events is unknown.{TOTAL_ABSENT}"
    ),
    source="exporter.bridges.monitor",
)
TORCH_MONITOR_REFUSED = TrainingFamily(
    name="training_torch_monitor_refused_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help=(
        "Numbers of torch.monitor Stats that were not recorded (invalid or taken name, too many "
        f"names, not a number), and unreadable events.{TOTAL_ABSENT}"
    ),
    source="exporter.bridges.monitor",
)
SPAN_EXPORTER_RECORDS = TrainingFamily(
    name="training_span_exporter_records_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exporter"),
    help=(
        "Records (starts, stops, events and errors of spans) that an exporter of the job "
        f"accepted.{TOTAL_ABSENT}"
    ),
    source="exporter of spans; `exporter` is the class, with -2 and so on for more of the same",
)
SPAN_EXPORTER_DROPPED = TrainingFamily(
    name="training_span_exporter_dropped_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exporter", "reason"),
    help=(
        "Records that an exporter of the job missed: queue full (queue_full), every call raised "
        f"(failed), the process ended first (exit).{TOTAL_ABSENT}"
    ),
    source="exporter of spans",
)
SPAN_EXPORTER_ERRORS = TrainingFamily(
    name="training_span_exporter_errors_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exporter"),
    help=(
        "Calls of an exporter of the job that raised; each call is retried, so most errors lose "
        f"no record.{TOTAL_ABSENT}"
    ),
    source="exporter of spans",
)

SPECS = (
    TORCH_MONITOR_OVERFLOWS,
    TORCH_MONITOR_REFUSED,
    SPAN_EXPORTER_RECORDS,
    SPAN_EXPORTER_DROPPED,
    SPAN_EXPORTER_ERRORS,
)

SPAN_EXPORTERS = (
    SPAN_EXPORTER_RECORDS,
    SPAN_EXPORTER_DROPPED,
    SPAN_EXPORTER_ERRORS,
)
