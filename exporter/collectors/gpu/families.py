"""The families of single GPUs, each with the readings of the NVML child that fill it.

Used in the sidecar: `state` keeps the counters that they ask for, `publishing` makes the samples and has the families
about NVML itself. A reading is a number, or a mapping from the values of further labels (joined by a slash) to numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from exporter.collectors.gpu.counters import CounterRule
from exporter.families import FamilySpec, rows

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


# Most machines never see these, and nobody waits for them: eight GPUs would have 24 series of zeros.
_RARE = {"gpu_clocks_event_seconds_total": ("board_limit", "reliability", "sync_boost")}
_RULES = {
    "": CounterRule(),
    "child": OF_CHILD,
    "nvlink": _NVLINK,
    "nvlink_kib": _NVLINK_KIB,
    "nanoseconds": _NANOSECONDS,
}


def _of(spec: FamilySpec, words: str) -> Iterator[GpuFamily]:
    """Read the readings of a family, each `name` or `name:rule`; without any it is the one of the family's name."""
    for word in words.split() or [spec.name.removeprefix("gpu_")]:
        reading, _, rule = word.partition(":")
        counter = spec.type == "counter"
        by_link = counter and spec.name.startswith("gpu_nvlink_")
        yield GpuFamily(spec, reading, _RULES[rule] if counter else None, by_link, _RARE.get(spec.name, ()))


