"""What those functions of NVML do on a replayed GPU that give numbers, texts or structures.

Used in the NVML child, by the replay's library; the list of the functions also by the sidecar, to find mistakes in a
description. Arguments come as pynvml passes them to C: numbers as ctypes integers or plain ones, results as
`byref()` objects, into which the answer is written; a return code goes out. Versions of structures are checked as NVML
checks them, so that a wrong call does not pass unseen. What gives lists is in `lists`.

Source: nvml.h; shapes and traps as seen with pynvml's wrappers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exporter.collectors.gpu.nvml.library import CODES, SUCCESS
from exporter.replay.timeline import ReplayedGpu

Call = Callable[..., int]

NOT_SUPPORTED = CODES["not_supported"]
INVALID = CODES["invalid_argument"]
TOO_SMALL = CODES["insufficient_size"]
_VERSION = CODES["argument_version_mismatch"]

ONE_NUMBER = {
    "nvmlDeviceGetComputeMode": "compute_mode",
    "nvmlDeviceGetPersistenceMode": "persistence_mode",
    "nvmlDeviceGetPowerUsage": "power",
    "nvmlDeviceGetTotalEnergyConsumption": "energy",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_enforced",
    "nvmlDeviceGetPowerManagementLimit": "power_limit",
    "nvmlDeviceGetPowerManagementDefaultLimit": "power_limit_default",
    "nvmlDeviceGetCurrentClocksEventReasons": "event_reasons",
    "nvmlDeviceGetSupportedClocksEventReasons": "event_reasons_supported",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "event_reasons",
    "nvmlDeviceGetSupportedClocksThrottleReasons": "event_reasons_supported",
    "nvmlDeviceGetPerformanceState": "performance_state",
    "nvmlDeviceGetNumFans": "fans",
    "nvmlDeviceGetCurrPcieLinkGeneration": "pcie_generation",
    "nvmlDeviceGetMaxPcieLinkGeneration": "pcie_generation_max",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie_width",
    "nvmlDeviceGetMaxPcieLinkWidth": "pcie_width_max",
    "nvmlDeviceGetPcieReplayCounter": "pcie_replays",
    "nvmlDeviceGetSupportedEventTypes": "event_types",
    "nvmlDeviceGetNumaNodeId": "numa_node",
    "nvmlDeviceGetArchitecture": "architecture",
}
"""Functions that give one number, and the reading that it is."""

BY_NUMBER = {
    "nvmlDeviceGetClockInfo": ("clock_graphics", "clock_sm", "clock_memory", "clock_video"),
    "nvmlDeviceGetMaxClockInfo": (
        *("clock_max_graphics", "clock_max_sm", "clock_max_memory", "clock_max_video"),
    ),
    "nvmlDeviceGetTemperature": ("temperature",),
    "nvmlDeviceGetTemperatureThreshold": (
        *("threshold_shutdown", "threshold_slowdown", "threshold_mem_max", "threshold_gpu_max"),
    ),
    "nvmlDeviceGetPcieThroughput": ("pcie_transmit_rate", "pcie_receive_rate"),
}
"""Functions that give one number of several, chosen by a number before it."""

SEVERAL = {
    "nvmlDeviceGetPowerManagementLimitConstraints": ("power_limit_min", "power_limit_max"),
    "nvmlDeviceGetEccMode": ("ecc_mode", "ecc_mode_pending"),
    "nvmlDeviceGetMigMode": ("mig_mode", "mig_mode_pending"),
    "nvmlDeviceGetRemappedRows": (
        *("remapped_correctable", "remapped_uncorrectable", "remapping_pending", "remapping_failed"),
    ),
}
"""Functions that give several numbers; supported where the first is, of which the others are copies if left out."""

ENGINES = {
    "nvmlDeviceGetEncoderUtilization": "encoder",
    "nvmlDeviceGetDecoderUtilization": "decoder",
    "nvmlDeviceGetJpgUtilization": "jpeg",
    "nvmlDeviceGetOfaUtilization": "ofa",
}
_ENGINE_PERIOD_MICROSECONDS = 167_000

TEXTS = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetSerial": "serial",
    "nvmlDeviceGetVbiosVersion": "vbios",
    "nvmlDeviceGetBoardPartNumber": "board",
}

MEMORY_ERRORS = {
    (kind, counter, location): f"ecc_{scope}{word}_{place}"
    for kind, word in enumerate(("corrected", "uncorrected"))
    for counter, scope in enumerate(("", "aggregate_"))
    for location, place in ((2, "dram"), (7, "sram"))
}

# Version of the structure, and the reading in each member; supported where the first reading is.
_STRUCTURES: dict[str, tuple[int | None, dict[str, str]]] = {
    "nvmlDeviceGetUtilizationRates": (None, {"gpu": "utilization", "memory": "memory_utilization"}),
    "nvmlDeviceGetTemperatureV": (0x0100000C, {"temperature": "temperature"}),
    "nvmlDeviceGetMarginTemperature": (0x01000008, {"marginTemperature": "temperature_margin"}),
    "nvmlDeviceGetSramEccErrorStatus": (0x01000068, {"bThresholdExceeded": "sram_threshold"}),
}


class Asked:
    """A call on a GPU: when, and what it would give.

    Attributes:
        gpu: The GPU.
        moment: Seconds on the timeline.
        wall: Unix seconds.
        returned: What the description says that this call gives; None where the readings count.
    """

    def __init__(self, gpu: ReplayedGpu, moment: float, wall: float, returned: float | None) -> None:
        self.gpu = gpu
        self.moment = moment
        self.wall = wall
        self.returned = returned

    def reading(self, name: str) -> float | None:
        """A reading now, or what the description says instead."""
        return self.gpu.readings.at(name, self.moment) if self.returned is None else self.returned


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


def _one_number(reading: str) -> Call:
    def call(asked: Asked, result: Any) -> int:
        value = asked.reading(reading)
        if value is None:
            return NOT_SUPPORTED
        put(result, value)
        return SUCCESS

    return call


def _by_number(readings: tuple[str, ...]) -> Call:
    def call(asked: Asked, which: Any, result: Any) -> int:
        place = number(which)
        if not 0 <= place < len(readings):
            return NOT_SUPPORTED
        return _one_number(readings[place])(asked, result)

    return call


def _several(readings: tuple[str, ...]) -> Call:
    def call(asked: Asked, *results: Any) -> int:
        first = asked.reading(readings[0])
        if first is None:
            return NOT_SUPPORTED
        for reading, result in zip(readings, results, strict=True):
            value = asked.reading(reading)
            put(result, first if value is None else value)
        return SUCCESS

    return call


def _engine(reading: str) -> Call:
    def call(asked: Asked, result: Any, period: Any) -> int:
        put(period, _ENGINE_PERIOD_MICROSECONDS)
        return _one_number(reading)(asked, result)

    return call


def _text(key: str) -> Call:
    def call(asked: Asked, buffer: Any, length: Any) -> int:
        value: str | None = asked.gpu.description[key]
        if value is None:
            return NOT_SUPPORTED
        encoded = value.encode("latin-1", "replace")
        if len(encoded) >= number(length):
            return TOO_SMALL
        buffer.value = encoded
        return SUCCESS

    return call


def _structure(version: int | None, members: dict[str, str]) -> Call:
    def call(asked: Asked, result: Any) -> int:
        filled = behind(result)
        if version is not None and filled.version != version:
            return _VERSION
        values = {member: asked.reading(reading) for member, reading in members.items()}
        if next(iter(values.values())) is None:
            return NOT_SUPPORTED
        for member, value in values.items():
            setattr(filled, member, int(value or 0))
        return SUCCESS

    return call


def _memory(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetMemoryInfo`: what the driver reserves counts as used."""
    info = behind(result)
    total = asked.reading("memory_total")
    if total is None:
        return NOT_SUPPORTED
    taken = (asked.reading("memory_used") or 0) + (asked.reading("memory_reserved") or 0)
    info.total, info.used, info.free = int(total), int(taken), max(0, int(total - taken))
    return SUCCESS


