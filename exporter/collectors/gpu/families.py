"""GPU families, each in a single row with the readings of the NVML child.

`nvml/queries.py` has the row that reads a field; the row here defines the family of a reading. The families about NVML itself,
energy, Xids and MIG instances are in `publishing`.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.collectors.gpu.counters import CounterRule
from exporter.families import FamilySpec

GPU = ("gpu", "uuid")
"""Labels of every family of a GPU."""

CHILD_COUNTER = CounterRule(of_process=True)
"""Rule of sums since the start of the NVML child."""
DRIVER_COUNTER = CounterRule()
# A counter of seconds cannot run faster than the clock; a faster counter is a different metric under the same id.
NANOSECONDS = CounterRule(scale=1e-9, most_per_second=1.0)
# Bytes a second that no link reaches: NVLink 5 carries 1.8e12 in all.
NVLINK_BYTES = CounterRule(most_per_second=2e13)
NVLINK_KIBIBYTES = CounterRule(scale=1024, most_per_second=2e13)

_GPM = "Absent before Hopper, on a divided GPU (MIG) and where the option gpu.gpm is false."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingSource:
    """Reading that sets a family's values."""

    reading: str  # name in the messages of the NVML child
    rule: CounterRule | None = None  # how a counter is read; None for a gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFamily:
    """GPU family with the alternative sources of the values; a GPU has a single source."""

    spec: FamilySpec  # labels: `gpu`, `uuid`, then the reading's labels
    sources: tuple[ReadingSource, ...]
    by_link: bool = False  # True if the first label of a reading is an NVLink, over which the family sums
    rare: frozenset[str] = frozenset()  # values of the last label that are omitted if 0


