"""What those functions of NVML do on a replayed GPU that fill structures, or need more than one number to choose.

Used in the NVML child, by the replay's library, beside `replay_calls`. Versions of structures are checked as NVML
checks them, so that a wrong call does not pass unseen.
"""

from __future__ import annotations

from exporter.collectors.nvml.codes import CODES, SUCCESS
from exporter.collectors.nvml.replay_calls import NOT_SUPPORTED, Asked, number, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.collectors.nvml.replay_calls import Call

_INVALID = CODES["invalid_argument"]
_VERSION = CODES["argument_version_mismatch"]

MEMORY_ERRORS = {
    (0, 0, 2): "ecc_corrected_dram",
    (0, 0, 7): "ecc_corrected_sram",
    (1, 0, 2): "ecc_uncorrected_dram",
    (1, 0, 7): "ecc_uncorrected_sram",
    (0, 1, 2): "ecc_aggregate_corrected_dram",
    (0, 1, 7): "ecc_aggregate_corrected_sram",
    (1, 1, 2): "ecc_aggregate_uncorrected_dram",
    (1, 1, 7): "ecc_aggregate_uncorrected_sram",
}


def utilization(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetUtilizationRates`."""
    value = asked.reading("utilization")
    if value is None:
        return NOT_SUPPORTED
    result._obj.gpu = int(value)  # noqa: SLF001 - see replay_calls.put
    result._obj.memory = int(asked.reading("memory_utilization") or 0)  # noqa: SLF001
    return SUCCESS


def memory(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetMemoryInfo`: what the driver reserves counts as used."""
    info = result._obj  # noqa: SLF001 - see replay_calls.put
    total = asked.reading("memory_total")
    if total is None:
        return NOT_SUPPORTED
    taken = (asked.reading("memory_used") or 0) + (asked.reading("memory_reserved") or 0)
    info.total, info.used, info.free = int(total), int(taken), max(0, int(total - taken))
    return SUCCESS


def memory_v2(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetMemoryInfo_v2`."""
    info = result._obj  # noqa: SLF001 - see replay_calls.put
    if info.version != 0x02000028:
        return _VERSION
    total = asked.reading("memory_total")
    if total is None:
        return NOT_SUPPORTED
    used, reserved = asked.reading("memory_used") or 0, asked.reading("memory_reserved") or 0
    info.total, info.used, info.reserved = int(total), int(used), int(reserved)
    info.free = max(0, int(total - used - reserved))
    return SUCCESS


def bar1(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetBAR1MemoryInfo`."""
    total = asked.reading("bar1_total")
    if total is None:
        return NOT_SUPPORTED
    info = result._obj  # noqa: SLF001 - see replay_calls.put
    info.bar1Total, info.bar1Used = int(total), int(asked.reading("bar1_used") or 0)
    info.bar1Free = info.bar1Total - info.bar1Used
    return SUCCESS


def temperature(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetTemperatureV`."""
    info = result._obj  # noqa: SLF001 - see replay_calls.put
    if info.version != 0x0100000C:
        return _VERSION
    value = asked.reading("temperature")
    if value is None or info.sensorType != 0:
        return NOT_SUPPORTED
    info.temperature = int(value)
    return SUCCESS


def margin(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetMarginTemperature`."""
    info = result._obj  # noqa: SLF001 - see replay_calls.put
    if info.version != 0x01000008:
        return _VERSION
    value = asked.reading("temperature_margin")
    if value is None:
        return NOT_SUPPORTED
    info.marginTemperature = int(value)
    return SUCCESS


def fan_speed(asked: Asked, fan: Any, result: Any) -> int:
    """`nvmlDeviceGetFanSpeed_v2`."""
    fans = asked.gpu.readings.at("fans", asked.moment) or 0
    value = asked.reading("fan_speed")
    if value is None or not 0 <= number(fan) < fans:
        return _INVALID if fans else NOT_SUPPORTED
    put(result, value)
    return SUCCESS


def fan_rpm(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetFanSpeedRPM`."""
    info = result._obj  # noqa: SLF001 - see replay_calls.put
    if info.version != 0x0100000C:
        return _VERSION
    value = asked.reading("fan_rpm")
    if value is None:
        return NOT_SUPPORTED
    info.speed = int(value)
    return SUCCESS


def capability(asked: Asked, major: Any, minor: Any) -> int:
    """`nvmlDeviceGetCudaComputeCapability`."""
    first, _, second = asked.gpu.description["compute_capability"].partition(".")
    put(major, int(first))
    put(minor, int(second or 0))
    return SUCCESS


def minor_number(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetMinorNumber`."""
    put(result, asked.gpu.index)
    return SUCCESS


def pci_info(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetPciInfo_v3`."""
    info = result._obj  # noqa: SLF001 - see replay_calls.put
    info.bus = 0x10 + asked.gpu.index
    info.busId = f"00000000:{info.bus:02X}:00.0".encode()
    return SUCCESS


def nvlink_state(asked: Asked, link: Any, result: Any) -> int:
    """`nvmlDeviceGetNvLinkState`."""
    links = asked.gpu.readings.at("nvlinks", asked.moment) or 0
    if not 0 <= number(link) < links:
        return _INVALID if links else NOT_SUPPORTED
    active = asked.reading("nvlinks_active")
    put(result, int(number(link) < (links if active is None else active)))
    return SUCCESS


def nvlink_errors(asked: Asked, link: Any, _counter: Any, result: Any) -> int:
    """`nvmlDeviceGetNvLinkErrorCounter`."""
    links = asked.gpu.readings.at("nvlinks_active", asked.moment) or 0
    value = asked.reading("nvlink_errors")
    if value is None or not 0 <= number(link) < links:
        return NOT_SUPPORTED
    put(result, value)
    return SUCCESS


def fabric(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetGpuFabricInfoV`."""
    info = result._obj  # noqa: SLF001 - see replay_calls.put
    if info.version != 0x02000024:
        return _VERSION
    state = asked.reading("fabric_state")
    if state is None:
        return NOT_SUPPORTED
    info.state, info.status = int(state), int(asked.reading("fabric_status") or 0)
    info.cliqueId = 1
    for place in range(16):
        info.clusterUuid[place] = place + 1
    return SUCCESS


def memory_errors(asked: Asked, kind: Any, counter: Any, location: Any, result: Any) -> int:
    """`nvmlDeviceGetMemoryErrorCounter`."""
    reading = MEMORY_ERRORS.get((number(kind), number(counter), number(location)))
    value = asked.reading(reading) if reading else None
    if value is None:
        return NOT_SUPPORTED
    put(result, value)
    return SUCCESS


def sram_status(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetSramEccErrorStatus`."""
    info = result._obj  # noqa: SLF001 - see replay_calls.put
    if info.version != 0x01000068:
        return _VERSION
    value = asked.reading("sram_threshold")
    if value is None:
        return NOT_SUPPORTED
    info.bThresholdExceeded = int(value)
    return SUCCESS


def remapped_rows(asked: Asked, *results: Any) -> int:
    """`nvmlDeviceGetRemappedRows`."""
    names = ("remapped_correctable", "remapped_uncorrectable", "remapping_pending", "remapping_failed")
    if asked.reading(names[0]) is None:
        return NOT_SUPPORTED
    for name, result in zip(names, results, strict=True):
        put(result, asked.reading(name) or 0)
    return SUCCESS


def remap_histogram(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetRowRemapperHistogram`."""
    value = asked.reading("remap_banks")
    if value is None:
        return NOT_SUPPORTED
    result._obj.max = int(value)  # noqa: SLF001 - see replay_calls.put
    return SUCCESS


STRUCTURES: dict[str, Call] = {
    "nvmlDeviceGetUtilizationRates": utilization,
    "nvmlDeviceGetMemoryInfo": memory,
    "nvmlDeviceGetMemoryInfo_v2": memory_v2,
    "nvmlDeviceGetBAR1MemoryInfo": bar1,
    "nvmlDeviceGetTemperatureV": temperature,
    "nvmlDeviceGetMarginTemperature": margin,
    "nvmlDeviceGetFanSpeed_v2": fan_speed,
    "nvmlDeviceGetFanSpeedRPM": fan_rpm,
    "nvmlDeviceGetCudaComputeCapability": capability,
    "nvmlDeviceGetMinorNumber": minor_number,
    "nvmlDeviceGetPciInfo_v3": pci_info,
    "nvmlDeviceGetNvLinkState": nvlink_state,
    "nvmlDeviceGetNvLinkErrorCounter": nvlink_errors,
    "nvmlDeviceGetGpuFabricInfoV": fabric,
    "nvmlDeviceGetMemoryErrorCounter": memory_errors,
    "nvmlDeviceGetSramEccErrorStatus": sram_status,
    "nvmlDeviceGetRemappedRows": remapped_rows,
    "nvmlDeviceGetRowRemapperHistogram": remap_histogram,
}
"""Functions of a GPU that fill structures."""
