"""Families that say who trains what, and on which device: run, ranks, peak FLOP/s.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Visible slots come in, and what the collector of GPUs
knows; families go out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from prometheus_client.core import Metric

from exporter.collectors.job import EnergyReading, GpuProcessUse
from exporter.families import FamilySpec
from exporter.ledger.families.peak_flops import data_type, peak_flops
from exporter.ledger.families.training import IDENTITY_LABELS
from exporter.ledger.visible import VisibleSlot

FACTS = (
    *("job_id", "job_name", "user", "framework", "framework_version", "model", "precision", "flops_method"),
    *("world_size", "nodes", "session_tag", "perf_tag", "application", "is_baseline"),
)
"""What may be told of a run, in the order of the labels; each is absent where nobody has told it."""

LONGEST_FACT = 256

RUN_INFO = FamilySpec(
    "training_run_info",
    "info",
    "What is known of the run, as the process of the lowest rank on this node tells it; every node of a run has one, so"
    " join on (run, instance) or take max by (run) first. Absent when the run's totals no longer linger.",
    ("run", *FACTS),
    source="exporter.training: configuration, describe(), environment",
)
PEAK_FLOPS = FamilySpec(
    "training_peak_flops",
    "gauge",
    "Dense FLOP/s of the rank's device for the data type of the run, from a table (source=table) or as configured"
    " (source=config); absent where the device or the data type is not known, as there is no fallback.",
    (*IDENTITY_LABELS, "dtype", "source", "name"),
    source="exporter.ledger.families.peak_flops, configuration, training.describe(peak_flops=...)",
)

SPECS = (RUN_INFO, PEAK_FLOPS)


@dataclass(frozen=True, slots=True)
class PeakSetting:
    """What somebody has configured of the devices whose name fits a pattern."""

    device: str
    dtype: str  # "" for whatever the run uses
    flops: float


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

    def alone(self, pid: int | None) -> str:
        """Give the UUID of the GPU that a process holds and nobody else does; "" where there is none such."""
        _, mine = self.of(pid) or ("", "")
        holders = [held for held in self._of_pid.values() if any(uuid == mine for _, uuid in held)]
        return mine if len(holders) == 1 else ""

    def name(self, pid: int | None) -> str:
        """Give the model of a process's GPU; "" where it is not known."""
        # Where nobody can tell who uses what, as in a container, it does not matter if all are the same.
        names = {self._names.get(uuid, "") for _, uuid in self._of_pid.get(pid, ())}
        if not self._of_pid:
            names = set(self._names.values())
        return next(iter(names)) if len(names) == 1 else ""


def run_info_families(
    slots: Sequence[VisibleSlot],
    pids: Mapping[str, int | None],
    devices: RankDevices,
    settings: Sequence[PeakSetting],
) -> list[Metric]:
    """Fill the families for one pass.

    Args:
        slots: All that may be shown.
        pids: Of living processes as seen from here, by process id.
        devices: Which GPU is whose.
        settings: What is configured of devices, the first that fits first.
    """
    runs: dict[str, VisibleSlot] = {}
    peaks: dict[tuple[str, ...], float] = {}
    for each in slots:
        run, reading = each.labels[0], each.process.training
        if run not in runs or _order(each) < _order(runs[run]):
            runs[run] = each
        if each.fresh and reading is not None:
            name = devices.name(pids.get(each.process.identity.id))
            dtype = data_type(dict(reading.facts).get("precision", ""))
            configured = [reading.peak_flops] if reading.peak_flops is not None else []
            configured += [
                setting.flops
                for setting in settings
                if name and setting.dtype in {"", dtype} and fnmatchcase(name, setting.device)
            ]
            source, flops = ("config", configured[0]) if configured else ("table", peak_flops(name, dtype))
            if flops is not None:
                peaks.update({(*each.labels, dtype, source, name): flops})
    infos = {(run, *_facts(each)): 1.0 for run, each in sorted(runs.items())}
    filled = ((RUN_INFO, infos), (PEAK_FLOPS, peaks))
    return [spec.family(samples) for spec, samples in filled if samples]


def _order(visible: VisibleSlot) -> tuple[bool, bool, bool, int, str]:
    """Who speaks for the run first; a process that only starts the ranks has nothing to say."""
    rank = visible.labels[1]
    told = any(_facts(visible))
    return (not told, not visible.process.living, not rank, int(rank or 0), visible.labels[2])


def _facts(visible: VisibleSlot) -> tuple[str, ...]:
    reading = visible.process.training
    told = {} if reading is None else dict(reading.facts)
    return tuple(told.get(name, "")[:LONGEST_FACT] for name in FACTS)
