"""Publication of all GPU families, and specifications of those that no single reading fills: NVML, energy, Xids and MIG devices.

Runs in the sidecar. `GpuBlock` computes the families from a `GpuRegistry` and the state of NVML; the caller holds the registry's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exporter.collectors.gpu.counters import CORRECTION_REASONS
from exporter.collectors.gpu.families import GPU_FAMILIES
from exporter.collectors.gpu.family import GPU, GpuFamily
from exporter.collectors.gpu.state import GpuRegistry, GpuState, Labels
from exporter.collectors.gpu.supervisor import RESTART_REASONS
from exporter.families import Collected, FamilyCache, FamilySpec

NVML_UP = FamilySpec(
    name="gpu_nvml_up",
    type="gauge",
    help="1 if NVML is loaded and answers, otherwise 0.",
    source="the NVML child",
)
NVML_ERROR = FamilySpec(
    name="gpu_nvml_error_info",
    type="info",
    labels=("reason",),
    help="Reason why NVML does not answer.",
    absent="while NVML answers",
    source="the NVML child",
)
DEVICES = FamilySpec(
    name="gpu_devices",
    type="gauge",
    help="Number of monitored GPUs that answer.",
    absent="while NVML does not answer",
    source="the NVML child",
)
DEVICES_EXPECTED = FamilySpec(
    name="gpu_devices_expected",
    type="gauge",
    help="Number of GPUs that should answer, including lost GPUs.",
    absent="if the variable names no GPU and NVML has listed none",
    source="CUDA_VISIBLE_DEVICES, nvmlDeviceGetCount",
    details=(
        (
            "The value is the largest number that NVML has listed, or the number of GPUs in"
            " `CUDA_VISIBLE_DEVICES` if that is larger."
        ),
    ),
)
GPU_UP = FamilySpec(
    name="gpu_up",
    type="gauge",
    labels=GPU,
    help="1 if the GPU answers any call, otherwise 0.",
    absent="while NVML does not answer, except for a GPU that was lost before or that hangs",
    source="the NVML child",
    details=("While the value is 0, the readings of the GPU are absent, but its Xid errors are published.",),
)
GPU_ERROR = FamilySpec(
    name="gpu_error_info",
    type="info",
    labels=(*GPU, "reason"),
    help="Reason why the GPU does not answer.",
    absent="while gpu_up is 1 or absent",
    source="NVML's return code; hung if a call on the GPU does not return",
)
RESET_REQUIRED = FamilySpec(
    name="gpu_reset_required",
    type="gauge",
    labels=GPU,
    help="1 if the driver does not use the GPU until it is reset, otherwise 0.",
    absent="like gpu_up",
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
    help="Model and identity of the GPU; index_host is NVML's index, gpu is the job's index.",
    absent="while the GPU does not answer",
    source="nvmlDeviceGetName, nvmlDeviceGetPciInfo, nvmlDeviceGetSerial, nvmlDeviceGetVbiosVersion and others",
)
CALLS = FamilySpec(
    name="exporter_nvml_calls_total",
    type="counter",
    help="NVML calls for all GPUs, without calls that wait for events.",
    absent="before the first pass",
    source="the NVML child",
)
CALL_SECONDS = FamilySpec(
    name="exporter_nvml_call_seconds_total",
    type="counter",
    unit="seconds",
    help="Time spent in NVML calls, including the time spent in pynvml.",
    absent="before the first pass",
    source="monotonic clock around each call",
)
ERRORS = FamilySpec(
    name="exporter_nvml_errors_total",
    type="counter",
    labels=("call", "error"),
    help="NVML calls that failed, and calls whose result was rejected as impossible (error: garbage).",
    absent="before the first error",
    source="NVML's return code",
    details=("A call that the GPU does not support is not an error.",),
)
CHILD_RESTARTS = FamilySpec(
    name="exporter_nvml_child_restarts_total",
    type="counter",
    labels=("reason",),
    help="Restarts of the process that calls NVML, by the reason for which the previous process ended.",
    source="the supervisor of the NVML child",
    details=(f"Reasons: {', '.join(f'`{reason}`' for reason in RESTART_REASONS)}.",),
)
CHILD_MEMORY = FamilySpec(
    name="exporter_nvml_child_resident_memory_bytes",
    type="gauge",
    unit="bytes",
    help="Resident memory of the process that calls NVML.",
    absent="without such a process",
    source="/proc/self/statm",
)
CHILD_CPU = FamilySpec(
    name="exporter_nvml_child_cpu_seconds_total",
    type="counter",
    unit="seconds",
    help="CPU time of the process that calls NVML, including earlier processes that were replaced.",
    absent="before the first pass",
    source="times(2)",
)
RESETS = FamilySpec(
    name="exporter_nvml_resets_total",
    type="counter",
    labels=("reason",),
    help="Corrections of GPU counters, by reason.",
    absent="before the first pass",
    source="comparison with the previous reading",
    details=(
        "`wrap`: a register wrapped.",
        "`reset`: the driver was reloaded, or the counter jumped.",
        "`glitch`: a single reading was wrong.",
    ),
)
ENERGY = FamilySpec(
    name="gpu_energy_joules_total",
    type="counter",
    unit="joules",
    labels=(*GPU, "source"),
    help="Energy of the GPU since the exporter started, by source.",
    absent="without recent readings or while another exporter counts the machine's energy",
    source="nvmlDeviceGetTotalEnergyConsumption / 1000, nvmlDeviceGetSamples(TOTAL_POWER_SAMPLES)",
    details=(
        "`nvml_counter`: the GPU's energy counter, read every 10 s, with power samples in between.",
        "`nvml_power`: power, integrated over time.",
        "Energy that was used while readings were missing is in `exporter_energy_gap_joules_total`.",
    ),
)
XID_ERRORS = FamilySpec(
    name="gpu_xid_errors_total",
    type="counter",
    labels=(*GPU, "xid"),
    help="Xid errors by number (xid) since the exporter started; counted also while the GPU is lost.",
    absent="before the first Xid error",
    source="nvmlEventSetWait_v2 and /dev/kmsg, the larger of the two",
)
XID_TIME = FamilySpec(
    name="gpu_xid_last_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=(*GPU, "xid"),
    help="Unix time of the last Xid error with this number.",
    absent="before the first Xid error",
    source="nvmlEventSetWait_v2 and /dev/kmsg",
)
_MIG_LABELS = (*GPU, "mig_uuid")
MIG_INFO = FamilySpec(
    name="gpu_mig_info",
    type="info",
    labels=(*_MIG_LABELS, "gi", "ci", "profile"),
    help=(
        "MIG device: ids of the GPU instance (gi) and the compute instance (ci), profile, and name in CUDA"
        " (mig_uuid)."
    ),
    absent="while MIG is disabled",
    source="nvmlDeviceGetMigDeviceHandleByIndex",
)
MIG_MEMORY_TOTAL = FamilySpec(
    name="gpu_mig_memory_total_bytes",
    type="gauge",
    unit="bytes",
    labels=_MIG_LABELS,
    help="Device memory of a MIG device.",
    absent="while MIG is disabled",
    source="nvmlDeviceGetMemoryInfo_v2().total",
)
MIG_MEMORY_USED = FamilySpec(
    name="gpu_mig_memory_used_bytes",
    type="gauge",
    unit="bytes",
    labels=_MIG_LABELS,
    help="Allocated device memory of a MIG device.",
    absent="while MIG is disabled",
    source="nvmlDeviceGetMemoryInfo_v2().used",
)
MIG_SM_ACTIVITY = FamilySpec(
    name="gpu_mig_sm_activity_ratio",
    type="gauge",
    unit="ratio",
    labels=_MIG_LABELS,
    help="Share of SM cycles of a MIG device in which at least one warp was resident.",
    absent="before Hopper or where the option `gpu.gpm` is false",
    source="nvmlGpmMigSampleGet, GPM 2 / 100",
    details=("All compute instances of a GPU instance have the same value.",),
)

STATUS_SPECS = (
    *(NVML_UP, NVML_ERROR, DEVICES, DEVICES_EXPECTED, GPU_UP, GPU_ERROR, RESET_REQUIRED, INFO),
    *(CALLS, CALL_SECONDS, ERRORS, CHILD_RESTARTS, CHILD_MEMORY, CHILD_CPU, RESETS),
)
ENERGY_XID_AND_MIG_SPECS = (
    ENERGY,
    XID_ERRORS,
    XID_TIME,
    MIG_INFO,
    MIG_MEMORY_TOTAL,
    MIG_MEMORY_USED,
    MIG_SM_ACTIVITY,
)
SPECS = (*STATUS_SPECS, *(family.spec for family in GPU_FAMILIES), *ENERGY_XID_AND_MIG_SPECS)
SPECS_WITHOUT_READING = (*STATUS_SPECS, *ENERGY_XID_AND_MIG_SPECS)
"""Families that do not come from a reading: all families except `GPU_FAMILIES`."""

Values = dict[Labels, float]
"""Values of a family by label values."""


class GpuBlock:
    """Builder of the families of all GPUs.

    A pass of the NVML child updates only part of the readings. A family without a new value is reused from the previous call.
    """

    def __init__(self) -> None:
        self._cache = FamilyCache()

    def families(
        self, registry: GpuRegistry, reason: str, restarts: Mapping[str, int], *, expected: int | None = None
    ) -> Collected:
        """Return the families of a registry.

        Args:
            registry: All GPUs; the caller holds the registry's lock.
            reason: Reason of NVML's failure; "" if NVML is up.
            restarts: Restarts of the child by reason.
            expected: Number of GPUs in CUDA_VISIBLE_DEVICES, or None if the variable names no GPU.
        """
        gpus = sorted(registry.gpus.values(), key=lambda gpu: (gpu.job_index, gpu.index))
        values_by_name: dict[str, Values] = {spec.name: {} for spec in SPECS_WITHOUT_READING}
        values_by_name[NVML_UP.name][()] = float(not reason)
        if reason:
            values_by_name[NVML_ERROR.name][reason,] = 1
        else:
            values_by_name[DEVICES.name][()] = sum(gpu.failure == "" for gpu in gpus)
        expected_count = max(expected or 0, registry.max_gpu_count)
        if expected_count:
            values_by_name[DEVICES_EXPECTED.name][()] = expected_count
        for gpu in gpus:
            _add_status(values_by_name, gpu, registry.machine)
            if gpu.failure == "":
                if gpu.energy.is_current(registry.time) and not registry.energy_is_paused:
                    for source, joules in gpu.energy.joules.items():
                        values_by_name[ENERGY.name][gpu.labels(source)] = joules
                _add_instances(values_by_name, gpu)
            _add_xids(values_by_name, gpu)
        _add_child(values_by_name, registry)
        if not reason and registry.resident_bytes:
            values_by_name[CHILD_MEMORY.name][()] = registry.resident_bytes
        values_by_name[CHILD_RESTARTS.name] = {
            (restart_reason,): count for restart_reason, count in sorted(restarts.items())
        }
        gpus_up = [gpu for gpu in gpus if gpu.failure == ""]
        updated_readings = registry.take_changes()
        all_values: dict[str, Mapping[Labels, float]] = dict(values_by_name)
        for family in GPU_FAMILIES:
            all_values[family.spec.name] = self._values(family, gpus_up, updated_readings)
        collected = Collected()
        collected += filter(None, [self._cache.family(spec, all_values[spec.name]) for spec in SPECS])
        return collected

    def _values(
        self, family: GpuFamily, gpus: Sequence[GpuState], updated_readings: set[str] | None
    ) -> Mapping[Labels, float]:
        """Return the values of a family.

        If the family was present and none of its readings is in *updated_readings*, the values are those of the previous call. The value
        None of *updated_readings* means that all readings may have changed.
        """
        previous = self._cache.values(family.spec)
        if previous is not None and updated_readings is not None:
            readings = {source.reading for source in family.sources}
            if readings.isdisjoint(updated_readings):
                return previous
        family_values: Values = {}
        for gpu in gpus:
            _add_readings(family_values, gpu, family)
        return family_values


def _add_status(values_by_name: dict[str, Values], gpu: GpuState, machine: Mapping[str, Any]) -> None:
    """Add the state of a GPU. Add the identity if the GPU is up. Add nothing if the state is unknown."""
    if gpu.failure is None:
        return
    values_by_name[GPU_UP.name][gpu.labels()] = float(not gpu.failure)
    values_by_name[RESET_REQUIRED.name][gpu.labels()] = float(gpu.failure == "reset_required")
    if gpu.failure:
        values_by_name[GPU_ERROR.name][gpu.labels(gpu.failure)] = 1
        return
    identity = (str(gpu.identity.get(name, "")) for name in INFO_IDENTITY)
    driver = (str(machine.get(name, "")) for name in ("driver_version", "cuda_version"))
    values_by_name[INFO.name][gpu.labels(*identity, *driver, str(gpu.index))] = 1


def _add_readings(family_values: Values, gpu: GpuState, family: GpuFamily) -> None:
    """Add the values of a GPU to a family. A source without readings of the GPU adds nothing."""
    gpu_labels = gpu.labels()
    if family.by_link:
        sums = _sums_over_links(gpu, family)
        family_values.update({(*gpu_labels, *labels): total for labels, total in sums.items()})
        return
    for source in family.sources:
        latest_values = gpu.values.get(source.reading, {})
        if source.rule is None:
            family_values.update({(*gpu_labels, *labels): value for labels, value in latest_values.items()})
            continue
        for labels, counter in gpu.counters.get(source.reading, {}).items():
            total = counter.value()
            if total is None or labels not in latest_values:
                continue
            if total or not labels or labels[-1] not in family.omitted_at_zero:
                series_labels = (*gpu_labels, *labels)
                family_values[series_labels] = total


def _sums_over_links(gpu: GpuState, family: GpuFamily) -> dict[Labels, float]:
    """Return the totals of a family over all links, by the labels that follow the link.

    A sum contains the totals of inactive links and of earlier sources, because a counter must not decrease. A sum is absent if no link
    has a reading, and while the total of a link is in doubt.
    """
    sums: dict[Labels, float] = {}
    read_series: set[Labels] = set()
    series_in_doubt: set[Labels] = set()
    for source in family.sources:
        latest_values = gpu.values.get(source.reading, {})
        for labels, counter in gpu.counters.get(source.reading, {}).items():
            series = labels[1:]
            sums[series] = sums.get(series, 0) + counter.total * counter.rule.scale
            if labels in latest_values:
                read_series.add(series)
                if counter.value() is None:
                    series_in_doubt.add(series)
    return {series: sums[series] for series in sums if series in read_series - series_in_doubt}


def _add_instances(values_by_name: dict[str, Values], gpu: GpuState) -> None:
    for instance in gpu.instances:
        values_by_name[MIG_INFO.name][
            gpu.labels(instance.uuid, str(instance.gi), str(instance.ci), instance.profile)
        ] = 1
        for spec, value in (
            (MIG_MEMORY_TOTAL, instance.memory_total_bytes),
            (MIG_MEMORY_USED, instance.memory_used_bytes),
            (MIG_SM_ACTIVITY, instance.sm_activity_ratio),
        ):
            if value is not None:
                values_by_name[spec.name][gpu.labels(instance.uuid)] = value


def _add_xids(values_by_name: dict[str, Values], gpu: GpuState) -> None:
    """Add the numbers and times of the Xids."""
    # NVML's events and the kernel log report the same errors, but neither has the errors from before it was opened.
    for xid in sorted({*gpu.xids, *gpu.kernel_xids}):
        event_count = gpu.xids[xid].total if xid in gpu.xids else 0
        values_by_name[XID_ERRORS.name][gpu.labels(xid)] = max(event_count, gpu.kernel_xids.get(xid, 0))
    for xid, unix_time in gpu.xid_times.items():
        values_by_name[XID_TIME.name][gpu.labels(xid)] = unix_time


def _add_child(values_by_name: dict[str, Values], registry: GpuRegistry) -> None:
    """Add the errors of NVML calls. Once a child has initialized NVML, also add the cost of the calls and the corrections of counters."""
    values_by_name[ERRORS.name] = {
        labels: counter.total for labels, counter in sorted(registry.errors.items())
    }
    if registry.machine:
        values_by_name[CALLS.name][()] = registry.calls.total
        values_by_name[CALL_SECONDS.name][()] = registry.call_seconds.total
        values_by_name[CHILD_CPU.name][()] = registry.cpu_seconds.total
        corrections = registry.corrections()
        values_by_name[RESETS.name] = {(reason,): corrections.get(reason, 0) for reason in CORRECTION_REASONS}