# Every ratio of the performance counters is the mean over the time between two samples; nothing is missed in between.
GPU_SPECS = rows("""
gpu_utilization_ratio{gpu,uuid}: Share of the last sampling period of the driver (0.1 to 1 s) in which at
    least one kernel ran; says nothing about how many SMs were busy. Absent on a divided GPU (MIG). <-
    nvmlDeviceGetUtilizationRates().gpu / 100
gpu_memory_bandwidth_utilization_ratio{gpu,uuid}: Share of the last sampling period in which device memory
    was read or written; not how much of it is used. Absent on a divided GPU (MIG). <-
    nvmlDeviceGetUtilizationRates().memory / 100
gpu_utilization_busy_seconds_total{gpu,uuid} [utilization_busy_seconds_total:child]: Time in which at least
    one kernel ran, with nothing missed in between. Absent on a divided GPU (MIG). <- integral of GPM 1,
    else of nvmlDeviceGetSamples(GPU_UTILIZATION_SAMPLES)
gpu_memory_total_bytes{gpu,uuid}: Device memory of the card. Absent where it is the machine's (unified
    memory). <- nvmlDeviceGetMemoryInfo_v2().total
gpu_memory_used_bytes{gpu,uuid}: Device memory that is allocated, without what the driver reserves (with it
    on drivers before 510). Absent where it is the machine's. <- nvmlDeviceGetMemoryInfo_v2().used
gpu_processes{gpu,uuid}: Processes that compute on the GPU. <- nvmlDeviceGetComputeRunningProcesses
gpu_power_watts{gpu,uuid}: Power of the card: the mean of the last second on Ampere (without GA100) and
    later, else of the moment. <- nvmlDeviceGetPowerUsage / 1000, else field 185
gpu_power_limit_watts{gpu,uuid,limit}: Limits of the card's power: enforced now, by default. <-
    nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementDefaultLimit, / 1000
gpu_temperature_celsius{gpu,uuid,sensor} [temperature_celsius temperature_memory]: Temperature of the chip,
    and of its memory where there is a sensor. <- nvmlDeviceGetTemperatureV, field 82
gpu_temperature_threshold_celsius{gpu,uuid,threshold}: Temperature at which the card slows down. Absent
    where there are margins only, as on data centre cards from Hopper on. <-
    nvmlDeviceGetTemperatureThreshold
gpu_temperature_margin_celsius{gpu,uuid,threshold}: How far the temperature is from the nearest limit,
    negative beyond it. Absent before Ada. <- nvmlDeviceGetMarginTemperature
gpu_clock_hertz{gpu,uuid,clock}: Clock of the SMs and of the memory. <- nvmlDeviceGetClockInfo * 1e6
gpu_clocks_event_seconds_total{gpu,uuid,reason} [clocks_event_seconds_total:nanoseconds]: Time in which a
    reason held the clocks back, since the driver was loaded. Absent for a reason that the driver does not
    count, and for one that ran faster than the clock; sw_thermal, hw_thermal and hw_power_brake before
    driver 575, where thermal is all heat; board_limit, reliability and sync_boost also as long as they
    never did. <- fields 74 to 79 and 269 to 271 (251 to 253 of the drivers 575 to 580.65), ns / 1e9
gpu_sm_activity_ratio{gpu,uuid}: Share of SM cycles in which at least one warp was resident, over all SMs.
    Absent before Hopper, on a divided GPU (MIG) and where GPM is switched off. <- GPM 2 / 100
gpu_sm_occupancy_ratio{gpu,uuid}: Resident warps as a share of what the SMs could hold. Absent before
    Hopper, on a divided GPU (MIG) and where GPM is switched off. <- GPM 3 / 100
gpu_tensor_activity_ratio{gpu,uuid,pipe}: Share of SM cycles in which tensor cores worked: any of them, or a
    pipe (hmma for 16 and 8 bits, imma for integers; with details dmma, dfma). Absent before Hopper, on a
    divided GPU (MIG) and where GPM is switched off. <- GPM 5 any, 6 dfma, 7 hmma, 8 dmma, 9 imma / 100
gpu_pipe_activity_ratio{gpu,uuid,pipe}: Share of SM cycles in which a pipe outside the tensor cores worked:
    fp32, fp16; with details fp64, int. Absent before Hopper, on a divided GPU (MIG) and where GPM is
    switched off. <- GPM 11 fp64, 12 fp32, 13 fp16, 4 int / 100
gpu_dram_activity_ratio{gpu,uuid}: Memory bandwidth in use as a share of what is possible. Absent before
    Hopper, on a divided GPU (MIG) and where GPM is switched off. <- GPM 10 / 100
gpu_pcie_link_generation{gpu,uuid,kind}: Generation of the PCIe link, now and at most; an idle GPU goes down
    to the first, so it tells something under load only. <- nvmlDeviceGetCurrPcieLinkGeneration,
    nvmlDeviceGetMaxPcieLinkGeneration
gpu_pcie_link_width{gpu,uuid,kind}: Lanes of the PCIe link, now and at most. <-
    nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth
gpu_pcie_transmit_bytes_total{gpu,uuid} [pcie_transmit_bytes_total:child]: Bytes that the GPU sent over
    PCIe, packet headers included. Absent before Hopper. <- GPM 20 integrated
gpu_pcie_receive_bytes_total{gpu,uuid} [pcie_receive_bytes_total:child]: Bytes that the GPU received over
    PCIe, packet headers included. Absent before Hopper. <- GPM 21 integrated
gpu_pcie_replays_total{gpu,uuid}: Packets that had to be sent again over PCIe. <-
    nvmlDeviceGetPcieReplayCounter
gpu_pcie_errors_total{gpu,uuid,kind}: Errors of the PCIe link: correctable, non_fatal, fatal. Absent on
    older drivers. <- fields 173, 179, 180
gpu_nvlink_links{gpu,uuid,state}: NVLink ports, in use (active) or not. Absent without NVLink. <-
    nvmlDeviceGetNvLinkState
gpu_nvlink_transmit_bytes_total{gpu,uuid} [nvlink_transmit_kibibytes:nvlink_kib nvlink_transmit_bytes:nvlink
    nvlink_transmit_gpm:child]: Bytes that the GPU sent over NVLink, over all ports. Absent without NVLink.
    <- field 138 * 1024, else field 202, else GPM 61 integrated
gpu_nvlink_receive_bytes_total{gpu,uuid} [nvlink_receive_kibibytes:nvlink_kib nvlink_receive_bytes:nvlink
    nvlink_receive_gpm:child]: Bytes that the GPU received over NVLink, over all ports. Absent without
    NVLink. <- field 139 * 1024, else field 204, else GPM 60 integrated
gpu_nvlink_errors_total{gpu,uuid,kind}: Errors of NVLink by kind, over all ports. Absent without NVLink. <-
    fields 38, 45, 52, 59, 160 to 163, of the fifth generation 206 to 215
gpu_ecc_errors_total{gpu,uuid,kind,scope,location}: Memory errors: volatile ones since the driver was
    loaded, with details also aggregate ones over the card's life. Absent without ECC. <-
    nvmlDeviceGetMemoryErrorCounter
gpu_sram_ecc_threshold_exceeded{gpu,uuid}: Whether the card has had so many SRAM errors that it should be
    replaced. Absent before Ampere and on older drivers. <-
    nvmlDeviceGetSramEccErrorStatus().bThresholdExceeded
gpu_remapped_rows{gpu,uuid,kind}: Rows of memory that were replaced by spare ones. Absent before Ampere, on
    GeForce and on a divided GPU (MIG). <- nvmlDeviceGetRemappedRows
gpu_remapped_rows_pending{gpu,uuid}: Whether a row waits for the next reset to be replaced. Absent where
    rows are not remapped. <- nvmlDeviceGetRemappedRows
gpu_remapped_rows_failed{gpu,uuid}: Whether a row could not be replaced; the card should be. Absent where
    rows are not remapped. <- nvmlDeviceGetRemappedRows
gpu_recovery_action{gpu,uuid}: What the driver wants to be done: 0 nothing, 1 reset the GPU, 2 reboot, 3
    drain peer to peer traffic, 4 drain and reset, 5 recover the IMEX domain, 6 reset the bus, 7 reboot the
    system. Absent on drivers before 565. <- field 230
""")
GPU_FAMILIES = tuple(each for spec, words in GPU_SPECS.items() for each in _of(spec, words))

RULES = {
    **{each.reading: each.rule for each in GPU_FAMILIES if each.rule is not None},
    ENERGY_READING: ENERGY_RULE,
    **dict.fromkeys((INTEGRAL_READING, "xids", "kernel_xids"), OF_CHILD),
}
"""How each reading that is a counter is added up."""
