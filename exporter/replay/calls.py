"""Readings of a replayed GPU by their names in a description, and the NVML functions that return them.

Used in the NVML child; `description` and `library` use the tables. Arguments come as pynvml passes them to C,
results go through `byref()` objects; versions of structures and lengths of lists are checked as NVML does. Source: nvml.h; pynvml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

from exporter.collectors.gpu.nvml.device import SUM_OF_LINKS
from exporter.replay.machine import ReplayedGpu

ONE_NUMBER = {
    "nvmlDeviceGetPowerUsage": "power",
    "nvmlDeviceGetTotalEnergyConsumption": "energy",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_enforced",
    "nvmlDeviceGetPowerManagementDefaultLimit": "power_limit_default",
    "nvmlDeviceGetCurrPcieLinkGeneration": "pcie_generation",
    "nvmlDeviceGetMaxPcieLinkGeneration": "pcie_generation_max",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie_width",
    "nvmlDeviceGetMaxPcieLinkWidth": "pcie_width_max",
    "nvmlDeviceGetPcieReplayCounter": "pcie_replays",
    "nvmlDeviceGetSupportedEventTypes": "event_types",
    "nvmlDeviceGetNumaNodeId": "numa_node",
    "nvmlDeviceGetArchitecture": "architecture",
}
"""Functions with one number as their result, and the name of the reading."""

BY_NUMBER = {
    "nvmlDeviceGetClockInfo": ("", "clock_sm", "clock_memory"),
    "nvmlDeviceGetTemperature": ("temperature",),
    "nvmlDeviceGetTemperatureThreshold": ("", "threshold_slowdown"),
}
"""Functions with one number, selected by an index argument; "" for an index that the exporter never reads."""

SEVERAL = {
    "nvmlDeviceGetMigMode": ("mig_mode", "mig_mode"),
    "nvmlDeviceGetRemappedRows": (
        *("remapped_correctable", "remapped_uncorrectable", "remapping_pending", "remapping_failed"),
    ),
}
"""Functions with several numbers; supported if the first reading is, which replaces readings that are left out."""

TEXTS = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetSerial": "serial",
    "nvmlDeviceGetVbiosVersion": "vbios",
    "nvmlDeviceGetBoardPartNumber": "board",
}

VOLATILE = 0
MEMORY_ERRORS = {
    (kind, VOLATILE, location): f"ecc_{error}_{place}"
    for kind, error in enumerate(("corrected", "uncorrected"))
    for location, place in ((2, "dram"), (7, "sram"))
}
"""Counters since the driver was loaded, by type of error, counter and location; the exporter reads no lifetime counters."""

STRUCTURES: dict[str, tuple[int | None, dict[str, str]]] = {
    "nvmlDeviceGetUtilizationRates": (None, {"gpu": "utilization", "memory": "memory_utilization"}),
    "nvmlDeviceGetTemperatureV": (0x0100000C, {"temperature": "temperature"}),
    "nvmlDeviceGetMarginTemperature": (0x01000008, {"marginTemperature": "temperature_margin"}),
    "nvmlDeviceGetSramEccErrorStatus": (0x01000068, {"bThresholdExceeded": "sram_threshold"}),
}
"""Version of the structure, and the reading in each member; supported where the first reading is."""

FIELDS = {
    74: "throttle_sw_power_cap",
    75: "throttle_thermal",
    76: "throttle_sync_boost",
    77: "throttle_board_limit",
    78: "throttle_low_utilization",
    79: "throttle_reliability",
    82: "memory_temperature",
    91: "nvlinks",
    230: "recovery_action",
    **dict.fromkeys((38, 45, 52, 59, 160), "nvlink_errors"),
    **dict.fromkeys((173, 179, 180), "pcie_errors"),
}
"""Fields of a whole GPU."""

LINK_FIELDS = {
    138: "nvlink_transmit_kib",
    139: "nvlink_receive_kib",
    161: "nvlink_errors",
    162: "nvlink_errors",
    163: "nvlink_errors",
    202: "nvlink_transmit_bytes",
    204: "nvlink_receive_bytes",
    **dict.fromkeys(range(206, 216), "nvlink_errors_fifth"),
}
"""Fields whose scope is an NVLink. Each reading is the value of a single link."""

SUMMABLE_FIELDS = frozenset({138, 139})
"""Link fields with a sum over all links (scope `SUM_OF_LINKS`)."""

# Ids are written here again, and not imported from the child, so that a test finds a wrong id in either table.
_THERMAL = ("throttle_sw_thermal", "throttle_hw_thermal", "throttle_hw_power_brake")
_SMOOTHING = "power_smoothing"


@dataclass(frozen=True, slots=True)
class SampleBuffer:
    """Ring buffer of the driver with the samples of a reading."""

    reading: str
    interval_seconds: float
    capacity: int


SAMPLE_BUFFERS = {
    0: SampleBuffer("power", 0.02, 119),
    1: SampleBuffer("utilization", 0.2, 71),
    2: SampleBuffer("memory_utilization", 0.2, 71),
}
"""Sample buffers by NVML's kind of samples."""

