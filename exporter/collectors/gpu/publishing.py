"""What is known about the GPUs as families.

Used in the sidecar by the GPU collector, under its lock, once for each publication. Pure: a `GpuRegistry` and the
state of NVML come in, families go out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exporter.collectors.gpu import families, health_families, use_families
from exporter.collectors.gpu.counters import REASONS
from exporter.collectors.gpu.families import Gauge, Row
from exporter.collectors.gpu.state import ALTERNATIVES, ROWS, GpuRegistry, GpuState
from exporter.families import Collected, FamilySpec

_ROWS: dict[FamilySpec, list[Row]] = {}
for _row in ROWS:
    _ROWS.setdefault(_row.spec, []).append(_row)

SPECS: tuple[FamilySpec, ...] = (*families.STATUS_SPECS, *_ROWS, use_families.ENERGY, *health_families.SPECS)


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

Samples = dict[tuple[str, ...], float]


class _Block:
    """Families in the making."""

    def __init__(self) -> None:
        self._samples: dict[FamilySpec, Samples] = {}

    def add(self, spec: FamilySpec, value: float, *labels: str) -> None:
        """Add a sample."""
        self._samples.setdefault(spec, {})[labels] = value

    def add_to(self, collected: Collected) -> None:
        """Hand the families over, in the order of the specifications."""
        for spec in SPECS:
            collected.add_family(spec, self._samples.get(spec, {}))


def gpu_families(
    registry: GpuRegistry,
    status: NvmlStatus,
    *,
    expected: int | None,
    window: str,
    per_link: bool,
    kernel_xids: KernelXids,
    per_call: bool = True,
) -> Collected:
    """Make the families.

    Args:
        registry: The GPUs.
        status: How NVML is.
        expected: How many GPUs there should be, if that is known from elsewhere.
        window: The label of minima and maxima.
        per_link: Whether NVLinks are told apart.
        kernel_xids: What the kernel's log says.
        per_call: Whether functions of NVML are told apart.
    """
    block = _Block()
    gpus = sorted(registry.gpus.values(), key=lambda gpu: (gpu.number, gpu.index))
    _add_status(block, registry, status, gpus, expected)
    for gpu in gpus:
        if gpu.down == "":
            for spec, rows in _ROWS.items():
                for row in rows:
                    if isinstance(row, Gauge):
                        _add_gauge(block, gpu, row, window)
                    elif row is rows[0]:
                        _add_count(block, gpu, spec, now=registry.time, per_link=per_link)
            for source, joules in gpu.joules().items():
                block.add(use_families.ENERGY, joules, *gpu.labels, source)
            _add_instances(block, gpu)
        _add_events(block, gpu, kernel_xids)
    _add_cost(block, registry, status, per_call=per_call)
    collected = Collected()
    block.add_to(collected)
    return collected


def _add_status(
    block: _Block, registry: GpuRegistry, status: NvmlStatus, gpus: Sequence[GpuState], expected: int | None
) -> None:
    block.add(families.NVML_UP, float(status.up))
    if status.up:
        versions = (str(registry.machine.get(name, "")) for name in families.NVML.labels)
        block.add(families.NVML, 1, *versions)
        block.add(families.DEVICES, sum(gpu.down == "" for gpu in gpus))
    else:
        block.add(families.NVML_ERROR, 1, status.reason)
    most = expected or registry.most_seen
    if most:
        block.add(families.DEVICES_EXPECTED, most)
    for gpu in gpus:
        if gpu.down is None:
            continue
        block.add(families.UP, float(not gpu.down), *gpu.labels)
        block.add(families.RESET_REQUIRED, float(gpu.down == "reset_required"), *gpu.labels)
        if gpu.down:
            block.add(families.ERROR, 1, *gpu.labels, gpu.down)
            continue
        identity = (str(gpu.identity.get(name, "")) for name in families.IDENTITY_LABELS)
        driver = (str(registry.machine.get(name, "")) for name in ("driver_version", "cuda_version"))
        block.add(families.INFO, 1, *gpu.labels, *identity, *driver, str(gpu.index))


def _add_gauge(block: _Block, gpu: GpuState, row: Gauge, window: str) -> None:
    value = gpu.values.get(row.reading)
    labels = (*gpu.labels, window) if row.windowed else gpu.labels
    if isinstance(value, dict):
        for label, number in value.items():
            block.add(row.spec, number, *labels, *label.split("/"))
    elif value is not None:
        block.add(row.spec, value, *labels)


def _add_count(block: _Block, gpu: GpuState, spec: FamilySpec, *, now: float, per_link: bool) -> None:
    rows = ALTERNATIVES[spec]
    shown = next((row for row in rows if gpu.values.get(row.reading) is not None), None)
    if shown is None:
        return
    totals: dict[str, float] = {}
    if len(rows) > 1:
        totals = gpu.chains.get(spec, {})
    else:
        for label, counter in gpu.counters[shown.reading].items():
            value = counter.value(now)
            if value or (value is not None and label not in shown.rare):
                totals[label] = value
    sums: Samples = {}
    for label, total in totals.items():
        own = tuple(label.split("/")) if len(spec.labels) > len(gpu.labels) else ()
        if shown.by_link and not per_link:
            # A link that went down keeps its part of the sum, which would fall without it.
            own = ("", *own[1:])
        sums[own] = sums.get(own, 0) + total
    for own, total in sums.items():
        block.add(spec, total, *gpu.labels, *own)


def _add_instances(block: _Block, gpu: GpuState) -> None:
    for each in gpu.values.get("mig") or ():
        own = (*gpu.labels, str(each["uuid"]))
        block.add(health_families.MIG_INFO, 1, *own, *(str(each[name]) for name in ("gi", "ci", "profile")))
        for name, spec in health_families.MIG_READINGS.items():
            if each.get(name) is not None:
                block.add(spec, each[name], *own)


def _add_events(block: _Block, gpu: GpuState, kernel_xids: KernelXids) -> None:
    for name, counter in gpu.counters.get("events", {}).items():
        block.add(health_families.EVENTS, counter.total, *gpu.labels, name)
    seen = gpu.counters.get("xids", {})
    logged = kernel_xids.get(gpu.identity.get("pci_bus_id", ""), {})
    for xid in sorted({*seen, *logged}, key=lambda text: (len(text), text)):
        # Both report the same errors; each misses those of the time in which it could not listen.
        mine = seen[xid].total if xid in seen else 0
        theirs = logged.get(xid, XidCount(0, 0.0))
        block.add(health_families.XID_ERRORS, max(mine, theirs.count), *gpu.labels, xid)
        last = max(gpu.xid_times.get(xid, 0.0), theirs.last)
        if last:
            block.add(health_families.XID_TIME, last, *gpu.labels, xid)


def _add_cost(block: _Block, registry: GpuRegistry, status: NvmlStatus, *, per_call: bool) -> None:
    calls = [call for (call,) in registry.cost_keys("calls")]
    for spec, kind in ((families.CALLS, "calls"), (families.CALL_SECONDS, "seconds")):
        if per_call:
            for call in calls:
                block.add(spec, registry.cost(kind, call), call)
        elif calls:
            block.add(spec, sum(registry.cost(kind, call) for call in calls), "")
    for call, error in registry.cost_keys("errors"):
        block.add(families.ERRORS, registry.cost("errors", call, error), call, error)
    if registry.machine:
        block.add(families.CHILD_CPU, registry.cost("cpu"))
        resets = registry.resets()
        for reason in REASONS:
            block.add(families.RESETS, resets.get(reason, 0), reason)
    if status.up and registry.resident_bytes:
        block.add(families.CHILD_MEMORY, registry.resident_bytes)
    for reason, number in sorted(status.restarts.items()):
        block.add(families.RESTARTS, number, reason)
