"""NVML functions of a replayed GPU, which return the readings of a description.

Used in the NVML child, by `exporter.replay.library`. A function receives its arguments as pynvml passes them to C, and writes results to
`byref()` objects. The functions check the versions of structures and the lengths of lists as NVML does. Source: nvml.h; pynvml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

from exporter.collectors.gpu.nvml.device import SUM_OF_LINKS
from exporter.collectors.gpu.nvml.library import CODES, SUCCESS
from exporter.replay.machine import ReplayedGpu
from exporter.replay.readings import (
    INDEXED_NUMBERS,
    LINK_FIELDS,
    MEMORY_ERRORS,
    NUMBER_LISTS,
    SAMPLE_BUFFERS,
    SINGLE_NUMBERS,
    STRUCTURES,
    SUMMABLE_FIELDS,
    Structure,
    fields_of_driver,
)

TEXT_KEYS = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetSerial": "serial",
    "nvmlDeviceGetVbiosVersion": "vbios",
    "nvmlDeviceGetBoardPartNumber": "board",
}
"""Functions with a text as their result, and its key in the description of the model."""

MEMORY_INFO_V2 = 0x02000028
"""Version of nvmlMemory_v2_t. Not imported from the queries of the NVML child, so that a test detects a wrong version."""
# Types of a value, as NVML numbers them (nvmlValueType_t).
DOUBLE = 0
UNSIGNED_INT = 1
UNSIGNED_LONG_LONG = 3
SIGNED_LONG_LONG = 4
MEMORY_NOT_AVAILABLE = (1 << 64) - 1
"""Memory of a process if the driver does not report it."""
PROCESS_SAMPLE_CAPACITY = 72
"""Number of samples of each process that the driver keeps; it takes a sample every second."""


class ReplayedError(Exception):
    """NVML error by name, raised by a replayed function."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """Arguments common to all calls on a GPU: the GPU, the time and the driver version."""

    gpu: ReplayedGpu
    moment: float  # seconds on the timeline
    wall: float  # Unix seconds
    driver: str  # version of the driver

    def moment_of(self, unix_microseconds: int) -> float:
        """Return a Unix time as seconds on the timeline."""
        return self.moment - (self.wall - unix_microseconds / 1e6)

    def optional_reading(self, name: str) -> float | None:
        """Return the current value of a reading, or None if the GPU does not support the reading."""
        return self.gpu.readings.value_at(name, self.moment)

    def reading(self, name: str) -> float:
        """Return the current value of a reading. Raises ReplayedError if the GPU does not support the reading."""
        value = self.optional_reading(name)
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


def _single_number(reading: str) -> Call:
    """Return the function that writes a reading."""
    return lambda context, result: write_number(result, context.reading(reading))


def _indexed_number(readings: tuple[str, ...]) -> Call:
    """Return the function that writes the reading that an index argument selects."""

    def call(context: CallContext, index: Any, result: Any) -> None:
        if not 0 <= to_int(index) < len(readings) or not readings[to_int(index)]:
            raise ReplayedError("not_supported")
        write_number(result, context.reading(readings[to_int(index)]))

    return call


def _number_list(readings: tuple[str, ...]) -> Call:
    """Return the function that writes several readings.

    The first reading decides whether the GPU supports the function, and replaces the others that are missing.
    """

    def call(context: CallContext, *results: Any) -> None:
        first_value = context.reading(readings[0])
        for reading, result in zip(readings, results, strict=True):
            value = context.optional_reading(reading)
            write_number(result, first_value if value is None else value)

    return call


def _text(key: str) -> Call:
    """Return the function for a text of the model. A text that does not fit into the buffer is an error, as in NVML."""

    def call(context: CallContext, buffer: Any, length: Any) -> None:
        text: str | None = context.gpu.description[key]
        if text is None:
            raise ReplayedError("not_supported")
        encoded_text = text.encode("latin-1", "replace")
        if len(encoded_text) >= to_int(length):
            raise ReplayedError("insufficient_size")
        buffer.value = encoded_text

    return call


def _structure(structure: Structure) -> Call:
    """Return the function that fills a structure. The first member decides whether the GPU supports the function."""

    def call(context: CallContext, result: Any) -> None:
        target = target_of(result)
        if structure.version is not None:
            check_version(target, structure.version)
        context.reading(next(iter(structure.readings_by_member.values())))
        for member, reading in structure.readings_by_member.items():
            setattr(target, member, int(context.optional_reading(reading) or 0))

    return call


def _memory(context: CallContext, result: Any) -> None:
    """Fill the members of version 1 of the structure, in which memory reserved by the driver counts as used."""
    info, total_bytes = target_of(result), int(context.reading("memory_total"))
    used_bytes, reserved_bytes = (
        int(context.optional_reading(name) or 0) for name in ("memory_used", "memory_reserved")
    )
    used_bytes += reserved_bytes
    info.total, info.used, info.free = total_bytes, used_bytes, max(0, total_bytes - used_bytes)


def _memory_v2(context: CallContext, result: Any) -> None:
    """Fill version 2 of the structure, in which the reserved memory has a member of its own."""
    info = target_of(result)
    check_version(info, MEMORY_INFO_V2)
    _memory(context, result)
    info.used, info.reserved = (
        int(context.optional_reading(f"memory_{part}") or 0) for part in ("used", "reserved")
    )


def _capability(context: CallContext, major: Any, minor: Any) -> None:
    major_text, _, minor_text = context.gpu.description["compute_capability"].partition(".")
    write_number(major, int(major_text))
    write_number(minor, int(minor_text or 0))


def _pci_info(context: CallContext, result: Any) -> None:
    """Fill the PCI address: the buses of the GPUs have consecutive numbers."""
    info = target_of(result)
    info.bus = 0x10 + context.gpu.index
    info.busId = f"00000000:{info.bus:02X}:00.0".encode()


def _nvlink_state(context: CallContext, link: Any, result: Any) -> None:
    """Write 1 for an active link and 0 for an inactive one. The links with the lowest numbers are active."""
    link_count = context.optional_reading("nvlinks") or 0
    if not 0 <= to_int(link) < link_count:
        raise ReplayedError("invalid_argument" if link_count else "not_supported")
    write_number(result, int(to_int(link) < _active_link_count(context)))


def _active_link_count(context: CallContext) -> float:
    """Return the number of active NVLinks; by default, all links are active."""
    active_count = context.optional_reading("nvlinks_active")
    return (context.optional_reading("nvlinks") or 0) if active_count is None else active_count


def _memory_errors(context: CallContext, error_type: Any, counter: Any, location: Any, result: Any) -> None:
    key = to_int(error_type), to_int(counter), to_int(location)
    if key not in MEMORY_ERRORS:
        raise ReplayedError("not_supported")
    write_number(result, context.reading(MEMORY_ERRORS[key]))


def _field_values(context: CallContext, count: Any, array: Any) -> None:
    """Fill the field values. The call succeeds, and each field has a separate result code."""
    readings = fields_of_driver(context.driver)
    for field_value in target_of(array)[: to_int(count)]:
        field_value.timestamp = int(context.wall * 1e6)
        number = _field(context, readings, field_value.fieldId, field_value.scopeId)
        field_value.nvmlReturn = CODES["not_supported"] if number is None else SUCCESS
        if number is None:
            continue
        if not isfinite(number):
            field_value.valueType, field_value.value.dVal = DOUBLE, number
        elif number < 0:
            field_value.valueType, field_value.value.sllVal = SIGNED_LONG_LONG, int(number)
        else:
            field_value.valueType, field_value.value.ullVal = UNSIGNED_LONG_LONG, int(number)


def _field(context: CallContext, readings: dict[int, str], field: int, scope: int) -> float | None:
    """Return the value of a field, or None if not supported. *scope* is a link, or `SUM_OF_LINKS`."""
    # A description can give the value of any field by its id, instead of the named reading.
    number = context.optional_reading(f"field.{field}")
    if number is not None:
        return number
    if field not in LINK_FIELDS:
        return context.optional_reading(readings[field]) if field in readings else None
    number, active_count = context.optional_reading(LINK_FIELDS[field]), _active_link_count(context)
    if number is None:
        return None
    if scope == SUM_OF_LINKS:
        return number * active_count if field in SUMMABLE_FIELDS else None
    return number if scope < active_count else None


def _processes(context: CallContext, count: Any, array: Any) -> None:
    """Fill the array of processes. Raises ReplayedError if the array is too small."""
    processes = context.gpu.processes(context.moment)
    capacity = target_of(count).value
    write_number(count, len(processes))
    if processes and (array is None or capacity < len(processes)):
        raise ReplayedError("insufficient_size")
    for position, process in enumerate(processes):
        used_bytes = process["memory"]
        array[position].pid = process["pid"]
        array[position].usedGpuMemory = MEMORY_NOT_AVAILABLE if used_bytes is None else used_bytes


def _process_utilization(context: CallContext, array: Any, count: Any, since: Any) -> None:
    """Fill the array with the utilization samples of all processes that are later than *since*.

    If *since* is 0, fill only the oldest sample of each process.
    Raises ReplayedError if there are no samples, or if the array is too small.
    """
    since_microseconds = to_int(since)
    times = _sample_times(
        context.wall, since_microseconds, interval_seconds=1.0, capacity=PROCESS_SAMPLE_CAPACITY
    )
    filled_times = times if since_microseconds else times[:1]
    processes = [process for process in context.gpu.processes(context.moment) if process["sm"] is not None]
    samples = [(time, process) for time in filled_times for process in processes]
    if not samples:
        raise ReplayedError("not_found")
    capacity = target_of(count).value
    write_number(count, len(samples))
    if array is None or capacity < len(samples):
        raise ReplayedError("insufficient_size")
    for position, (time, process) in enumerate(samples):
        level = context.gpu.readings.load.level_at(context.moment_of(time))
        array[position].pid = process["pid"]
        array[position].timeStamp = time
        array[position].smUtil = int(process["sm"] * level)


def _samples(
    context: CallContext, sample_type: Any, since: Any, value_type: Any, count: Any, array: Any
) -> None:
    """Fill the array of the driver's samples. Without an array, write only the type of the values and the number of samples."""
    buffer = SAMPLE_BUFFERS.get(to_int(sample_type))
    if buffer is None or not context.optional_reading("sample_buffers"):
        raise ReplayedError("not_supported")
    context.reading(buffer.reading)
    times = _sample_times(
        context.wall, to_int(since), interval_seconds=buffer.interval_seconds, capacity=buffer.capacity
    )
    if not times:
        raise ReplayedError("not_found")
    write_number(value_type, UNSIGNED_INT)
    if array is not None:
        times = times[: len(array)]
        for position, time in enumerate(times):
            number = context.gpu.readings.value_at(buffer.reading, context.moment_of(time))
            array[position].timeStamp, array[position].sampleValue.uiVal = time, int(number or 0)
    write_number(count, len(times))


def _sample_times(
    wall: float, since_microseconds: int, *, interval_seconds: float, capacity: int
) -> list[int]:
    """Return the times of the samples that a ring buffer has after a time, in Unix microseconds."""
    interval_microseconds = int(interval_seconds * 1e6)
    newest_index = int(wall * 1e6) // interval_microseconds
    oldest_index = max(newest_index - capacity + 1, ceil((since_microseconds + 1) / interval_microseconds))
    return [index * interval_microseconds for index in range(oldest_index, newest_index + 1)]


CALLS: dict[str, Call] = {
    **{symbol: _single_number(reading) for symbol, reading in SINGLE_NUMBERS.items()},
    **{symbol: _indexed_number(readings) for symbol, readings in INDEXED_NUMBERS.items()},
    **{symbol: _number_list(readings) for symbol, readings in NUMBER_LISTS.items()},
    **{symbol: _text(key) for symbol, key in TEXT_KEYS.items()},
    **{symbol: _structure(structure) for symbol, structure in STRUCTURES.items()},
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
