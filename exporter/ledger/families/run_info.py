"""Families that say who trains what, and on which device: run, ranks, peak FLOP/s.

For peak FLOP/s there is no fallback: a device of a similar name is not it (an L40S is no L4). Numbers are those of the
data sheets, without sparsity. Source: the vendors' data sheets, by way of stas00/ml-engineering and torchtitan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from exporter.collectors.job import EnergyReading, GpuProcessUse
from exporter.config.options import REQUIRED, Range, option
from exporter.families import Collected, FamilySpec
from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.totals import VisibleSlot

FACTS = (
    *("job_id", "job_name", "user", "framework", "framework_version", "model", "precision", "flops_method"),
    *("world_size", "nodes", "session_tag", "perf_tag", "application", "is_baseline"),
)
"""What may be told of a run, in the order of the labels; each is absent where nobody has told it."""

RUN_INFO = FamilySpec(
    name="training_run_info",
    type="info",
    help="What is known of the run, as the process of the lowest rank on this node tells it; every node of a run has one, so"
    " join on (run, instance) or take max by (run) first. Absent when the run's totals no longer linger.",
    labels=("run", *FACTS),
    source="exporter.training: configuration, describe(), environment",
)
PEAK_FLOPS = FamilySpec(
    name="training_peak_flops",
    type="gauge",
    help="Dense FLOP/s of the rank's device for the data type of the run, from a table (source=table) or as configured"
    " (source=config); absent where the device or the data type is not known, as there is no fallback.",
    labels=(*IDENTITY_LABELS, "dtype", "source", "name"),
    source="exporter.ledger.families.run_info, configuration, training.describe(peak_flops=...)",
)

SPECS = (RUN_INFO, PEAK_FLOPS)


@dataclass(frozen=True, slots=True)
class PeakFlops:
    """Peak performance of a device."""

    device: str = option(
        REQUIRED,
        "Pattern of the device's name in gpu_info. The first match wins over the built-in table.",
        example="*H100*",
    )
    flops: Annotated[float, Range(1, 1e21)] = option(
        REQUIRED, "Dense floating-point operations per second.", example=9.89e14
    )
    dtype: Literal["bf16", "fp16", "fp8", "tf32"] | None = option(
        None, "Data type that they are of. null means any that the run uses.", example="bf16"
    )


@dataclass(frozen=True, slots=True)
class Gpus:
    """What the collector of GPUs knows: which process uses which, and their names; callable from any thread."""

    use: Callable[[], Sequence[GpuProcessUse]] = lambda: ()
    readings: Callable[[], Sequence[EnergyReading]] = lambda: ()


class RankDevices:
    """Which GPU is whose, in one pass; processes are told by their pid as seen from here."""

    def __init__(self, gpus: Gpus) -> None:
        self._of_pid: dict[int | None, set[tuple[str, str]]] = {}
        for use in gpus.use():
            self._of_pid.setdefault(use.pid, set()).add((use.gpu, use.uuid))
        self._names = {each.device: each.name for each in gpus.readings() if each.component == "gpu"}

    def of(self, pid: int | None) -> tuple[str, str] | None:
        """Give index and UUID of the one GPU that a process holds; None where it is none, several or not known."""
        held = self._of_pid.get(pid, ())
        return next(iter(held)) if len(held) == 1 else None

    def name(self, pid: int | None) -> str:
        """Give the model of a process's GPU; "" where it is not known."""
        # Where nobody can tell who uses what, as in a container, it does not matter if all are the same.
        names = {self._names.get(uuid, "") for _, uuid in self._of_pid.get(pid, ())}
        if not self._of_pid:
            names = set(self._names.values())
        return next(iter(names)) if len(names) == 1 else ""


def tell_runs(
    collected: Collected,
    slots: Sequence[VisibleSlot],
    pids: Mapping[str, int | None],
    devices: RankDevices,
    settings: Sequence[PeakFlops],
) -> None:
    """Fill the families for one pass; `pids` are those of living processes as seen from here, by process id."""
    runs: dict[str, VisibleSlot] = {}
    for each in sorted(slots, key=_order):
        runs.setdefault(each.labels[0], each)
    for run, each in sorted(runs.items()):
        collected.add(RUN_INFO, 1.0, run, *_facts(each))
    for each in slots:
        reading = each.process.training
        if each.fresh and reading is not None:
            name = devices.name(pids.get(each.process.identity.id))
            dtype = data_type(dict(reading.facts).get("precision", ""))
            fitting = [it for it in settings if it.dtype in {None, dtype} and fnmatchcase(name, it.device)]
            flops, source = reading.peak_flops, "config"
            if flops is None and name and fitting:
                flops = fitting[0].flops
            if flops is None:
                flops, source = peak_flops(name, dtype), "table"
            collected.add(PEAK_FLOPS, flops, *each.labels, dtype, source, name)


