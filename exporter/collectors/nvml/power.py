"""Power, energy, temperature, clocks and what holds them back.

Used in the NVML child. `read_fast` holds cheap calls only; reading the energy counter costs milliseconds on some
GPUs and has a step of its own. Counters leave as NVML gives them (millijoules, nanoseconds): the sidecar
adds them up.
"""

from __future__ import annotations

from exporter.collectors.nvml.conversions import (
    GarbageError,
    celsius,
    count,
    hertz,
    multiple,
    ratio,
    small,
    temperature,
    watts,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from exporter.collectors.nvml.gpu import Gpu
    from exporter.collectors.nvml.options import Options

_SENSOR_GPU = 0
_MEMORY_TEMPERATURE = 82
_POWER_AVERAGE = 185
_POWER_INSTANT = 186
_TEMPERATURE_LIMITS = {193: "shutdown", 194: "slowdown", 195: "mem_max", 196: "gpu_max"}
_EDPP = 274

_CLOCKS = {"sm": 1, "memory": 2}
_CLOCKS_DETAILS = {"graphics": 0, "video": 3}
_THRESHOLDS = {"slowdown": 1}
_THRESHOLDS_DETAILS = {"shutdown": 0, "mem_max": 2, "gpu_max": 3}

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

_LOWEST_PSTATE = 15


def read_fast(gpu: Gpu, options: Options, throttle: dict[int, str], out: dict[str, Any]) -> None:
    """Read what costs microseconds."""
    power = gpu.ask("power", "nvmlDeviceGetPowerUsage", convert=watts)
    if power is not None or not gpu.lacks("power"):
        out["power"] = power  # else `read_medium` looks for it elsewhere
    fields = gpu.fields((_POWER_INSTANT, *throttle))
    out["power_instant"] = _converted(gpu, _POWER_INSTANT, fields, watts)
    counters = {reason: _converted(gpu, field, fields, count) for field, reason in throttle.items()}
    out["throttle_nanoseconds"] = _known(counters)
    out["temperature"] = _known({"gpu": _temperature(gpu)})
    clocks = {**_CLOCKS, **_CLOCKS_DETAILS} if options.details else _CLOCKS
    out["clock"] = _known(
        {
            name: gpu.ask(f"clock.{name}", "nvmlDeviceGetClockInfo", number, convert=hertz)
            for name, number in clocks.items()
        }
    )
    out["performance_state"] = gpu.ask(
        "performance_state", "nvmlDeviceGetPerformanceState", convert=_performance_state
    )
    if options.details:
        out["reasons"] = _reasons(gpu)


def read_energy(gpu: Gpu, out: dict[str, Any]) -> None:
    """Read the energy counter: millijoules since the driver was loaded."""
    out["energy_millijoules"] = gpu.ask("energy", "nvmlDeviceGetTotalEnergyConsumption", convert=count)


def read_medium(gpu: Gpu, out: dict[str, Any]) -> None:
    """Read what costs a millisecond, or changes slowly."""
    wanted = [_MEMORY_TEMPERATURE, _EDPP]
    if gpu.lacks("power"):
        wanted.append(_POWER_AVERAGE)
    fields = gpu.fields(wanted)
    if gpu.lacks("power"):
        out["power"] = _converted(gpu, _POWER_AVERAGE, fields, watts)
    memory = _converted(gpu, _MEMORY_TEMPERATURE, fields, temperature)
    out["temperature_memory"] = _known({"memory": memory})
    out["edpp_multiplier"] = _converted(gpu, _EDPP, fields, multiple)
    enforced = gpu.ask("power_limit.enforced", "nvmlDeviceGetEnforcedPowerLimit", convert=watts)
    out["power_limit_enforced"] = _known({"enforced": enforced})
    nearest = gpu.ask("temperature_margin", "nvmlDeviceGetMarginTemperature", convert=celsius)
    out["temperature_margin"] = _known({"nearest": nearest})
    _read_fans(gpu, out)


def read_slow(gpu: Gpu, options: Options, out: dict[str, Any]) -> None:
    """Read limits: they change when somebody sets them."""
    default = gpu.ask("power_limit.default", "nvmlDeviceGetPowerManagementDefaultLimit", convert=watts)
    limits = {"default": default}
    thresholds = dict(_THRESHOLDS)
    if options.details:
        management = gpu.ask("power_limit.management", "nvmlDeviceGetPowerManagementLimit", convert=watts)
        bounds = gpu.ask(
            "power_limit.bounds", "nvmlDeviceGetPowerManagementLimitConstraints", convert=_two_watts
        )
        limits["management"] = management
        limits["min"], limits["max"] = bounds or (None, None)
        thresholds.update(_THRESHOLDS_DETAILS)
        fields = gpu.fields(_TEMPERATURE_LIMITS)
        margins = {
            name: _converted(gpu, field, fields, celsius) for field, name in _TEMPERATURE_LIMITS.items()
        }
        out["temperature_limit"] = _known(margins)
        out["clock_max"] = _known(
            {
                name: gpu.ask(f"clock_max.{name}", "nvmlDeviceGetMaxClockInfo", number, convert=hertz)
                for name, number in {**_CLOCKS, **_CLOCKS_DETAILS}.items()
            }
        )
    out["power_limit"] = _known(limits)
    out["temperature_threshold"] = _known(
        {
            name: gpu.ask(
                f"temperature_threshold.{name}",
                "nvmlDeviceGetTemperatureThreshold",
                number,
                convert=temperature,
            )
            for name, number in thresholds.items()
        }
    )


def _read_fans(gpu: Gpu, out: dict[str, Any]) -> None:
    fans = gpu.ask("fans", "nvmlDeviceGetNumFans", convert=small) or 0
    out["fan_speed"] = _known(
        {
            str(fan): gpu.ask(f"fan.{fan}", "nvmlDeviceGetFanSpeed_v2", fan, convert=ratio)
            for fan in range(min(fans, 8))
        }
    )
    rpm = gpu.ask("fan_rpm", "nvmlDeviceGetFanSpeedRPM", convert=small) if fans else None
    out["fan_rpm"] = _known({"0": rpm})  # NVML's binding asks for the first fan only


def _temperature(gpu: Gpu) -> float | None:
    found: float | None = gpu.ask(
        "temperature", "nvmlDeviceGetTemperatureV", _SENSOR_GPU, convert=temperature
    )
    if found is None and gpu.lacks("temperature"):
        found = gpu.ask("temperature.v1", "nvmlDeviceGetTemperature", _SENSOR_GPU, convert=temperature)
    return found


def _reasons(gpu: Gpu) -> dict[str, int] | None:
    masks = []
    for what in ("Supported", "Current"):
        mask = gpu.ask(f"reasons.{what}", f"nvmlDeviceGet{what}ClocksEventReasons", convert=count)
        if mask is None and gpu.lacks(f"reasons.{what}"):  # drivers before 535
            old = f"nvmlDeviceGet{what}ClocksThrottleReasons"
            mask = gpu.ask(f"reasons.{what}.v1", old, convert=count)
        masks.append(mask)
    supported, current = masks
    if supported is None or current is None:
        return None
    return {name: int(bool(current & bit)) for bit, name in REASONS.items() if supported & bit}


def _converted(
    gpu: Gpu,
    field: int,
    fields: dict[int | tuple[int, int], float],
    convert: Callable[[Any], Any],
) -> Any:
    if field not in fields:
        return None
    try:
        return convert(fields[field])
    except GarbageError:
        gpu.fail(f"field.{field}", "nvmlDeviceGetFieldValues", "garbage")
        return None


def _known(values: dict[str, Any]) -> dict[str, Any] | None:
    return {name: value for name, value in values.items() if value is not None} or None


def _two_watts(pair: Any) -> tuple[float, float]:
    least, most = pair
    return watts(least), watts(most)


def _performance_state(number: int) -> int:
    if not 0 <= number <= _LOWEST_PSTATE:  # 32 is NVML's "unknown"
        raise GarbageError(number)
    return number
