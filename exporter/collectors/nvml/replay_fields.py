"""Field values of a replayed GPU: which reading is behind which id.

Used in the NVML child, by the replay's library. The ids of some throttle counters depend on the driver's version;
this is written down here apart from `fields`, which chooses what to ask for, so that the one finds mistakes in
the other.
"""

from __future__ import annotations

from math import isfinite

from exporter.collectors.nvml.codes import CODES
from exporter.collectors.nvml.replay_calls import NOT_SUPPORTED, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.collectors.nvml.replay_calls import Asked

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
    95: "pcie_replay_rollovers",
    169: "pcie_l0_to_recovery",
    170: "c2c_links",
    185: "power_average",
    186: "power_instant",
    193: "tlimit_shutdown",
    194: "tlimit_slowdown",
    195: "tlimit_mem_max",
    196: "tlimit_gpu_max",
    197: "pcie_transmit_bytes",
    198: "pcie_receive_bytes",
    230: "recovery_action",
    274: "edpp_multiplier",
    297: "mma_stall",
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
    for value in array._obj[: number(count)]:  # noqa: SLF001 - see replay_calls.put
        value.timestamp = int(asked.wall * 1e6)
        value.latencyUsec = _LATENCY_MICROSECONDS
        value.nvmlReturn = 0
        field = value.fieldId
        if newest is not None and field > newest:
            value.nvmlReturn = CODES["invalid_argument"]
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
