"""What functions of NVML do on a replayed GPU.

Used in the NVML child, by the replay's library. Arguments come as pynvml passes them to C: numbers as ctypes integers or
plain ones, results as `byref()` objects, into which the answer is written. Versions of structures are checked as NVML
checks them, and lists have NVML's protocols for telling their length. Source: nvml.h; traps as seen with pynvml.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, isfinite
from typing import Any

from exporter.collectors.gpu.nvml.device import ALL_LINKS
from exporter.replay.machine import ReplayedGpu
from exporter.replay.readings import (
    BY_NUMBER,
    LINK_FIELDS,
    MEMORY_ERRORS,
    ONE_NUMBER,
    SAMPLES,
    SEVERAL,
    STRUCTURES,
    SUMMABLE_FIELDS,
    TEXTS,
    fields_of_driver,
)


class RefusedError(Exception):
    """A call that ends with an error of NVML's, by its name."""


class Asked:
    """A call on a GPU: when, and what it would give.

    Attributes:
        gpu: The GPU.
        moment: Seconds on the timeline.
        wall: Unix seconds.
        driver: Version of the driver.
        newest_field: Greater ids of fields are invalid; None where there is no such.
        returned: What the description says that this call gives; None where the readings count.
    """

    def __init__(
        self,
        gpu: ReplayedGpu,
        moment: float,
        wall: float,
        *,
        driver: str,
        newest_field: int | None,
        returned: float | None,
    ) -> None:
        self.gpu = gpu
        self.moment = moment
        self.wall = wall
        self.driver = driver
        self.newest_field = newest_field
        self.returned = returned

    def maybe(self, name: str) -> float | None:
        """A reading now, or what the description says instead."""
        return self.gpu.readings.at(name, self.moment) if self.returned is None else self.returned

    def reading(self, name: str) -> float:
        """The same where it must be there.

        Raises:
            RefusedError: It is not supported.
        """
        value = self.maybe(name)
        if value is None:
            raise RefusedError("not_supported")
        return value


Call = Callable[..., None]
"""Takes what is asked, and the arguments after the handle; raises RefusedError."""


def number(argument: Any) -> int:
    """A number that was passed by value."""
    return int(getattr(argument, "value", argument))


def behind(reference: Any) -> Any:
    """What a `byref()` object refers to."""
    return reference._obj  # noqa: SLF001 - the only way to it


def put(reference: Any, value: float) -> None:
    """Write through what `byref` made."""
    target = behind(reference)
    target.value = value if isinstance(target.value, float) else int(value)


def check_version(structure: Any, version: int) -> None:
    """Refuse a structure of another version."""
    if structure.version != version:
        raise RefusedError("argument_version_mismatch")


def _one_number(reading: str) -> Call:
    return lambda asked, result: put(result, asked.reading(reading))


def _by_number(readings: tuple[str, ...]) -> Call:
    def call(asked: Asked, which: Any, result: Any) -> None:
        if not 0 <= number(which) < len(readings):
            raise RefusedError("not_supported")
        put(result, asked.reading(readings[number(which)]))

    return call


def _several(readings: tuple[str, ...]) -> Call:
    def call(asked: Asked, *results: Any) -> None:
        first = asked.reading(readings[0])
        for reading, result in zip(readings, results, strict=True):
            value = asked.maybe(reading)
            put(result, first if value is None else value)

    return call


def _text(key: str) -> Call:
    def call(asked: Asked, buffer: Any, length: Any) -> None:
        value: str | None = asked.gpu.description[key]
        if value is None:
            raise RefusedError("not_supported")
        encoded = value.encode("latin-1", "replace")
        if len(encoded) >= number(length):
            raise RefusedError("insufficient_size")
        buffer.value = encoded

    return call


def _structure(version: int | None, members: dict[str, str]) -> Call:
    def call(asked: Asked, result: Any) -> None:
        filled = behind(result)
        if version is not None:
            check_version(filled, version)
        asked.reading(next(iter(members.values())))
        for member, reading in members.items():
            setattr(filled, member, int(asked.maybe(reading) or 0))

    return call


