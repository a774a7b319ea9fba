"""What each function of NVML does on a replayed GPU.

Used in the NVML child, by the replay's library; the list of the functions also by the sidecar, to find mistakes in a
description. Arguments come as pynvml passes them to C: numbers as ctypes integers or plain ones, results as
`byref()` objects, into which the answer is written; a return code goes out. Counts and versions of structures are
checked as NVML checks them, so that a wrong call does not pass unseen.

Source: nvml.h; shapes and traps as seen with pynvml's wrappers.
"""

from __future__ import annotations

from exporter.collectors.nvml.codes import CODES, SUCCESS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from exporter.collectors.nvml.replay_machine import ReplayedGpu

    Call = Callable[..., int]

NOT_SUPPORTED = CODES["not_supported"]
_INVALID = CODES["invalid_argument"]
_TOO_SMALL = CODES["insufficient_size"]
_VERSION = CODES["argument_version_mismatch"]

ONE_NUMBER = {
    "nvmlDeviceGetComputeMode": "compute_mode",
    "nvmlDeviceGetPersistenceMode": "persistence_mode",
    "nvmlDeviceGetAccountingMode": "accounting_mode",
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
    "nvmlDeviceGetRetiredPagesPendingStatus": "retired_pages_pending",
    "nvmlDeviceGetSupportedEventTypes": "event_types",
    "nvmlDeviceGetNumaNodeId": "numa_node",
    "nvmlDeviceGetArchitecture": "architecture",
}
"""Functions that give one number, and the reading that it is."""

BY_NUMBER = {
    "nvmlDeviceGetClockInfo": ("clock_graphics", "clock_sm", "clock_memory", "clock_video"),
    "nvmlDeviceGetMaxClockInfo": (
        "clock_max_graphics",
        "clock_max_sm",
        "clock_max_memory",
        "clock_max_video",
    ),
    "nvmlDeviceGetTemperature": ("temperature",),
    "nvmlDeviceGetTemperatureThreshold": (
        "threshold_shutdown",
        "threshold_slowdown",
        "threshold_mem_max",
        "threshold_gpu_max",
    ),
    "nvmlDeviceGetPcieThroughput": ("pcie_transmit_rate", "pcie_receive_rate"),
}
"""Functions that give one number of several, chosen by a number before it."""

TWO_NUMBERS = {
    "nvmlDeviceGetPowerManagementLimitConstraints": ("power_limit_min", "power_limit_max"),
    "nvmlDeviceGetEccMode": ("ecc_mode", "ecc_mode_pending"),
    "nvmlDeviceGetMigMode": ("mig_mode", "mig_mode_pending"),
}

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
    (0, 0, 2): "ecc_corrected_dram",
    (0, 0, 7): "ecc_corrected_sram",
    (1, 0, 2): "ecc_uncorrected_dram",
    (1, 0, 7): "ecc_uncorrected_sram",
    (0, 1, 2): "ecc_aggregate_corrected_dram",
    (0, 1, 7): "ecc_aggregate_corrected_sram",
    (1, 1, 2): "ecc_aggregate_uncorrected_dram",
    (1, 1, 7): "ecc_aggregate_uncorrected_sram",
}


class Asked:
    """A call on a GPU: when, and what it would give.

    Attributes:
        gpu: The GPU.
        moment: Seconds on the timeline.
        wall: Unix seconds.
        returned: What the description says that this call gives; None where the readings count.
    """

    __slots__ = ("gpu", "moment", "wall", "returned")

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


def put(reference: Any, value: float) -> None:
    """Write through what `byref` made."""
    target = reference._obj  # noqa: SLF001 - the only way to what byref() holds
    target.value = value if isinstance(target.value, float) else int(value)


def one_number(reading: str) -> Call:
    """Make a function of one result."""

    def call(asked: Asked, result: Any) -> int:
        value = asked.reading(reading)
        if value is None:
            return NOT_SUPPORTED
        put(result, value)
        return SUCCESS

    return call