READINGS = tuple(
    dict.fromkeys(
        name
        for names in (
            ("memory_total", "memory_used", "memory_reserved", "sample_buffers", "nvlinks_active"),
            (name for name in ONE_NUMBER.values() if name != "architecture"),
            *(names for table in (BY_NUMBER, SEVERAL) for names in table.values()),
            MEMORY_ERRORS.values(),
            *(members.values() for _, members in STRUCTURES.values()),
            *(FIELDS.values(), LINK_FIELDS.values(), _THERMAL, (_SMOOTHING,)),
        )
        for name in names
        if name
    )
)
"""All readings by their names in a description; docs/replay.md has the units."""


def fields_of_driver(driver: str) -> dict[int, str]:
    """Return the names of the readings by field id, as a driver numbers the fields."""
    major, _, rest = driver.partition(".")
    version = int(major), int(rest.partition(".")[0])
    first, second = dict.fromkeys((251, 252, 253), _SMOOTHING), dict.fromkeys((269, 270, 271), _SMOOTHING)
    if version < (570, 0):
        return FIELDS
    if (575, 0) <= version < (580, 82):
        first = dict(zip(first, _THERMAL, strict=True))
    elif version >= (580, 82):
        second = dict(zip(second, _THERMAL, strict=True))
    return {**FIELDS, **first, **second}


