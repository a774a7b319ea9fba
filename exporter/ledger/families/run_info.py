"""Facts about a run, number of its ranks, and peak FLOP/s of devices.

A device that is not in the table has no peak, because a device with a similar name may be different: an L40S is not an L4. The table
contains the dense FLOP/s of the vendors' data sheets, collected by stas00/ml-engineering and torchtitan.
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
from exporter.recording.values import TrainingReading

FACTS = (
    *("job_id", "job_name", "user", "framework", "framework_version", "model", "precision", "flops_method"),
    *("world_size", "nodes", "session_tag", "perf_tag", "application", "is_baseline"),
)
"""Names of the facts, in the order of the labels."""
MAX_FACT_CHARACTERS = 256
"""Maximum length of a fact in a label. A longer fact is cut."""

RUN_INFO = FamilySpec(
    name="training_run_info",
    type="info",
    labels=("run", *FACTS),
    help="Facts about the run as labels, such as the user, the model and the number of ranks (world_size).",
    absent="*expired*",
    source="environment of the launcher, exporter.training.describe(), configuration of one-logger, bridges",
    details=(
        f"The label of an unknown fact is empty. A fact is cut after {MAX_FACT_CHARACTERS} characters.",
        "`job_id`, `user`, `nodes`: environment of the launcher, such as `SLURM_JOB_ID`.",
        "`job_name`, `world_size`: the same environment, unless the job reports a value.",
        "`flops_method`: method by which the job computed its FLOPs, such as `6N`.",
        "`session_tag`, `perf_tag`, `application`, `is_baseline`: see docs/one-logger.md.",
        (
            "A node publishes the facts of the lowest of its ranks that reported any; a running process takes"
            " precedence over an exited process."
        ),
        "Every node of a run has this series: join on `(run, instance)`, or use `max by (run)`.",
    ),
)
WORLD_SIZE = FamilySpec(
    name="training_world_size",
    type="gauge",
    labels=("run",),
    help="Number of ranks of the run.",
    absent="*not reported* or *expired*",
    source="the label world_size of training_run_info",
    details=("Every node of a run has this series: use `max by (run)`.",),
)
PEAK_FLOPS = FamilySpec(
    name="training_peak_flops_per_second",
    type="gauge",
    labels=(*IDENTITY_LABELS, "dtype", "source", "name"),
    help="Peak dense FLOP/s of the rank's device (name) for the data type of the run (dtype), by source.",
    absent=(
        "*not instrumented*, *exited*, *stale*, or if the job reports no peak and the configuration and the table"
        " have none for the device and the data type"
    ),
    source="built-in table, configuration, training.describe(peak_flops=...)",
    details=(
        "`table`: built-in table.",
        "`config`: set by the user, with `goodput.peak_flops` or `training.describe(peak_flops=...)`.",
    ),
)

SPECS = (RUN_INFO, WORLD_SIZE, PEAK_FLOPS)


@dataclass(frozen=True, slots=True)
class ConfiguredPeak:
    """Peak performance of a device in the configuration."""

    device: str = option(
        REQUIRED,
        "Pattern of the device's name in gpu_info. The first match overrides the built-in table.",
        example="*H100*",
    )
    flops: Annotated[float, Range(1, 1e21)] = option(
        REQUIRED, "Dense floating-point operations per second.", example=9.89e14
    )
    dtype: Literal["bf16", "fp16", "fp8", "tf32"] | None = option(
        None, "Data type of the operations. null means every data type.", example="bf16"
    )


@dataclass(frozen=True, slots=True)
class Gpus:
    """Sources of the latest GPU data. The functions may be called from any thread."""

    use: Callable[[], Sequence[GpuProcessUse]] = lambda: ()  # by process
    readings: Callable[[], Sequence[EnergyReading]] = lambda: ()  # with the device names


class GpusByPid:
    """GPUs of the processes in a pass, by pid in the sidecar's pid namespace."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus_by_pid: dict[int | None, set[tuple[str, str]]] = {}  # index and UUID
        for use in gpus.use():
            self._gpus_by_pid.setdefault(use.pid, set()).add((use.gpu, use.uuid))
        # The name is empty for a GPU in MIG mode, because an instance has a lower peak than the GPU.
        self._name_by_uuid = {
            reading.device: "" if reading.is_mig else reading.name
            for reading in gpus.readings()
            if reading.component == "gpu"
        }

    def find_gpu(self, pid: int | None) -> tuple[str, str] | None:
        """Return index and UUID of a process's GPU, or None if the process uses no GPU or several."""
        gpus = self._gpus_by_pid.get(pid, ())
        return next(iter(gpus)) if len(gpus) == 1 else None

    def find_gpu_name(self, pid: int | None) -> str:
        """Return the name of a process's GPUs, or an empty string if it is unknown or if the names differ.

        If the driver lists no process at all, as in a container, return the common name of the machine's GPUs.
        """
        names = {self._name_by_uuid.get(uuid, "") for _, uuid in self._gpus_by_pid.get(pid, ())}
        if not self._gpus_by_pid:
            names = set(self._name_by_uuid.values())
        return next(iter(names)) if len(names) == 1 else ""


