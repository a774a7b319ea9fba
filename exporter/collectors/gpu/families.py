"""The families of single GPUs, each with the readings of the NVML child that fill it.

Used in the sidecar: `state` keeps the counters that they ask for, `publishing` makes the samples and has the families
about NVML itself. A reading is a number, or a mapping from the values of further labels (joined by a slash) to numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.collectors.gpu.counters import CounterRule
from exporter.families import FamilySpec, family

OF_CHILD = CounterRule(of_process=True)
"""What the NVML child has added up since it began."""

ENERGY_READING, INTEGRAL_READING = "energy_millijoules", "power_joules"
ENERGY_RULE = CounterRule(scale=0.001, most_per_second=10_000.0, from_zero=True)
"""No card draws 10 kW; a counter that grows faster gives garbage."""

# Bytes a second that no link reaches: NVLink 5 carries 1.8e12 in all.
_NVLINK = CounterRule(most_per_second=2e13)
_NVLINK_KIB = CounterRule(scale=1024, most_per_second=2e13)
# A counter of seconds cannot run faster than the clock; one that does is another metric under the same id.
_NANOSECONDS = CounterRule(scale=1e-9, most_per_second=1.0)


@dataclass(frozen=True, slots=True)
class GpuFamily:
    """A family of single GPUs, and where its values come from."""

    spec: FamilySpec  # its labels are `gpu`, `uuid`, then those of the reading
    reading: str  # of the child; families may have several, a row each
    rule: CounterRule | None = None  # how a counter is added up; None for a gauge
    by_link: bool = False  # whether the reading's first label is an NVLink, over which it is summed
    rare: tuple[str, ...] = ()  # labels that are left out while they never counted


def of_gpu(name: str, help: str, source: str, *labels: str) -> FamilySpec:
    """Describe a family with the labels of a GPU before its own."""
    return family(name, help, source, "gpu", "uuid", *labels)


def _of(
    name: str,
    help: str,
    source: str,
    *labels: str,
    reading: str = "",
    rule: CounterRule | None = None,
    by_link: bool = False,
    rare: tuple[str, ...] = (),
) -> GpuFamily:
    spec = of_gpu(name, help, source, *labels)
    if spec.type == "counter" and rule is None:
        rule = CounterRule()
    return GpuFamily(spec, reading or name.removeprefix("gpu_"), rule, by_link, rare)


# Every ratio of the performance counters is the mean over the time between two samples; nothing is missed in between.
_GPM = "Absent before Hopper, on a divided GPU (MIG) and where GPM is switched off."

GPU_FAMILIES: tuple[GpuFamily, ...] = (
    # Use and memory.
    _of(
        "gpu_utilization_ratio",
        "Share of the last sampling period of the driver (0.1 to 1 s) in which at least one kernel ran; says nothing about how many SMs were busy. Absent on a divided GPU (MIG).",
        "nvmlDeviceGetUtilizationRates().gpu / 100",
    ),
    _of(
        "gpu_memory_bandwidth_utilization_ratio",
        "Share of the last sampling period in which device memory was read or written; not how much of it is used. Absent on a divided GPU (MIG).",
        "nvmlDeviceGetUtilizationRates().memory / 100",
    ),
    _of(
        "gpu_utilization_busy_seconds_total",
        "Time in which at least one kernel ran, with nothing missed in between. Absent on a divided GPU (MIG).",
        "integral of GPM 1, else of nvmlDeviceGetSamples(GPU_UTILIZATION_SAMPLES)",
        rule=OF_CHILD,
    ),
    _of(
        "gpu_memory_total_bytes",
        "Device memory of the card. Absent where it is the machine's (unified memory).",
        "nvmlDeviceGetMemoryInfo_v2().total",
    ),
    _of(
        "gpu_memory_used_bytes",
        "Device memory that is allocated, without what the driver reserves (with it on drivers before 510). Absent where it is the machine's.",
        "nvmlDeviceGetMemoryInfo_v2().used",
    ),
    _of("gpu_processes", "Processes that compute on the GPU.", "nvmlDeviceGetComputeRunningProcesses"),
    # Power, temperature, clocks and what holds them back.
    _of(
        "gpu_power_watts",
        "Power of the card: the mean of the last second on Ampere (without GA100) and later, else of the moment.",
        "nvmlDeviceGetPowerUsage / 1000, else field 185",
    ),
    _of(
        "gpu_power_limit_watts",
        "Limits of the card's power: enforced now, by default.",
        "nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementDefaultLimit, / 1000",
        "limit",
    ),
    *(
        _of(
            "gpu_temperature_celsius",
            "Temperature of the chip, and of its memory where there is a sensor.",
            "nvmlDeviceGetTemperatureV, field 82",
            "sensor",
            reading=reading,
        )
        for reading in ("temperature_celsius", "temperature_memory")
    ),
    _of(
        "gpu_temperature_threshold_celsius",
        "Temperature at which the card slows down. Absent where there are margins only, as on data centre cards from Hopper on.",
        "nvmlDeviceGetTemperatureThreshold",
        "threshold",
    ),
    _of(
        "gpu_temperature_margin_celsius",
        "How far the temperature is from the nearest limit, negative beyond it. Absent before Ada.",
        "nvmlDeviceGetMarginTemperature",
        "threshold",
    ),
    _of("gpu_clock_hertz", "Clock of the SMs and of the memory.", "nvmlDeviceGetClockInfo * 1e6", "clock"),
    _of(
        "gpu_clocks_event_seconds_total",
        "Time in which a reason held the clocks back, since the driver was loaded. Absent for a reason that the driver does not count, and for one that ran faster than the clock; sw_thermal, hw_thermal and hw_power_brake before driver 575, where thermal is all heat; board_limit, reliability and sync_boost also as long as they never did.",
        "fields 74 to 79 and 269 to 271 (251 to 253 of the drivers 575 to 580.65), ns / 1e9",
        "reason",
        rule=_NANOSECONDS,
        # Most machines never see these, and nobody waits for them: eight GPUs would have 24 series of zeros.
        rare=("board_limit", "reliability", "sync_boost"),
    ),
    # What the SMs, tensor cores and memory really do.
    _of(
        "gpu_sm_activity_ratio",
        f"Share of SM cycles in which at least one warp was resident, over all SMs. {_GPM}",
        "GPM 2 / 100",
    ),
    _of(
        "gpu_sm_occupancy_ratio",
        f"Resident warps as a share of what the SMs could hold. {_GPM}",
        "GPM 3 / 100",
    ),
    _of(
        "gpu_tensor_activity_ratio",
        f"Share of SM cycles in which tensor cores worked: any of them, or a pipe (hmma for 16 and 8 bits, imma for integers; with details dmma, dfma). {_GPM}",
        "GPM 5 any, 6 dfma, 7 hmma, 8 dmma, 9 imma / 100",
        "pipe",
    ),
    _of(
        "gpu_pipe_activity_ratio",
        f"Share of SM cycles in which a pipe outside the tensor cores worked: fp32, fp16; with details fp64, int. {_GPM}",
        "GPM 11 fp64, 12 fp32, 13 fp16, 4 int / 100",
        "pipe",
    ),
    _of(
        "gpu_dram_activity_ratio",
        f"Memory bandwidth in use as a share of what is possible. {_GPM}",
        "GPM 10 / 100",
    ),
    # Links.
    _of(
        "gpu_pcie_link_generation",
        "Generation of the PCIe link, now and at most; an idle GPU goes down to the first, so it tells something under load only.",
        "nvmlDeviceGetCurrPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkGeneration",
        "kind",
    ),
    _of(
        "gpu_pcie_link_width",
        "Lanes of the PCIe link, now and at most.",
        "nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth",
        "kind",
    ),
    *(
        _of(
            f"gpu_pcie_{way}_bytes_total",
            f"Bytes that the GPU {did} over PCIe, packet headers included. Absent before Hopper.",
            f"GPM {gpm} integrated",
            rule=OF_CHILD,
        )
        for way, did, gpm in (("transmit", "sent", 20), ("receive", "received", 21))
    ),
    _of(
        "gpu_pcie_replays_total",
        "Packets that had to be sent again over PCIe.",
        "nvmlDeviceGetPcieReplayCounter",
    ),
    _of(
        "gpu_pcie_errors_total",
        "Errors of the PCIe link: correctable, non_fatal, fatal. Absent on older drivers.",
        "fields 173, 179, 180",
        "kind",
    ),
    _of(
        "gpu_nvlink_links",
        "NVLink ports, in use (active) or not. Absent without NVLink.",
        "nvmlDeviceGetNvLinkState",
        "state",
    ),
    *(
        _of(
            f"gpu_nvlink_{way}_bytes_total",
            f"Bytes that the GPU {did} over NVLink, over all ports. Absent without NVLink.",
            f"field {kib} * 1024, else field {plain}, else GPM {gpm} integrated",
            reading=f"nvlink_{way}_{reading}",
            rule=rule,
            by_link=True,
        )
        for way, did, kib, plain, gpm in (
            ("transmit", "sent", 138, 202, 61),
            ("receive", "received", 139, 204, 60),
        )
        for reading, rule in (("kibibytes", _NVLINK_KIB), ("bytes", _NVLINK), ("gpm", OF_CHILD))
    ),
    _of(
        "gpu_nvlink_errors_total",
        "Errors of NVLink by kind, over all ports. Absent without NVLink.",
        "fields 38, 45, 52, 59, 160 to 163, of the fifth generation 206 to 215",
        "kind",
        by_link=True,
    ),
    # Errors that the card's owner should know of.
    _of(
        "gpu_ecc_errors_total",
        "Memory errors: volatile ones since the driver was loaded, with details also aggregate ones over the card's life. Absent without ECC.",
        "nvmlDeviceGetMemoryErrorCounter",
        *("kind", "scope", "location"),
    ),
    _of(
        "gpu_sram_ecc_threshold_exceeded",
        "Whether the card has had so many SRAM errors that it should be replaced. Absent before Ampere and on older drivers.",
        "nvmlDeviceGetSramEccErrorStatus().bThresholdExceeded",
    ),
    _of(
        "gpu_remapped_rows",
        "Rows of memory that were replaced by spare ones. Absent before Ampere, on GeForce and on a divided GPU (MIG).",
        "nvmlDeviceGetRemappedRows",
        "kind",
    ),
    _of(
        "gpu_remapped_rows_pending",
        "Whether a row waits for the next reset to be replaced. Absent where rows are not remapped.",
        "nvmlDeviceGetRemappedRows",
    ),
    _of(
        "gpu_remapped_rows_failed",
        "Whether a row could not be replaced; the card should be. Absent where rows are not remapped.",
        "nvmlDeviceGetRemappedRows",
    ),
    _of(
        "gpu_recovery_action",
        "What the driver wants to be done: 0 nothing, 1 reset the GPU, 2 reboot, 3 drain peer to peer traffic, 4 drain and reset, 5 recover the IMEX domain, 6 reset the bus, 7 reboot the system. Absent on drivers before 565.",
        "field 230",
    ),
)

RULES = {
    **{each.reading: each.rule for each in GPU_FAMILIES if each.rule is not None},
    ENERGY_READING: ENERGY_RULE,
    **dict.fromkeys((INTEGRAL_READING, "xids", "kernel_xids"), OF_CHILD),
}
"""How each reading that is a counter is added up."""
