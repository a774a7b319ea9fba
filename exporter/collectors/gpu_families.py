"""What is known about the GPUs as families.

Used in the sidecar by the GPU collector, under its lock, once for each publication. Pure: a `Fleet` and the state of
NVML come in, families go out. The specifications and what fills them are in the `gpu_<subject>` modules.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exporter.collectors import (
    gpu_activity,
    gpu_health,
    gpu_links,
    gpu_mig,
    gpu_power,
    gpu_status,
    gpu_use,
)
from exporter.collectors.family import Family, FamilySpec, Sample
from exporter.collectors.gpu_counters import REASONS
from exporter.collectors.gpu_rows import Count, Gauge, Row
from exporter.collectors.gpu_state import ALTERNATIVES, ROWS, Fleet, GpuState, energy_of

SPECS: tuple[FamilySpec, ...] = (
    *gpu_status.SPECS,
    *gpu_use.SPECS,
    *gpu_power.SPECS,
    *gpu_activity.SPECS,
    *gpu_links.SPECS,
    *gpu_health.SPECS,
    *gpu_mig.SPECS,
)

STATES = ("supported", "unsupported", "failed", "forbidden")


def _by_spec() -> dict[FamilySpec, tuple[Row, ...]]:
    found: dict[FamilySpec, list[Row]] = {}
    for row in ROWS:
        found.setdefault(row.spec, []).append(row)
    return {spec: tuple(rows) for spec, rows in found.items()}


_ROWS_BY_SPEC = _by_spec()


@dataclass(frozen=True, slots=True)
class NvmlStatus:
    """How NVML is.

    Attributes:
        up: Whether it answers.
        reason: Why it does not; "" while it does.
        restarts: By reason, how often its process was started again.
    """

    up: bool
    reason: str
    restarts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class XidCount:
    """What the kernel's log says about an Xid of a GPU.

    Attributes:
        count: How often it was there.
        last: Unix time of the last one.
    """

    count: int
    last: float


KernelXids = Mapping[str, Mapping[str, XidCount]]
"""By the GPU's PCI address as NVML writes it, then by the Xid's number."""


class _Block:
    """Families in the making."""

    def __init__(self) -> None:
        self._samples: dict[FamilySpec, list[Sample]] = {}

    def add(self, spec: FamilySpec, value: float, *labels: str) -> None:
        """Add a sample."""
        self._samples.setdefault(spec, []).append(Sample(labels, value))

    def add_samples(self, spec: FamilySpec, samples: list[Sample]) -> None:
        """Add the samples of a family; none of them leave it out."""
        if samples:
            self._samples.setdefault(spec, []).extend(samples)

    def families(self) -> tuple[Family, ...]:
        """Hand them over, in the order of the specifications."""
        return tuple(Family(spec, tuple(self._samples[spec])) for spec in SPECS if spec in self._samples)


def gpu_families(
    fleet: Fleet,
    status: NvmlStatus,
    *,
    expected: int | None,
    window: str,
    per_link: bool,
    kernel_xids: KernelXids,
    per_call: bool = True,
) -> tuple[Family, ...]:
    """Make the block.

    Args:
        fleet: The GPUs.
        status: How NVML is.
        expected: How many GPUs there should be, if that is known from elsewhere.
        window: The label of minima and maxima.
        per_link: Whether NVLinks are told apart.
        kernel_xids: What the kernel's log says.
        per_call: Whether functions of NVML are told apart.
    """
    block = _Block()
    gpus = sorted(fleet.gpus.values(), key=lambda gpu: (gpu.number, gpu.index))
    _add_status(block, fleet, status, gpus, expected)
    up = [gpu for gpu in gpus if not gpu.down]
    for spec, rows in _ROWS_BY_SPEC.items():
        samples: list[Sample] = []
        for gpu in up:
            for row in rows:
                if isinstance(row, Gauge):
                    _gauge_samples(samples, gpu, row, window)
                elif row is rows[0]:
                    _count_samples(samples, gpu, rows, now=fleet.time, per_link=per_link)
        block.add_samples(spec, samples)
    for gpu in up:
        energy = energy_of(gpu, at=fleet.time)
        if gpu.values.get(gpu_power.ENERGY_READING) is not None or energy.source == gpu_power.INTEGRAL_SOURCE:
            for source, joules in sorted(energy.joules.items()):
                block.add(gpu_power.ENERGY, joules, *gpu.labels, source)
        for spec, sample in gpu_mig.instance_samples(gpu.labels, gpu.values.get("mig") or ()):
            block.add_samples(spec, [sample])
    for gpu in gpus:
        _add_events(block, gpu, kernel_xids)
    _add_cost(block, fleet, status, per_call=per_call)
    return block.families()


def _add_status(
    block: _Block, fleet: Fleet, status: NvmlStatus, gpus: Sequence[GpuState], expected: int | None
) -> None:
    block.add(gpu_status.NVML_UP, float(status.up))
    if status.up:
        machine = fleet.machine
        versions = (str(machine.get(name, "")) for name in gpu_status.NVML.labels)
        block.add(gpu_status.NVML, 1, *versions)
        block.add(gpu_status.DEVICES, sum(not gpu.down for gpu in gpus))
    else:
        block.add(gpu_status.NVML_ERROR, 1, status.reason)
    most = expected or fleet.most_seen
    if most:
        block.add(gpu_status.DEVICES_EXPECTED, most)
    for gpu in gpus:
        block.add(gpu_status.UP, float(not gpu.down), *gpu.labels)
        block.add(gpu_status.RESET_REQUIRED, float(gpu.down == "reset_required"), *gpu.labels)
        if gpu.down:
            block.add(gpu_status.ERROR, 1, *gpu.labels, gpu.down)
            continue
        identity = (str(gpu.identity.get(name, "")) for name in gpu_status.IDENTITY_LABELS)
        driver = (str(fleet.machine.get(name, "")) for name in ("driver_version", "cuda_version"))
        block.add(gpu_status.INFO, 1, *gpu.labels, *identity, *driver, str(gpu.index))


def _gauge_samples(samples: list[Sample], gpu: GpuState, row: Gauge, window: str) -> None:
    value = gpu.values.get(row.reading)
    if value is None:
        return
    labels = (*gpu.labels, window) if row.windowed else gpu.labels
    if isinstance(value, dict):
        width = len(row.spec.labels) - len(labels)
        samples.extend(Sample((*labels, *_split(label, width)), number) for label, number in value.items())
    else:
        samples.append(Sample(labels, value))


def _count_samples(
    samples: list[Sample], gpu: GpuState, rows: Sequence[Row], *, now: float, per_link: bool
) -> None:
    counts = [row for row in rows if isinstance(row, Count)]
    first = counts[0]
    shown = next((row for row in counts if gpu.values.get(row.reading) is not None), None)
    if shown is None:
        return
    totals: dict[str, float]
    if len(ALTERNATIVES[first.spec]) > 1:
        totals = gpu.chains.get(first.spec, {})
    else:
        values = {label: counter.value(now) for label, counter in gpu.counters[shown.reading].items()}
        rare = first.rare
        totals = {
            label: value
            for label, value in values.items()
            if value or (value is not None and label not in rare)
        }
    width = len(first.spec.labels) - len(gpu.labels)
    if not first.by_link or per_link:
        samples.extend(Sample((*gpu.labels, *_split(label, width)), total) for label, total in totals.items())
        return
    # A link that went down keeps its part of the sum, which would fall without it.
    sums: dict[tuple[str, ...], float] = {}
    for label, total in totals.items():
        key = ("", *_split(label, width)[1:])
        sums[key] = sums.get(key, 0) + total
    samples.extend(Sample((*gpu.labels, *key), total) for key, total in sums.items())


@functools.lru_cache(maxsize=4096)
def _split(label: str, width: int) -> tuple[str, ...]:
    """The values of further labels; a reading without any has the empty one."""
    return tuple(label.split("/")) if width else ()


def _add_events(block: _Block, gpu: GpuState, kernel_xids: KernelXids) -> None:
    for name, counter in gpu.counters.get("events", {}).items():
        block.add(gpu_health.EVENTS, counter.total, *gpu.labels, name)
    seen = gpu.counters.get("xids", {})
    logged = kernel_xids.get(gpu.identity.get("pci_bus_id", ""), {})
    for xid in sorted({*seen, *logged}, key=lambda text: (len(text), text)):
        # Both report the same errors; each misses those of the time in which it could not listen.
        mine = seen[xid].total if xid in seen else 0
        theirs = logged.get(xid, XidCount(0, 0.0))
        block.add(gpu_health.XID_ERRORS, max(mine, theirs.count), *gpu.labels, xid)
        last = max(gpu.xid_times.get(xid, 0.0), theirs.last)
        if last:
            block.add(gpu_health.XID_TIME, last, *gpu.labels, xid)


def _add_cost(block: _Block, fleet: Fleet, status: NvmlStatus, *, per_call: bool) -> None:
    calls = [call for (call,) in fleet.cost_keys("calls")]
    for spec, kind in ((gpu_status.CALLS, "calls"), (gpu_status.CALL_SECONDS, "seconds")):
        if per_call:
            block.add_samples(spec, [Sample((call,), fleet.cost(kind, call)) for call in calls])
        elif calls:
            block.add(spec, sum(fleet.cost(kind, call) for call in calls), "")
    for call, error in fleet.cost_keys("errors"):
        block.add(gpu_status.ERRORS, fleet.cost("errors", call, error), call, error)
    if fleet.machine:
        block.add(gpu_status.FIELD_SECONDS, fleet.cost("fields"))
        block.add(gpu_status.CHILD_CPU, fleet.cost("cpu"))
        resets = fleet.resets()
        for reason in REASONS:
            block.add(gpu_status.RESETS, resets.get(reason, 0), reason)
    if status.up:
        for state in STATES:
            block.add(gpu_status.QUESTIONS, fleet.states.get(state, 0), state)
        if fleet.resident_bytes:
            block.add(gpu_status.CHILD_MEMORY, fleet.resident_bytes)
    for reason, number in sorted(status.restarts.items()):
        block.add(gpu_status.RESTARTS, number, reason)