def add_runs(
    collected: Collected,
    slots: Sequence[VisibleSlot],
    pids: Mapping[str, int | None],
    gpus_by_pid: GpusByPid,
    configured_peaks: Sequence[ConfiguredPeak],
) -> None:
    """Add the facts and the number of ranks of each run, and the peak FLOP/s of each rank.

    *pids* contains the pids of running processes by `ProcessIdentity.id`.
    """
    reporter_by_run: dict[str, VisibleSlot] = {}
    for slot in sorted(slots, key=_reporter_order):
        reporter_by_run.setdefault(slot.key.run, slot)
    for run, reporter in sorted(reporter_by_run.items()):
        facts = _facts(reporter)
        collected.add(RUN_INFO, 1.0, run, *facts)
        world_size = facts[FACTS.index("world_size")]
        if world_size.isascii() and world_size.isdigit():
            collected.add(WORLD_SIZE, float(world_size), run)
    for slot in slots:
        if slot.is_fresh and slot.process.training is not None:
            gpu_name = gpus_by_pid.find_gpu_name(pids.get(slot.process.identity.id))
            _add_peak(collected, slot, slot.process.training, gpu_name, configured_peaks)


def _add_peak(
    collected: Collected,
    slot: VisibleSlot,
    reading: TrainingReading,
    gpu_name: str,
    configured_peaks: Sequence[ConfiguredPeak],
) -> None:
    """Add the peak that the job reports, else the first matching peak of the configuration, else the peak of the table."""
    dtype = data_type(dict(reading.facts).get("precision", ""))
    matching_flops = [
        peak.flops
        for peak in configured_peaks
        if peak.dtype in {None, dtype} and fnmatchcase(gpu_name, peak.device)
    ]
    flops, source = reading.peak_flops, "config"
    if flops is None and gpu_name and matching_flops:
        flops = matching_flops[0]
    if flops is None:
        flops, source = flops_in_table(gpu_name, dtype), "table"
    collected.add(PEAK_FLOPS, flops, *slot.labels, dtype, source, gpu_name)


def _reporter_order(slot: VisibleSlot) -> tuple[bool, bool, bool, int, int]:
    """Return the sort key by which the first slot of a run reports the facts of the run.

    Slots with facts precede slots without facts, then running processes precede exited processes, then lower ranks precede.
    """
    rank, worker = slot.key.rank, slot.worker_slot.number or 0
    return (not any(_facts(slot)), not slot.process.is_alive, rank is None, rank or 0, worker)


def _facts(slot: VisibleSlot) -> tuple[str, ...]:
    """Return the facts that a slot's process reports, in the order of `FACTS`; an unknown fact is empty."""
    reading = slot.process.training
    reported_facts = {} if reading is None else dict(reading.facts)
    return tuple(reported_facts.get(name, "")[:MAX_FACT_CHARACTERS] for name in FACTS)


# Peak FLOP/s, the denominator of model FLOPs utilization ----------------------------------------------

