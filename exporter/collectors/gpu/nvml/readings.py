"""What a GPU is asked by a call or a field value, as tables: a row is a question, with its tier. And its processes.

Used in the NVML child. A reading is called as its family is, without `gpu_`. It leaves in base units, counters as NVML
gives them (nanoseconds): the sidecar adds them up. What costs more than microseconds, or changes when somebody sets it,
is in a slower tier. Process ids are those of the host's namespace, as the driver knows no other; they go to the sidecar
as values and never become labels.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.nvml.device import (
    Convert,
    Device,
    GarbageError,
    Out,
    bounded,
    celsius,
    count,
    flag,
    hertz,
    ratio,
    size,
    small,
    temperature,
    watts,
)
from exporter.collectors.gpu.nvml.library import GARBAGE, CallFailedError


@dataclass(frozen=True, slots=True)
class Question:
    """What a GPU is asked."""

    reading: str | tuple[str, ...]  # where the answer goes; several where `convert` gives as many values
    source: str | int  # pynvml's function, or NVML's id of a field value
    convert: Convert = small  # makes the value
    arguments: tuple[int, ...] = ()  # of the function, after the handle
    # Under which the value stands in the reading's mapping; "" where the reading is the value.
    label: str = ""
    details: bool = False  # whether it is asked with details only
    before: tuple[Any, ...] = ()  # the function of older drivers, with its arguments


MEMORY_V2 = 0x02000028
"""The version of NVML's structure that tells apart what the driver reserves."""

_PROCESS_UTILIZATION = "nvmlDeviceGetProcessUtilization"
_MOST_PROCESSES = 256
_LONGEST_SAMPLE_SECONDS = 5.0
_LARGEST_PID = 1 << 22
"""Of Linux; a driver whose structure differs from the binding's (535.43, 535.86) gives others."""


def _rows(rows: Any) -> tuple[Any, ...]:
    correctable, uncorrectable, pending, failed = rows
    kinds = {"correctable": small(correctable), "uncorrectable": small(uncorrectable)}
    return kinds, flag(pending), flag(failed)


MEMORY = Question(
    ("memory_total_bytes", "memory_used_bytes"),
    "nvmlDeviceGetMemoryInfo",
    lambda info: (size(info.total), size(info.used)),
    (MEMORY_V2,),
    before=("nvmlDeviceGetMemoryInfo",),  # version 1 counts what the driver reserves as used
)

FAST = (
    Question(
        ("utilization_ratio", "memory_bandwidth_utilization_ratio"),
        "nvmlDeviceGetUtilizationRates",
        lambda rates: (ratio(rates.gpu), ratio(rates.memory)),
    ),
    MEMORY,
    Question("power_watts", "nvmlDeviceGetPowerUsage", watts),
)
"""Every pass."""

_OLD_TEMPERATURE = ("nvmlDeviceGetTemperature", 0)
CLOSE = (
    Question(
        "temperature_celsius", "nvmlDeviceGetTemperatureV", temperature, (0,), "gpu", before=_OLD_TEMPERATURE
    ),
    Question("clock_hertz", "nvmlDeviceGetClockInfo", hertz, (1,), "sm"),
    Question("clock_hertz", "nvmlDeviceGetClockInfo", hertz, (2,), "memory"),
)
"""With the sample buffers, every 2 s."""

MEDIUM = (
    Question("temperature_memory", 82, temperature, label="memory"),
    Question("recovery_action", 230, bounded(0, 63)),
    Question("temperature_margin_celsius", "nvmlDeviceGetMarginTemperature", celsius, label="nearest"),
    Question("energy_millijoules", "nvmlDeviceGetTotalEnergyConsumption", count),
)
"""Every 10 s: the energy counter costs milliseconds of processor time."""

SLOW = (
    Question("power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit", watts, label="enforced"),
    Question("power_limit_watts", "nvmlDeviceGetPowerManagementDefaultLimit", watts, label="default"),
    Question(
        "temperature_threshold_celsius", "nvmlDeviceGetTemperatureThreshold", temperature, (1,), "slowdown"
    ),
    *(
        Question(
            "ecc_errors_total",
            "nvmlDeviceGetMemoryErrorCounter",
            count,
            (type_number, scope_number, location_number),
            f"{type_name}/{scope}/{location}",
            details=scope == "aggregate",
        )
        for type_number, type_name in enumerate(("corrected", "uncorrected"))
        for scope_number, scope in enumerate(("volatile", "aggregate"))
        for location, location_number in (("dram", 2), ("sram", 7))
    ),
    Question(
        ("remapped_rows", "remapped_rows_pending", "remapped_rows_failed"), "nvmlDeviceGetRemappedRows", _rows
    ),
    Question("pcie_link_generation", "nvmlDeviceGetCurrPcieLinkGeneration", label="current"),
    Question("pcie_link_generation", "nvmlDeviceGetMaxPcieLinkGeneration", label="max"),
    Question("pcie_link_width", "nvmlDeviceGetCurrPcieLinkWidth", label="current"),
    Question("pcie_link_width", "nvmlDeviceGetMaxPcieLinkWidth", label="max"),
    Question("pcie_replays_total", "nvmlDeviceGetPcieReplayCounter"),
)
"""Every minute: what changes when somebody sets it, and errors."""

