"""The families of energy, carbon, water and cost: what they are.

Used in the sidecar by the energy ledger, which fills them. PUE, carbon intensity and prices are families of
their own and never part of energy or power; what is not configured is absent.
"""

from __future__ import annotations

from exporter.families import FamilySpec

_RUN = "Absent as long as nothing of it could be attributed, a while after the run's end, and while it cannot be kept."

COUNTING = FamilySpec(
    "exporter_energy_counting",
    "gauge",
    "Whether this exporter counts the energy of its machine (1), or another one on it does (0).",
    source="record lock in shared memory",
)
SOURCE_INFO = FamilySpec(
    "exporter_energy_source_info",
    "info",
    "What the energy of a device is read from; measured is false for a model.",
    ("component", "device", "source", "measured", "name", "index"),
    source="collectors of energy",
)
RESOLUTION = FamilySpec(
    "exporter_energy_resolution_seconds",
    "gauge",
    "Measured time between two changes of the device's energy counter. Absent where it could not be measured.",
    ("device",),
    unit="seconds",
    source="smallest time between changes, over at least 10",
)
GAP = FamilySpec(
    "exporter_energy_gap_seconds_total",
    "counter",
    "Time without a reading of the device's energy; what was used in it is counted where the counter tells later. Reasons: permission, lost, error, suspended.",
    ("component", "device", "reason"),
    unit="seconds",
    source="collectors of energy",
)
RESETS = FamilySpec(
    "exporter_energy_resets_total",
    "counter",
    "Corrections of the device's energy counter: wrap (nothing is lost), reset, backwards and jump (bridged with the last power). Absent before the first of its reason.",
    ("device", "reason"),
    source="collectors of energy",
)
CROSSCHECK = FamilySpec(
    "exporter_energy_crosscheck_ratio",
    "gauge",
    "Energy by the device's counter divided by its power over time, over 5 minutes; 1 where both agree. Absent without two independent sources, and in the first 5 minutes.",
    ("device",),
    unit="ratio",
    source="energy counter / integral of power",
)
COVERAGE = FamilySpec(
    "exporter_energy_coverage_ratio",
    "gauge",
    "Share of the time since the exporter's start in which the component's energy was measured; a model counts as 0. Absent without such devices.",
    ("component",),
    unit="ratio",
    source="readings / uptime",
)
GPU_IDLE = FamilySpec(
    "gpu_power_idle_watts",
    "gauge",
    "Power of a GPU without work, by the way in which it is known: before_start (tenth percentile while no process held it), min_seen. A method is absent as long as it knows nothing.",
    ("gpu", "uuid", "method"),
    unit="watts",
    source="energy / time",
)
ENERGY = FamilySpec(
    "training_energy_joules_total",
    "counter",
    f"Energy of the run on this machine, by the way in which its share was found: exclusive, sm_share, mig_share, memory_share, cpu_share, whole. {_RUN}",
    ("run", "component", "method"),
    unit="joules",
    source="sum of share * energy of each device",
)
SHARE = FamilySpec(
    "training_energy_share_ratio",
    "gauge",
    "The run's share of a device's energy in the last interval. Absent where it has none or none could be found.",
    ("run", "component", "device"),
    unit="ratio",
    source="see training_energy_joules_total",
)
PUE = FamilySpec(
    "training_pue_ratio",
    "gauge",
    "Energy of the site for each joule of its machines. Absent when not configured.",
    ("source",),
    unit="ratio",
    source="configuration",
)
INTENSITY = FamilySpec(
    "training_carbon_intensity_grams_per_joule",
    "gauge",
    "Carbon intensity of electricity in force. Absent when not configured, and before the first entry of the file.",
    ("zone", "source", "factor", "kind"),
    source="configuration or its file, g/kWh / 3.6e6",
)
INTENSITY_TIME = FamilySpec(
    "training_carbon_intensity_last_update_timestamp_seconds",
    "gauge",
    "Since when the carbon intensity in force applies, Unix time. Absent for a number of the configuration.",
    ("zone", "source"),
    unit="seconds",
    source="the file's entry in force, or its time of change",
)
CARBON = FamilySpec(
    "training_carbon_grams_total",
    "counter",
    f"CO2 equivalent of the run's energy, at the PUE (where configured) and the carbon intensity of each moment. {_RUN}",
    ("run", "component"),
    unit="grams",
    source="sum of energy * PUE * carbon intensity",
)
EMBODIED = FamilySpec(
    "training_embodied_carbon_grams_total",
    "counter",
    f"The run's part of what making the devices has emitted. {_RUN}",
    ("run", "component"),
    unit="grams",
    source="sum of embodied carbon / lifetime * time * share",
)
WATER = FamilySpec(
    "training_water_liters_total",
    "counter",
    f"Water for the run's energy: site (cooling, of the machines' energy alone) and source (making electricity, times the PUE). {_RUN}",
    ("run", "scope"),
    unit="liters",
    source="sum of energy * WUE; sum of energy * PUE * EWIF",
)
PRICE = FamilySpec(
    "training_electricity_price_per_joule",
    "gauge",
    "Price of electricity in force. Absent when not configured.",
    ("currency", "source"),
    source="configuration, per kWh / 3.6e6",
)
DEVICE_PRICE = FamilySpec(
    "training_device_price_per_second",
    "gauge",
    "Rent of a device, or of the machine (node). Absent when not configured.",
    ("currency", "device_type"),
    source="configuration, per hour / 3600",
)
COST = FamilySpec(
    "training_cost_total",
    "counter",
    f"Money for the run on this machine: electricity (times the PUE, where configured) and device_time. {_RUN}",
    ("run", "kind", "currency"),
    source="sum of energy * PUE * price; sum of time * price * share",
)

_WORK = "Absent where the job does not tell its training, where no source of energy is read, and as training_energy_joules_total."
PHASE_ENERGY = FamilySpec(
    "training_phase_energy_joules_total",
    "counter",
    f"Energy of the run on this machine by what its processes did, split by the time in each phase (method: time_share). With the phase unattributed it sums to the run's energy. {_WORK}",
    ("run", "phase", "component", "method"),
    unit="joules",
    source="energy of an interval * time in the phase / time",
)
PRODUCTIVE_ENERGY = FamilySpec(
    "training_productive_energy_joules_total",
    "counter",
    f"Energy of work that a successful save covers, or whose process did all that it was to do. {_WORK}",
    ("run",),
    unit="joules",
    source="energy of work * share of it that became productive",
)
WASTED_ENERGY = FamilySpec(
    "training_wasted_energy_joules_total",
    "counter",
    f"Energy of the run that did not advance the training for good, by the causes of training_badput_seconds_total; other has what could be attributed to no phase. With productive energy, and that of work whose fate is open, it sums to the run's energy. {_WORK}",
    ("run", "cause"),
    unit="joules",
    source="energy of phases, energy of work * share of it that was lost",
)

SPECS = (
    COUNTING,
    SOURCE_INFO,
    RESOLUTION,
    GAP,
    RESETS,
    CROSSCHECK,
    COVERAGE,
    GPU_IDLE,
    ENERGY,
    SHARE,
    PUE,
    INTENSITY,
    INTENSITY_TIME,
    CARBON,
    EMBODIED,
    WATER,
    PRICE,
    DEVICE_PRICE,
    COST,
    PHASE_ENERGY,
    PRODUCTIVE_ENERGY,
    WASTED_ENERGY,
)