_TERA = 1e12

_HOPPER = {"bf16": 989, "fp16": 989, "fp8": 1979, "tf32": 494.5}


@dataclass(frozen=True, slots=True)
class _DeviceModel:
    """Peak performance of a device model, which is recognized by words of the device name."""

    required_words: frozenset[str]
    excluded_words: frozenset[str]
    tera_flops: Mapping[str, float]  # dense TFLOP/s by data type


def _device_model(required: str, tera_flops: Mapping[str, float], *, excluded: str = "") -> _DeviceModel:
    """Return a device model; *required* and *excluded* are words of the device name, separated by spaces."""
    return _DeviceModel(frozenset(required.split()), frozenset(excluded.split()), tera_flops)


_DEVICE_MODELS = (
    _device_model("GB300", {"bf16": 2500, "fp16": 2500, "fp8": 5000, "tf32": 1250}),
    _device_model("GB200", {"bf16": 2500, "fp16": 2500, "fp8": 5000, "tf32": 1250}),
    _device_model("B300", {"bf16": 2250, "fp16": 2250, "fp8": 4500, "tf32": 1125}),
    _device_model("B200", {"bf16": 2250, "fp16": 2250, "fp8": 4500, "tf32": 1125}),
    _device_model("GH200", _HOPPER),
    _device_model("H200", _HOPPER, excluded="NVL"),
    _device_model("H100 HBM3", _HOPPER, excluded="NVL PCIE"),
    _device_model("H100 SXM5", _HOPPER, excluded="NVL PCIE"),
    _device_model("H100 NVL", {"bf16": 835, "fp16": 835}),
    _device_model("H100 PCIE", {"bf16": 756, "fp16": 756, "fp8": 1513, "tf32": 378}, excluded="NVL"),
    _device_model("H20", {"bf16": 148, "fp16": 148}),
    _device_model("A100", {"bf16": 312, "fp16": 312, "tf32": 156}),
    _device_model("L40S", {"bf16": 362, "fp16": 362, "fp8": 733, "tf32": 183}),
    _device_model("L4", {"bf16": 121, "fp16": 121}),
    _device_model("A10", {"bf16": 125, "fp16": 125}),
    _device_model("A6000", {"bf16": 154.8, "fp16": 154.8}),
    _device_model("V100 SXM2", {"fp16": 125}),
    _device_model("V100 SXM3", {"fp16": 125}),
    _device_model("V100 PCIE", {"fp16": 112}),
    _device_model("T4", {"fp16": 65}),
    _device_model("MI355X", {"bf16": 2500, "fp16": 2500}),
    _device_model("MI325X", {"bf16": 1300, "fp16": 1300, "fp8": 2610}),
    _device_model("MI300X", {"bf16": 1300, "fp16": 1300, "fp8": 2610}),
    _device_model("MI250X", {"bf16": 191.5, "fp16": 191.5}),  # each of the two dies is a device
)

_SLICE_WORD = re.compile(r"MIG|GRID|VGPU|\d+[ABCQ]")
"""Pattern of a word in the name of a device slice (`GRID A100-10C`). The peak performance of a slice is unknown."""

_DTYPE_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"fp8|float8|e4m3|e5m2|transformer.engine", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|^16|half", "fp16"),
    (r"tf32", "tf32"),
)


def data_type(precision: str) -> str:
    """Return the data type of matrix products from a framework's precision, such as `16-mixed`, or an empty string."""
    return next((name for pattern, name in _DTYPE_PATTERNS if re.search(pattern, precision.lower())), "")


def flops_in_table(device_name: str, dtype: str) -> float | None:
    """Return the dense FLOP/s of a device in the built-in table, or None if the table has no number."""
    name_words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    if any(map(_SLICE_WORD.fullmatch, name_words)):
        return None
    for model in _DEVICE_MODELS:
        if name_words >= model.required_words and name_words.isdisjoint(model.excluded_words):
            return model.tera_flops[dtype] * _TERA if dtype in model.tera_flops else None
    return None
