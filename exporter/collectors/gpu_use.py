"""How much a GPU is used, and its memory: families.

Used in the sidecar. The readings come from the NVML child's `use`, `buffers` and `processes`.
"""

from __future__ import annotations

from exporter.collectors.family import FamilySpec
from exporter.collectors.gpu_counters import CounterRule
from exporter.collectors.gpu_rows import GPU_LABELS, Count, Gauge, Row

_BUSY = CounterRule(of_process=True)

UTILIZATION = FamilySpec(
    "gpu_utilization_ratio",
    "gauge",
    "Share of the last sampling period of the driver (0.1 to 1 s) in which at least one kernel ran; says nothing about how many SMs were busy. Absent on a divided GPU (MIG).",
    GPU_LABELS,
    unit="ratio",
    source="nvmlDeviceGetUtilizationRates().gpu / 100",
)
BANDWIDTH_UTILIZATION = FamilySpec(
    "gpu_memory_bandwidth_utilization_ratio",
    "gauge",
    "Share of the last sampling period in which device memory was read or written; not how much of it is used. Absent on a divided GPU (MIG).",
    GPU_LABELS,
    unit="ratio",
    source="nvmlDeviceGetUtilizationRates().memory / 100",
)
BUSY_SECONDS = FamilySpec(
    "gpu_utilization_busy_seconds_total",
    "counter",
    "Time in which at least one kernel ran, from every sample of the driver's buffer. Absent on a divided GPU (MIG).",
    GPU_LABELS,
    unit="seconds",
    source="integral of nvmlDeviceGetSamples(GPU_UTILIZATION_SAMPLES)",
)
MEMORY_BUSY_SECONDS = FamilySpec(
    "gpu_memory_busy_seconds_total",
    "counter",
    "Time in which device memory was read or written, from every sample of the driver's buffer. Absent on a divided GPU (MIG).",
    GPU_LABELS,
    unit="seconds",
    source="integral of nvmlDeviceGetSamples(MEMORY_UTILIZATION_SAMPLES)",
)
UTILIZATION_MIN = FamilySpec(
    "gpu_utilization_ratio_min",
    "gauge",
    "The least utilisation of all samples in the window. Absent on a divided GPU (MIG).",
    (*GPU_LABELS, "window"),
    source="nvmlDeviceGetSamples(GPU_UTILIZATION_SAMPLES)",
)
UTILIZATION_MAX = FamilySpec(
    "gpu_utilization_ratio_max",
    "gauge",
    "The highest utilisation of all samples in the window. Absent on a divided GPU (MIG).",
    (*GPU_LABELS, "window"),
    source="nvmlDeviceGetSamples(GPU_UTILIZATION_SAMPLES)",
)
_ENGINE_ABSENT = "Absent unless video engines are asked for, and where there is none."
ENCODER = FamilySpec(
    "gpu_encoder_utilization_ratio",
    "gauge",
    f"Share of time in which the video encoder was busy. {_ENGINE_ABSENT}",
    GPU_LABELS,
    unit="ratio",
    source="nvmlDeviceGetEncoderUtilization()[0] / 100",
)
DECODER = FamilySpec(
    "gpu_decoder_utilization_ratio",
    "gauge",
    f"Share of time in which the video decoder was busy. {_ENGINE_ABSENT}",
    GPU_LABELS,
    unit="ratio",
    source="nvmlDeviceGetDecoderUtilization()[0] / 100",
)
JPEG = FamilySpec(
    "gpu_jpeg_utilization_ratio",
    "gauge",
    f"Share of time in which the JPEG decoder was busy. {_ENGINE_ABSENT}",
    GPU_LABELS,
    unit="ratio",
    source="nvmlDeviceGetJpgUtilization()[0] / 100",
)
OFA = FamilySpec(
    "gpu_ofa_utilization_ratio",
    "gauge",
    f"Share of time in which the optical flow accelerator was busy. {_ENGINE_ABSENT}",
    GPU_LABELS,
    unit="ratio",
    source="nvmlDeviceGetOfaUtilization()[0] / 100",
)
MEMORY_TOTAL = FamilySpec(
    "gpu_memory_total_bytes",
    "gauge",
    "Device memory of the card. Absent where it is the machine's (unified memory).",
    GPU_LABELS,
    unit="bytes",
    source="nvmlDeviceGetMemoryInfo_v2().total",
)
MEMORY_USED = FamilySpec(
    "gpu_memory_used_bytes",
    "gauge",
    "Device memory that is allocated, without what the driver reserves (with it on drivers before 510). Absent where it is the machine's.",
    GPU_LABELS,
    unit="bytes",
    source="nvmlDeviceGetMemoryInfo_v2().used",
)
MEMORY_FREE = FamilySpec(
    "gpu_memory_free_bytes",
    "gauge",
    "Device memory that is free. Absent where it is the machine's.",
    GPU_LABELS,
    unit="bytes",
    source="nvmlDeviceGetMemoryInfo_v2().free",
)
MEMORY_RESERVED = FamilySpec(
    "gpu_memory_reserved_bytes",
    "gauge",
    "Device memory that the driver and the firmware reserve. Absent on drivers before 510.",
    GPU_LABELS,
    unit="bytes",
    source="nvmlDeviceGetMemoryInfo_v2().reserved",
)
_DETAIL_ABSENT = "Absent unless details are asked for."
BAR1_TOTAL = FamilySpec(
    "gpu_bar1_memory_total_bytes",
    "gauge",
    f"Size of the window through which the CPU reaches device memory. {_DETAIL_ABSENT}",
    GPU_LABELS,
    unit="bytes",
    source="nvmlDeviceGetBAR1MemoryInfo().bar1Total",
)
BAR1_USED = FamilySpec(
    "gpu_bar1_memory_used_bytes",
    "gauge",
    f"How much of that window is in use. {_DETAIL_ABSENT}",
    GPU_LABELS,
    unit="bytes",
    source="nvmlDeviceGetBAR1MemoryInfo().bar1Used",
)
COMPUTE_MODE = FamilySpec(
    "gpu_compute_mode",
    "gauge",
    f"Who may compute: 0 anyone, 2 nobody, 3 one process. {_DETAIL_ABSENT}",
    GPU_LABELS,
    source="nvmlDeviceGetComputeMode",
)
PERSISTENCE_MODE = FamilySpec(
    "gpu_persistence_mode",
    "gauge",
    f"Whether the driver stays loaded without a process that uses it. {_DETAIL_ABSENT}",
    GPU_LABELS,
    source="nvmlDeviceGetPersistenceMode",
)
ACCOUNTING_MODE = FamilySpec(
    "gpu_accounting_mode",
    "gauge",
    f"Whether the driver keeps statistics by process. {_DETAIL_ABSENT}",
    GPU_LABELS,
    source="nvmlDeviceGetAccountingMode",
)
PROCESSES = FamilySpec(
    "gpu_processes",
    "gauge",
    "Processes that hold the GPU; those that draw only where details are asked for.",
    (*GPU_LABELS, "kind"),
    source="nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses",
)

