"""The instances of a divided GPU (MIG): families.

Used in the sidecar. The readings come from the NVML child's `mig`. An instance is known by the UUID that CUDA knows
it by; what is shared between compute instances of one GPU instance (its activity) is told for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exporter.collectors.family import FamilySpec, Sample
from exporter.collectors.gpu_rows import GPU_LABELS, Gauge, Row

_ABSENT = "Absent on a GPU that is not divided."
_LABELS = (*GPU_LABELS, "mig_uuid")

MODE = FamilySpec(
    "gpu_mig_mode",
    "gauge",
    "Whether the GPU is divided; with details also whether it will be after the next reset. Absent where it cannot be.",
    (*GPU_LABELS, "kind"),
    source="nvmlDeviceGetMigMode",
)
INFO = FamilySpec(
    "gpu_mig_info",
    "info",
    f"An instance: GPU instance, compute instance and profile. {_ABSENT}",
    (*_LABELS, "gi", "ci", "profile"),
    source="nvmlDeviceGetMigDeviceHandleByIndex",
)
MEMORY_TOTAL = FamilySpec(
    "gpu_mig_memory_total_bytes",
    "gauge",
    f"Device memory of an instance. {_ABSENT}",
    _LABELS,
    unit="bytes",
    source="nvmlDeviceGetMemoryInfo_v2().total",
)
MEMORY_USED = FamilySpec(
    "gpu_mig_memory_used_bytes",
    "gauge",
    f"Device memory of an instance that is allocated. {_ABSENT}",
    _LABELS,
    unit="bytes",
    source="nvmlDeviceGetMemoryInfo_v2().used",
)
_ACTIVITY_ABSENT = "Absent before Hopper, and where GPM is switched off."
SM = FamilySpec(
    "gpu_mig_sm_activity_ratio",
    "gauge",
    f"Share of SM cycles of an instance in which at least one warp was resident. {_ACTIVITY_ABSENT}",
    _LABELS,
    unit="ratio",
    source="nvmlGpmMigSampleGet, GPM 2 / 100",
)
TENSOR = FamilySpec(
    "gpu_mig_tensor_activity_ratio",
    "gauge",
    f"Share of SM cycles of an instance in which tensor cores worked. {_ACTIVITY_ABSENT}",
    _LABELS,
    unit="ratio",
    source="nvmlGpmMigSampleGet, GPM 5 / 100",
)
DRAM = FamilySpec(
    "gpu_mig_dram_activity_ratio",
    "gauge",
    f"Memory bandwidth of an instance in use as a share of what is possible. {_ACTIVITY_ABSENT}",
    _LABELS,
    unit="ratio",
    source="nvmlGpmMigSampleGet, GPM 10 / 100",
)

ROWS: tuple[Row, ...] = (Gauge(MODE, "mig_mode"),)
SPECS = (MODE, INFO, MEMORY_TOTAL, MEMORY_USED, SM, TENSOR, DRAM)

_NUMBERS = {
    MEMORY_TOTAL: "memory_total",
    MEMORY_USED: "memory_used",
    SM: "sm",
    TENSOR: "tensor",
    DRAM: "dram",
}


def instance_samples(
    labels: tuple[str, ...], instances: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[FamilySpec, Sample]]:
    """Make the samples of a GPU's instances.

    Args:
        labels: Of the GPU.
        instances: As the child describes them.
    """
    for each in instances:
        own = (*labels, str(each["uuid"]))
        about = (str(each["gi"]), str(each["ci"]), str(each["profile"]))
        yield INFO, Sample((*own, *about), 1)
        for spec, name in _NUMBERS.items():
            if each.get(name) is not None:
                yield spec, Sample(own, each[name])
