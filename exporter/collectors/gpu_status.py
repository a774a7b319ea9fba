"""Whether NVML and each GPU answer, what the GPUs are, and what asking them costs: families.

Used in the sidecar. These stay when everything else about a GPU is gone, and tell why it is.
"""

from __future__ import annotations

from exporter.collectors.family import FamilySpec
from exporter.collectors.gpu_rows import GPU_LABELS

NVML_UP = FamilySpec(
    "gpu_nvml_up",
    "gauge",
    "Whether NVIDIA's library is there and answers.",
    source="the NVML child",
)
NVML_ERROR = FamilySpec(
    "gpu_nvml_error_info",
    "info",
    "Why it does not. Absent while it does.",
    ("reason",),
    source="the NVML child",
)
NVML = FamilySpec(
    "gpu_nvml_info",
    "info",
    "Versions of driver, library and CUDA. Absent while NVML does not answer.",
    ("driver_version", "nvml_version", "cuda_version"),
    source="nvmlSystemGetDriverVersion, nvmlSystemGetNVMLVersion, nvmlSystemGetCudaDriverVersion_v2",
)
DEVICES = FamilySpec(
    "gpu_devices",
    "gauge",
    "GPUs that answer, of those that are watched. Absent while NVML does not answer.",
    source="the NVML child",
)
DEVICES_EXPECTED = FamilySpec(
    "gpu_devices_expected",
    "gauge",
    "GPUs that there should be: as many as CUDA_VISIBLE_DEVICES names, or the most that were ever seen. Absent before any was.",
    source="CUDA_VISIBLE_DEVICES, gpu_devices",
)
UP = FamilySpec(
    "gpu_up",
    "gauge",
    "Whether the GPU answers; while it does not, only this and the counts of what happened to it are there.",
    GPU_LABELS,
    source="the NVML child",
)
ERROR = FamilySpec(
    "gpu_error_info",
    "info",
    "Why the GPU does not answer. Absent while it does.",
    (*GPU_LABELS, "reason"),
    source="NVML's return code, or what became of the NVML child",
)
RESET_REQUIRED = FamilySpec(
    "gpu_reset_required",
    "gauge",
    "Whether the driver refuses to work with the GPU before it is reset.",
    GPU_LABELS,
    source="NVML_ERROR_RESET_REQUIRED",
)
IDENTITY_LABELS = (
    "name",
    "pci_bus_id",
    "serial",
    "vbios",
    "architecture",
    "compute_capability",
    "minor",
    "numa_node",
    "board",
)
INFO = FamilySpec(
    "gpu_info",
    "info",
    "What the GPU is; index_host is NVML's number of it, gpu the job's. Absent while it does not answer.",
    (*GPU_LABELS, *IDENTITY_LABELS, "driver", "cuda_driver", "index_host"),
    source="nvmlDeviceGetName, nvmlDeviceGetPciInfo, nvmlDeviceGetSerial, nvmlDeviceGetVbiosVersion and others",
)

CALLS = FamilySpec(
    "exporter_nvml_calls_total",
    "counter",
    "Calls of NVML, over all GPUs, apart from the wait for events; with details by function.",
    ("call",),
    source="the NVML child",
)
CALL_SECONDS = FamilySpec(
    "exporter_nvml_call_seconds_total",
    "counter",
    "Time spent in calls of NVML, the binding's included; with details by function.",
    ("call",),
    unit="seconds",
    source="monotonic clock around each call",
)
ERRORS = FamilySpec(
    "exporter_nvml_errors_total",
    "counter",
    "Calls of NVML that failed, and results that cannot be (garbage); what a GPU merely does not have is no error. Absent before the first one.",
    ("call", "error"),
    source="NVML's return code",
)
FIELD_SECONDS = FamilySpec(
    "exporter_nvml_field_seconds_total",
    "counter",
    "What NVML itself says that reading field values took it.",
    unit="seconds",
    source="latencyUsec of nvmlDeviceGetFieldValues",
)
QUESTIONS = FamilySpec(
    "exporter_nvml_questions",
    "gauge",
    "Things that GPUs are asked, over all GPUs: supported, unsupported and forbidden (not asked again for ten minutes), failed the last time.",
    ("state",),
    source="the NVML child",
)
RESTARTS = FamilySpec(
    "exporter_nvml_child_restarts_total",
    "counter",
    "How often the process that calls NVML was started again, by what became of the one before.",
    ("reason",),
    source="the NVML child's supervisor",
)
CHILD_MEMORY = FamilySpec(
    "exporter_nvml_child_resident_memory_bytes",
    "gauge",
    "Memory of the process that calls NVML. Absent while there is none.",
    unit="bytes",
    source="/proc/self/statm",
)
CHILD_CPU = FamilySpec(
    "exporter_nvml_child_cpu_seconds_total",
    "counter",
    "CPU time of the processes that called NVML.",
    unit="seconds",
    source="times(2)",
)
RESETS = FamilySpec(
    "exporter_nvml_resets_total",
    "counter",
    "How often a counter of a GPU did not go on where it was, and was corrected: a register that wrapped, a driver that was loaded anew (reset), a step back, a jump, a single wrong number (glitch).",
    ("reason",),
    source="comparison with the number before",
)

SPECS = (
    NVML_UP,
    NVML_ERROR,
    NVML,
    DEVICES,
    DEVICES_EXPECTED,
    UP,
    ERROR,
    RESET_REQUIRED,
    INFO,
    CALLS,
    CALL_SECONDS,
    ERRORS,
    FIELD_SECONDS,
    QUESTIONS,
    RESTARTS,
    CHILD_MEMORY,
    CHILD_CPU,
    RESETS,
)