def _memory_v2(asked: Asked, result: Any) -> int:
    info = behind(result)
    if info.version != 0x02000028:
        return _VERSION
    code = _memory(asked, result)
    if code == SUCCESS:
        info.used, info.reserved = (
            int(asked.reading("memory_used") or 0),
            int(asked.reading("memory_reserved") or 0),
        )
    return code


def _fan_speed(asked: Asked, fan: Any, result: Any) -> int:
    fans = asked.gpu.readings.at("fans", asked.moment) or 0
    if asked.reading("fan_speed") is None or not 0 <= number(fan) < fans:
        return INVALID if fans else NOT_SUPPORTED
    return _one_number("fan_speed")(asked, result)


def _capability(asked: Asked, major: Any, minor: Any) -> int:
    first, _, second = asked.gpu.description["compute_capability"].partition(".")
    put(major, int(first))
    put(minor, int(second or 0))
    return SUCCESS


def _minor_number(asked: Asked, result: Any) -> int:
    put(result, asked.gpu.index)
    return SUCCESS


def _pci_info(asked: Asked, result: Any) -> int:
    info = behind(result)
    info.bus = 0x10 + asked.gpu.index
    info.busId = f"00000000:{info.bus:02X}:00.0".encode()
    return SUCCESS


def _nvlink_state(asked: Asked, link: Any, result: Any) -> int:
    links = asked.gpu.readings.at("nvlinks", asked.moment) or 0
    if not 0 <= number(link) < links:
        return INVALID if links else NOT_SUPPORTED
    active = asked.reading("nvlinks_active")
    put(result, int(number(link) < (links if active is None else active)))
    return SUCCESS


