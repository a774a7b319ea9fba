"""Families of the bridge to torch.monitor itself; what it brings are Stats and events like any other.

Filled by Stats of the same name that `exporter.bridges.torch_monitor` makes in each process of the job.
"""

from __future__ import annotations

from exporter.collectors.family import FamilySpec
from exporter.ledger.identity_labels import IDENTITY_LABELS

OVERFLOWS = FamilySpec(
    "training_torch_monitor_overflows_total",
    "counter",
    "Looks that found the bridge's queue of torch.monitor events full, so that an unknown number of them was lost;"
    " absent where the bridge is not installed.",
    IDENTITY_LABELS,
    source="exporter.bridges.torch_monitor",
)
REFUSED = FamilySpec(
    "training_torch_monitor_refused_total",
    "counter",
    "Numbers of torch.monitor Stats that were not recorded (a name that cannot be used or is somebody else's, too many"
    " names, no number), and events of a class that cannot be read; absent where the bridge is not installed.",
    IDENTITY_LABELS,
    source="exporter.bridges.torch_monitor",
)

SPECS = (OVERFLOWS, REFUSED)
