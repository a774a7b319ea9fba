"""Families of the bridge to torch.monitor and of span exporters, filled by Stats of the job's processes.

The names are reserved, as in `families.training`.
"""

from __future__ import annotations

from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.families.training_family import TOTAL_ABSENT, TrainingFamily

TORCH_MONITOR_OVERFLOWS = TrainingFamily(
    name="training_torch_monitor_overflows_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help=(
        "Times the bridge found its queue of torch.monitor events full. The number of lost events is "
        f"unknown.{TOTAL_ABSENT}"
    ),
    source="exporter.bridges.monitor",
)
TORCH_MONITOR_REFUSED = TrainingFamily(
    name="training_torch_monitor_refused_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help=(
        "Values of torch.monitor Stats that were refused (invalid name, name in use, too many names, not a "
        f"number), and unreadable events.{TOTAL_ABSENT}"
    ),
    source="exporter.bridges.monitor",
)
SPAN_EXPORTER_RECORDS = TrainingFamily(
    name="training_span_exporter_records_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exporter"),
    help=(
        "Records (starts, stops, events and errors of spans) that a span exporter of the job "
        f"accepted.{TOTAL_ABSENT}"
    ),
    source="span exporter; the label `exporter` is the class name, with the suffix -2, -3, … for further instances",
)
SPAN_EXPORTER_DROPPED = TrainingFamily(
    name="training_span_exporter_dropped_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exporter", "reason"),
    help=(
        "Records that a span exporter of the job did not export, by reason: full queue (queue_full), every "
        "call raised (failed), spans that the backend rejected and the exporter discarded (rejected), exit of the "
        f"process (exit).{TOTAL_ABSENT}"
    ),
    source="span exporter",
)
SPAN_EXPORTER_ERRORS = TrainingFamily(
    name="training_span_exporter_errors_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exporter"),
    help=(
        "Calls of a span exporter of the job that raised. Each call is retried, so most errors lose no "
        f"record.{TOTAL_ABSENT}"
    ),
    source="span exporter",
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
