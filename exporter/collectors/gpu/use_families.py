"""The families of how GPUs are used: utilisation, memory, power, energy, clocks and activity.

Used in the sidecar. The readings come from the NVML child's `readings`, `buffers`, `processes` and `gpm`.
"""

from __future__ import annotations

from exporter.collectors.gpu.counters import CounterRule
from exporter.collectors.gpu.families import OF_CHILD, Count, Gauge, Row, of_gpu

# How much a GPU is used, and its memory.

BUSY_SECONDS = of_gpu(
    "gpu_utilization_busy_seconds_total",
    "Time in which at least one kernel ran, with nothing missed in between. Absent on a divided GPU (MIG).",
    "integral of GPM 1, else of nvmlDeviceGetSamples(GPU_UTILIZATION_SAMPLES)",
)
_PROCESSES = of_gpu(
    "gpu_processes",
    "Processes that hold the GPU; those that draw only where details are asked for.",
    "nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses",
    "kind",
)

_USE: tuple[Row, ...] = (
    Gauge(
        of_gpu(
            "gpu_utilization_ratio",
            "Share of the last sampling period of the driver (0.1 to 1 s) in which at least one kernel ran; says nothing about how many SMs were busy. Absent on a divided GPU (MIG).",
            "nvmlDeviceGetUtilizationRates().gpu / 100",
        ),
        "utilization",
    ),
    Gauge(
        of_gpu(
            "gpu_memory_bandwidth_utilization_ratio",
            "Share of the last sampling period in which device memory was read or written; not how much of it is used. Absent on a divided GPU (MIG).",
            "nvmlDeviceGetUtilizationRates().memory / 100",
        ),
        "bandwidth_utilization",
    ),
    Count(BUSY_SECONDS, "busy_seconds_gpm", OF_CHILD),
    Count(BUSY_SECONDS, "busy_seconds", OF_CHILD),
    Gauge(
        of_gpu(
            "gpu_video_engine_utilization_ratio",
            "Share of time in which a video engine was busy: encoder, decoder, jpeg, ofa (optical flow). Absent unless details are asked for, and where there is none.",
            "nvmlDeviceGetEncoderUtilization()[0] / 100 and others",
            "engine",
        ),
        "video_engines",
    ),
    Gauge(
        of_gpu(
            "gpu_memory_total_bytes",
            "Device memory of the card. Absent where it is the machine's (unified memory).",
            "nvmlDeviceGetMemoryInfo_v2().total",
        ),
        "memory_total",
    ),
    Gauge(
        of_gpu(
            "gpu_memory_used_bytes",
            "Device memory that is allocated, without what the driver reserves (with it on drivers before 510). Absent where it is the machine's.",
            "nvmlDeviceGetMemoryInfo_v2().used",
        ),
        "memory_used",
    ),
    Gauge(
        of_gpu(
            "gpu_memory_reserved_bytes",
            "Device memory that the driver and the firmware reserve. Absent on drivers before 510.",
            "nvmlDeviceGetMemoryInfo_v2().reserved",
        ),
        "memory_reserved",
    ),
    Gauge(
        of_gpu(
            "gpu_compute_mode",
            "Who may compute: 0 anyone, 2 nobody, 3 one process. Absent unless details are asked for.",
            "nvmlDeviceGetComputeMode",
        ),
        "compute_mode",
    ),
    Gauge(
        of_gpu(
            "gpu_persistence_mode",
            "Whether the driver stays loaded without a process that uses it. Absent unless details are asked for.",
            "nvmlDeviceGetPersistenceMode",
        ),
        "persistence_mode",
    ),
    Gauge(_PROCESSES, "processes_running"),
    Gauge(_PROCESSES, "processes_drawing"),
)

# Power, energy, temperature, clocks and what holds them back.

ENERGY_READING = "energy_millijoules"
INTEGRAL_READING = "power_joules"
COUNTER_SOURCE, INTEGRAL_SOURCE = "nvml_counter", "nvml_power"

_MOST_WATTS = 10_000.0
"""Far above any card; a counter that grows faster gives garbage."""