# Throttle counters whose ids depend on the driver. Three came with driver 575, under ids that had been settings of
# power smoothing in 570; between 580.65 and 580.82 NVIDIA gave these back to power smoothing and moved the counters.
# The same id on the wrong driver is silently another metric, so nothing is asked before 575 and between the two; and
# the sidecar checks that no counter of seconds runs faster than the clock.
# Source: NVML's change log (570 to 575, 575 to 580); pynvml 12.570, 12.575, 13.580.65, 13.580.82.
_THROTTLE = dict(
    enumerate(
        ("sw_power_cap", "thermal", "sync_boost", "board_limit", "low_utilization", "reliability"), start=74
    )
)
_THROTTLE_FIRST = {251: "sw_thermal", 252: "hw_thermal", 253: "hw_power_brake"}
_THROTTLE_MOVED = {269: "sw_thermal", 270: "hw_thermal", 271: "hw_power_brake"}


def throttle_fields(driver_version: str) -> dict[int, str]:
    """Give the ids to ask for on a driver, with the reason for which each counts nanoseconds."""
    found = dict(_THROTTLE)
    parts = driver_version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return found
    version = int(parts[0]), int(parts[1])
    if (575, 0) <= version <= (580, 65):
        found.update(_THROTTLE_FIRST)
    elif version >= (580, 82):
        found.update(_THROTTLE_MOVED)
    return found


def read(device: Device, questions: tuple[Question, ...], out: Out) -> None:
    """Ask all questions of a tier; what has no answer now is None."""
    values = device.fields({each.source: each.convert for each in questions if isinstance(each.source, int)})
    for each in questions:
        answer = values.get(each.source) if isinstance(each.source, int) else ask(device, each)
        if isinstance(each.reading, tuple):
            out.update(zip(each.reading, answer or (None,) * len(each.reading), strict=True))
        elif not each.label:
            out[each.reading] = answer
        elif answer is None:
            out.setdefault(each.reading, None)
        else:
            out[each.reading] = {**(out.get(each.reading) or {}), each.label: answer}


def ask(device: Device, question: Question) -> Any:
    """Ask a question by its function, or by that of older drivers."""
    item = f"{question.source}{question.arguments or ''}"
    answer = device.ask(item, str(question.source), *question.arguments, convert=question.convert)
    if answer is None and question.before and device.lacks(item):
        answer = device.ask(str(question.before), *question.before, convert=question.convert)
    return answer


def sram_exceeded(device: Device) -> int | None:
    """Read whether too many errors of SRAM say that the card should be replaced; None where that is not told."""
    structure = getattr(device.library.binding, "c_nvmlEccSramErrorStatus_v1_t", None)
    if structure is None:  # the binding is older
        return None
    status = structure()
    answer = device.ask("sram", "nvmlDeviceGetSramEccErrorStatus", ctypes.byref(status))
    return None if answer is None else int(status.bThresholdExceeded != 0)


def _memories(processes: Any) -> dict[int, int | None]:
    """Memory by process id; None where the driver does not tell it (some MIG modes, vGPU)."""
    found: dict[int, int | None] = {}
    for process in processes:
        if process.pid > _LARGEST_PID:
            raise GarbageError(process.pid)
        used = None if process.usedGpuMemory is None else size(process.usedGpuMemory)
        before = found.get(process.pid)
        # On a MIG GPU a process is listed once for each instance that it uses.
        found[process.pid] = used if before is None else before + (used or 0)
    return found


_RUNNING = Question(
    "processes",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    _memories,
    before=("nvmlDeviceGetComputeRunningProcesses_v2",),
)


class Processes:
    """Which processes compute on a GPU, their memory on it, and how busy they keep it."""

    def __init__(self) -> None:
        self._last = 0  # driver's time of the newest sample, µs

    def read(self, device: Device, *, wall: float, out: Out) -> None:
        """Read who is there, and what each did since the last time."""
        running = ask(device, _RUNNING)
        out["process_use"] = out["processes"] = None
        if running is not None:
            busy = self._utilization(device, wall=wall)
            out["processes"] = len(running)
            out["process_use"] = {
                str(pid): {"memory": memory, **({"sm": busy[pid]} if pid in busy else {})}
                for pid, memory in list(running.items())[:_MOST_PROCESSES]
            }

    def _utilization(self, device: Device, *, wall: float) -> dict[int, float]:
        item = "processes.utilization"
        if device.lacks(item):
            return {}
        # With 0 the driver gives a last, stale sample of every process it remembers.
        since = self._last or int((wall - _LONGEST_SAMPLE_SECONDS) * 1e6)
        try:
            samples = device.library.call(_PROCESS_UTILIZATION, device.handle, since)
        except CallFailedError as failure:
            # Nothing new: some drivers say so by success with no samples, of which the binding makes an error.
            if failure.error not in {"success", "not_found"}:
                device.fail(item, failure.call, failure.error)
            return {}
        found: dict[int, list[float]] = {}
        future = int((wall + _LONGEST_SAMPLE_SECONDS) * 1e6)
        for sample in samples:
            if not since < sample.timeStamp <= future:
                continue
            try:
                found.setdefault(sample.pid, []).append(ratio(sample.smUtil))
            except GarbageError:
                device.library.count_error(_PROCESS_UTILIZATION, GARBAGE)
            self._last = max(self._last, sample.timeStamp)
        if self._last > future:  # the wall clock was set back
            self._last = 0
        return {pid: sum(ratios) / len(ratios) for pid, ratios in found.items() if ratios}
