"""What a replayed GPU can be asked, by NVML's functions and field ids, and under which names a description has it.

Used by `description`, to find mistakes, by `capture`, and in the NVML child by `calls`. Tables only. The ids of throttle
counters are written down here apart from the child's `readings`, so that the one finds mistakes in the other.
"""

from __future__ import annotations

ONE_NUMBER = {
    "nvmlDeviceGetPowerUsage": "power",
    "nvmlDeviceGetTotalEnergyConsumption": "energy",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_enforced",
    "nvmlDeviceGetPowerManagementDefaultLimit": "power_limit_default",
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
    "nvmlDeviceGetTemperature": ("temperature",),
    "nvmlDeviceGetTemperatureThreshold": (
        *("threshold_shutdown", "threshold_slowdown", "threshold_mem_max", "threshold_gpu_max"),
    ),
}
"""Functions that give one number of several, chosen by a number before it."""

SEVERAL = {
    "nvmlDeviceGetEccMode": ("ecc_mode", "ecc_mode"),
    "nvmlDeviceGetMigMode": ("mig_mode", "mig_mode"),
    "nvmlDeviceGetRemappedRows": (
        *("remapped_correctable", "remapped_uncorrectable", "remapping_pending", "remapping_failed"),
    ),
}
"""Functions that give several numbers; supported where the first is, of which the others are copies if left out."""

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

STRUCTURES: dict[str, tuple[int | None, dict[str, str]]] = {
    "nvmlDeviceGetUtilizationRates": (None, {"gpu": "utilization", "memory": "memory_utilization"}),
    "nvmlDeviceGetTemperatureV": (0x0100000C, {"temperature": "temperature"}),
    "nvmlDeviceGetMarginTemperature": (0x01000008, {"marginTemperature": "temperature_margin"}),
    "nvmlDeviceGetSramEccErrorStatus": (0x01000068, {"bThresholdExceeded": "sram_threshold"}),
    "nvmlDeviceGetGpuFabricInfoV": (0x02000024, {"state": "fabric_state"}),
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
    185: "power_average",
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
"""Fields whose scope is a link; the readings are those of one link."""

SUMMABLE_FIELDS = frozenset({138, 139})
"""Those that can be asked over all links."""

_THERMAL = ("throttle_sw_thermal", "throttle_hw_thermal", "throttle_hw_power_brake")
_SMOOTHING = "power_smoothing"

SAMPLES = {0: ("power", 0.02, 119), 1: ("utilization", 0.2, 71), 2: ("memory_utilization", 0.2, 71)}
"""The driver's buffers by kind: the reading, seconds between samples, how many there are."""

READINGS = tuple(
    dict.fromkeys(
        (
            *(
                "memory_total",
                "memory_used",
                "memory_reserved",
                "fan_speed",
                "sample_buffers",
                "nvlinks_active",
            ),
            *(name for name in ONE_NUMBER.values() if name != "architecture"),
            *(name for table in (BY_NUMBER, SEVERAL) for names in table.values() for name in names),
            *MEMORY_ERRORS.values(),
            *(name for _, members in STRUCTURES.values() for name in members.values()),
            *(*FIELDS.values(), *LINK_FIELDS.values(), *_THERMAL, _SMOOTHING),
            *("retired_pages_sbe", "retired_pages_dbe"),
        )
    )
)
"""What a GPU can be asked, by its name in a description; docs/replay.md has the units."""


def fields_of_driver(driver: str) -> dict[int, str]:
    """The readings of fields by id, as a driver has them."""
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