ROWS: tuple[Row, ...] = (
    Gauge(UTILIZATION, "utilization"),
    Gauge(BANDWIDTH_UTILIZATION, "bandwidth_utilization"),
    Count(BUSY_SECONDS, "busy_seconds", _BUSY),
    Count(MEMORY_BUSY_SECONDS, "memory_busy_seconds", _BUSY),
    Gauge(UTILIZATION_MIN, "utilization_min", windowed=True),
    Gauge(UTILIZATION_MAX, "utilization_max", windowed=True),
    Gauge(ENCODER, "encoder_utilization"),
    Gauge(DECODER, "decoder_utilization"),
    Gauge(JPEG, "jpeg_utilization"),
    Gauge(OFA, "ofa_utilization"),
    Gauge(MEMORY_TOTAL, "memory_total"),
    Gauge(MEMORY_USED, "memory_used"),
    Gauge(MEMORY_FREE, "memory_free"),
    Gauge(MEMORY_RESERVED, "memory_reserved"),
    Gauge(BAR1_TOTAL, "bar1_total"),
    Gauge(BAR1_USED, "bar1_used"),
    Gauge(COMPUTE_MODE, "compute_mode"),
    Gauge(PERSISTENCE_MODE, "persistence_mode"),
    Gauge(ACCOUNTING_MODE, "accounting_mode"),
    Gauge(PROCESSES, "processes_running"),
    Gauge(PROCESSES, "processes_drawing"),
)
SPECS = tuple(dict.fromkeys(row.spec for row in ROWS))