class ReplayedError(Exception):
    """NVML error by name, raised by a replayed function."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """Arguments common to all calls on a GPU: the GPU, the time and the driver version."""

    gpu: ReplayedGpu
    moment: float  # seconds on the timeline
    wall: float  # Unix seconds
    driver: str  # version of the driver

    def maybe(self, name: str) -> float | None:
        """Return the current value of a reading, or None if the GPU does not support the reading."""
        return self.gpu.readings.value_at(name, self.moment)

    def reading(self, name: str) -> float:
        """Return the current value of a reading. Raises ReplayedError if the GPU does not support the reading."""
        value = self.maybe(name)
        if value is None:
            raise ReplayedError("not_supported")
        return value


Call = Callable[..., None]
"""Replayed function: receives the context and the arguments after the handle. Raises ReplayedError."""


def to_int(argument: Any) -> int:
    """Return the number in an argument that was passed by value."""
    return int(getattr(argument, "value", argument))


def target_of(reference: Any) -> Any:
    """Return the object behind a `byref()` reference."""
    return reference._obj  # noqa: SLF001 - ctypes offers no public attribute for the object


def write_number(reference: Any, value: float) -> None:
    """Write a value to the target of a `byref()` reference."""
    target = target_of(reference)
    target.value = value if isinstance(target.value, float) else int(value)


def check_version(structure: Any, version: int) -> None:
    """Raise ReplayedError if a structure has a different version."""
    if structure.version != version:
        raise ReplayedError("argument_version_mismatch")


def _one_number(reading: str) -> Call:
    return lambda context, result: write_number(result, context.reading(reading))


def _by_number(readings: tuple[str, ...]) -> Call:
    def call(context: CallContext, which: Any, result: Any) -> None:
        if not 0 <= to_int(which) < len(readings) or not readings[to_int(which)]:
            raise ReplayedError("not_supported")
        write_number(result, context.reading(readings[to_int(which)]))

    return call


def _several(readings: tuple[str, ...]) -> Call:
    def call(context: CallContext, *results: Any) -> None:
        first = context.reading(readings[0])
        for reading, result in zip(readings, results, strict=True):
            value = context.maybe(reading)
            write_number(result, first if value is None else value)

    return call


def _text(key: str) -> Call:
    def call(context: CallContext, buffer: Any, length: Any) -> None:
        value: str | None = context.gpu.description[key]
        if value is None:
            raise ReplayedError("not_supported")
        text = value.encode("latin-1", "replace")
        if len(text) >= to_int(length):
            raise ReplayedError("insufficient_size")
        buffer.value = text

    return call


def _structure(version: int | None, members: dict[str, str]) -> Call:
    def call(context: CallContext, result: Any) -> None:
        structure = target_of(result)
        if version is not None:
            check_version(structure, version)
        context.reading(next(iter(members.values())))
        for member, reading in members.items():
            setattr(structure, member, int(context.maybe(reading) or 0))

    return call


def _memory(context: CallContext, result: Any) -> None:
    """Fill version 1 of the structure, in which memory reserved by the driver counts as used."""
    info, total = target_of(result), int(context.reading("memory_total"))
    used_bytes = int((context.maybe("memory_used") or 0) + (context.maybe("memory_reserved") or 0))
    info.total, info.used, info.free = total, used_bytes, max(0, total - used_bytes)


def _memory_v2(context: CallContext, result: Any) -> None:
    info = target_of(result)
    check_version(info, 0x02000028)
    _memory(context, result)
    info.used, info.reserved = (int(context.maybe(f"memory_{part}") or 0) for part in ("used", "reserved"))


def _capability(context: CallContext, major: Any, minor: Any) -> None:
    first, _, second = context.gpu.description["compute_capability"].partition(".")
    write_number(major, int(first))
    write_number(minor, int(second or 0))


def _pci_info(context: CallContext, result: Any) -> None:
    info = target_of(result)
    info.bus = 0x10 + context.gpu.index
    info.busId = f"00000000:{info.bus:02X}:00.0".encode()


def _nvlink_state(context: CallContext, link: Any, result: Any) -> None:
    links = context.maybe("nvlinks") or 0
    if not 0 <= to_int(link) < links:
        raise ReplayedError("invalid_argument" if links else "not_supported")
    active = context.maybe("nvlinks_active")
    write_number(result, int(to_int(link) < (links if active is None else active)))


def _memory_errors(context: CallContext, *arguments: Any) -> None:
    *which, result = arguments
    error_type, counter, location = map(to_int, which)
    if (error_type, counter, location) not in MEMORY_ERRORS:
        raise ReplayedError("not_supported")
    write_number(result, context.reading(MEMORY_ERRORS[error_type, counter, location]))


def _field_values(context: CallContext, count: Any, array: Any) -> None:
    """Fill the field values. The call succeeds, and each field has a separate result code."""
    readings = fields_of_driver(context.driver)
    for value in target_of(array)[: to_int(count)]:
        value.timestamp = int(context.wall * 1e6)
        field = value.fieldId
        found = _field(context, readings, field, value.scopeId)
        value.nvmlReturn = 3 if found is None else 0
        if found is None:
            continue
        if not isfinite(found):
            value.valueType, value.value.dVal = 0, found
        elif found < 0:
            value.valueType, value.value.sllVal = 4, int(found)
        else:
            value.valueType, value.value.ullVal = 3, int(found)


def _field(context: CallContext, readings: dict[int, str], field: int, scope: int) -> float | None:
    value = context.maybe(f"field.{field}")
    if value is not None:
        return value
    if field not in LINK_FIELDS:
        return context.maybe(readings[field]) if field in readings else None
    active = context.maybe("nvlinks_active")
    if active is None:
        active = context.maybe("nvlinks") or 0
    value = context.maybe(LINK_FIELDS[field])
    if value is None:
        return None
    if scope == SUM_OF_LINKS:
        return value * active if field in SUMMABLE_FIELDS else None
    return value if scope < active else None


def _processes(context: CallContext, count: Any, array: Any) -> None:
    """Fill the array of processes, or return an error if the array is too small."""
    running = context.gpu.processes(context.moment)
    space = target_of(count).value
    write_number(count, len(running))
    if running and (array is None or space < len(running)):
        raise ReplayedError("insufficient_size")
    for place, process in enumerate(running):
        used_bytes = process["memory"]
        array[place].pid = process["pid"]
        array[place].usedGpuMemory = 0xFFFFFFFFFFFFFFFF if used_bytes is None else used_bytes


def _process_utilization(context: CallContext, array: Any, count: Any, since: Any) -> None:
    """Fill the utilization samples of processes; for the time 0 only the oldest."""
    times = _times(context.wall, to_int(since), 1.0, 72)
    times = times if to_int(since) else times[:1]
    running = [process for process in context.gpu.processes(context.moment) if process["sm"] is not None]
    samples = [(time, process) for time in times for process in running]
    if not samples:
        raise ReplayedError("not_found")
    space = target_of(count).value
    write_number(count, len(samples))
    if array is None or space < len(samples):
        raise ReplayedError("insufficient_size")
    for place, (time, process) in enumerate(samples):
        level = context.gpu.readings.load.level_at(context.moment - (context.wall - time / 1e6))
        array[place].pid = process["pid"]
        array[place].timeStamp = time
        array[place].smUtil = int(process["sm"] * level)


def _samples(context: CallContext, kind: Any, since: Any, value_type: Any, count: Any, array: Any) -> None:
    """Fill the array of the driver's samples. A call without an array returns the number of samples."""
    buffer = SAMPLE_BUFFERS.get(to_int(kind))
    if buffer is None or not context.maybe("sample_buffers"):
        raise ReplayedError("not_supported")
    context.reading(buffer.reading)
    times = _times(context.wall, to_int(since), buffer.interval_seconds, buffer.capacity)
    if not times:
        raise ReplayedError("not_found")
    write_number(value_type, 1)  # unsigned int
    if array is not None:
        times = times[: len(array)]
        for place, time in enumerate(times):
            moment = context.moment - (context.wall - time / 1e6)
            array[place].timeStamp = time
            array[place].sampleValue.uiVal = int(context.gpu.readings.value_at(buffer.reading, moment) or 0)
    write_number(count, len(times))