ENERGY_RULE = CounterRule(scale=0.001, most_per_second=_MOST_WATTS, from_zero=True)
# A counter of seconds cannot run faster than the clock; one that does is another metric under the same id.
_SECONDS = CounterRule(scale=1e-9, most_per_second=1.0, withdraw=True)
# Most machines never see these, and nobody waits for them: eight GPUs would have 24 series of zeros.
_RARE = frozenset({"board_limit", "reliability", "sync_boost"})

ENERGY = of_gpu(
    "gpu_energy_joules_total",
    "Energy of the card since the exporter began to count; source tells whether the card counts it (nvml_counter, read every 10 s, with power samples in between) or power was integrated (nvml_power).",
    "nvmlDeviceGetTotalEnergyConsumption / 1000, corrected for wraps and resets",
    "source",
)
_POWER_LIMIT = of_gpu(
    "gpu_power_limit_watts",
    "Limits of the card's power: enforced now, by default; with details also as set by management, and the least and most that can be set.",
    "nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementDefaultLimit and others, / 1000",
    "limit",
)
_TEMPERATURE = of_gpu(
    "gpu_temperature_celsius",
    "Temperature of the chip, and of its memory where there is a sensor.",
    "nvmlDeviceGetTemperatureV, field 82",
    "sensor",
)
_MARGIN = of_gpu(
    "gpu_temperature_margin_celsius",
    "How far the temperature is from the nearest limit (threshold nearest); with details also where each limit lies relative to it, negative beyond it. Absent before Ada.",
    "nvmlDeviceGetMarginTemperature, fields 193 to 196",
    "threshold",
)

_POWER: tuple[Row, ...] = (
    Gauge(
        of_gpu(
            "gpu_power_watts",
            "Power of the card: the mean of the last second on Ampere (without GA100) and later, else of the moment.",
            "nvmlDeviceGetPowerUsage / 1000, else field 185",
        ),
        "power",
    ),
    Gauge(
        of_gpu(
            "gpu_power_instant_watts",
            "Power of the card at the moment. Absent on Turing and older, and on drivers before 525.",
            "field 186 / 1000",
        ),
        "power_instant",
    ),
    Gauge(
        of_gpu(
            "gpu_power_min_watts",
            "The least power of all samples in the window.",
            "nvmlDeviceGetSamples(TOTAL_POWER_SAMPLES)",
            "window",
        ),
        "power_min",
        windowed=True,
    ),
    Gauge(
        of_gpu(
            "gpu_power_max_watts",
            "The highest power of all samples in the window.",
            "nvmlDeviceGetSamples(TOTAL_POWER_SAMPLES)",
            "window",
        ),
        "power_max",
        windowed=True,
    ),
    Gauge(_POWER_LIMIT, "power_limit"),
    Gauge(_TEMPERATURE, "temperature"),
    Gauge(_TEMPERATURE, "temperature_memory"),
    Gauge(
        of_gpu(
            "gpu_temperature_threshold_celsius",
            "Temperature at which the card slows down; with details also the other limits. Absent where there are margins only, as on data centre cards from Hopper on.",
            "nvmlDeviceGetTemperatureThreshold",
            "threshold",
        ),
        "temperature_threshold",
    ),
    Gauge(_MARGIN, "temperature_margin"),
    Gauge(_MARGIN, "temperature_limit"),
    Gauge(
        of_gpu(
            "gpu_clock_hertz",
            "Clock of the SMs and of the memory; with details also graphics and video.",
            "nvmlDeviceGetClockInfo * 1e6",
            "clock",
        ),
        "clock",
    ),
    Gauge(
        of_gpu(
            "gpu_clock_max_hertz",
            "The highest that each clock can be. Absent unless details are asked for.",
            "nvmlDeviceGetMaxClockInfo * 1e6",
            "clock",
        ),
        "clock_max",
    ),
    Gauge(
        of_gpu(
            "gpu_clocks_event_active",
            "Whether a reason holds the clocks back at the moment; the counter of seconds misses nothing. Absent unless details are asked for.",
            "nvmlDeviceGetCurrentClocksEventReasons & nvmlDeviceGetSupportedClocksEventReasons",
            "reason",
        ),
        "reasons",
    ),
    Count(
        of_gpu(
            "gpu_clocks_event_seconds_total",
            "Time in which a reason held the clocks back, since the driver was loaded. Absent for a reason that the driver does not count, and for one that ran faster than the clock; sw_thermal, hw_thermal and hw_power_brake before driver 575, where thermal is all heat; board_limit, reliability and sync_boost also as long as they never did.",
            "fields 74 to 79 and 269 to 271 (251 to 253 of the drivers 575 to 580.65), ns / 1e9",
            "reason",
        ),
        "throttle_nanoseconds",
        _SECONDS,
        rare=_RARE,
    ),
    Gauge(
        of_gpu(
            "gpu_performance_state",
            "Performance state: 0 is the fastest, 15 the slowest.",
            "nvmlDeviceGetPerformanceState",
        ),
        "performance_state",
    ),
    Gauge(
        of_gpu(
            "gpu_fan_speed_ratio",
            "How fast each fan is meant to turn. Absent on passive cards.",
            "nvmlDeviceGetFanSpeed_v2 / 100",
            "fan",
        ),
        "fan_speed",
    ),
)