def _memory(asked: Asked, result: Any) -> None:
    """Of the first version, where what the driver reserves counts as used."""
    info, total = behind(result), int(asked.reading("memory_total"))
    taken = int((asked.maybe("memory_used") or 0) + (asked.maybe("memory_reserved") or 0))
    info.total, info.used, info.free = total, taken, max(0, total - taken)


def _memory_v2(asked: Asked, result: Any) -> None:
    info = behind(result)
    check_version(info, 0x02000028)
    _memory(asked, result)
    info.used, info.reserved = (int(asked.maybe(f"memory_{each}") or 0) for each in ("used", "reserved"))


def _fan_speed(asked: Asked, fan: Any, result: Any) -> None:
    fans = asked.gpu.readings.at("fans", asked.moment) or 0
    if asked.maybe("fan_speed") is None or not 0 <= number(fan) < fans:
        raise RefusedError("invalid_argument" if fans else "not_supported")
    put(result, asked.reading("fan_speed"))


def _capability(asked: Asked, major: Any, minor: Any) -> None:
    first, _, second = asked.gpu.description["compute_capability"].partition(".")
    put(major, int(first))
    put(minor, int(second or 0))


def _pci_info(asked: Asked, result: Any) -> None:
    info = behind(result)
    info.bus = 0x10 + asked.gpu.index
    info.busId = f"00000000:{info.bus:02X}:00.0".encode()


def _nvlink_state(asked: Asked, link: Any, result: Any) -> None:
    links = asked.gpu.readings.at("nvlinks", asked.moment) or 0
    if not 0 <= number(link) < links:
        raise RefusedError("invalid_argument" if links else "not_supported")
    active = asked.maybe("nvlinks_active")
    put(result, int(number(link) < (links if active is None else active)))


def _nvlink_errors(asked: Asked, link: Any, _counter: Any, result: Any) -> None:
    if not 0 <= number(link) < (asked.gpu.readings.at("nvlinks_active", asked.moment) or 0):
        raise RefusedError("not_supported")
    put(result, asked.reading("nvlink_errors"))


def _memory_errors(asked: Asked, *arguments: Any) -> None:
    *which, result = arguments
    kind, counter, location = map(number, which)
    if (kind, counter, location) not in MEMORY_ERRORS:
        raise RefusedError("not_supported")
    put(result, asked.reading(MEMORY_ERRORS[kind, counter, location]))


def _field_values(asked: Asked, count: Any, array: Any) -> None:
    """Succeeds, with a code for each field."""
    readings = fields_of_driver(asked.driver)
    for value in behind(array)[: number(count)]:
        value.timestamp = int(asked.wall * 1e6)
        field = value.fieldId
        invalid = asked.newest_field is not None and field > asked.newest_field
        found = None if invalid else _field(asked, readings, field, value.scopeId)
        value.nvmlReturn = 2 if invalid else 3 if found is None else 0
        if found is None:
            continue
        if not isfinite(found):
            value.valueType, value.value.dVal = 0, found
        elif found < 0:
            value.valueType, value.value.sllVal = 4, int(found)
        else:
            value.valueType, value.value.ullVal = 3, int(found)


def _field(asked: Asked, readings: dict[int, str], field: int, scope: int) -> float | None:
    described = asked.gpu.readings.at(f"field.{field}", asked.moment)
    if described is not None:
        return described
    if field not in LINK_FIELDS:
        return asked.maybe(readings[field]) if field in readings else None
    active = asked.gpu.readings.at("nvlinks_active", asked.moment)
    if active is None:
        active = asked.gpu.readings.at("nvlinks", asked.moment) or 0
    value = asked.maybe(LINK_FIELDS[field])
    if value is None:
        return None
    if scope == ALL_LINKS:
        return value * active if field in SUMMABLE_FIELDS else None
    return value if scope < active else None