def _times(wall: float, since: int, seconds: float, length: int) -> list[int]:
    """Return the times of the samples in a ring buffer after `since`, in microseconds."""
    step = int(seconds * 1e6)
    newest = int(wall * 1e6) // step
    oldest = max(newest - length + 1, ceil((since + 1) / step))
    return [place * step for place in range(oldest, newest + 1)]


CALLS: dict[str, Call] = {
    **{symbol: _one_number(reading) for symbol, reading in ONE_NUMBER.items()},
    **{symbol: _by_number(readings) for symbol, readings in BY_NUMBER.items()},
    **{symbol: _several(readings) for symbol, readings in SEVERAL.items()},
    **{symbol: _text(key) for symbol, key in TEXTS.items()},
    **{symbol: _structure(*parts) for symbol, parts in STRUCTURES.items()},
    "nvmlDeviceGetMinorNumber": lambda context, result: write_number(result, context.gpu.index),
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetMemoryInfo_v2": _memory_v2,
    "nvmlDeviceGetCudaComputeCapability": _capability,
    "nvmlDeviceGetPciInfo_v3": _pci_info,
    "nvmlDeviceGetNvLinkState": _nvlink_state,
    "nvmlDeviceGetMemoryErrorCounter": _memory_errors,
    "nvmlDeviceGetFieldValues": _field_values,
    "nvmlDeviceGetComputeRunningProcesses_v2": _processes,
    "nvmlDeviceGetComputeRunningProcesses_v3": _processes,
    "nvmlDeviceGetProcessUtilization": _process_utilization,
    "nvmlDeviceGetSamples": _samples,
}
"""Functions of a GPU by their C names."""
