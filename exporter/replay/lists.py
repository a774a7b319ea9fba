"""What those functions of NVML do on a replayed GPU that give lists: field values, processes, samples, retired pages.

Used in the NVML child, by the replay's library, beside `calls`. Each has a protocol of its own for telling the length
first; pynvml makes an exception of whatever differs from it.

The ids of some throttle counters depend on the driver's version; this is written down here apart from the child's
`readings`, which chooses what to ask for, so that the one finds mistakes in the other.
"""

from __future__ import annotations

from math import ceil, isfinite
from typing import Any

from exporter.collectors.gpu.nvml.library import CODES, SUCCESS
from exporter.replay.calls import INVALID, NOT_SUPPORTED, TOO_SMALL, Asked, Call, behind, number, put

_NOT_FOUND = CODES["not_found"]

ALL_LINKS = 0xFFFFFFFF
_UNSIGNED_LONG_LONG = 3
_SIGNED_LONG_LONG = 4
_LATENCY_MICROSECONDS = 2

READINGS = {
    74: "throttle_sw_power_cap",
    75: "throttle_thermal",
    76: "throttle_sync_boost",
    77: "throttle_board_limit",
    78: "throttle_low_utilization",
    79: "throttle_reliability",
    80: "throttle_total_app_clocks",
    81: "throttle_total_base_clocks",
    82: "memory_temperature",
    83: "energy",
    91: "nvlinks",
    185: "power_average",
    186: "power_instant",
    193: "tlimit_shutdown",
    194: "tlimit_slowdown",
    195: "tlimit_mem_max",
    196: "tlimit_gpu_max",
    197: "pcie_transmit_bytes",
    198: "pcie_receive_bytes",
    230: "recovery_action",
    **dict.fromkeys((38, 45, 52, 59, 160), "nvlink_errors"),
    **dict.fromkeys(range(173, 184), "pcie_errors"),
}
"""Fields of a whole GPU."""

OF_LINKS = {
    138: "nvlink_transmit_kib",
    139: "nvlink_receive_kib",
    161: "nvlink_errors",
    162: "nvlink_errors",
    163: "nvlink_errors",
    164: "nvlink_speed",
    202: "nvlink_transmit_bytes",
    204: "nvlink_receive_bytes",
    **dict.fromkeys(range(206, 216), "nvlink_errors_fifth"),
}
"""Fields whose scope is a link; the readings are those of one link."""

SUMMABLE = frozenset({138, 139})
"""Those that can be asked over all links."""

_SIGNED = frozenset({193, 194, 195, 196})

_THERMAL = ("throttle_sw_thermal", "throttle_hw_thermal", "throttle_hw_power_brake")
_SMOOTHING = "power_smoothing"


def readings_of_driver(driver: str) -> dict[int, str]:
    """The readings by id, as a driver has them."""
    major, _, rest = driver.partition(".")
    version = int(major), int(rest.partition(".")[0])
    first, second = dict.fromkeys((251, 252, 253), _SMOOTHING), dict.fromkeys((269, 270, 271), _SMOOTHING)
    if version < (570, 0):
        return READINGS
    if (575, 0) <= version < (580, 82):
        first = dict(zip(first, _THERMAL, strict=True))
    elif version >= (580, 82):
        second = dict(zip(second, _THERMAL, strict=True))
    return {**READINGS, **first, **second}


def field_values(asked: Asked, count: Any, array: Any, *, driver: str, newest: int | None) -> int:
    """`nvmlDeviceGetFieldValues`: succeeds, with a code for each field."""
    readings = readings_of_driver(driver)
    for value in behind(array)[: number(count)]:
        value.timestamp = int(asked.wall * 1e6)
        value.latencyUsec = _LATENCY_MICROSECONDS
        value.nvmlReturn = 0
        field = value.fieldId
        if newest is not None and field > newest:
            value.nvmlReturn = INVALID
            continue
        found = _reading(asked, readings, field, value.scopeId)
        if found is None:
            value.nvmlReturn = NOT_SUPPORTED
        elif not isfinite(found):
            value.valueType, value.value.dVal = 0, found
        elif field in _SIGNED:
            # Some drivers say so; the bits are the same.
            value.valueType, value.value.sllVal = _UNSIGNED_LONG_LONG, int(found)
        elif found < 0:
            value.valueType, value.value.sllVal = _SIGNED_LONG_LONG, int(found)
        else:
            value.valueType, value.value.ullVal = _UNSIGNED_LONG_LONG, int(found)
    return 0


def _reading(asked: Asked, readings: dict[int, str], field: int, scope: int) -> float | None:
    described = asked.gpu.readings.at(f"field.{field}", asked.moment)
    if described is not None:
        return described
    if field not in OF_LINKS:
        return asked.reading(readings[field]) if field in readings else None
    active = asked.gpu.readings.at("nvlinks_active", asked.moment)
    if active is None:
        active = asked.gpu.readings.at("nvlinks", asked.moment) or 0
    value = asked.reading(OF_LINKS[field])
    if value is None:
        return None
    if scope == ALL_LINKS:
        return value * active if field in SUMMABLE else None
    return value if scope < active else None