UTILIZATION = GpuFamily(
    spec=FamilySpec(
        name="gpu_utilization_ratio",
        type="gauge",
        unit="ratio",
        labels=GPU,
        help="Share of the driver's last sampling period (0.1 to 1 s) in which at least one kernel ran. Does not tell how "
        "many SMs were busy. Absent on a divided GPU (MIG).",
        source="nvmlDeviceGetUtilizationRates().gpu / 100",
    ),
    sources=(ReadingSource(reading="utilization_ratio"),),
)
MEMORY_BANDWIDTH = GpuFamily(
    spec=FamilySpec(
        name="gpu_memory_bandwidth_utilization_ratio",
        type="gauge",
        unit="ratio",
        labels=GPU,
        help="Share of the driver's last sampling period in which device memory was read or written. Absent on a divided "
        "GPU (MIG).",
        source="nvmlDeviceGetUtilizationRates().memory / 100",
    ),
    sources=(ReadingSource(reading="memory_bandwidth_utilization_ratio"),),
)
BUSY_SECONDS = GpuFamily(
    spec=FamilySpec(
        name="gpu_utilization_busy_seconds_total",
        type="counter",
        unit="seconds",
        labels=GPU,
        help="Time in which at least one kernel ran, measured without pauses. Absent on a divided GPU (MIG).",
        source="integral of GPM 1, else of nvmlDeviceGetSamples(GPU_UTILIZATION_SAMPLES)",
    ),
    sources=(ReadingSource(reading="busy_seconds", rule=CHILD_COUNTER),),
)
MEMORY_TOTAL = GpuFamily(
    spec=FamilySpec(
        name="gpu_memory_total_bytes",
        type="gauge",
        unit="bytes",
        labels=GPU,
        help="Device memory of the card. Absent on a card that shares the machine's memory.",
        source="nvmlDeviceGetMemoryInfo_v2().total",
    ),
    sources=(ReadingSource(reading="memory_total_bytes"),),
)
MEMORY_USED = GpuFamily(
    spec=FamilySpec(
        name="gpu_memory_used_bytes",
        type="gauge",
        unit="bytes",
        labels=GPU,
        help="Allocated device memory without the driver's reserve (with the reserve on drivers before 510). Absent on a "
        "card that shares the machine's memory.",
        source="nvmlDeviceGetMemoryInfo_v2().used",
    ),
    sources=(ReadingSource(reading="memory_used_bytes"),),
)
PROCESSES = GpuFamily(
    spec=FamilySpec(
        name="gpu_processes",
        type="gauge",
        labels=GPU,
        help="Compute processes on the GPU. Absent if the driver does not list processes.",
        source="nvmlDeviceGetComputeRunningProcesses",
    ),
    sources=(ReadingSource(reading="processes"),),
)
POWER = GpuFamily(
    spec=FamilySpec(
        name="gpu_power_watts",
        type="gauge",
        unit="watts",
        labels=GPU,
        help="Power of the card: the mean of the last second on Ampere (except GA100) and later, otherwise the power at the "
        "moment of the reading. Absent if the card does not measure power.",
        source="nvmlDeviceGetPowerUsage / 1000",
    ),
    sources=(ReadingSource(reading="power_watts"),),
)
POWER_LIMIT = GpuFamily(
    spec=FamilySpec(
        name="gpu_power_limit_watts",
        type="gauge",
        unit="watts",
        labels=(*GPU, "limit"),
        help="Power limits of the card: enforced is the one in force, default the one of the board. Absent if the card has "
        "no power limit.",
        source="nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementDefaultLimit, / 1000",
    ),
    sources=(ReadingSource(reading="power_limit_watts"),),
)
TEMPERATURE = GpuFamily(
    spec=FamilySpec(
        name="gpu_temperature_celsius",
        type="gauge",
        unit="celsius",
        labels=(*GPU, "sensor"),
        help="Temperature of the chip (gpu) and of its memory (memory). Absent without the sensor.",
        source="nvmlDeviceGetTemperatureV, field 82",
    ),
    sources=(ReadingSource(reading="temperature_celsius"),),
)
TEMPERATURE_THRESHOLD = GpuFamily(
    spec=FamilySpec(
        name="gpu_temperature_threshold_celsius",
        type="gauge",
        unit="celsius",
        labels=(*GPU, "threshold"),
        help="Temperature at which the card slows down. Absent on data centre cards from Hopper on, which report margins only.",
        source="nvmlDeviceGetTemperatureThreshold",
    ),
    sources=(ReadingSource(reading="temperature_threshold_celsius"),),
)
TEMPERATURE_MARGIN = GpuFamily(
    spec=FamilySpec(
        name="gpu_temperature_margin_celsius",
        type="gauge",
        unit="celsius",
        labels=(*GPU, "threshold"),
        help="Distance of the temperature from the nearest limit, negative beyond the limit. Absent before Ada.",
        source="nvmlDeviceGetMarginTemperature",
    ),
    sources=(ReadingSource(reading="temperature_margin_celsius"),),
)
CLOCK = GpuFamily(
    spec=FamilySpec(
        name="gpu_clock_hertz",
        type="gauge",
        unit="hertz",
        labels=(*GPU, "clock"),
        help="Clock of the SMs (sm) and of the memory (memory). Absent if the driver does not report clocks.",
        source="nvmlDeviceGetClockInfo * 1e6",
    ),
    sources=(ReadingSource(reading="clock_hertz"),),
)
CLOCKS_EVENT_SECONDS = GpuFamily(
    spec=FamilySpec(
        name="gpu_clocks_event_seconds_total",
        type="counter",
        unit="seconds",
        labels=(*GPU, "reason"),
        help="Time in which a reason lowered the clocks, since the driver was loaded. Reasons overlap, do not add them: thermal "
        "is all heat and contains sw_thermal and hw_thermal. Absent for a reason that the driver does not count, while a "
        "reading is refused, and for a counter faster than the clock; sw_thermal, hw_thermal and hw_power_brake before "
        "driver 575; board_limit, reliability and sync_boost while they are 0.",
        source="fields 74 to 79 and 269 to 271 (251 to 253 of the drivers 575 to 580.65), ns / 1e9",
    ),
    sources=(ReadingSource(reading="clocks_event_nanoseconds", rule=NANOSECONDS),),
    # Omit zeros: three series on each GPU without information.
    rare=frozenset({"board_limit", "reliability", "sync_boost"}),
)
SM_ACTIVITY = GpuFamily(
    spec=FamilySpec(
        name="gpu_sm_activity_ratio",
        type="gauge",
        unit="ratio",
        labels=GPU,
        help=f"Share of SM cycles in which at least one warp was resident, over all SMs. {_GPM}",
        source="GPM 2 / 100",
    ),
    sources=(ReadingSource(reading="sm_activity_ratio"),),
)
SM_OCCUPANCY = GpuFamily(
    spec=FamilySpec(
        name="gpu_sm_occupancy_ratio",
        type="gauge",
        unit="ratio",
        labels=GPU,
        help=f"Resident warps as a share of the warps that the SMs can hold. {_GPM}",
        source="GPM 3 / 100",
    ),
    sources=(ReadingSource(reading="sm_occupancy_ratio"),),
)
TENSOR_ACTIVITY = GpuFamily(
    spec=FamilySpec(
        name="gpu_tensor_activity_ratio",
        type="gauge",
        unit="ratio",
        labels=GPU,
        help=f"Share of SM cycles in which any tensor core worked. {_GPM}",
        source="GPM 5 / 100",
    ),
    sources=(ReadingSource(reading="tensor_activity_ratio"),),
)
PIPE_ACTIVITY = GpuFamily(
    spec=FamilySpec(
        name="gpu_pipe_activity_ratio",
        type="gauge",
        unit="ratio",
        labels=(*GPU, "pipe"),
        help="Share of SM cycles in which a pipe worked: fp32 and fp16, and of the tensor cores hmma (16 and 8 bits) and imma "
        f"(integers), which are parts of gpu_tensor_activity_ratio. {_GPM}",
        source="GPM 7 hmma, 9 imma, 12 fp32, 13 fp16, / 100",
    ),
    sources=(ReadingSource(reading="pipe_activity_ratio"),),
)
DRAM_ACTIVITY = GpuFamily(
    spec=FamilySpec(
        name="gpu_dram_activity_ratio",
        type="gauge",
        unit="ratio",
        labels=GPU,
        help=f"Memory bandwidth in use as a share of the highest possible. {_GPM}",
        source="GPM 10 / 100",
    ),
    sources=(ReadingSource(reading="dram_activity_ratio"),),
)
PCIE_GENERATION = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_link_generation",
        type="gauge",
        labels=(*GPU, "kind"),
        help="Generation of the PCIe link: current and max. An idle GPU lowers the current one to 1. Absent if the driver does "
        "not report the link.",
        source="nvmlDeviceGetCurrPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkGeneration",
    ),
    sources=(ReadingSource(reading="pcie_link_generation"),),
)
PCIE_WIDTH = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_link_width",
        type="gauge",
        labels=(*GPU, "kind"),
        help="Lanes of the PCIe link: current and max. Absent if the driver does not report the link.",
        source="nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth",
    ),
    sources=(ReadingSource(reading="pcie_link_width"),),
)
PCIE_TRANSMITTED = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_transmit_bytes_total",
        type="counter",
        unit="bytes",
        labels=GPU,
        help="Bytes that the GPU sent over PCIe, packet headers included. Absent before Hopper.",
        source="GPM 20 integrated",
    ),
    sources=(ReadingSource(reading="pcie_transmit_bytes", rule=CHILD_COUNTER),),
)
PCIE_RECEIVED = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_receive_bytes_total",
        type="counter",
        unit="bytes",
        labels=GPU,
        help="Bytes that the GPU received over PCIe, packet headers included. Absent before Hopper.",
        source="GPM 21 integrated",
    ),
    sources=(ReadingSource(reading="pcie_receive_bytes", rule=CHILD_COUNTER),),
)
PCIE_REPLAYS = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_replays_total",
        type="counter",
        labels=GPU,
        help="PCIe packets that were sent again. Absent if the driver does not count them.",
        source="nvmlDeviceGetPcieReplayCounter",
    ),
    sources=(ReadingSource(reading="pcie_replays", rule=DRIVER_COUNTER),),
)
PCIE_ERRORS = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_errors_total",
        type="counter",
        labels=(*GPU, "kind"),
        help="Errors of the PCIe link: correctable, non_fatal, fatal. Absent on older drivers.",
        source="fields 173, 179, 180",
    ),
    sources=(ReadingSource(reading="pcie_errors", rule=DRIVER_COUNTER),),
)
NVLINK_LINKS = GpuFamily(
    spec=FamilySpec(
        name="gpu_nvlink_links",
        type="gauge",
        labels=(*GPU, "state"),
        help="NVLink ports by state: active or inactive. Absent without NVLink.",
        source="nvmlDeviceGetNvLinkState",
    ),
    sources=(ReadingSource(reading="nvlink_links"),),
)
NVLINK_TRANSMITTED = GpuFamily(
    spec=FamilySpec(
        name="gpu_nvlink_transmit_bytes_total",
        type="counter",
        unit="bytes",
        labels=GPU,
        help="Bytes that the GPU sent over NVLink, over all ports. Absent without NVLink.",
        source="field 138 * 1024, else field 202, else GPM 61 integrated",
    ),
    sources=(
        ReadingSource(reading="nvlink_transmit_kibibytes", rule=NVLINK_KIBIBYTES),
        ReadingSource(reading="nvlink_transmit_bytes", rule=NVLINK_BYTES),
        ReadingSource(reading="nvlink_transmit_gpm", rule=CHILD_COUNTER),
    ),
    by_link=True,
)
NVLINK_RECEIVED = GpuFamily(
    spec=FamilySpec(
        name="gpu_nvlink_receive_bytes_total",
        type="counter",
        unit="bytes",
        labels=GPU,
        help="Bytes that the GPU received over NVLink, over all ports. Absent without NVLink.",
        source="field 139 * 1024, else field 204, else GPM 60 integrated",
    ),
    sources=(
        ReadingSource(reading="nvlink_receive_kibibytes", rule=NVLINK_KIBIBYTES),
        ReadingSource(reading="nvlink_receive_bytes", rule=NVLINK_BYTES),
        ReadingSource(reading="nvlink_receive_gpm", rule=CHILD_COUNTER),
    ),
    by_link=True,
)
NVLINK_ERRORS = GpuFamily(
    spec=FamilySpec(
        name="gpu_nvlink_errors_total",
        type="counter",
        labels=(*GPU, "kind"),
        help="NVLink errors by kind, over all ports. Absent without NVLink.",
        source="fields 38, 45, 52, 59, 160 to 163, of the fifth generation 206 to 215",
    ),
    sources=(ReadingSource(reading="nvlink_errors", rule=DRIVER_COUNTER),),
    by_link=True,
)
ECC_ERRORS = GpuFamily(
    spec=FamilySpec(
        name="gpu_ecc_errors_total",
        type="counter",
        labels=(*GPU, "kind", "location"),
        help="Memory errors since the driver was loaded (volatile counters): kind is corrected or uncorrected, location dram or "
        "sram. Absent without ECC.",
        source="nvmlDeviceGetMemoryErrorCounter",
    ),
    sources=(ReadingSource(reading="ecc_errors", rule=DRIVER_COUNTER),),
)
SRAM_THRESHOLD = GpuFamily(
    spec=FamilySpec(
        name="gpu_sram_ecc_threshold_exceeded",
        type="gauge",
        labels=GPU,
        help="1 if the number of SRAM errors says that the card should be replaced. Absent before Ampere and on older drivers.",
        source="nvmlDeviceGetSramEccErrorStatus().bThresholdExceeded",
    ),
    sources=(ReadingSource(reading="sram_ecc_threshold_exceeded"),),
)
REMAPPED_ROWS = GpuFamily(
    spec=FamilySpec(
        name="gpu_remapped_rows",
        type="gauge",
        labels=(*GPU, "kind"),
        help="Memory rows that were replaced by spare rows, by kind of error: correctable or uncorrectable. Absent before "
        "Ampere, on GeForce and on a divided GPU (MIG).",
        source="nvmlDeviceGetRemappedRows",
    ),
    sources=(ReadingSource(reading="remapped_rows"),),
)
REMAPPED_PENDING = GpuFamily(
    spec=FamilySpec(
        name="gpu_remapped_rows_pending",
        type="gauge",
        labels=GPU,
        help="1 if a row will be replaced at the next reset. Absent if the card does not replace rows.",
        source="nvmlDeviceGetRemappedRows",
    ),
    sources=(ReadingSource(reading="remapped_rows_pending"),),
)
REMAPPED_FAILED = GpuFamily(
    spec=FamilySpec(
        name="gpu_remapped_rows_failed",
        type="gauge",
        labels=GPU,
        help="1 if a row could not be replaced; the card should be. Absent if the card does not replace rows.",
        source="nvmlDeviceGetRemappedRows",
    ),
    sources=(ReadingSource(reading="remapped_rows_failed"),),
)
RECOVERY_ACTION = GpuFamily(
    spec=FamilySpec(
        name="gpu_recovery_action",
        type="gauge",
        labels=GPU,
        help="Action that the driver asks for: 0 none, 1 reset the GPU, 2 reboot, 3 drain peer to peer traffic, 4 drain and "
        "reset, 5 recover the IMEX domain, 6 reset the bus, 7 reboot the system. Absent on drivers before 565.",
        source="field 230",
    ),
    sources=(ReadingSource(reading="recovery_action"),),
)

