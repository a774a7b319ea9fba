"""The families of GPUs: how a reading becomes one, and those about NVML itself.

Used in the sidecar. A row says which reading of the NVML child becomes which family; `use_families` and
`health_families` have the rows, `state` keeps the counters that they ask for, `publishing` makes the samples.

A reading is a number, or a mapping from the values of further labels (joined by a slash) to numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.collectors.gpu.counters import CounterRule
from exporter.families import FamilySpec, FamilyType

GPU_LABELS = ("gpu", "uuid")

PLAIN = CounterRule()
"""A number of things, as the driver counts them."""

OF_CHILD = CounterRule(of_process=True)
"""What the NVML child has added up since it began."""

_UNITS = ("seconds", "bytes", "joules", "watts", "hertz", "celsius", "ratio")


@dataclass(frozen=True, slots=True)
class Gauge:
    """A reading that is shown as it is.

    Attributes:
        spec: The family; its labels are `gpu`, `uuid`, the fixed ones, those of the reading.
        reading: The child's name of it.
        windowed: Whether the label `window` follows, with the time over which it was taken.
    """

    spec: FamilySpec
    reading: str
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class Count:
    """A reading that is a counter.

    Attributes:
        spec: The family. Where several readings fill one, the first that a GPU offers counts.
        reading: The child's name of it.
        rule: How to add it up.
        by_link: Whether the first label of the reading is a link, told apart only when asked for.
        rare: Labels that are left out while they never counted.
    """

    spec: FamilySpec
    reading: str
    rule: CounterRule = PLAIN
    by_link: bool = False
    rare: frozenset[str] = frozenset()


Row = Gauge | Count


def spec(name: str, help: str, source: str, *labels: str, kind: FamilyType = "gauge") -> FamilySpec:
    """A family of NVML itself, without the labels of a GPU."""
    kind = "counter" if name.endswith("_total") else "info" if name.endswith("_info") else kind
    unit = name.removesuffix("_total").rpartition("_")[2]
    return FamilySpec(name, kind, help, labels, unit if unit in _UNITS else "", source)


def of_gpu(name: str, help: str, source: str, *labels: str) -> FamilySpec:
    """A family with the labels of a GPU before its own."""
    return spec(name, help, source, *GPU_LABELS, *labels)


# Whether NVML and each GPU answer. These stay when everything else about a GPU is gone, and tell why it is.

_CHILD = "the NVML child"
NVML_UP = spec("gpu_nvml_up", "Whether NVIDIA's library is there and answers.", _CHILD)
NVML_ERROR = spec(
    "gpu_nvml_error_info", "Why NVIDIA's library does not answer. Absent while it does.", _CHILD, "reason"
)
NVML = spec(
    "gpu_nvml_info",
    "Versions of driver, library and CUDA. Absent while NVML does not answer.",
    "nvmlSystemGetDriverVersion, nvmlSystemGetNVMLVersion, nvmlSystemGetCudaDriverVersion_v2",
    *("driver_version", "nvml_version", "cuda_version"),
)
DEVICES = spec(
    "gpu_devices", "GPUs that answer, of those that are watched. Absent while NVML does not answer.", _CHILD
)
DEVICES_EXPECTED = spec(
    "gpu_devices_expected",
    "GPUs that there should be: as many as CUDA_VISIBLE_DEVICES names, or the most that were ever seen. Absent before any was.",
    "CUDA_VISIBLE_DEVICES, gpu_devices",
)
UP = of_gpu(
    "gpu_up",
    "Whether the GPU answers; while it does not, only this and the counts of what happened to it are there. Absent while NVML itself does not answer.",
    _CHILD,
)
ERROR = of_gpu(
    "gpu_error_info",
    "Why the GPU does not answer. Absent while it does.",
    "NVML's return code; hung where a call on the GPU does not return",
    "reason",
)
RESET_REQUIRED = of_gpu(
    "gpu_reset_required",
    "Whether the driver refuses to work with the GPU before it is reset. Absent while NVML itself does not answer.",
    "NVML_ERROR_RESET_REQUIRED",
)
IDENTITY_LABELS = (
    *(
        "name",
        "pci_bus_id",
        "serial",
        "vbios",
        "architecture",
        "compute_capability",
        "minor",
        "numa_node",
        "board",
    ),
)
INFO = of_gpu(
    "gpu_info",
    "What the GPU is; index_host is NVML's number of it, gpu the job's. Absent while it does not answer.",
    "nvmlDeviceGetName, nvmlDeviceGetPciInfo, nvmlDeviceGetSerial, nvmlDeviceGetVbiosVersion and others",
    *(*IDENTITY_LABELS, "driver", "cuda_driver", "index_host"),
)

# What asking costs.

CALLS = spec(
    "exporter_nvml_calls_total",
    "Calls of NVML, over all GPUs, apart from the wait for events; with details by function.",
    _CHILD,
    "call",
)
CALL_SECONDS = spec(
    "exporter_nvml_call_seconds_total",
    "Time spent in calls of NVML, the binding's included; with details by function.",
    "monotonic clock around each call",
    "call",
)
ERRORS = spec(
    "exporter_nvml_errors_total",
    "Calls of NVML that failed, and results that cannot be (garbage); what a GPU merely does not have is no error. Absent before the first one.",
    "NVML's return code",
    *("call", "error"),
)
RESTARTS = spec(
    "exporter_nvml_child_restarts_total",
    "How often the process that calls NVML was started again, by what became of the one before.",
    "the NVML child's supervisor",
    "reason",
)
CHILD_MEMORY = spec(
    "exporter_nvml_child_resident_memory_bytes",
    "Memory of the process that calls NVML. Absent while there is none.",
    "/proc/self/statm",
)
CHILD_CPU = spec(
    "exporter_nvml_child_cpu_seconds_total", "CPU time of the processes that called NVML.", "times(2)"
)
RESETS = spec(
    "exporter_nvml_resets_total",
    "How often a counter of a GPU did not go on where it was, and was corrected: a register that wrapped, a driver that was loaded anew (reset), a step back, a jump, a single wrong number (glitch).",
    "comparison with the number before",
    "reason",
)

STATUS_SPECS = (
    *(NVML_UP, NVML_ERROR, NVML, DEVICES, DEVICES_EXPECTED, UP, ERROR, RESET_REQUIRED, INFO),
    *(CALLS, CALL_SECONDS, ERRORS, RESTARTS, CHILD_MEMORY, CHILD_CPU, RESETS),
)
"""Families about NVML and its process, which begin anew with the sidecar."""