def _order(visible: VisibleSlot) -> tuple[bool, bool, bool, int, str]:
    """Who speaks for the run first; a process that only starts the ranks has nothing to say."""
    rank = visible.labels[1]
    told = any(_facts(visible))
    return (not told, not visible.process.living, not rank, int(rank or 0), visible.labels[2])


def _facts(visible: VisibleSlot) -> tuple[str, ...]:
    reading = visible.process.training
    told = {} if reading is None else dict(reading.facts)
    return tuple(told.get(name, "")[:256] for name in FACTS)


# Peak FLOP/s: what model FLOPs utilization is measured by ----------------------------------------------

_TERA = 1e12

_HOPPER = {"bf16": 989, "fp16": 989, "fp8": 1979, "tf32": 494.5}
_MODELS: tuple[tuple[str, str, Mapping[str, float]], ...] = (
    ("GB300", "", {"bf16": 2500, "fp16": 2500, "fp8": 5000, "tf32": 1250}),
    ("GB200", "", {"bf16": 2500, "fp16": 2500, "fp8": 5000, "tf32": 1250}),
    ("B300", "", {"bf16": 2250, "fp16": 2250, "fp8": 4500, "tf32": 1125}),
    ("B200", "", {"bf16": 2250, "fp16": 2250, "fp8": 4500, "tf32": 1125}),
    ("GH200", "", _HOPPER),
    ("H200", "NVL", _HOPPER),
    ("H100 HBM3", "NVL PCIE", _HOPPER),
    ("H100 SXM5", "NVL PCIE HBM3", _HOPPER),
    ("H100 NVL", "", {"bf16": 835, "fp16": 835}),
    ("H100 PCIE", "NVL", {"bf16": 756, "fp16": 756, "fp8": 1513, "tf32": 378}),
    ("H20", "", {"bf16": 148, "fp16": 148}),
    ("A100", "", {"bf16": 312, "fp16": 312, "tf32": 156}),
    ("L40S", "", {"bf16": 362, "fp16": 362, "fp8": 733, "tf32": 183}),
    ("L4", "", {"bf16": 121, "fp16": 121}),
    ("A10", "", {"bf16": 125, "fp16": 125}),
    ("A6000", "", {"bf16": 154.8, "fp16": 154.8}),
    ("V100 SXM2", "", {"fp16": 125}),
    ("V100 SXM3", "", {"fp16": 125}),
    ("V100 PCIE", "", {"fp16": 112}),
    ("T4", "", {"fp16": 65}),
    ("MI355X", "", {"bf16": 2500, "fp16": 2500}),
    ("MI325X", "", {"bf16": 1300, "fp16": 1300, "fp8": 2610}),
    ("MI300X", "", {"bf16": 1300, "fp16": 1300, "fp8": 2610}),
    ("MI250X", "", {"bf16": 191.5, "fp16": 191.5}),  # of one of its two dies, each of which is a device
)
"""Words that a device's name has, words that it has not, dense TFLOP/s by data type."""

_SLICE = re.compile(r"MIG|GRID|VGPU|\d+[ABCQ]")
"""A word in the name of a part of a device, which has not its peak (`GRID A100-10C`)."""

_TYPES: tuple[tuple[str, str], ...] = (
    (r"fp8|float8|e4m3|e5m2|transformer.engine", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|^16|half", "fp16"),
    (r"tf32", "tf32"),
)


def data_type(precision: str) -> str:
    """Tell the data type of matrix products from a framework's word (`16-mixed`, `torch.float16`); "" is not clear."""
    return next((name for pattern, name in _TYPES if re.search(pattern, precision.lower())), "")


def peak_flops(device: str, dtype: str) -> float | None:
    """Look up the dense FLOP/s of a device, by the name that its driver gives it; None where they are not known."""
    words = set(re.findall(r"[A-Z0-9]+", device.upper()))
    if any(map(_SLICE.fullmatch, words)):
        return None
    for needs, never, tera_flops in _MODELS:
        if words.issuperset(needs.split()) and words.isdisjoint(never.split()):
            return tera_flops[dtype] * _TERA if dtype in tera_flops else None
    return None
