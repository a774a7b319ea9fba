"""What a GPU is asked by a call or a field value, as tables: a row is a question, with its tier.

Used in the NVML child. Readings leave in base units, counters as NVML gives them (nanoseconds): the sidecar adds them
up. What costs more than microseconds, or changes when somebody sets it, is in a slower tier. Links, sample buffers,
performance counters, processes and instances have files of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.nvml.device import Device
from exporter.collectors.gpu.nvml.units import (
    GarbageError,
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
from exporter.collectors.gpu.options import GpuOptions

Out = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A function of NVML to be called.

    Attributes:
        reading: Where the answer goes; "" where `convert` gives several readings by name.
        call: pynvml's function.
        arguments: After the handle.
        convert: Makes the value, or a mapping of values.
        label: Under which the value stands in the reading's mapping; "" where the reading is the value.
        details: Whether it is asked with details only.
        before: The function of older drivers, with the same arguments and answer.
        parts: The readings that `convert` gives.
    """

    reading: str
    call: str
    arguments: tuple[int, ...] = ()
    convert: Callable[[Any], Any] = small
    label: str = ""
    details: bool = False
    before: str = ""
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldQuestion:
    """A field value to be read, in one call with the others of its tier.

    Attributes:
        reading: Where the answer goes.
        field: NVML's id.
        convert: Makes the value.
        label: As with `Question`.
        details: Whether it is asked with details only.
    """

    reading: str
    field: int
    convert: Callable[[Any], Any] = count
    label: str = ""
    details: bool = False


Questions = tuple[Question | FieldQuestion, ...]

_MEMORY_V2 = 0x02000028
_CLOCKS = {"sm": 1, "memory": 2}
_CLOCKS_DETAILS = {"graphics": 0, "video": 3}
_ENGINES = {"encoder": "Encoder", "decoder": "Decoder", "jpeg": "Jpg", "ofa": "Ofa"}
_LOWEST_PSTATE = 15
_MOST_ACTIONS = 64

REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clock_setting",
}
"""Bits of NVML's clock event reasons."""


def _rates(rates: Any) -> Out:
    return {"utilization": ratio(rates.gpu), "bandwidth_utilization": ratio(rates.memory)}


def _memory(info: Any) -> Out:
    parts = ("total", "used", "reserved") if hasattr(info, "reserved") else ("total", "used")
    return {f"memory_{part}": size(getattr(info, part)) for part in parts}


def _performance_state(number: int) -> int:
    if not 0 <= number <= _LOWEST_PSTATE:  # 32 is NVML's "unknown"
        raise GarbageError(number)
    return number


def _first_ratio(pair: Any) -> float:
    return ratio(pair[0])


def _bounds(pair: Any) -> Out:
    least, most = pair
    return {"min": watts(least), "max": watts(most)}


def _modes(pair: Any) -> Out:
    current, pending = pair
    return {"current": flag(current), "pending": flag(pending)}


def _rows(rows: Any) -> Out:
    correctable, uncorrectable, pending, failed = rows
    return {
        "remapped_rows": {"correctable": small(correctable), "uncorrectable": small(uncorrectable)},
        "remapped_rows_pending": flag(pending),
        "remapped_rows_failed": flag(failed),
    }


def _action(number: float) -> float:
    if not 0 <= number < _MOST_ACTIONS:
        raise GarbageError(number)
    return number


FAST: Questions = (
    Question(
        "",
        "nvmlDeviceGetUtilizationRates",
        convert=_rates,
        parts=("utilization", "bandwidth_utilization"),
    ),
    Question(
        "",
        "nvmlDeviceGetMemoryInfo",
        (_MEMORY_V2,),
        convert=_memory,
        parts=("memory_total", "memory_used", "memory_reserved"),
    ),
)
"""Every pass; with the power, which has two sources (`read_power`)."""

CLOSE: Questions = (
    FieldQuestion("power_instant", 186, watts),
    Question(
        "temperature",
        "nvmlDeviceGetTemperatureV",
        (0,),
        temperature,
        "gpu",
        before="nvmlDeviceGetTemperature",
    ),
    *(
        Question("clock", "nvmlDeviceGetClockInfo", (number,), hertz, name, details=name not in _CLOCKS)
        for name, number in {**_CLOCKS, **_CLOCKS_DETAILS}.items()
    ),
    Question("performance_state", "nvmlDeviceGetPerformanceState", convert=_performance_state),
)
"""With the sample buffers, every 2 s."""

