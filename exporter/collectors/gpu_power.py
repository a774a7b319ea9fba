"""Power, energy, temperature, clocks and what holds them back: families.

Used in the sidecar. The readings come from the NVML child's `power` and `buffers`.

Energy is the hardware's counter. Where there is none, power integrated over time stands in, under another value of
`source`; only one of them grows at a time, so that the sum over the sources is right.
"""

from __future__ import annotations

from exporter.collectors.family import FamilySpec
from exporter.collectors.gpu_counters import CounterRule
from exporter.collectors.gpu_rows import GPU_LABELS, Count, Gauge, Row

ENERGY_READING = "energy_millijoules"
INTEGRAL_READING = "power_joules"
COUNTER_SOURCE, INTEGRAL_SOURCE = "nvml_counter", "nvml_power"

_MOST_WATTS = 10_000.0
"""Far above any card; a counter that grows faster gives garbage."""

ENERGY_RULE = CounterRule(scale=0.001, most_per_second=_MOST_WATTS, from_zero=True)
INTEGRAL_RULE = CounterRule(of_process=True)
# A counter of seconds cannot run faster than the clock; one that does is another metric under the same id.
_SECONDS = CounterRule(scale=1e-9, most_per_second=1.0, withdraw=True)

POWER = FamilySpec(
    "gpu_power_watts",
    "gauge",
    "Power of the card: the mean of the last second on Ampere (without GA100) and later, else of the moment.",
    GPU_LABELS,
    unit="watts",
    source="nvmlDeviceGetPowerUsage / 1000, else field 185",
)
POWER_INSTANT = FamilySpec(
    "gpu_power_instant_watts",
    "gauge",
    "Power of the card at the moment. Absent on Turing and older, and on drivers before 525.",
    GPU_LABELS,
    unit="watts",
    source="field 186 / 1000",
)
POWER_MIN = FamilySpec(
    "gpu_power_min_watts",
    "gauge",
    "The least power of all samples in the window.",
    (*GPU_LABELS, "window"),
    unit="watts",
    source="nvmlDeviceGetSamples(TOTAL_POWER_SAMPLES)",
)
POWER_MAX = FamilySpec(
    "gpu_power_max_watts",
    "gauge",
    "The highest power of all samples in the window.",
    (*GPU_LABELS, "window"),
    unit="watts",
    source="nvmlDeviceGetSamples(TOTAL_POWER_SAMPLES)",
)
ENERGY = FamilySpec(
    "gpu_energy_joules_total",
    "counter",
    "Energy of the card since the exporter began to count; source tells whether the card counts it (nvml_counter) or power was integrated, which misses what is between its samples (nvml_power).",
    (*GPU_LABELS, "source"),
    unit="joules",
    source="nvmlDeviceGetTotalEnergyConsumption / 1000, corrected for wraps and resets",
)
POWER_LIMIT = FamilySpec(
    "gpu_power_limit_watts",
    "gauge",
    "Limits of the card's power: enforced now, by default; with details also as set by management, and the least and most that can be set.",
    (*GPU_LABELS, "limit"),
    unit="watts",
    source="nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementDefaultLimit and others, / 1000",
)
TEMPERATURE = FamilySpec(
    "gpu_temperature_celsius",
    "gauge",
    "Temperature of the chip, and of its memory where there is a sensor.",
    (*GPU_LABELS, "sensor"),
    unit="celsius",
    source="nvmlDeviceGetTemperatureV, field 82",
)
TEMPERATURE_THRESHOLD = FamilySpec(
    "gpu_temperature_threshold_celsius",
    "gauge",
    "Temperature at which the card slows down; with details also the other limits. Absent where there are margins only, as on data centre cards from Hopper on.",
    (*GPU_LABELS, "threshold"),
    unit="celsius",
    source="nvmlDeviceGetTemperatureThreshold",
)
TEMPERATURE_MARGIN = FamilySpec(
    "gpu_temperature_margin_celsius",
    "gauge",
    "How far the temperature is from the nearest limit (threshold nearest); with details also where each limit lies relative to it, negative beyond it. Absent before Ada.",
    (*GPU_LABELS, "threshold"),
    unit="celsius",
    source="nvmlDeviceGetMarginTemperature, fields 193 to 196",
)
CLOCK = FamilySpec(
    "gpu_clock_hertz",
    "gauge",
    "Clock of the SMs and of the memory; with details also graphics and video.",
    (*GPU_LABELS, "clock"),
    unit="hertz",
    source="nvmlDeviceGetClockInfo * 1e6",
)
CLOCK_MAX = FamilySpec(
    "gpu_clock_max_hertz",
    "gauge",
    "The highest that each clock can be. Absent unless details are asked for.",
    (*GPU_LABELS, "clock"),
    unit="hertz",
    source="nvmlDeviceGetMaxClockInfo * 1e6",
)
EVENT_ACTIVE = FamilySpec(
    "gpu_clocks_event_active",
    "gauge",
    "Whether a reason holds the clocks back at the moment; the counter of seconds misses nothing. Absent unless details are asked for.",
    (*GPU_LABELS, "reason"),
    source="nvmlDeviceGetCurrentClocksEventReasons & nvmlDeviceGetSupportedClocksEventReasons",
)
EVENT_SECONDS = FamilySpec(
    "gpu_clocks_event_seconds_total",
    "counter",
    "Time in which a reason held the clocks back, since the driver was loaded. Absent for a reason that the driver does not count, and for one that ran faster than the clock; sw_thermal, hw_thermal and hw_power_brake before driver 575, where thermal is all heat; board_limit, reliability and sync_boost also as long as they never did.",
    (*GPU_LABELS, "reason"),
    unit="seconds",
    source="fields 74 to 79 and 269 to 271 (251 to 253 of the drivers 575 to 580.65), ns / 1e9",
)
PERFORMANCE_STATE = FamilySpec(
    "gpu_performance_state",
    "gauge",
    "Performance state: 0 is the fastest, 15 the slowest.",
    GPU_LABELS,
    source="nvmlDeviceGetPerformanceState",
)
FAN_SPEED = FamilySpec(
    "gpu_fan_speed_ratio",
    "gauge",
    "How fast each fan is meant to turn. Absent on passive cards.",
    (*GPU_LABELS, "fan"),
    unit="ratio",
    source="nvmlDeviceGetFanSpeed_v2 / 100",
)
FAN_RPM = FamilySpec(
    "gpu_fan_rpm",
    "gauge",
    "Revolutions of the first fan in a minute. Absent on passive cards and on drivers before 565.",
    (*GPU_LABELS, "fan"),
    source="nvmlDeviceGetFanSpeedRPM",
)
EDPP = FamilySpec(
    "gpu_edpp_multiplier_ratio",
    "gauge",
    "How far peaks of power may exceed the limit: 1 is not at all. Absent but on data centre cards, and on drivers before 590.",
    GPU_LABELS,
    unit="ratio",
    source="field 274 / 100",
)