GPU_FAMILIES = (
    *(UTILIZATION, MEMORY_BANDWIDTH, BUSY_SECONDS, MEMORY_TOTAL, MEMORY_USED, PROCESSES),
    *(
        POWER,
        POWER_LIMIT,
        TEMPERATURE,
        TEMPERATURE_THRESHOLD,
        TEMPERATURE_MARGIN,
        CLOCK,
        CLOCKS_EVENT_SECONDS,
    ),
    *(SM_ACTIVITY, SM_OCCUPANCY, TENSOR_ACTIVITY, PIPE_ACTIVITY, DRAM_ACTIVITY),
    *(PCIE_GENERATION, PCIE_WIDTH, PCIE_TRANSMITTED, PCIE_RECEIVED, PCIE_REPLAYS, PCIE_ERRORS),
    *(NVLINK_LINKS, NVLINK_TRANSMITTED, NVLINK_RECEIVED, NVLINK_ERRORS),
    *(ECC_ERRORS, SRAM_THRESHOLD, REMAPPED_ROWS, REMAPPED_PENDING, REMAPPED_FAILED, RECOVERY_ACTION),
)
"""In the order of docs/METRICS.md."""

RULES = {
    source.reading: source.rule
    for family in GPU_FAMILIES
    for source in family.sources
    if source.rule is not None
}
"""Rule of each reading that is a counter."""