MEDIUM: Questions = (
    FieldQuestion("temperature_memory", 82, temperature, "memory"),
    FieldQuestion("recovery_action", 230, _action),
    Question("temperature_margin", "nvmlDeviceGetMarginTemperature", (), celsius, "nearest"),
    Question("energy_millijoules", "nvmlDeviceGetTotalEnergyConsumption", convert=count),
    *(
        Question(
            "video_engines",
            f"nvmlDeviceGet{call}Utilization",
            convert=_first_ratio,
            label=name,
            details=True,
        )
        for name, call in _ENGINES.items()
    ),
)
"""Every 10 s: the energy counter costs milliseconds of processor time."""

SLOW: Questions = (
    Question("power_limit", "nvmlDeviceGetEnforcedPowerLimit", (), watts, "enforced"),
    Question("power_limit", "nvmlDeviceGetPowerManagementDefaultLimit", (), watts, "default"),
    Question("power_limit", "nvmlDeviceGetPowerManagementLimit", (), watts, "management", details=True),
    Question("power_limit", "nvmlDeviceGetPowerManagementLimitConstraints", (), _bounds, "*", details=True),
    *(
        Question(
            "temperature_threshold",
            "nvmlDeviceGetTemperatureThreshold",
            (number,),
            temperature,
            name,
            details=name != "slowdown",
        )
        for number, name in enumerate(("shutdown", "slowdown", "mem_max", "gpu_max"))
    ),
    *(
        FieldQuestion("temperature_limit", 193 + place, celsius, name, details=True)
        for place, name in enumerate(("shutdown", "slowdown", "mem_max", "gpu_max"))
    ),
    *(
        Question("clock_max", "nvmlDeviceGetMaxClockInfo", (number,), hertz, name, details=True)
        for name, number in {**_CLOCKS, **_CLOCKS_DETAILS}.items()
    ),
    Question("compute_mode", "nvmlDeviceGetComputeMode", details=True),
    Question("persistence_mode", "nvmlDeviceGetPersistenceMode", details=True),
    *(
        Question(
            "ecc_errors",
            "nvmlDeviceGetMemoryErrorCounter",
            (type_number, scope_number, location_number),
            count,
            f"{type_name}/{scope}/{location}",
            details=scope == "aggregate",
        )
        for type_number, type_name in enumerate(("corrected", "uncorrected"))
        for scope_number, scope in enumerate(("volatile", "aggregate"))
        for location, location_number in (("dram", 2), ("sram", 7))
    ),
    Question("ecc_mode", "nvmlDeviceGetEccMode", (), _modes, "*"),
    Question(
        "",
        "nvmlDeviceGetRemappedRows",
        convert=_rows,
        parts=("remapped_rows", "remapped_rows_pending", "remapped_rows_failed"),
    ),
    *(
        Question("retired_pages", "nvmlDeviceGetRetiredPages", (number,), len, name)
        for number, name in enumerate(("sbe", "dbe"))
    ),
    Question("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration", label="current"),
    Question("pcie_generation", "nvmlDeviceGetMaxPcieLinkGeneration", label="max"),
    Question("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", label="current"),
    Question("pcie_width", "nvmlDeviceGetMaxPcieLinkWidth", label="max"),
    Question("pcie_replays", "nvmlDeviceGetPcieReplayCounter"),
)
"""Every minute: what changes when somebody sets it, and errors."""

# Throttle counters whose ids depend on the driver. Three came with driver 575, under ids that had been settings of
# power smoothing in 570; between 580.65 and 580.82 NVIDIA gave these back to power smoothing and moved the counters.
# The same id on the wrong driver is silently another metric, so nothing is asked before 575 and between the two; and
# the sidecar checks that no counter of seconds runs faster than the clock.
# Source: NVML's change log (570 to 575, 575 to 580); pynvml 12.570, 12.575, 13.580.65, 13.580.82.
_THROTTLE = {
    74: "sw_power_cap",
    75: "thermal",
    76: "sync_boost",
    77: "board_limit",
    78: "low_utilization",
    79: "reliability",
}
_THROTTLE_DETAILS = {80: "total_app_clocks", 81: "total_base_clocks"}
_THROTTLE_FIRST = {251: "sw_thermal", 252: "hw_thermal", 253: "hw_power_brake"}
_THROTTLE_MOVED = {269: "sw_thermal", 270: "hw_thermal", 271: "hw_power_brake"}


