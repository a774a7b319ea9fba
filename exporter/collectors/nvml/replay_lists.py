"""What those functions of NVML do on a replayed GPU that give lists: processes, samples, retired pages.

Used in the NVML child, by the replay's library, beside `replay_calls`. Each has a protocol of its own for telling the
length first; pynvml makes an exception of whatever differs from it.
"""

from __future__ import annotations

from math import ceil

from exporter.collectors.nvml.codes import CODES, SUCCESS
from exporter.collectors.nvml.replay_calls import NOT_SUPPORTED, Asked, number, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.collectors.nvml.replay_calls import Call

_TOO_SMALL = CODES["insufficient_size"]
_NOT_FOUND = CODES["not_found"]


def retired_pages(asked: Asked, cause: Any, count: Any, pages: Any) -> int:
    """`nvmlDeviceGetRetiredPages`: a first call without an array asks for the number."""
    value = asked.reading(("retired_pages_sbe", "retired_pages_dbe")[number(cause) & 1])
    if value is None:
        return NOT_SUPPORTED
    space = count._obj.value  # noqa: SLF001 - see put
    put(count, value)
    if pages is None or space < value:
        return _TOO_SMALL if value else SUCCESS
    for place in range(int(value)):
        pages[place] = 0x1000 * (place + 1)
    return SUCCESS


def processes(asked: Asked, count: Any, array: Any) -> int:
    """`nvmlDeviceGetComputeRunningProcesses_v3`: success only when there is none, or room for all."""
    running = asked.gpu.processes(asked.moment)
    space = count._obj.value  # noqa: SLF001 - see put
    put(count, len(running) if asked.returned is None or array is None else asked.returned)
    if not running:
        return SUCCESS
    if array is None or space < len(running):
        return _TOO_SMALL
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
    space = count._obj.value  # noqa: SLF001 - see put
    put(count, len(found))
    if array is None or space < len(found):
        return _TOO_SMALL
    for place, (time, process) in enumerate(found):
        array[place].pid = process["pid"]
        array[place].timeStamp = time
        level = asked.gpu.readings.load.at(asked.moment - (asked.wall - time / 1e6))
        array[place].smUtil = int(process["sm"] * level)
        array[place].memUtil = int(process["memory_bandwidth"] * level)
    return SUCCESS


_SAMPLES = {
    0: ("power", 0.02, 119),
    1: ("utilization", 0.2, 71),
    2: ("memory_utilization", 0.2, 71),
}
_UNSIGNED_INT = 1


def samples(asked: Asked, kind: Any, since: Any, value_type: Any, count: Any, array: Any) -> int:
    """`nvmlDeviceGetSamples`: a first call without an array succeeds with the number."""
    reading, seconds, length = _SAMPLES.get(number(kind), ("", 1.0, 0))
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
