"""Families of the GPU itself: utilization, memory, processes, power, temperature, clocks and activity.

`nvml/queries.py` reads the values; the rows here define the families.
"""

from __future__ import annotations

from exporter.collectors.gpu.family import CHILD_COUNTER, GPU, NANOSECONDS, GpuFamily, ReadingSource
from exporter.families import FamilySpec

_GPM = "before Hopper, while MIG is enabled, or where the option `gpu.gpm` is false"

UTILIZATION = GpuFamily(
    spec=FamilySpec(
        name="gpu_utilization_ratio",
        type="gauge",
        unit="ratio",
        labels=GPU,
        help=(
            "Share of the driver's last sampling period (0.1 to 1 s) in which at least one kernel ran. Does not"
            " show how many SMs were busy."
        ),
        absent="while MIG is enabled",
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
        help="Share of the driver's last sampling period in which device memory was read or written.",
        absent="while MIG is enabled",
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
        help="Time in which at least one kernel ran, without gaps between the sampling periods.",
        absent="while MIG is enabled",
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
        help="Device memory of the GPU.",
        absent="on a GPU without separate memory",
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
        help="Allocated device memory; before driver 510, the memory reserved by the driver is included.",
        absent="on a GPU without separate memory",
        source="nvmlDeviceGetMemoryInfo_v2().used",
    ),
    sources=(ReadingSource(reading="memory_used_bytes"),),
)
PROCESSES = GpuFamily(
    spec=FamilySpec(
        name="gpu_processes",
        type="gauge",
        labels=GPU,
        help="Number of compute processes on the GPU.",
        absent="if the driver does not list processes",
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
        help="Power of the GPU.",
        absent="if the GPU does not measure power",
        source="nvmlDeviceGetPowerUsage / 1000",
        details=(
            (
                "On Ampere (except GA100) and later, the value is the mean of the last second, otherwise the"
                " instantaneous power."
            ),
        ),
    ),
    sources=(ReadingSource(reading="power_watts"),),
)
POWER_LIMIT = GpuFamily(
    spec=FamilySpec(
        name="gpu_power_limit_watts",
        type="gauge",
        unit="watts",
        labels=(*GPU, "limit"),
        help="Power limits of the GPU: enforced is the limit in force, default is the limit of the board.",
        absent="if the GPU has no power limit",
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
        help="Temperature by sensor: the chip (gpu) and its memory (memory).",
        absent="without the sensor",
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
        help="Temperature at which the GPU reduces its clocks (threshold: slowdown).",
        absent="on data center GPUs from Hopper on, which report only margins",
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
        help=(
            "Difference between the nearest temperature limit (threshold: nearest) and the temperature; negative"
            " above the limit."
        ),
        absent="before Ada",
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
        help="Frequency by clock: the SMs (sm) and the memory (memory).",
        absent="if the driver does not report clocks",
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
        help=(
            "Time in which the clocks were reduced since the driver was loaded, by reason. The reasons"
            " overlap: do not sum them."
        ),
        absent=(
            "for a reason that the driver does not count, after a failed reading, or if the counter grew by"
            " more than the elapsed time"
        ),
        source="fields 74 to 79 and 269 to 271, ns / 1e9",
        details=(
            "`thermal` includes `sw_thermal` and `hw_thermal`.",
            (
                "`sw_thermal`, `hw_thermal` and `hw_power_brake` need driver 575. Up to driver 580.65, they"
                " are in the fields 251 to 253."
            ),
            "`board_limit`, `reliability` and `sync_boost` have no series while the value is 0.",
        ),
    ),
    sources=(ReadingSource(reading="clocks_event_nanoseconds", rule=NANOSECONDS),),
    # These reasons are rare: zeros would be three series per GPU without information.
    omitted_at_zero=frozenset({"board_limit", "reliability", "sync_boost"}),
)
SM_ACTIVITY = GpuFamily(
    spec=FamilySpec(
        name="gpu_sm_activity_ratio",
        type="gauge",
        unit="ratio",
        labels=GPU,
        help="Share of SM cycles in which at least one warp was resident, over all SMs.",
        absent=_GPM,
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
        help="Resident warps as a share of the warps that the SMs can hold.",
        absent=_GPM,
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
        help="Share of SM cycles in which a tensor core was active.",
        absent=_GPM,
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
        help="Share of SM cycles in which a pipe was active.",
        absent=_GPM,
        source="GPM 7 hmma, 9 imma, 12 fp32, 13 fp16, / 100",
        details=(
            "`fp32`, `fp16`: pipes of the SM for floating-point numbers.",
            ("`hmma`: tensor core pipe for types of 16 and 8 bits; part of `gpu_tensor_activity_ratio`."),
            "`imma`: tensor core pipe for integers; part of `gpu_tensor_activity_ratio`.",
        ),
    ),
    sources=(ReadingSource(reading="pipe_activity_ratio"),),
)
DRAM_ACTIVITY = GpuFamily(
    spec=FamilySpec(
        name="gpu_dram_activity_ratio",
        type="gauge",
        unit="ratio",
        labels=GPU,
        help="Used memory bandwidth as a share of the maximum bandwidth.",
        absent=_GPM,
        source="GPM 10 / 100",
    ),
    sources=(ReadingSource(reading="dram_activity_ratio"),),
)

DEVICE_FAMILIES = (
    *(UTILIZATION, MEMORY_BANDWIDTH, BUSY_SECONDS, MEMORY_TOTAL, MEMORY_USED, PROCESSES, POWER, POWER_LIMIT),
    *(TEMPERATURE, TEMPERATURE_THRESHOLD, TEMPERATURE_MARGIN, CLOCK, CLOCKS_EVENT_SECONDS),
    *(SM_ACTIVITY, SM_OCCUPANCY, TENSOR_ACTIVITY, PIPE_ACTIVITY, DRAM_ACTIVITY),
)