def throttle_fields(driver_version: str, *, details: bool) -> dict[int, str]:
    """Give the ids to ask for on a driver, with the reason for which each counts nanoseconds."""
    found = {**_THROTTLE, **_THROTTLE_DETAILS} if details else dict(_THROTTLE)
    parts = driver_version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return found
    version = int(parts[0]), int(parts[1])
    if (575, 0) <= version <= (580, 65):
        found.update(_THROTTLE_FIRST)
    elif version >= (580, 82):
        found.update(_THROTTLE_MOVED)
    return found


class Reader:
    """Asks the questions of a tier.

    Args:
        questions: Of the tier.
        options: Whether details are wanted.
    """

    def __init__(self, questions: Questions, options: GpuOptions) -> None:
        wanted = [each for each in questions if options.details or not each.details]
        self._calls = [each for each in wanted if isinstance(each, Question)]
        self._fields = {each.field: each for each in wanted if isinstance(each, FieldQuestion)}
        self._details = options.details

    def read(self, device: Device, out: Out) -> None:
        """Ask them all; what has no answer now is None."""
        values = device.fields(self._fields)
        for number, field in self._fields.items():
            value = values.get(number)
            converted = None if value is None else device.converted(number, value, field.convert)
            _put(out, field.reading, field.label, converted)
        for question in self._calls:
            answer = _answer(device, question)
            for part in question.parts:
                out[part] = (answer or {}).get(part)
            if question.label == "*":
                for name, value in (answer or {}).items():
                    if self._details or name != "pending":
                        _put(out, question.reading, name, value)
                out.setdefault(question.reading, None)
            elif question.reading:
                _put(out, question.reading, question.label, answer)


def _answer(device: Device, question: Question) -> Any:
    item = f"{question.call}{question.arguments or ''}"
    answer = device.ask(item, question.call, *question.arguments, convert=question.convert)
    if answer is None and device.lacks(item):
        if question.before:
            item = question.before
            answer = device.ask(item, question.before, *question.arguments, convert=question.convert)
        elif question.arguments == (_MEMORY_V2,):
            # Version 1 counts what the driver reserves as used.
            answer = device.ask("memory.v1", question.call, convert=question.convert)
    return answer


def _put(out: Out, reading: str, label: str, value: Any) -> None:
    if not label:
        out[reading] = value
    elif value is None:
        out.setdefault(reading, None)
    else:
        out[reading] = {**(out.get(reading) or {}), label: value}


def read_power(device: Device, out: Out) -> None:
    """Read the power; from a field where there is no call for it."""
    power = device.ask("power", "nvmlDeviceGetPowerUsage", convert=watts)
    if power is None and device.lacks("power"):
        found = device.fields((185,)).get(185)
        power = None if found is None else device.converted(185, found, watts)
    out["power"] = power


def read_throttling(device: Device, fields: dict[int, str], options: GpuOptions, out: Out) -> None:
    """Read for how long which reason held the clocks back, and with details which do now."""
    found = device.counts(fields)
    counters = {reason: found[field] for field, reason in fields.items() if field in found}
    out["throttle_nanoseconds"] = counters or None
    if options.details:
        out["reasons"] = _reasons(device)


def read_fans(device: Device, out: Out) -> None:
    """Read how fast each fan is meant to turn."""
    call = "nvmlDeviceGetFanSpeed_v2"
    fans = device.ask("fans", "nvmlDeviceGetNumFans", convert=small) or 0
    speeds = {str(fan): device.ask(f"fan.{fan}", call, fan, convert=ratio) for fan in range(min(fans, 8))}
    out["fan_speed"] = {fan: speed for fan, speed in speeds.items() if speed is not None} or None


def read_sram(device: Device, out: Out) -> None:
    """Read whether too many errors of SRAM say that the card should be replaced."""
    structure = getattr(device.library.binding, "c_nvmlEccSramErrorStatus_v1_t", None)
    out["sram_threshold"] = None
    if structure is not None:
        status = structure()
        call = "nvmlDeviceGetSramEccErrorStatus"
        if device.ask("sram_threshold", call, ctypes.byref(status)) is not None:
            out["sram_threshold"] = int(status.bThresholdExceeded != 0)


def _reasons(device: Device) -> dict[str, int] | None:
    masks = []
    for what in ("Supported", "Current"):
        call = f"nvmlDeviceGet{what}ClocksEventReasons"
        mask = device.ask(call, call, convert=count)
        if mask is None and device.lacks(call):  # drivers before 535
            old = f"nvmlDeviceGet{what}ClocksThrottleReasons"
            mask = device.ask(old, old, convert=count)
        masks.append(mask)
    supported, current = masks
    if supported is None or current is None:
        return None
    return {name: int(bool(current & bit)) for bit, name in REASONS.items() if supported & bit}
