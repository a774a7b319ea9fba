"""Families of NVML itself, energy, Xids and MIG instances, and the publication of all GPU families.

Runs in the sidecar, under the registry's lock: families are computed from a `GpuRegistry` and the state of NVML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric

from exporter.collectors.gpu.counters import REASONS
from exporter.collectors.gpu.families import GPU_FAMILIES
from exporter.collectors.gpu.family import GPU, GpuFamily
from exporter.collectors.gpu.state import GpuRegistry, GpuState, Labels
from exporter.families import Collected, FamilySpec, with_values

NVML_UP = FamilySpec(
    name="gpu_nvml_up",
    type="gauge",
    help="1 if NVIDIA's library is loaded and answers, otherwise 0.",
    source="the NVML child",
)
NVML_ERROR = FamilySpec(
    name="gpu_nvml_error_info",
    type="info",
    labels=("reason",),
    help="Why NVIDIA's library does not answer. Absent while it answers.",
    source="the NVML child",
)
DEVICES = FamilySpec(
    name="gpu_devices",
    type="gauge",
    help="GPUs that answer, of those that are watched. Absent while NVML does not answer.",
    source="the NVML child",
)
DEVICES_EXPECTED = FamilySpec(
    name="gpu_devices_expected",
    type="gauge",
    help="GPUs that should answer: the number that CUDA_VISIBLE_DEVICES names, otherwise the most that NVML has listed, lost "
    "ones included. Absent before NVML has listed any.",
    source="CUDA_VISIBLE_DEVICES, nvmlDeviceGetCount",
)
GPU_UP = FamilySpec(
    name="gpu_up",
    type="gauge",
    labels=GPU,
    help="1 if the GPU answers any call. While it is 0, only the counts of past events of the GPU are published. Absent while "
    "NVML does not answer.",
    source="the NVML child",
)
GPU_ERROR = FamilySpec(
    name="gpu_error_info",
    type="info",
    labels=(*GPU, "reason"),
    help="Why the GPU does not answer. Absent while it answers.",
    source="NVML's return code; hung if a call on the GPU does not return",
)
RESET_REQUIRED = FamilySpec(
    name="gpu_reset_required",
    type="gauge",
    labels=GPU,
    help="1 if the driver refuses to use the GPU before a reset. Absent while NVML does not answer.",
    source="NVML_ERROR_RESET_REQUIRED",
)
INFO_IDENTITY = (
    *("name", "pci_bus_id", "serial", "vbios", "architecture", "compute_capability", "minor", "numa_node"),
    "board",
)
INFO = FamilySpec(
    name="gpu_info",
    type="info",
    labels=(*GPU, *INFO_IDENTITY, "driver", "cuda_driver", "index_host"),
    help="Model and identity of the GPU; index_host is NVML's index, gpu the job's. Absent while the GPU does not answer.",
    source="nvmlDeviceGetName, nvmlDeviceGetPciInfo, nvmlDeviceGetSerial, nvmlDeviceGetVbiosVersion and others",
)
CALLS = FamilySpec(
    name="exporter_nvml_calls_total",
    type="counter",
    help="NVML calls over all GPUs, without the wait for events. Absent before the first pass.",
    source="the NVML child",
)
CALL_SECONDS = FamilySpec(
    name="exporter_nvml_call_seconds_total",
    type="counter",
    unit="seconds",
    help="Time in NVML calls, the binding included. Absent before the first pass.",
    source="monotonic clock around each call",
)
ERRORS = FamilySpec(
    name="exporter_nvml_errors_total",
    type="counter",
    labels=("call", "error"),
    help="NVML calls that failed, and refused results (garbage). A reading that the GPU does not support is not an error. "
    "Absent before the first error.",
    source="NVML's return code",
)
CHILD_RESTARTS = FamilySpec(
    name="exporter_nvml_child_restarts_total",
    type="counter",
    labels=("reason",),
    help="Restarts of the process that calls NVML, by the end of its predecessor.",
    source="the supervisor of the NVML child",
)
CHILD_MEMORY = FamilySpec(
    name="exporter_nvml_child_resident_memory_bytes",
    type="gauge",
    unit="bytes",
    help="Resident memory of the process that calls NVML. Absent without such a process.",
    source="/proc/self/statm",
)
CHILD_CPU = FamilySpec(
    name="exporter_nvml_child_cpu_seconds_total",
    type="counter",
    unit="seconds",
    help="CPU time of the processes that called NVML. Absent before the first pass.",
    source="times(2)",
)
RESETS = FamilySpec(
    name="exporter_nvml_resets_total",
    type="counter",
    labels=("reason",),
    help="Corrections of GPU counters: a register wrapped (wrap), the driver was loaded again or the counter jumped (reset), "
    "a single wrong number (glitch). Absent before the first pass.",
    source="comparison with the previous number",
)
ENERGY = FamilySpec(
    name="gpu_energy_joules_total",
    type="counter",
    unit="joules",
    labels=(*GPU, "source"),
    help="Energy of the card since the exporter started: source is nvml_counter (the card's counter every 10 s, power samples "
    "in between) or nvml_power (integrated power). Energy of a time without readings is in "
    "exporter_energy_gap_joules_total. Absent while the readings are refused.",
    source="nvmlDeviceGetTotalEnergyConsumption / 1000, nvmlDeviceGetSamples(TOTAL_POWER_SAMPLES)",
)
XID_ERRORS = FamilySpec(
    name="gpu_xid_errors_total",
    type="counter",
    labels=(*GPU, "xid"),
    help="Xid errors since the exporter started, also while the GPU is lost. Absent before the first one.",
    source="nvmlEventSetWait_v2 and /dev/kmsg, the larger of the two",
)
XID_TIME = FamilySpec(
    name="gpu_xid_last_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=(*GPU, "xid"),
    help="Unix time of the last Xid error. Absent before the first one.",
    source="nvmlEventSetWait_v2 and /dev/kmsg",
)
_MIG = (*GPU, "mig_uuid")
MIG_INFO = FamilySpec(
    name="gpu_mig_info",
    type="info",
    labels=(*_MIG, "gi", "ci", "profile"),
    help="MIG instance: GPU instance, compute instance and profile; mig_uuid is CUDA's name. Absent on a GPU that is not divided.",
    source="nvmlDeviceGetMigDeviceHandleByIndex",
)
MIG_MEMORY_TOTAL = FamilySpec(
    name="gpu_mig_memory_total_bytes",
    type="gauge",
    unit="bytes",
    labels=_MIG,
    help="Device memory of a MIG instance. Absent on a GPU that is not divided.",
    source="nvmlDeviceGetMemoryInfo_v2().total",
)
MIG_MEMORY_USED = FamilySpec(
    name="gpu_mig_memory_used_bytes",
    type="gauge",
    unit="bytes",
    labels=_MIG,
    help="Allocated device memory of a MIG instance. Absent on a GPU that is not divided.",
    source="nvmlDeviceGetMemoryInfo_v2().used",
)
MIG_SM_ACTIVITY = FamilySpec(
    name="gpu_mig_sm_activity_ratio",
    type="gauge",
    unit="ratio",
    labels=_MIG,
    help="Share of SM cycles of a MIG instance in which at least one warp was resident; compute instances of one GPU instance "
    "share the value. Absent before Hopper, and where the option gpu.gpm is false.",
    source="nvmlGpmMigSampleGet, GPM 2 / 100",
)

STATUS_SPECS = (
    *(NVML_UP, NVML_ERROR, DEVICES, DEVICES_EXPECTED, GPU_UP, GPU_ERROR, RESET_REQUIRED, INFO),
    *(CALLS, CALL_SECONDS, ERRORS, CHILD_RESTARTS, CHILD_MEMORY, CHILD_CPU, RESETS),
)
EVENT_SPECS = (ENERGY, XID_ERRORS, XID_TIME, MIG_INFO, MIG_MEMORY_TOTAL, MIG_MEMORY_USED, MIG_SM_ACTIVITY)
SPECS = (*STATUS_SPECS, *(family.spec for family in GPU_FAMILIES), *EVENT_SPECS)
OTHER_SPECS = (*STATUS_SPECS, *EVENT_SPECS)
"""Families that are not in `families`."""

Samples = dict[Labels, float]
"""Values of a family by label values."""


@dataclass(frozen=True, slots=True)
class PublishedFamily:
    """Family of the last pass."""

    samples: Samples
    metric: Metric


class GpuBlock:
    """Families of all GPUs, from pass to pass.

    A pass comes every second, and most readings are older: a family without a new reading is not made again, and a family
    without a new value is the same object, so that the page does not render it again.
    """

    def __init__(self) -> None:
        self._published: dict[str, PublishedFamily] = {}

    def families(
        self, registry: GpuRegistry, reason: str, restarts: Mapping[str, int], *, expected: int | None = None
    ) -> Collected:
        """Return the families of a registry.

        Args:
            registry: All GPUs; the caller holds the registry's lock.
            reason: Reason of NVML's failure; "" if NVML is up.
            restarts: Restarts of the child by reason.
            expected: Number of GPUs in CUDA_VISIBLE_DEVICES, or None.
        """
        gpus = sorted(registry.gpus.values(), key=lambda gpu: (gpu.number, gpu.index))
        block: dict[str, Samples] = {spec.name: {} for spec in OTHER_SPECS}
        block[NVML_UP.name][()] = float(not reason)
        if reason:
            block[NVML_ERROR.name][reason,] = 1
        else:
            block[DEVICES.name][()] = sum(gpu.down == "" for gpu in gpus)
        if expected or registry.most_seen:
            block[DEVICES_EXPECTED.name][()] = expected or registry.most_seen
        for gpu in gpus:
            _add_status(block, gpu, registry.machine)
            if gpu.down == "":
                if gpu.energy.is_current(registry.time) and not registry.energy_paused:
                    for source, joules in gpu.energy.joules.items():
                        block[ENERGY.name][gpu.labels(source)] = joules
                _add_instances(block, gpu)
            _add_xids(block, gpu)
        _add_child(block, registry)
        if not reason and registry.resident_bytes:
            block[CHILD_MEMORY.name][()] = registry.resident_bytes
        block[CHILD_RESTARTS.name] = {(why,): number for why, number in sorted(restarts.items())}
        up = [gpu for gpu in gpus if gpu.down == ""]
        received = registry.take_changes()
        for family in GPU_FAMILIES:
            block[family.spec.name] = self._readings(family, up, received)
        collected = Collected()
        collected += filter(None, [self._made(spec, block[spec.name]) for spec in SPECS])
        return collected

    def _readings(self, family: GpuFamily, gpus: Sequence[GpuState], received: set[str] | None) -> Samples:
        """Return the values of a family; those of the last pass if no reading of the family is in *received*."""
        published = self._published.get(family.spec.name)
        if published is not None and received is not None:
            readings = {source.reading for source in family.sources}
            if readings.isdisjoint(received):
                return published.samples
        samples: Samples = {}
        for gpu in gpus:
            _add_readings(samples, gpu, family)
        return samples

    def _made(self, spec: FamilySpec, samples: Samples) -> Metric | None:
        """Return a family, the one of the last pass if no value has changed; None without samples."""
        published = self._published.get(spec.name)
        if not samples:
            self._published.pop(spec.name, None)
            return None
        if published is None or published.samples != samples:
            before = published if published is not None and [*published.samples] == [*samples] else None
            metric = spec.family(samples) if before is None else with_values(before.metric, samples.values())
            published = self._published[spec.name] = PublishedFamily(samples, metric)
        return published.metric


def _add_status(block: dict[str, Samples], gpu: GpuState, machine: Mapping[str, Any]) -> None:
    if gpu.down is None:
        return
    block[GPU_UP.name][gpu.labels()] = float(not gpu.down)
    block[RESET_REQUIRED.name][gpu.labels()] = float(gpu.down == "reset_required")
    if gpu.down:
        block[GPU_ERROR.name][gpu.labels(gpu.down)] = 1
        return
    identity = (str(gpu.identity.get(name, "")) for name in INFO_IDENTITY)
    driver = (str(machine.get(name, "")) for name in ("driver_version", "cuda_version"))
    block[INFO.name][gpu.labels(*identity, *driver, str(gpu.index))] = 1


def _add_readings(samples: Samples, gpu: GpuState, family: GpuFamily) -> None:
    own = gpu.labels()
    for source in family.sources:
        present = gpu.values.get(source.reading)
        if not present:
            continue
        if source.rule is None:
            samples.update({(*own, *labels): number for labels, number in present.items()})
            continue
        for labels, counter in gpu.counters[source.reading].items():
            number = counter.value()
            # The sum keeps the part of an inactive link, because a counter must not fall.
            if number is None or not (family.by_link or labels in present):
                continue
            if not number and labels and labels[-1] in family.rare:
                continue
            if family.by_link:
                named = (*own, *labels[1:])  # without the link; a sum over all links has no labels
                samples[named] = samples.get(named, 0) + number
            else:
                named = (*own, *labels)
                samples[named] = number


def _add_instances(block: dict[str, Samples], gpu: GpuState) -> None:
    for each in gpu.instances:
        block[MIG_INFO.name][gpu.labels(each.uuid, str(each.gi), str(each.ci), each.profile)] = 1
        for spec, number in (
            (MIG_MEMORY_TOTAL, each.memory_total),
            (MIG_MEMORY_USED, each.memory_used),
            (MIG_SM_ACTIVITY, each.sm),
        ):
            if number is not None:
                block[spec.name][gpu.labels(each.uuid)] = number


def _add_xids(block: dict[str, Samples], gpu: GpuState) -> None:
    # NVML's events and the kernel log report the same errors; each source misses the time before its start.
    for xid in sorted({*gpu.xids, *gpu.kernel_xids}):
        counted = gpu.xids[xid].total if xid in gpu.xids else 0
        block[XID_ERRORS.name][gpu.labels(xid)] = max(counted, gpu.kernel_xids.get(xid, 0))
    for xid, last in gpu.xid_times.items():
        block[XID_TIME.name][gpu.labels(xid)] = last


def _add_child(block: dict[str, Samples], registry: GpuRegistry) -> None:
    block[ERRORS.name] = {labels: counter.total for labels, counter in sorted(registry.errors.items())}
    if registry.machine:
        block[CALLS.name][()] = registry.calls.total
        block[CALL_SECONDS.name][()] = registry.call_seconds.total
        block[CHILD_CPU.name][()] = registry.cpu_seconds.total
        resets = registry.resets()
        block[RESETS.name] = {(reason,): resets.get(reason, 0) for reason in REASONS}
