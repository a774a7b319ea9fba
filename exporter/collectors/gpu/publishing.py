"""What is known about the GPUs as families; those about NVML itself and of Xids and instances are described here.

Used in the sidecar by the GPU collector, under its lock, once for each publication. Pure: a `GpuRegistry` and the
state of NVML come in, families go out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exporter.collectors.gpu.counters import REASONS
from exporter.collectors.gpu.families import GPU_FAMILIES, GPU_SPECS, GpuFamily
from exporter.collectors.gpu.state import GpuRegistry, GpuState
from exporter.families import Collected, FamilySpec, table

# Families about NVML and its process, which begin anew with the sidecar. Whether NVML and each GPU answer stays when
# everything else about a GPU is gone, and tells why it is; then what asking costs.
STATUS_SPECS = table("""
gpu_nvml_up: Whether NVIDIA's library is there and answers. <- the NVML child
gpu_nvml_error_info{reason}: Why NVIDIA's library does not answer. Absent while it does. <- the NVML child
gpu_devices: GPUs that answer, of those that are watched. Absent while NVML does not answer. <- the NVML
    child
gpu_devices_expected: GPUs that there should be: as many as CUDA_VISIBLE_DEVICES names, or the most that
    were ever seen. Absent before any was. <- CUDA_VISIBLE_DEVICES, gpu_devices
gpu_up{gpu,uuid}: Whether the GPU answers; while it does not, only this and the counts of what happened to
    it are there. Absent while NVML itself does not answer. <- the NVML child
gpu_error_info{gpu,uuid,reason}: Why the GPU does not answer. Absent while it does. <- NVML's return code;
    hung where a call on the GPU does not return
gpu_reset_required{gpu,uuid}: Whether the driver refuses to work with the GPU before it is reset. Absent
    while NVML itself does not answer. <- NVML_ERROR_RESET_REQUIRED
gpu_info{gpu,uuid,name,pci_bus_id,serial,vbios,architecture,compute_capability,minor,numa_node,board,driver,cuda_driver,index_host}:
    What the GPU is; index_host is NVML's number of it, gpu the job's. Absent while it does not answer. <-
    nvmlDeviceGetName, nvmlDeviceGetPciInfo, nvmlDeviceGetSerial, nvmlDeviceGetVbiosVersion and others
exporter_nvml_calls_total{call}: Calls of NVML, over all GPUs, apart from the wait for events; with details
    by function. <- the NVML child
exporter_nvml_call_seconds_total{call}: Time spent in calls of NVML, the binding's included; with details by
    function. <- monotonic clock around each call
exporter_nvml_errors_total{call,error}: Calls of NVML that failed, and results that cannot be (garbage);
    what a GPU merely does not have is no error. Absent before the first one. <- NVML's return code
exporter_nvml_child_restarts_total{reason}: How often the process that calls NVML was started again, by what
    became of the one before. <- the NVML child's supervisor
exporter_nvml_child_resident_memory_bytes: Memory of the process that calls NVML. Absent while there is
    none. <- /proc/self/statm
exporter_nvml_child_cpu_seconds_total: CPU time of the processes that called NVML. <- times(2)
exporter_nvml_resets_total{reason}: How often a counter of a GPU did not go on where it was, and was
    corrected: a register that wrapped, a driver that was loaded anew (reset), a step back, a jump, a single
    wrong number (glitch). <- comparison with the number before
""")
(_UP, _WHY, _DEVICES, _EXPECTED, _GPU_UP, _GPU_WHY, _RESET_REQUIRED, _INFO) = STATUS_SPECS[:8]
(_CALLS, _CALL_SECONDS, _ERRORS, _RESTARTS, _CHILD_MEMORY, _CHILD_CPU, _RESETS) = STATUS_SPECS[8:]
_IDENTITY = _INFO.labels[2:-3]

# The instances of a divided GPU are known by the UUID that CUDA knows them by; what the compute instances of one GPU
# instance share (its activity) is told for each.
_OTHERS = table("""
gpu_energy_joules_total{gpu,uuid,source}: Energy of the card since the exporter began to count; source tells
    whether the card counts it (nvml_counter, read every 10 s, with power samples in between) or power was
    integrated (nvml_power). <- nvmlDeviceGetTotalEnergyConsumption / 1000, corrected for wraps and resets
gpu_xid_errors_total{gpu,uuid,xid}: Xid errors since the exporter began to listen; they stay while the GPU
    is lost. Absent before the first one. <- nvmlEventSetWait_v2 and /dev/kmsg, whichever has seen more
gpu_xid_last_timestamp_seconds{gpu,uuid,xid}: When an Xid was last reported, Unix time. Absent before the
    first one. <- nvmlEventSetWait_v2 and /dev/kmsg
gpu_mig_info{gpu,uuid,mig_uuid,gi,ci,profile}: An instance: GPU instance, compute instance and profile.
    Absent on a GPU that is not divided. <- nvmlDeviceGetMigDeviceHandleByIndex
gpu_mig_memory_total_bytes{gpu,uuid,mig_uuid}: Device memory of an instance. Absent on a GPU that is not
    divided. <- nvmlDeviceGetMemoryInfo_v2().total
gpu_mig_memory_used_bytes{gpu,uuid,mig_uuid}: Device memory of an instance that is allocated. Absent on a
    GPU that is not divided. <- nvmlDeviceGetMemoryInfo_v2().used
gpu_mig_sm_activity_ratio{gpu,uuid,mig_uuid}: Share of SM cycles of an instance in which at least one warp
    was resident. Absent before Hopper, and where GPM is switched off. <- nvmlGpmMigSampleGet, GPM 2 / 100
""")
(ENERGY, _XIDS, _XID_TIME, _MIG_INFO) = _OTHERS[:4]
_MIG = dict(zip(("memory_total", "memory_used", "sm"), _OTHERS[4:], strict=True))

SPECS = (*STATUS_SPECS, *GPU_SPECS, *_OTHERS)


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
    """Make the families; `reason` is why NVML does not answer, `restarts` how often its process was started again."""
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
