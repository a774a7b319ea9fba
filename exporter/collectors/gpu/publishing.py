"""What is known about the GPUs as families; those about NVML itself and of Xids and instances are described here.

Used in the sidecar by the GPU collector, under its lock, once for each publication. Pure: a `GpuRegistry` and the
state of NVML come in, families go out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exporter.collectors.gpu.counters import REASONS
from exporter.collectors.gpu.families import GPU_FAMILIES, GpuFamily, of_gpu
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
_MIG_INFO = of_gpu(
    "gpu_mig_info",
    f"An instance: GPU instance, compute instance and profile. {_NOT_DIVIDED}",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    *("mig_uuid", "gi", "ci", "profile"),
)
_MIG = {
    "memory_total": of_gpu(
        "gpu_mig_memory_total_bytes",
        f"Device memory of an instance. {_NOT_DIVIDED}",
        "nvmlDeviceGetMemoryInfo_v2().total",
        "mig_uuid",
    ),
    "memory_used": of_gpu(
        "gpu_mig_memory_used_bytes",
        f"Device memory of an instance that is allocated. {_NOT_DIVIDED}",
        "nvmlDeviceGetMemoryInfo_v2().used",
        "mig_uuid",
    ),
    "sm": of_gpu(
        "gpu_mig_sm_activity_ratio",
        "Share of SM cycles of an instance in which at least one warp was resident. Absent before Hopper, and where GPM is switched off.",
        "nvmlGpmMigSampleGet, GPM 2 / 100",
        "mig_uuid",
    ),
}

SPECS = (
    *STATUS_SPECS,
    *dict.fromkeys(each.spec for each in GPU_FAMILIES),
    *(ENERGY, _XIDS, _XID_TIME, _MIG_INFO),
    *_MIG.values(),
)


Block = dict[FamilySpec, dict[tuple[str, ...], float]]
"""Families in the making: their samples by labels."""


def gpu_families(
    registry: GpuRegistry,
    reason: str,
    restarts: Mapping[str, int],
    *,
    expected: int | None = None,
    per_call: bool = True,
) -> Collected:
    """Make the families.

    Args:
        registry: The GPUs.
        reason: Why NVML does not answer; "" while it does.
        restarts: By reason, how often its process was started again.
        expected: How many GPUs there should be, if that is known from elsewhere.
        per_call: Whether functions of NVML are told apart.
    """
    block: Block = {spec: {} for spec in SPECS}
    gpus = sorted(registry.gpus.values(), key=lambda gpu: (gpu.number, gpu.index))
    block[_UP][()] = float(not reason)
    if reason:
        block[_WHY][reason,] = 1
    else:
        block[_DEVICES][()] = sum(gpu.down == "" for gpu in gpus)
    if expected or registry.most_seen:
        block[_EXPECTED][()] = expected or registry.most_seen
    for gpu in gpus:
        _add_status(block, gpu, registry.machine)
        if gpu.down == "":
            for each in GPU_FAMILIES:
                _add_readings(block, gpu, each)
            for source, joules in gpu.joules.items():
                block[ENERGY][gpu.labelled(source)] = joules
            _add_instances(block, gpu)
        _add_xids(block, gpu)
    _add_cost(block, registry, per_call=per_call)
    if not reason and registry.resident_bytes:
        block[_CHILD_MEMORY][()] = registry.resident_bytes
    block[_RESTARTS] = {(why,): number for why, number in sorted(restarts.items())}
    collected = Collected()
    for spec, samples in block.items():
        collected.add_family(spec, samples)
    return collected


def _add_status(block: Block, gpu: GpuState, machine: Mapping[str, Any]) -> None:
    if gpu.down is None:
        return
    block[_GPU_UP][gpu.labelled()] = float(not gpu.down)
    block[_RESET_REQUIRED][gpu.labelled()] = float(gpu.down == "reset_required")
    if gpu.down:
        block[_GPU_WHY][gpu.labelled(gpu.down)] = 1
        return
    identity = (str(gpu.identity.get(name, "")) for name in _IDENTITY)
    driver = (str(machine.get(name, "")) for name in ("driver_version", "cuda_version"))
    block[_INFO][gpu.labelled(*identity, *driver, str(gpu.index))] = 1


def _add_readings(block: Block, gpu: GpuState, each: GpuFamily) -> None:
    value = gpu.values.get(each.reading)
    if value is None:
        return
    found: dict[str, float | None] = value if isinstance(value, dict) else {"": value}
    if each.rule is not None:
        # All that ever counted: a link that went down keeps its part of the sum, which would fall without it.
        found = {label: counter.value() for label, counter in gpu.counters.get(each.reading, {}).items()}
    samples = block[each.spec]
    for label, number in found.items():
        if number is None or (not number and label in each.rare):
            continue
        labels = gpu.labelled(*(label.split("/")[each.by_link :] if label else ()))
        samples[labels] = number + (samples.get(labels, 0) if each.by_link else 0)


def _add_instances(block: Block, gpu: GpuState) -> None:
    for each in gpu.values.get("mig") or ():
        uuid = str(each["uuid"])
        block[_MIG_INFO][gpu.labelled(uuid, *(str(each[name]) for name in ("gi", "ci", "profile")))] = 1
        for name, spec in _MIG.items():
            if each.get(name) is not None:
                block[spec][gpu.labelled(uuid)] = each[name]


def _add_xids(block: Block, gpu: GpuState) -> None:
    # Both report the same errors; each misses those of the time in which it could not listen.
    for reading in ("xids", "kernel_xids"):
        for xid, counter in gpu.counters.get(reading, {}).items():
            labels = gpu.labelled(xid)
            block[_XIDS][labels] = max(counter.total, block[_XIDS].get(labels, 0))
    for xid, last in gpu.xid_times.items():
        block[_XID_TIME][gpu.labelled(xid)] = last


def _add_cost(block: Block, registry: GpuRegistry, *, per_call: bool) -> None:
    for spec, kind in ((_CALLS, "calls"), (_CALL_SECONDS, "seconds")):
        costs = registry.costs(kind)
        block[spec] = costs if per_call or not costs else {("",): sum(costs.values())}
    block[_ERRORS] = registry.costs("errors")
    if registry.machine:
        block[_CHILD_CPU][()] = registry.costs("cpu").get((), 0)
        resets = registry.resets()
        block[_RESETS] = {(reason,): resets.get(reason, 0) for reason in REASONS}