def _retired_pages(asked: Asked, cause: Any, count: Any, pages: Any) -> None:
    """A first call without an array asks for the number."""
    value = int(asked.reading(("retired_pages_sbe", "retired_pages_dbe")[number(cause) & 1]))
    space = behind(count).value
    put(count, value)
    if value and (pages is None or space < value):
        raise RefusedError("insufficient_size")
    for place in range(value):
        pages[place] = 0x1000 * (place + 1)


def _processes(asked: Asked, count: Any, array: Any) -> None:
    """Success only when there is none, or room for all."""
    running = asked.gpu.processes(asked.moment)
    space = behind(count).value
    put(count, len(running) if asked.returned is None or array is None else asked.returned)
    if running and (array is None or space < len(running)):
        raise RefusedError("insufficient_size")
    for place, process in enumerate(running):
        used = process["memory"]
        array[place].pid = process["pid"]
        array[place].usedGpuMemory = 0xFFFFFFFFFFFFFFFF if used is None else used


def _process_utilization(asked: Asked, array: Any, count: Any, since: Any) -> None:
    """The first call must say that the array is too small; for the time 0 there is one sample, of some past time."""
    times = _times(asked.wall, number(since), 1.0, 72)
    times = times if number(since) else times[:1]
    running = [process for process in asked.gpu.processes(asked.moment) if process["sm"] is not None]
    found = [(time, process) for time in times for process in running]
    if not found:
        raise RefusedError("not_found")
    space = behind(count).value
    put(count, len(found))
    if array is None or space < len(found):
        raise RefusedError("insufficient_size")
    for place, (time, process) in enumerate(found):
        level = asked.gpu.readings.load.at(asked.moment - (asked.wall - time / 1e6))
        array[place].pid = process["pid"]
        array[place].timeStamp = time
        array[place].smUtil = int(process["sm"] * level)
        array[place].memUtil = int(process["memory_bandwidth"] * level)


def _samples(asked: Asked, kind: Any, since: Any, value_type: Any, count: Any, array: Any) -> None:
    """A first call without an array succeeds with the number."""
    reading, seconds, length = SAMPLES.get(number(kind), ("", 1.0, 0))
    if not reading or not asked.gpu.readings.at("sample_buffers", asked.moment):
        raise RefusedError("not_supported")
    asked.reading(reading)
    times = _times(asked.wall, number(since), seconds, length)
    if not times:
        raise RefusedError("not_found")
    put(value_type, 1)  # unsigned int
    if array is not None:
        times = times[: len(array)]
        for place, time in enumerate(times):
            then = asked.moment - (asked.wall - time / 1e6)
            value = asked.gpu.readings.at(reading, then) if asked.returned is None else asked.returned
            array[place].timeStamp = time
            array[place].sampleValue.uiVal = int(value or 0)
    put(count, len(times))


def _times(wall: float, since: int, seconds: float, length: int) -> list[int]:
    """The times of the samples in a ring that are newer than one, microseconds."""
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
    "nvmlDeviceGetMinorNumber": lambda asked, result: put(result, asked.gpu.index),
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetMemoryInfo_v2": _memory_v2,
    "nvmlDeviceGetFanSpeed_v2": _fan_speed,
    "nvmlDeviceGetCudaComputeCapability": _capability,
    "nvmlDeviceGetPciInfo_v3": _pci_info,
    "nvmlDeviceGetNvLinkState": _nvlink_state,
    "nvmlDeviceGetNvLinkErrorCounter": _nvlink_errors,
    "nvmlDeviceGetMemoryErrorCounter": _memory_errors,
    "nvmlDeviceGetFieldValues": _field_values,
    "nvmlDeviceGetRetiredPages": _retired_pages,
    "nvmlDeviceGetComputeRunningProcesses_v2": _processes,
    "nvmlDeviceGetComputeRunningProcesses_v3": _processes,
    "nvmlDeviceGetProcessUtilization": _process_utilization,
    "nvmlDeviceGetSamples": _samples,
}
"""Functions of a GPU by their C names."""
