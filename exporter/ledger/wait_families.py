"""Families of torch's wait counters: how long the distributed runtime waited, and for what.

Filled by Stats of the same name that `exporter.bridges.torch_stats` makes in each process of the job.
"""

from __future__ import annotations

from exporter.collectors.family import FamilySpec
from exporter.ledger.identity_labels import IDENTITY_LABELS

_ABSENT = "; absent where the bridge is not installed or torch has not waited yet."
_LABELS = (*IDENTITY_LABELS, "key")

CALLS = FamilySpec(
    "training_torch_wait_calls_total",
    "counter",
    "Waits of torch's stores, process groups and compiler that have begun" + _ABSENT,
    _LABELS,
    source="wait_counter_values of torch's control plane: total_calls",
)
SECONDS = FamilySpec(
    "training_torch_wait_seconds_total",
    "counter",
    "Time of the waits of torch's stores, process groups and compiler that have ended" + _ABSENT,
    _LABELS,
    "seconds",
    "wait_counter_values: total_time_us",
)
ACTIVE = FamilySpec(
    "training_torch_waits",
    "gauge",
    "Waits of torch's stores, process groups and compiler that are under way" + _ABSENT,
    _LABELS,
    source="wait_counter_values: active_count",
)
LONGEST = FamilySpec(
    "training_torch_wait_longest_seconds",
    "gauge",
    "The longest wait of torch's stores, process groups and compiler in this process so far" + _ABSENT,
    _LABELS,
    "seconds",
    "wait_counter_values: max_time_us",
)

SPECS = (CALLS, SECONDS, ACTIVE, LONGEST)
