"""Errors of a GPU that its owner should know of: families.

Used in the sidecar. The readings come from the NVML child's `health` and `events`; Xids also from the kernel's log
(`gpu_kernel_log`).
"""

from __future__ import annotations

from exporter.collectors.family import FamilySpec
from exporter.collectors.gpu_counters import CounterRule
from exporter.collectors.gpu_rows import GPU_LABELS, Count, Gauge, Row

EVENTS_RULE = CounterRule(of_process=True)

ECC_ERRORS = FamilySpec(
    "gpu_ecc_errors_total",
    "counter",
    "Memory errors: volatile ones since the driver was loaded, with details also aggregate ones over the card's life. Absent without ECC.",
    (*GPU_LABELS, "type", "scope", "location"),
    source="nvmlDeviceGetMemoryErrorCounter",
)
ECC_MODE = FamilySpec(
    "gpu_ecc_mode",
    "gauge",
    "Whether ECC is on; with details also whether it will be after the next reset. Absent without ECC.",
    (*GPU_LABELS, "kind"),
    source="nvmlDeviceGetEccMode",
)
SRAM_THRESHOLD = FamilySpec(
    "gpu_sram_ecc_threshold_exceeded",
    "gauge",
    "Whether the card has had so many SRAM errors that it should be replaced. Absent before Ampere and on older drivers.",
    GPU_LABELS,
    source="nvmlDeviceGetSramEccErrorStatus().bThresholdExceeded",
)
REMAPPED_ROWS = FamilySpec(
    "gpu_remapped_rows",
    "gauge",
    "Rows of memory that were replaced by spare ones. Absent before Ampere, on GeForce and on a divided GPU (MIG).",
    (*GPU_LABELS, "type"),
    source="nvmlDeviceGetRemappedRows",
)
REMAPPED_PENDING = FamilySpec(
    "gpu_remapped_rows_pending",
    "gauge",
    "Whether a row waits for the next reset to be replaced. Absent where rows are not remapped.",
    GPU_LABELS,
    source="nvmlDeviceGetRemappedRows",
)
REMAPPED_FAILED = FamilySpec(
    "gpu_remapped_rows_failed",
    "gauge",
    "Whether a row could not be replaced; the card should be. Absent where rows are not remapped.",
    GPU_LABELS,
    source="nvmlDeviceGetRemappedRows",
)
ROW_BANKS = FamilySpec(
    "gpu_row_remap_banks",
    "gauge",
    "Memory banks by how many of their spare rows are left. Absent unless asked for: it fills the kernel's log in guests with a vGPU.",
    (*GPU_LABELS, "availability"),
    source="nvmlDeviceGetRowRemapperHistogram",
)
RETIRED_PAGES = FamilySpec(
    "gpu_retired_pages",
    "gauge",
    "Pages of memory that are no longer used, because of several single bit errors (sbe) or a double bit error (dbe). Absent from Ampere on.",
    (*GPU_LABELS, "cause"),
    source="nvmlDeviceGetRetiredPages",
)
RETIRED_PENDING = FamilySpec(
    "gpu_retired_pages_pending",
    "gauge",
    "Whether a page waits for the next reset to be retired. Absent from Ampere on.",
    GPU_LABELS,
    source="nvmlDeviceGetRetiredPagesPendingStatus",
)
RECOVERY_ACTION = FamilySpec(
    "gpu_recovery_action",
    "gauge",
    "What the driver wants to be done: 0 nothing, 1 reset the GPU, 2 reboot, 3 drain peer to peer traffic, 4 drain and reset, 5 recover the IMEX domain, 6 reset the bus, 7 reboot the system. Absent on drivers before 565.",
    GPU_LABELS,
    source="field 230",
)
EVENTS = FamilySpec(
    "gpu_events_total",
    "counter",
    "Events that the driver reported since the exporter began to listen; they stay while the GPU is lost. Absent for a kind that the GPU does not report.",
    (*GPU_LABELS, "event"),
    source="nvmlEventSetWait_v2",
)
XID_ERRORS = FamilySpec(
    "gpu_xid_errors_total",
    "counter",
    "Xid errors since the exporter began to listen; they stay while the GPU is lost. Absent before the first one.",
    (*GPU_LABELS, "xid"),
    source="nvmlEventSetWait_v2 and /dev/kmsg, whichever has seen more",
)
XID_TIME = FamilySpec(
    "gpu_xid_last_timestamp_seconds",
    "gauge",
    "When an Xid was last reported, Unix time. Absent before the first one.",
    (*GPU_LABELS, "xid"),
    unit="seconds",
    source="nvmlEventSetWait_v2 and /dev/kmsg",
)

ROWS: tuple[Row, ...] = (
    Count(ECC_ERRORS, "ecc_errors"),
    Gauge(ECC_MODE, "ecc_mode"),
    Gauge(SRAM_THRESHOLD, "sram_threshold"),
    Gauge(REMAPPED_ROWS, "remapped_rows"),
    Gauge(REMAPPED_PENDING, "remapped_rows_pending"),
    Gauge(REMAPPED_FAILED, "remapped_rows_failed"),
    Gauge(ROW_BANKS, "row_remap_banks"),
    Gauge(RETIRED_PAGES, "retired_pages"),
    Gauge(RETIRED_PENDING, "retired_pages_pending"),
    Gauge(RECOVERY_ACTION, "recovery_action"),
)
SPECS = (*(row.spec for row in ROWS), EVENTS, XID_ERRORS, XID_TIME)
