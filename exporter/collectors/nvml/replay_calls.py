"""What those functions of NVML do on a replayed GPU that give numbers or texts, and what every function is given.

Used in the NVML child, by the replay's library; the list of the functions also by the sidecar, to find mistakes in a
description. Arguments come as pynvml passes them to C: numbers as ctypes integers or plain ones, results as
`byref()` objects, into which the answer is written; a return code goes out. What fills structures is in
`replay_structures`, what gives lists in `replay_lists`.

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
_TOO_SMALL = CODES["insufficient_size"]

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


CALLS: dict[str, Call] = {
    **{symbol: one_number(reading) for symbol, reading in ONE_NUMBER.items()},
    **{symbol: by_number(readings) for symbol, readings in BY_NUMBER.items()},
    **{symbol: two_numbers(*readings) for symbol, readings in TWO_NUMBERS.items()},
    **{symbol: engine(reading) for symbol, reading in ENGINES.items()},
    **{symbol: text(key) for symbol, key in TEXTS.items()},
}
"""Functions of a GPU that give numbers or texts."""
