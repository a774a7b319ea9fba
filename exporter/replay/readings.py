"""Readings of a replayed GPU by their names in a description, and the NVML functions and fields that return each reading.

Used in the NVML child by `calls`, and in the sidecar by `description`. Source: nvml.h.
"""

from __future__ import annotations

from dataclasses import dataclass

SINGLE_NUMBERS = {
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

INDEXED_NUMBERS = {
    "nvmlDeviceGetClockInfo": ("", "clock_sm", "clock_memory"),
    "nvmlDeviceGetTemperature": ("temperature",),
    "nvmlDeviceGetTemperatureThreshold": ("", "threshold_slowdown"),
}
"""Functions with one number as their result, selected by an index argument; "" for an index that the exporter does not read."""

NUMBER_LISTS = {
    "nvmlDeviceGetMigMode": (
        "mig_mode",
        "mig_mode",
    ),  # the current mode, and the mode after a reset of the GPU
    "nvmlDeviceGetRemappedRows": (
        "remapped_correctable",
        "remapped_uncorrectable",
        "remapping_pending",
        "remapping_failed",
    ),
}
"""Functions with several numbers as their result. A function is supported if its first reading is. The first reading also replaces missing
readings."""

VOLATILE = 0
"""NVML's kind of counters since the driver was loaded."""
MEMORY_ERRORS = {
    (error_type, VOLATILE, location): f"ecc_{error_name}_{location_name}"
    for error_type, error_name in enumerate(("corrected", "uncorrected"))
    for location, location_name in ((2, "dram"), (7, "sram"))  # NVML's numbers of the locations
}
"""Readings by type of error, kind of counter and location. The exporter reads no counters over the lifetime of the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Structure that a function fills with readings."""

    version: int | None = None  # required version; None for a structure without versions
    readings_by_member: dict[str, str]


STRUCTURES = {
    "nvmlDeviceGetUtilizationRates": Structure(
        readings_by_member={"gpu": "utilization", "memory": "memory_utilization"}
    ),
    "nvmlDeviceGetTemperatureV": Structure(
        version=0x0100000C, readings_by_member={"temperature": "temperature"}
    ),
    "nvmlDeviceGetMarginTemperature": Structure(
        version=0x01000008, readings_by_member={"marginTemperature": "temperature_margin"}
    ),
    "nvmlDeviceGetSramEccErrorStatus": Structure(
        version=0x01000068, readings_by_member={"bThresholdExceeded": "sram_threshold"}
    ),
}
"""Functions that fill a structure. A function is supported if its first reading is; other missing readings are 0."""

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
"""Readings of the fields of a whole GPU, by field id."""

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
"""Readings of the fields whose scope is an NVLink, by field id. Each reading is the value of a single link."""

SUMMABLE_FIELDS = frozenset({138, 139})
"""Link fields with a sum over all links (scope `SUM_OF_LINKS`)."""

# Readings of the fields whose ids depend on the version of the driver, see `fields_of_driver`. The ids are repeated there and not
# imported from the table of the NVML child, so that a test detects a wrong id in either table.
_THERMAL = ("throttle_sw_thermal", "throttle_hw_thermal", "throttle_hw_power_brake")
_SMOOTHING = "power_smoothing"


@dataclass(frozen=True, slots=True)
class SampleBuffer:
    """Ring buffer of the driver with the samples of a reading."""

    reading: str
    interval_seconds: float
    capacity: int  # number of samples


SAMPLE_BUFFERS = {
    0: SampleBuffer("power", interval_seconds=0.02, capacity=119),
    1: SampleBuffer("utilization", interval_seconds=0.2, capacity=71),
    2: SampleBuffer("memory_utilization", interval_seconds=0.2, capacity=71),
}
"""Sample buffers by NVML's number of the kind of samples."""

READINGS = tuple(
    dict.fromkeys(
        name
        for names in (
            ("memory_total", "memory_used", "memory_reserved", "sample_buffers", "nvlinks_active"),
            (name for name in SINGLE_NUMBERS.values() if name != "architecture"),
            *(names for table in (INDEXED_NUMBERS, NUMBER_LISTS) for names in table.values()),
            MEMORY_ERRORS.values(),
            *(structure.readings_by_member.values() for structure in STRUCTURES.values()),
            *(FIELDS.values(), LINK_FIELDS.values(), _THERMAL, (_SMOOTHING,)),
        )
        for name in names
        if name
    )
)
"""All readings by their names in a description; docs/replay.md has the units."""


def fields_of_driver(driver: str) -> dict[int, str]:
    """Return the names of the readings by field id.

    The ids of the thermal fields and of power smoothing depend on the version of the driver. Before version 575, a driver has no
    thermal fields; before 570, it has neither.
    """
    major, minor = driver.split(".")[:2]
    version = int(major), int(minor)
    if version < (570, 0):
        return FIELDS
    thermal_ids: tuple[int, ...] = ()
    if version >= (580, 82):
        thermal_ids = (269, 270, 271)
    elif version >= (575, 0):
        thermal_ids = (251, 252, 253)
    # In the other versions, these ids are settings of power smoothing.
    smoothing = dict.fromkeys((251, 252, 253, 269, 270, 271), _SMOOTHING)
    return {**FIELDS, **smoothing, **dict(zip(thermal_ids, _THERMAL, strict=False))}