def retired_pages(asked: Asked, cause: Any, count: Any, pages: Any) -> int:
    """`nvmlDeviceGetRetiredPages`: a first call without an array asks for the number."""
    value = asked.reading(("retired_pages_sbe", "retired_pages_dbe")[number(cause) & 1])
    if value is None:
        return NOT_SUPPORTED
    space = behind(count).value
    put(count, value)
    if pages is None or space < value:
        return TOO_SMALL if value else SUCCESS
    for place in range(int(value)):
        pages[place] = 0x1000 * (place + 1)
    return SUCCESS


def processes(asked: Asked, count: Any, array: Any) -> int:
    """`nvmlDeviceGetComputeRunningProcesses_v3`: success only when there is none, or room for all."""
    running = asked.gpu.processes(asked.moment)
    space = behind(count).value
    put(count, len(running) if asked.returned is None or array is None else asked.returned)
    if not running:
        return SUCCESS
    if array is None or space < len(running):
        return TOO_SMALL
    for place, process in enumerate(running):
        array[place].pid = process["pid"]
        used = process["memory"]
        array[place].usedGpuMemory = 0xFFFFFFFFFFFFFFFF if used is None else used
    return SUCCESS


def no_processes(_asked: Asked, count: Any, _array: Any) -> int:
    """`nvmlDeviceGetGraphicsRunningProcesses_v3`: training draws nothing."""
    put(count, 0)
    return SUCCESS


_PROCESS_SAMPLE_SECONDS = 1.0
_PROCESS_RING = 72


def process_utilization(asked: Asked, array: Any, count: Any, since: Any) -> int:
    """`nvmlDeviceGetProcessUtilization`: the first call must say that the array is too small.

    For the time 0 the driver gives one sample a process, of some time in the past.
    """
    times = _times(asked.wall, number(since), _PROCESS_SAMPLE_SECONDS, _PROCESS_RING)
    if number(since) == 0:
        times = times[:1]
    found = [
        (time, process)
        for time in times
        for process in asked.gpu.processes(asked.moment)
        if process["sm"] is not None
    ]
    if not found:
        return _NOT_FOUND
    space = behind(count).value
    put(count, len(found))
    if array is None or space < len(found):
        return TOO_SMALL
    for place, (time, process) in enumerate(found):
        array[place].pid = process["pid"]
        array[place].timeStamp = time
        level = asked.gpu.readings.load.at(asked.moment - (asked.wall - time / 1e6))
        array[place].smUtil = int(process["sm"] * level)
        array[place].memUtil = int(process["memory_bandwidth"] * level)
    return SUCCESS


SAMPLES = {
    0: ("power", 0.02, 119),
    1: ("utilization", 0.2, 71),
    2: ("memory_utilization", 0.2, 71),
}
_UNSIGNED_INT = 1


def samples(asked: Asked, kind: Any, since: Any, value_type: Any, count: Any, array: Any) -> int:
    """`nvmlDeviceGetSamples`: a first call without an array succeeds with the number."""
    reading, seconds, length = SAMPLES.get(number(kind), ("", 1.0, 0))
    if not reading or not asked.gpu.readings.at("sample_buffers", asked.moment):
        return NOT_SUPPORTED
    if asked.reading(reading) is None:
        return NOT_SUPPORTED
    times = _times(asked.wall, number(since), seconds, length)
    if not times:
        return _NOT_FOUND
    put(value_type, _UNSIGNED_INT)
    if array is not None:
        times = times[: len(array)]
        for place, time in enumerate(times):
            then = asked.moment - (asked.wall - time / 1e6)
            value = asked.gpu.readings.at(reading, then) if asked.returned is None else asked.returned
            array[place].timeStamp = time
            array[place].sampleValue.uiVal = int(value or 0)
    put(count, len(times))
    return SUCCESS


def _times(wall: float, since: int, seconds: float, length: int) -> list[int]:
    """The times of the samples in a ring that are newer than one, microseconds."""
    step = int(seconds * 1e6)
    newest = int(wall * 1e6) // step
    oldest = max(newest - length + 1, ceil((since + 1) / step))
    return [place * step for place in range(oldest, newest + 1)]


LISTS: dict[str, Call] = {
    "nvmlDeviceGetRetiredPages": retired_pages,
    "nvmlDeviceGetComputeRunningProcesses_v2": processes,
    "nvmlDeviceGetComputeRunningProcesses_v3": processes,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": no_processes,
    "nvmlDeviceGetProcessUtilization": process_utilization,
    "nvmlDeviceGetSamples": samples,
}
"""Functions of a GPU that give lists."""