# What the SMs, tensor cores and memory really do. Every ratio is the mean over the time between two samples, at most
# a few seconds; nothing is missed in between.

_GPM = "Absent before Hopper, on a divided GPU (MIG) and where GPM is switched off."
_CYCLES_ABSENT = (
    "Absent unless details are asked for, before Hopper, on most drivers and on a divided GPU (MIG)."
)
# 1,000 SMs at 5 GHz; a counter of 53 exact bits loses single cycles after hours, which no rate can see.
_CYCLES = CounterRule(most_per_second=5e12)

_ACTIVITY: tuple[Row, ...] = (
    Gauge(
        of_gpu(
            "gpu_graphics_activity_ratio",
            f"Share of time in which any compute or graphics work was there. {_GPM}",
            "GPM 1 / 100",
        ),
        "graphics_activity",
    ),
    Gauge(
        of_gpu(
            "gpu_sm_activity_ratio",
            f"Share of SM cycles in which at least one warp was resident, over all SMs. {_GPM}",
            "GPM 2 / 100",
        ),
        "sm_activity",
    ),
    Gauge(
        of_gpu(
            "gpu_sm_occupancy_ratio",
            f"Resident warps as a share of what the SMs could hold. {_GPM}",
            "GPM 3 / 100",
        ),
        "sm_occupancy",
    ),
    Gauge(
        of_gpu(
            "gpu_tensor_activity_ratio",
            f"Share of SM cycles in which tensor cores worked: any of them, or a pipe (hmma for 16 and 8 bits, imma for integers; with details dmma, dfma). {_GPM}",
            "GPM 5 any, 6 dfma, 7 hmma, 8 dmma, 9 imma / 100",
            "pipe",
        ),
        "tensor_activity",
    ),
    Gauge(
        of_gpu(
            "gpu_pipe_activity_ratio",
            f"Share of SM cycles in which a pipe outside the tensor cores worked: fp32, fp16; with details fp64, int. {_GPM}",
            "GPM 11 fp64, 12 fp32, 13 fp16, 4 int / 100",
            "pipe",
        ),
        "pipe_activity",
    ),
    Gauge(
        of_gpu(
            "gpu_dram_activity_ratio",
            f"Memory bandwidth in use as a share of what is possible. {_GPM}",
            "GPM 10 / 100",
        ),
        "dram_activity",
    ),
    Count(
        of_gpu(
            "gpu_sm_cycles_total",
            f"Cycles of all SMs: elapsed, and active ones with a resident warp. {_CYCLES_ABSENT}",
            "GPM 248, 249",
            "state",
        ),
        "sm_cycles",
        _CYCLES,
    ),
    Count(
        of_gpu(
            "gpu_tensor_cycles_total",
            f"Cycles in which tensor cores worked, any of them or a pipe. {_CYCLES_ABSENT}",
            "GPM 250 any, 251 dmma, 252 hmma, 253 imma, 254 dfma",
            "pipe",
        ),
        "tensor_cycles",
        _CYCLES,
    ),
)

ROWS: tuple[Row, ...] = (*_USE, *_POWER, *_ACTIVITY)
