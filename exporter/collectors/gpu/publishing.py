"""What is known about the GPUs as families; those about NVML itself and of Xids and instances are described here.

Used in the sidecar by the GPU collector, under its lock, once for each publication. Pure: a `GpuRegistry` and the
state of NVML come in, families go out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from exporter.collectors.gpu.counters import REASONS
from exporter.collectors.gpu.families import GPU_FAMILIES, GpuFamily, of_gpu
from exporter.collectors.gpu.kernel_log import KernelXids
from exporter.collectors.gpu.state import GpuRegistry, GpuState
from exporter.families import Collected, FamilySpec, family

# Whether NVML and each GPU answer. These stay when everything else about a GPU is gone, and tell why it is.

_CHILD = "the NVML child"
_UP = family("gpu_nvml_up", "Whether NVIDIA's library is there and answers.", _CHILD)
_WHY = family(
    "gpu_nvml_error_info", "Why NVIDIA's library does not answer. Absent while it does.", _CHILD, "reason"
)
_DEVICES = family(
    "gpu_devices", "GPUs that answer, of those that are watched. Absent while NVML does not answer.", _CHILD
)
_EXPECTED = family(
    "gpu_devices_expected",
    "GPUs that there should be: as many as CUDA_VISIBLE_DEVICES names, or the most that were ever seen. Absent before any was.",
    "CUDA_VISIBLE_DEVICES, gpu_devices",
)
_GPU_UP = of_gpu(
    "gpu_up",
    "Whether the GPU answers; while it does not, only this and the counts of what happened to it are there. Absent while NVML itself does not answer.",
    _CHILD,
)
_GPU_WHY = of_gpu(
    "gpu_error_info",
    "Why the GPU does not answer. Absent while it does.",
    "NVML's return code; hung where a call on the GPU does not return",
    "reason",
)
_RESET_REQUIRED = of_gpu(
    "gpu_reset_required",
    "Whether the driver refuses to work with the GPU before it is reset. Absent while NVML itself does not answer.",
    "NVML_ERROR_RESET_REQUIRED",
)
_IDENTITY = (
    *("name", "pci_bus_id", "serial", "vbios", "architecture", "compute_capability", "minor"),
    *("numa_node", "board"),
)
_INFO = of_gpu(
    "gpu_info",
    "What the GPU is; index_host is NVML's number of it, gpu the job's. Absent while it does not answer.",
    "nvmlDeviceGetName, nvmlDeviceGetPciInfo, nvmlDeviceGetSerial, nvmlDeviceGetVbiosVersion and others",
    *(*_IDENTITY, "driver", "cuda_driver", "index_host"),
)

# What asking costs.

_CALLS = family(
    "exporter_nvml_calls_total",
    "Calls of NVML, over all GPUs, apart from the wait for events; with details by function.",
    _CHILD,
    "call",
)
_CALL_SECONDS = family(
    "exporter_nvml_call_seconds_total",
    "Time spent in calls of NVML, the binding's included; with details by function.",
    "monotonic clock around each call",
    "call",
)
_ERRORS = family(
    "exporter_nvml_errors_total",
    "Calls of NVML that failed, and results that cannot be (garbage); what a GPU merely does not have is no error. Absent before the first one.",
    "NVML's return code",
    *("call", "error"),
)
_RESTARTS = family(
    "exporter_nvml_child_restarts_total",
    "How often the process that calls NVML was started again, by what became of the one before.",
    "the NVML child's supervisor",
    "reason",
)
_CHILD_MEMORY = family(
    "exporter_nvml_child_resident_memory_bytes",
    "Memory of the process that calls NVML. Absent while there is none.",
    "/proc/self/statm",
)
_CHILD_CPU = family(
    "exporter_nvml_child_cpu_seconds_total", "CPU time of the processes that called NVML.", "times(2)"
)
_RESETS = family(
    "exporter_nvml_resets_total",
    "How often a counter of a GPU did not go on where it was, and was corrected: a register that wrapped, a driver that was loaded anew (reset), a step back, a jump, a single wrong number (glitch).",
    "comparison with the number before",
    "reason",
)

STATUS_SPECS = (
    *(_UP, _WHY, _DEVICES, _EXPECTED, _GPU_UP, _GPU_WHY, _RESET_REQUIRED, _INFO),
    *(_CALLS, _CALL_SECONDS, _ERRORS, _RESTARTS, _CHILD_MEMORY, _CHILD_CPU, _RESETS),
)
"""Families about NVML and its process, which begin anew with the sidecar."""

ENERGY = of_gpu(
    "gpu_energy_joules_total",
    "Energy of the card since the exporter began to count; source tells whether the card counts it (nvml_counter, read every 10 s, with power samples in between) or power was integrated (nvml_power).",
    "nvmlDeviceGetTotalEnergyConsumption / 1000, corrected for wraps and resets",
    "source",
)
_XIDS = of_gpu(
    "gpu_xid_errors_total",
    "Xid errors since the exporter began to listen; they stay while the GPU is lost. Absent before the first one.",
    "nvmlEventSetWait_v2 and /dev/kmsg, whichever has seen more",
    "xid",
)
_XID_TIME = of_gpu(
    "gpu_xid_last_timestamp_seconds",
    "When an Xid was last reported, Unix time. Absent before the first one.",
    "nvmlEventSetWait_v2 and /dev/kmsg",
    "xid",
)

# The instances of a divided GPU, known by the UUID that CUDA knows them by; what the compute instances of one GPU
# instance share (its activity) is told for each.

_NOT_DIVIDED = "Absent on a GPU that is not divided."
_NO_GPM = "Absent before Hopper, and where GPM is switched off."
_MIG_INFO = of_gpu(
    "gpu_mig_info",
    f"An instance: GPU instance, compute instance and profile. {_NOT_DIVIDED}",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    *("mig_uuid", "gi", "ci", "profile"),
)
_MIG = {
    reading: of_gpu(name, text, source, "mig_uuid")
    for reading, name, text, source in (
        (
            "memory_total",
            "gpu_mig_memory_total_bytes",
            f"Device memory of an instance. {_NOT_DIVIDED}",
            "nvmlDeviceGetMemoryInfo_v2().total",
        ),
        (
            "memory_used",
            "gpu_mig_memory_used_bytes",
            f"Device memory of an instance that is allocated. {_NOT_DIVIDED}",
            "nvmlDeviceGetMemoryInfo_v2().used",
        ),
        (
            "sm",
            "gpu_mig_sm_activity_ratio",
            f"Share of SM cycles of an instance in which at least one warp was resident. {_NO_GPM}",
            "nvmlGpmMigSampleGet, GPM 2 / 100",
        ),
    )
}

SPECS = (
    *STATUS_SPECS,
    *dict.fromkeys(each.spec for each in GPU_FAMILIES),
    *(ENERGY, _XIDS, _XID_TIME, _MIG_INFO),
    *_MIG.values(),
)


class _Block:
    """Families in the making."""

    def __init__(self) -> None:
        self._samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {}

    def add(self, spec: FamilySpec, value: float, *labels: str) -> None:
        samples = self._samples.setdefault(spec, {})
        samples[labels] = value

    def collected(self) -> Collected:
        collected = Collected()
        for spec in SPECS:
            collected.add_family(spec, self._samples.get(spec, {}))
        return collected


def gpu_families(
    registry: GpuRegistry,
    reason: str,
    restarts: Mapping[str, int],
    *,
    expected: int | None = None,
    per_call: bool = True,
    kernel_xids: KernelXids,
) -> Collected:
    """Make the families.

    Args:
        registry: The GPUs.
        reason: Why NVML does not answer; "" while it does.
        restarts: By reason, how often its process was started again.
        expected: How many GPUs there should be, if that is known from elsewhere.
        per_call: Whether functions of NVML are told apart.
        kernel_xids: What the kernel's log says.
    """
    block = _Block()
    gpus = sorted(registry.gpus.values(), key=lambda gpu: (gpu.number, gpu.index))
    _add_status(block, registry, reason, gpus, expected)
    for gpu in gpus:
        if gpu.down == "":
            for each in GPU_FAMILIES:
                _add_readings(block, gpu, each)
            for source, joules in gpu.joules().items():
                block.add(ENERGY, joules, *gpu.labels, source)
            _add_instances(block, gpu)
        _add_xids(block, gpu, kernel_xids)
    _add_cost(block, registry, per_call=per_call)
    if not reason and registry.resident_bytes:
        block.add(_CHILD_MEMORY, registry.resident_bytes)
    for why, number in sorted(restarts.items()):
        block.add(_RESTARTS, number, why)
    return block.collected()


def _add_status(
    block: _Block, registry: GpuRegistry, reason: str, gpus: Sequence[GpuState], expected: int | None
) -> None:
    machine = registry.machine
    block.add(_UP, float(not reason))
    if reason:
        block.add(_WHY, 1, reason)
    else:
        block.add(_DEVICES, sum(gpu.down == "" for gpu in gpus))
    if expected or registry.most_seen:
        block.add(_EXPECTED, expected or registry.most_seen)
    for gpu in gpus:
        if gpu.down is None:
            continue
        block.add(_GPU_UP, float(not gpu.down), *gpu.labels)
        block.add(_RESET_REQUIRED, float(gpu.down == "reset_required"), *gpu.labels)
        if gpu.down:
            block.add(_GPU_WHY, 1, *gpu.labels, gpu.down)
            continue
        identity = (str(gpu.identity.get(name, "")) for name in _IDENTITY)
        driver = (str(machine.get(name, "")) for name in ("driver_version", "cuda_version"))
        block.add(_INFO, 1, *gpu.labels, *identity, *driver, str(gpu.index))


def _add_readings(block: _Block, gpu: GpuState, each: GpuFamily) -> None:
    value = gpu.values.get(each.reading)
    if value is None:
        return
    found: dict[str, float | None] = value if isinstance(value, dict) else {"": value}
    if each.rule is not None:
        # All that ever counted: a link that went down keeps its part of the sum, which would fall without it.
        found = {label: counter.value() for label, counter in gpu.counters[each.reading].items()}
    sums: dict[tuple[str, ...], float] = {}
    for label, number in found.items():
        if number is None or (not number and label in each.rare):
            continue
        own = tuple(label.split("/"))[each.by_link :] if label else ()
        sums[own] = sums.get(own, 0) + number
    for own, total in sums.items():
        block.add(each.spec, total, *gpu.labels, *own)


def _add_instances(block: _Block, gpu: GpuState) -> None:
    for each in gpu.values.get("mig") or ():
        own = (*gpu.labels, str(each["uuid"]))
        block.add(_MIG_INFO, 1, *own, *(str(each[name]) for name in ("gi", "ci", "profile")))
        for name, spec in _MIG.items():
            if each.get(name) is not None:
                block.add(spec, each[name], *own)


def _add_xids(block: _Block, gpu: GpuState, kernel_xids: KernelXids) -> None:
    seen = gpu.counters.get("xids", {})
    logged = kernel_xids.get(gpu.identity.get("pci_bus_id", ""), {})
    for xid in sorted({*seen, *logged}, key=lambda text: (len(text), text)):
        # Both report the same errors; each misses those of the time in which it could not listen.
        mine = seen[xid].total if xid in seen else 0
        theirs, last = logged.get(xid, (0, 0.0))
        block.add(_XIDS, max(mine, theirs), *gpu.labels, xid)
        last = max(gpu.xid_times.get(xid, 0.0), last)
        if last:
            block.add(_XID_TIME, last, *gpu.labels, xid)


def _add_cost(block: _Block, registry: GpuRegistry, *, per_call: bool) -> None:
    for spec, kind in ((_CALLS, "calls"), (_CALL_SECONDS, "seconds")):
        costs = registry.costs(kind)
        if costs and not per_call:
            costs = {("",): sum(costs.values())}
        for labels, number in costs.items():
            block.add(spec, number, *labels)
    for labels, number in registry.costs("errors").items():
        block.add(_ERRORS, number, *labels)
    if registry.machine:
        block.add(_CHILD_CPU, registry.costs("cpu").get((), 0))
        resets = registry.resets()
        for reason in REASONS:
            block.add(_RESETS, resets.get(reason, 0), reason)
