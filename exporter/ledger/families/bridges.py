"""Families of the bridge to torch.monitor and of span exporters, filled by Stats of the job's processes.

The names are reserved: a Stat with such a name is refused, unless it has the type, unit and labels of the family.
"""

from __future__ import annotations

from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.families.training_family import TOTAL_ABSENT, TrainingFamily

TORCH_MONITOR_OVERFLOWS = TrainingFamily(
    name="training_torch_monitor_overflows_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help=(
        "Times that the bridge found its queue of torch.monitor events full. The number of lost events is"
        " unknown."
    ),
    absent=TOTAL_ABSENT,
    source="exporter.bridges.monitor",
)
TORCH_MONITOR_REFUSED = TrainingFamily(
    name="training_torch_monitor_refused_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help="Values of torch.monitor Stats that were refused, and unreadable events.",
    absent=TOTAL_ABSENT,
    source="exporter.bridges.monitor",
    details=(
        (
            "A value is refused for an invalid name, a name in use, too many names, or a value that is not a"
            " number."
        ),
    ),
)
SPAN_EXPORTER_RECORDS = TrainingFamily(
    name="training_span_exporter_records_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exporter"),
    help="Records that a span exporter of the job accepted.",
    absent=TOTAL_ABSENT,
    source="span exporter",
    details=(
        "A record is the start, the stop, an event or an error of a span.",
        ("The label `exporter` is the class name. Further instances of the class have the suffix -2, -3, …"),
    ),
)
SPAN_EXPORTER_DROPPED = TrainingFamily(
    name="training_span_exporter_dropped_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exporter", "reason"),
    help="Records that a span exporter of the job did not export, by reason.",
    absent=TOTAL_ABSENT,
    source="span exporter",
    details=(
        "`queue_full`: the queue was full.",
        "`failed`: every call raised.",
        "`rejected`: the backend rejected spans, and the exporter discarded them.",
        "`exit`: the process exited.",
    ),
)
SPAN_EXPORTER_ERRORS = TrainingFamily(
    name="training_span_exporter_errors_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exporter"),
    help=(
        "Calls of a span exporter of the job that raised. A failed export is retried, so most errors lose no"
        " record."
    ),
    absent=TOTAL_ABSENT,
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