def _nvlink_errors(asked: Asked, link: Any, _counter: Any, result: Any) -> int:
    if not 0 <= number(link) < (asked.gpu.readings.at("nvlinks_active", asked.moment) or 0):
        return NOT_SUPPORTED
    return _one_number("nvlink_errors")(asked, result)


def _fabric(asked: Asked, result: Any) -> int:
    info = behind(result)
    if info.version != 0x02000024:
        return _VERSION
    state = asked.reading("fabric_state")
    if state is None:
        return NOT_SUPPORTED
    info.state, info.status, info.cliqueId = int(state), 0, 1
    for place in range(16):
        info.clusterUuid[place] = place + 1
    return SUCCESS


def _memory_errors(asked: Asked, kind: Any, counter: Any, location: Any, result: Any) -> int:
    reading = MEMORY_ERRORS.get((number(kind), number(counter), number(location)))
    return NOT_SUPPORTED if reading is None else _one_number(reading)(asked, result)


CALLS: dict[str, Call] = {
    **{symbol: _one_number(reading) for symbol, reading in ONE_NUMBER.items()},
    **{symbol: _by_number(readings) for symbol, readings in BY_NUMBER.items()},
    **{symbol: _several(readings) for symbol, readings in SEVERAL.items()},
    **{symbol: _engine(reading) for symbol, reading in ENGINES.items()},
    **{symbol: _text(key) for symbol, key in TEXTS.items()},
    **{symbol: _structure(*parts) for symbol, parts in _STRUCTURES.items()},
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetMemoryInfo_v2": _memory_v2,
    "nvmlDeviceGetFanSpeed_v2": _fan_speed,
    "nvmlDeviceGetCudaComputeCapability": _capability,
    "nvmlDeviceGetMinorNumber": _minor_number,
    "nvmlDeviceGetPciInfo_v3": _pci_info,
    "nvmlDeviceGetNvLinkState": _nvlink_state,
    "nvmlDeviceGetNvLinkErrorCounter": _nvlink_errors,
    "nvmlDeviceGetGpuFabricInfoV": _fabric,
    "nvmlDeviceGetMemoryErrorCounter": _memory_errors,
}
"""Functions of a GPU that give no lists."""
