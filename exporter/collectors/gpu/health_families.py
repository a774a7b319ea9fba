"""Families of memory errors, row remapping and recovery.

`nvml/queries.py` reads the values; the rows here define the families.
"""

from __future__ import annotations

from exporter.collectors.gpu.family import DRIVER_COUNTER, GPU, GpuFamily, ReadingSource
from exporter.families import FamilySpec

ECC_ERRORS = GpuFamily(
    spec=FamilySpec(
        name="gpu_ecc_errors_total",
        type="counter",
        labels=(*GPU, "kind", "location"),
        help=(
            "ECC memory errors since the driver was loaded (volatile counters), by kind (corrected, uncorrected)"
            " and location (dram, sram)."
        ),
        absent="without ECC",
        source="nvmlDeviceGetMemoryErrorCounter",
    ),
    sources=(ReadingSource(reading="ecc_errors", rule=DRIVER_COUNTER),),
)
SRAM_THRESHOLD = GpuFamily(
    spec=FamilySpec(
        name="gpu_sram_ecc_threshold_exceeded",
        type="gauge",
        labels=GPU,
        help="1 if the SRAM errors exceed the threshold for a replacement of the GPU.",
        absent="before Ampere and on older drivers",
        source="nvmlDeviceGetSramEccErrorStatus().bThresholdExceeded",
    ),
    sources=(ReadingSource(reading="sram_ecc_threshold_exceeded"),),
)
REMAPPED_ROWS = GpuFamily(
    spec=FamilySpec(
        name="gpu_remapped_rows",
        type="gauge",
        labels=(*GPU, "kind"),
        help="Memory rows that are remapped to spare rows, by kind of error: correctable or uncorrectable.",
        absent="before Ampere, on GeForce, or while MIG is enabled",
        source="nvmlDeviceGetRemappedRows",
    ),
    sources=(ReadingSource(reading="remapped_rows"),),
)
REMAPPED_PENDING = GpuFamily(
    spec=FamilySpec(
        name="gpu_remapped_rows_pending",
        type="gauge",
        labels=GPU,
        help="1 if a row will be remapped at the next reset.",
        absent="if the GPU does not support row remapping",
        source="nvmlDeviceGetRemappedRows",
    ),
    sources=(ReadingSource(reading="remapped_rows_pending"),),
)
REMAPPED_FAILED = GpuFamily(
    spec=FamilySpec(
        name="gpu_remapped_rows_failed",
        type="gauge",
        labels=GPU,
        help="1 if remapping of a row failed: replace the GPU.",
        absent="if the GPU does not support row remapping",
        source="nvmlDeviceGetRemappedRows",
    ),
    sources=(ReadingSource(reading="remapped_rows_failed"),),
)
RECOVERY_ACTION = GpuFamily(
    spec=FamilySpec(
        name="gpu_recovery_action",
        type="gauge",
        labels=GPU,
        help=(
            "Number of the recovery action that the driver requests (NVML_GPU_RECOVERY_ACTION_*); 0 if it"
            " requests none."
        ),
        absent="on drivers before 565",
        source="field 230",
        details=(
            "`1`: reset the GPU.",
            "`2`: reboot the node.",
            "`3`: drain peer-to-peer traffic.",
            "`4`: drain, then reset the GPU.",
            "`5`: recover the IMEX domain.",
            "`6`: reset the bus.",
            "`7`: reboot the system.",
        ),
    ),
    sources=(ReadingSource(reading="recovery_action"),),
)

HEALTH_FAMILIES = (
    *(ECC_ERRORS, SRAM_THRESHOLD, REMAPPED_ROWS, REMAPPED_PENDING, REMAPPED_FAILED, RECOVERY_ACTION),
)
