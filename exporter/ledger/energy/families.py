"""Families of energy, carbon and cost.

PUE, carbon intensity and prices are separate families and never part of energy or power.
"""

from __future__ import annotations

from exporter.families import FamilySpec

_RUN_ABSENT = (
    " Absent before a first share of the run is known, after the retention time of an ended run, and while the"
    " ledger's state cannot be written."
)
_WORK_ABSENT = (
    " Absent if the job does not use exporter.training or no source of energy is readable, and with"
    " training_energy_joules_total."
)

COUNTING = FamilySpec(
    name="exporter_energy_counting",
    type="gauge",
    help="1 if this exporter counts the energy of its machine, 0 if another exporter on the machine does.",
    source="record lock in shared memory",
)
SOURCE_INFO = FamilySpec(
    name="exporter_energy_source_info",
    type="info",
    labels=("component", "device", "source", "measured", "name", "index"),
    help="Source of a device's energy; measured is false for a model. Absent without a source.",
    source="collectors of energy",
)
GAP = FamilySpec(
    name="exporter_energy_gap_seconds_total",
    type="counter",
    unit="seconds",
    labels=("component", "device", "reason"),
    help="Time without a reading of the device's energy, by reason (permission, lost, error). Energy of the gap is"
    " counted later if the device's counter continued. Absent before the first gap of its reason.",
    source="collectors of energy",
)
GAP_JOULES = FamilySpec(
    name="exporter_energy_gap_joules_total",
    type="counter",
    unit="joules",
    labels=("component", "device", "reason"),
    help="Energy of the device that is part of no run, by reason: no_reading (a time without readings, known from the device's"
    " counter afterwards; part of no other family), process_not_listed (a process of a run ended before the driver listed"
    " the process, and the feed does not name its GPU), share_unknown (several runs used the GPU, and the driver reports"
    " neither utilization nor memory of the processes), state (the state of the run is unreadable). Absent before the"
    " first gap of its reason.",
    source="collectors of energy",
)
RESETS = FamilySpec(
    name="exporter_energy_resets_total",
    type="counter",
    labels=("device", "reason"),
    help="Corrections of the device's energy counter: wrap (no loss), reset, backwards and jump (bridged with the last"
    " power). Absent before the first of its reason.",
    source="collectors of energy",
)
CROSSCHECK = FamilySpec(
    name="exporter_energy_crosscheck",
    type="gauge",
    labels=("device",),
    help="Energy of the device's counter divided by the integral of its power over 5 minutes; 1 if both agree. Absent"
    " without two independent sources, and in the first 5 minutes.",
    source="energy counter / integral of power",
)
GPU_IDLE = FamilySpec(
    name="gpu_power_idle_watts",
    type="gauge",
    unit="watts",
    labels=("gpu", "uuid", "method"),
    help="Power of a GPU without work, by method: before_start (tenth percentile while no process used the GPU),"
    " min_seen (minimum, once the maximum was twice the minimum). Absent before the method has a value.",
    source="energy / time",
)
ENERGY = FamilySpec(
    name="training_energy_joules_total",
    type="counter",
    unit="joules",
    labels=("run", "component", "method"),
    help="Energy of the run on this machine, by the method of its share: exclusive, sm_share, memory_share, cpu_share,"
    " whole." + _RUN_ABSENT,
    source="sum of share * energy of each device",
)
SHARE = FamilySpec(
    name="training_energy_share_ratio",
    type="gauge",
    unit="ratio",
    labels=("run", "component", "device"),
    help="The run's share of a device's energy in the last interval. Absent if no share is known.",
    source="see training_energy_joules_total",
)
PUE = FamilySpec(
    name="training_power_usage_effectiveness",
    type="gauge",
    labels=("source",),
    help="Energy of the site per joule of its machines (PUE), 1 or more. Absent if not configured.",
    source="configuration",
)
INTENSITY = FamilySpec(
    name="training_carbon_intensity_grams_per_joule",
    type="gauge",
    labels=("zone", "source", "factor", "kind"),
    help="Current carbon intensity of electricity. Absent if not configured, and before the file was read.",
    source="configuration or its file, g/kWh / 3.6e6",
)
INTENSITY_TIME = FamilySpec(
    name="training_carbon_intensity_last_update_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=("zone", "source"),
    help="Unix time of the last change of the carbon intensity file. Absent for a number in the configuration.",
    source="modification time of the file",
)
CARBON = FamilySpec(
    name="training_carbon_grams_total",
    type="counter",
    unit="grams",
    labels=("run", "component"),
    help="CO2 equivalent of the run's energy at the PUE (if configured) and the current carbon intensity."
    + _RUN_ABSENT,
    source="sum of energy * PUE * carbon intensity",
)
PRICE = FamilySpec(
    name="training_electricity_price_per_joule",
    type="gauge",
    labels=("currency", "source"),
    help="Price of electricity. Absent if not configured.",
    source="configuration, per kWh / 3.6e6",
)
GPU_PRICE = FamilySpec(
    name="training_gpu_price_per_second",
    type="gauge",
    labels=("currency",),
    help="Price of a GPU for a second. Absent if not configured.",
    source="configuration, per hour / 3600",
)
COST = FamilySpec(
    name="training_cost_total",
    type="counter",
    labels=("run", "kind", "currency"),
    help="Cost of the run on this machine: electricity (times the PUE, if configured) and gpu_time. A price of a GPU"
    " hour usually includes electricity: configure and add both only if they are paid separately."
    + _RUN_ABSENT,
    source="sum of energy * PUE * price; sum of time * price * share",
)
PHASE_ENERGY = FamilySpec(
    name="training_phase_energy_joules_total",
    type="counter",
    unit="joules",
    labels=("run", "phase", "component", "method"),
    help="Energy of the run on this machine by phase. Methods: power_samples (GPU power every 20 ms, integrated over"
    " the phases of the ranks on the GPU and scaled to the energy counter; if the run has the GPU for itself), exclusive"
    " (an interval with one phase), time_share (by the time in each phase). With the phase unattributed the sum is the"
    " run's energy." + _WORK_ABSENT,
    source="energy of an interval * integral of power in the phase / integral of power",
)
PHASE_QUALITY = FamilySpec(
    name="training_phase_energy_quality_ratio",
    type="gauge",
    unit="ratio",
    labels=("run", "phase"),
    help="Part of a phase's energy by method power_samples in intervals of 50 ms and more. Energy of shorter intervals"
    " is mixed with the phases before and after. Absent without power samples.",
    source="1 - energy in short intervals / energy",
)
PRODUCTIVE_ENERGY = FamilySpec(
    name="training_productive_energy_joules_total",
    type="counter",
    unit="joules",
    labels=("run",),
    help="Energy of work covered by a successful save, or done by a process that completed the training."
    + _WORK_ABSENT,
    source="energy of work * share of the work that became productive",
)
WASTED_ENERGY = FamilySpec(
    name="training_wasted_energy_joules_total",
    type="counter",
    unit="joules",
    labels=("run", "cause"),
    help="Energy without lasting progress, by the causes of training_badput_seconds_total; other includes energy of no"
    " phase. Productive and wasted energy and the energy of uncommitted work sum to the run's energy."
    + _WORK_ABSENT,
    source="energy of phases, energy of work * share of the work that was lost",
)
SPECS = (
    *(COUNTING, SOURCE_INFO, GAP, GAP_JOULES, RESETS, CROSSCHECK, GPU_IDLE),
    *(ENERGY, SHARE, PUE, INTENSITY, INTENSITY_TIME, CARBON, PRICE, GPU_PRICE, COST),
    *(PHASE_ENERGY, PHASE_QUALITY, PRODUCTIVE_ENERGY, WASTED_ENERGY),
)
