"""Families that say who trains what, and on which device: run, ranks, peak FLOP/s.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Visible slots come in, and what the collector of GPUs
knows; families go out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from prometheus_client.core import Metric

from exporter.collectors.job import EnergyReading, GpuProcessUse
from exporter.families import FamilySpec
from exporter.ledger.admission import SeriesKey
from exporter.ledger.families.peak_flops import data_type, peak_flops
from exporter.ledger.families.training import IDENTITY_LABELS
from exporter.ledger.visible import VisibleSlot
from exporter.recording.values import TrainingReading

FACTS = (
    "job_id",
    "job_name",
    "user",
    "framework",
    "framework_version",
    "model",
    "precision",
    "flops_method",
    "world_size",
    "nodes",
    "session_tag",
    "perf_tag",
    "application",
    "is_baseline",
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

COLLECTIVE_WAIT = FamilySpec(
    "training_collective_wait_seconds_total",
    "counter",
    "Time that the main thread spent on exchanging gradients with other ranks: the phase grad_sync, and torch's own"
    " counters of collectives where it has some. Absent where neither is told, when the rank's totals no longer linger,"
    " and while the ledger's state cannot be written.",
    IDENTITY_LABELS,
    "seconds",
    "training_phase_seconds_total, training_torch_wait_seconds_total",
)
_PHASE = "training_phase_seconds_total"
_TORCH_WAIT = "training_torch_wait_seconds_total"
_GRAD_SYNC = (("phase", "grad_sync"),)
_COLLECTIVE = re.compile(
    r"(c10d\.)?_?(all_reduce|all_gather|all_to_all|reduce_scatter|reduce|gather|scatter|broadcast|barrier|monitored_barrier)"
    r"(_into_tensor|_tensor|_coalesced|_object|_object_list|_base)?"
)
"""Keys of torch's wait counters that are collectives; others are stores, process groups, compilation."""

SPECS = (RUN_INFO, PEAK_FLOPS, COLLECTIVE_WAIT)


@dataclass(frozen=True, slots=True)
class PeakSetting:
    """What somebody has configured of a device.

    Attributes:
        device: Pattern of its name.
        dtype: For which data type; "" for whatever the run uses.
        flops: FLOP/s.
    """

    device: str
    dtype: str
    flops: float


@dataclass(frozen=True, slots=True)
class Gpus:
    """What the collector of GPUs knows; each may be called from any thread.

    Attributes:
        use: Which process uses which GPU.
        readings: The energy of each, for their names.
    """

    use: Callable[[], Sequence[GpuProcessUse]] = lambda: ()
    readings: Callable[[], Sequence[EnergyReading]] = lambda: ()


class RankDevices:
    """Which GPU is whose, in one pass."""

    def __init__(self, gpus: Gpus) -> None:
        self._of_pid: dict[int, set[tuple[str, str]]] = {}
        for use in gpus.use():
            self._of_pid.setdefault(use.pid, set()).add((use.gpu, use.uuid))
        self._names = {each.device: each.name for each in gpus.readings() if each.component == "gpu"}

    def of(self, pid: int | None) -> tuple[str, str] | None:
        """Give index and UUID of the one GPU that a process holds; None where it is none, several or not known."""
        held = self._of_pid.get(pid) if pid is not None else None
        return next(iter(held)) if held is not None and len(held) == 1 else None

    def alone(self, pid: int | None) -> str:
        """Give the UUID of the GPU that a process holds and nobody else does; "" where there is none such."""
        mine = self.of(pid)
        if mine is None:
            return ""
        holders = [held for held in self._of_pid.values() if any(uuid == mine[1] for _, uuid in held)]
        return mine[1] if len(holders) == 1 else ""

    def name(self, pid: int | None) -> str:
        """Give the model of a process's GPU; "" where it is not known."""
        held = self._of_pid.get(pid) if pid is not None else None
        if held is not None:
            names = {self._names.get(uuid, "") for _, uuid in held}
        elif not self._of_pid:
            # Nobody can tell who uses what, as in a container; where all are the same it does not matter.
            names = set(self._names.values())
        else:
            return ""
        return next(iter(names)) if len(names) == 1 else ""


class RunInfo:
    """Makes the families.

    Attributes:
        peaks: What is configured, the first that fits first; may be replaced from any thread.
    """

    def __init__(self) -> None:
        self.peaks: Sequence[PeakSetting] = ()

    def families(
        self, slots: Sequence[VisibleSlot], pids: Mapping[str, int | None], devices: RankDevices
    ) -> list[Metric]:
        """Fill them for one pass.

        Args:
            slots: All that may be shown.
            pids: Of living processes as seen from here, by process id.
            devices: Which GPU is whose.
        """
        runs: dict[str, VisibleSlot] = {}
        peaks: dict[tuple[str, ...], float] = {}
        waits: dict[tuple[str, ...], float] = {}
        for each in slots:
            run = each.labels[0]
            if run not in runs or _order(each) < _order(runs[run]):
                runs[run] = each
            if each.fresh and each.process.training is not None:
                name = devices.name(pids.get(each.process.identity.id))
                if (peak := self._peak(each.process.training, name)) is not None:
                    dtype, source, flops = peak
                    labels = (*each.labels, dtype, source, name)
                    peaks[labels] = flops
            if each.counted and (seconds := _collective_wait(each)) is not None:
                waits[each.labels] = seconds
        infos = {(run, *_facts(each)): 1.0 for run, each in sorted(runs.items())}
        filled = ((RUN_INFO, infos), (PEAK_FLOPS, peaks), (COLLECTIVE_WAIT, waits))
        return [spec.family(samples) for spec, samples in filled if samples]

    def _peak(self, reading: TrainingReading, name: str) -> tuple[str, str, float] | None:
        dtype = data_type(dict(reading.facts).get("precision", ""))
        if reading.peak_flops is not None:
            return dtype, "config", reading.peak_flops
        for each in self.peaks:
            if each.dtype in {"", dtype} and name and fnmatchcase(name, each.device):
                return dtype, "config", each.flops
        flops = peak_flops(name, dtype)
        return None if flops is None else (dtype, "table", flops)


def _order(visible: VisibleSlot) -> tuple[bool, bool, bool, int, str]:
    """Who speaks for the run first; a process that only starts the ranks has nothing to say."""
    rank = visible.labels[1]
    return (
        not any(_facts(visible)),
        not visible.process.living,
        not rank,
        int(rank or 0),
        visible.labels[2],
    )


def _collective_wait(visible: VisibleSlot) -> float | None:
    """Add up a slot's waits; None where nobody tells of any."""
    keys: set[SeriesKey] = {(_PHASE, _GRAD_SYNC)}
    # Also what only the dead have waited for: the living may not have come to that yet.
    for part in visible.slot.parts():
        for key in part.series:
            if key[0] == _TORCH_WAIT and any(_COLLECTIVE.fullmatch(value) for _, value in key[1]):
                keys.add(key)
    totals = [total.sum for key in sorted(keys) if (total := visible.slot.total(key)) is not None]
    known = [seconds for seconds in totals if seconds is not None]
    return sum(known) if known else None


def _facts(visible: VisibleSlot) -> tuple[str, ...]:
    reading = visible.process.training
    told = {} if reading is None else dict(reading.facts)
    return tuple(told.get(name, "")[:LONGEST_FACT] for name in FACTS)