# Most machines never see these, and nobody waits for them: eight GPUs would have 24 series of zeros.
_RARE = frozenset({"board_limit", "reliability", "sync_boost"})

ROWS: tuple[Row, ...] = (
    Gauge(POWER, "power"),
    Gauge(POWER_INSTANT, "power_instant"),
    Gauge(POWER_MIN, "power_min", windowed=True),
    Gauge(POWER_MAX, "power_max", windowed=True),
    Gauge(POWER_LIMIT, "power_limit_enforced"),
    Gauge(POWER_LIMIT, "power_limit"),
    Gauge(TEMPERATURE, "temperature"),
    Gauge(TEMPERATURE, "temperature_memory"),
    Gauge(TEMPERATURE_THRESHOLD, "temperature_threshold"),
    Gauge(TEMPERATURE_MARGIN, "temperature_margin"),
    Gauge(TEMPERATURE_MARGIN, "temperature_limit"),
    Gauge(CLOCK, "clock"),
    Gauge(CLOCK_MAX, "clock_max"),
    Gauge(EVENT_ACTIVE, "reasons"),
    Count(EVENT_SECONDS, "throttle_nanoseconds", _SECONDS, rare=_RARE),
    Gauge(PERFORMANCE_STATE, "performance_state"),
    Gauge(FAN_SPEED, "fan_speed"),
    Gauge(FAN_RPM, "fan_rpm"),
    Gauge(EDPP, "edpp_multiplier"),
)
SPECS = (*dict.fromkeys(row.spec for row in ROWS), ENERGY)