def by_number(readings: tuple[str, ...]) -> Call:
    """Make a function whose argument chooses the result."""

    def call(asked: Asked, which: Any, result: Any) -> int:
        place = number(which)
        value = asked.reading(readings[place]) if 0 <= place < len(readings) else None
        if value is None:
            return NOT_SUPPORTED
        put(result, value)
        return SUCCESS

    return call


def two_numbers(first: str, second: str) -> Call:
    """Make a function of two results."""

    def call(asked: Asked, result: Any, other: Any) -> int:
        value = asked.reading(first)
        if value is None:
            return NOT_SUPPORTED
        pending = asked.reading(second)
        put(result, value)
        put(other, value if pending is None else pending)
        return SUCCESS

    return call


def engine(reading: str) -> Call:
    """Make a function of a video engine."""

    def call(asked: Asked, result: Any, period: Any) -> int:
        value = asked.reading(reading)
        if value is None:
            return NOT_SUPPORTED
        put(result, value)
        put(period, _ENGINE_PERIOD_MICROSECONDS)
        return SUCCESS

    return call


def text(key: str) -> Call:
    """Make a function that fills a buffer."""

    def call(asked: Asked, buffer: Any, length: Any) -> int:
        value: str | None = asked.gpu.description[key]
        if value is None:
            return NOT_SUPPORTED
        encoded = value.encode("latin-1", "replace")
        if len(encoded) >= number(length):
            return _TOO_SMALL
        buffer.value = encoded
        return SUCCESS

    return call


def utilization(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetUtilizationRates`."""
    value = asked.reading("utilization")
    if value is None:
        return NOT_SUPPORTED
    result._obj.gpu = int(value)  # noqa: SLF001 - see put
    result._obj.memory = int(asked.reading("memory_utilization") or 0)  # noqa: SLF001
    return SUCCESS


def memory(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetMemoryInfo`: what the driver reserves counts as used."""
    info = result._obj  # noqa: SLF001 - see put
    total = asked.reading("memory_total")
    if total is None:
        return NOT_SUPPORTED
    taken = (asked.reading("memory_used") or 0) + (asked.reading("memory_reserved") or 0)
    info.total, info.used, info.free = int(total), int(taken), max(0, int(total - taken))
    return SUCCESS


def memory_v2(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetMemoryInfo_v2`."""
    info = result._obj  # noqa: SLF001 - see put
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
    info = result._obj  # noqa: SLF001 - see put
    info.bar1Total, info.bar1Used = int(total), int(asked.reading("bar1_used") or 0)
    info.bar1Free = info.bar1Total - info.bar1Used
    return SUCCESS


def temperature(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetTemperatureV`."""
    info = result._obj  # noqa: SLF001 - see put
    if info.version != 0x0100000C:
        return _VERSION
    value = asked.reading("temperature")
    if value is None or info.sensorType != 0:
        return NOT_SUPPORTED
    info.temperature = int(value)
    return SUCCESS


def margin(asked: Asked, result: Any) -> int:
    """`nvmlDeviceGetMarginTemperature`."""
    info = result._obj  # noqa: SLF001 - see put
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
    info = result._obj  # noqa: SLF001 - see put
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
    info = result._obj  # noqa: SLF001 - see put
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
    info = result._obj  # noqa: SLF001 - see put
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
    info = result._obj  # noqa: SLF001 - see put
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
    result._obj.max = int(value)  # noqa: SLF001 - see put
    return SUCCESS


CALLS: dict[str, Call] = {
    **{symbol: one_number(reading) for symbol, reading in ONE_NUMBER.items()},
    **{symbol: by_number(readings) for symbol, readings in BY_NUMBER.items()},
    **{symbol: two_numbers(*readings) for symbol, readings in TWO_NUMBERS.items()},
    **{symbol: engine(reading) for symbol, reading in ENGINES.items()},
    **{symbol: text(key) for symbol, key in TEXTS.items()},
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
"""Functions of a GPU that give numbers, texts or a structure."""
