"""Families of energy, carbon and cost.

PUE, carbon intensity and prices are separate families and never part of energy or power.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from exporter.families import Collected, FamilySpec
from exporter.ledger.energy.devices import DeviceEnergy
from exporter.ledger.energy.options import EnergyOptions, Intensity

_RUN_ABSENT = "before energy is first attributed to the run, *expired*, or *not saved*"
_WORK_ABSENT = (
    "*not instrumented*, if no energy source is readable, or while `training_energy_joules_total` is absent"
)

COUNTING = FamilySpec(
    name="exporter_energy_counting",
    type="gauge",
    help="1 if this exporter counts the energy of the machine, 0 if a different exporter on the machine counts.",
    source="record lock in shared memory",
)
SOURCE_INFO = FamilySpec(
    name="exporter_energy_source_info",
    type="info",
    labels=("component", "device", "source", "measured", "name", "index"),
    help="Energy source of a device. The label measured is false if a model estimates the energy.",
    absent="without a source",
    source="collectors of energy",
)
GAP = FamilySpec(
    name="exporter_energy_gap_seconds_total",
    type="counter",
    unit="seconds",
    labels=("component", "device", "reason"),
    help=(
        "Time without a reading of the device's energy, by component (gpu, cpu, dram, soc) and reason"
        " (permission, error, lost, no_reading)."
    ),
    absent="for a GPU before the first gap",
    source="collectors of energy",
    details=(
        (
            "`permission`, `error`: a reading of a CPU's energy failed. If the counter continued, and the gap is at most"
            " 600 s, the first reading after the gap includes the energy of the gap."
        ),
        (
            "`lost`: more than 600 s passed between two readings of a CPU's counter, without a failed reading. The"
            " energy is not counted."
        ),
        (
            "`no_reading`: the energy of a GPU was not read, for example because the driver does not answer. The time"
            " also grows during the gap. If the GPU has a counter, the energy of the gap is part"
            " of `exporter_energy_gap_joules_total`."
        ),
        "`permission`, `error` and `lost` start at 0.",
    ),
)
GAP_JOULES = FamilySpec(
    name="exporter_energy_gap_joules_total",
    type="counter",
    unit="joules",
    labels=("component", "device", "reason"),
    help=(
        "Energy of the device that is attributed to no run, by component (gpu, cpu, dram, soc) and reason."
    ),
    absent="before the first gap with the reason",
    source="collectors of energy",
    details=(
        (
            "`no_reading`: energy of a gap without readings, which was counted after the gap. No other family"
            " includes it."
        ),
        (
            "`process_not_listed`: a process of a run exited before the driver listed the process, and the"
            " feed does not name the GPU."
        ),
        (
            "`share_unknown`: several runs used the GPU, and the driver reports neither utilization nor"
            " memory of the processes."
        ),
        "`state`: the state of the run is unreadable.",
    ),
)
RESETS = FamilySpec(
    name="exporter_energy_resets_total",
    type="counter",
    labels=("device", "reason"),
    help="Corrections of the device's energy counter, by reason.",
    absent="before the first correction with the reason",
    source="collectors of energy",
    details=(
        "`wrap`: the counter wrapped; no energy is lost.",
        (
            "`reset`, `backwards`, `jump`: the energy of the interval is estimated from the last power; 0 if the power is"
            " unknown."
        ),
    ),
)
CROSSCHECK = FamilySpec(
    name="exporter_energy_crosscheck",
    type="gauge",
    labels=("device",),
    help=(
        "Energy of the device's counter divided by the integral of the device's power over 5 minutes; 1 if"
        " both agree."
    ),
    absent="without two independent sources, or in their first 270 s",
    source="energy counter / integral of power",
)
GPU_IDLE = FamilySpec(
    name="gpu_power_idle_watts",
    type="gauge",
    unit="watts",
    labels=("gpu", "uuid", "method"),
    help="Power of an idle GPU, by method.",
    absent="before the method has a value",
    source="energy / time",
    details=(
        "`before_start`: tenth percentile of the power without processes on the GPU.",
        "`min_seen`: minimum of the power, once the maximum is at least twice the minimum.",
    ),
)
ENERGY = FamilySpec(
    name="training_energy_joules_total",
    type="counter",
    unit="joules",
    labels=("run", "component", "method"),
    help="Energy of the run on this machine, by component (gpu, cpu, dram, soc) and method of attribution.",
    absent=_RUN_ABSENT,
    source="sum of share * energy of each device",
    details=(
        "`exclusive`: no other run uses the GPU.",
        "`sm_share`: in proportion to the SM utilization of the processes on the GPU.",
        (
            "`memory_share`: in proportion to the memory of the processes on the GPU (component `gpu`), or to"
            " the resident memory of the run (component `dram`)."
        ),
        "`cpu_share`: in proportion to CPU time; idle power in proportion to the CPUs of the run.",
        (
            "`whole`: all energy of the machine, with the option `energy.whole_machine` and a single run on"
            " the machine."
        ),
    ),
)
SHARE = FamilySpec(
    name="training_energy_share_ratio",
    type="gauge",
    unit="ratio",
    labels=("run", "component", "device"),
    help="Share of the device's energy that was attributed to the run in the last interval.",
    absent="if the share is unknown",
    source="see training_energy_joules_total",
)
PUE = FamilySpec(
    name="training_power_usage_effectiveness",
    type="gauge",
    labels=("source",),
    help="Power usage effectiveness (PUE): energy of the site per joule of the machines, 1 or more.",
    absent="if not configured",
    source="configuration",
)
INTENSITY = FamilySpec(
    name="training_carbon_intensity_grams_per_joule",
    type="gauge",
    labels=("zone", "source", "factor", "kind"),
    help=(
        "Carbon intensity of electricity: grams of CO2 equivalent per joule, from the configuration"
        " (source=config) or the file (source=file)."
    ),
    absent="if not configured or before the file was read",
    source="configuration or its file, g/kWh / 3.6e6",
)
INTENSITY_TIME = FamilySpec(
    name="training_carbon_intensity_last_update_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=("zone", "source"),
    help="Unix time of the last change of the carbon intensity file.",
    absent="if the configuration contains the number",
    source="modification time of the file",
)
CARBON = FamilySpec(
    name="training_carbon_grams_total",
    type="counter",
    unit="grams",
    labels=("run", "component"),
    help="CO2 equivalent of the run's energy, by component (gpu, cpu, dram, soc).",
    absent=_RUN_ABSENT,
    source="sum of energy * PUE * carbon intensity",
    details=("Includes the PUE, if configured.",),
)
PRICE = FamilySpec(
    name="training_electricity_price_per_joule",
    type="gauge",
    labels=("currency", "source"),
    help="Price of a joule of electricity, in the currency of the label.",
    absent="if not configured",
    source="configuration, per kWh / 3.6e6",
)
GPU_PRICE = FamilySpec(
    name="training_gpu_price_per_second",
    type="gauge",
    labels=("currency",),
    help="Price of a GPU for one second, in the currency of the label.",
    absent="if not configured",
    source="configuration, per hour / 3600",
)
COST = FamilySpec(
    name="training_cost_total",
    type="counter",
    labels=("run", "kind", "currency"),
    help=(
        "Cost of the run on this machine, in the currency of the label, by kind (electricity, device_time)."
    ),
    absent="before energy or GPU time is first attributed to the run, *expired*, or *not saved*",
    source="sum of energy * PUE * price; sum of time on a GPU * price * share",
    details=(
        "`electricity`: energy times price, times the PUE if configured.",
        "`device_time`: GPU hours times price. A lost GPU is charged until the run ends.",
        (
            "After a restart of this exporter, a time without an exporter of at most 600 s is charged to the runs"
            " that ran before and after it. A longer time without an exporter is not charged."
        ),
        (
            "The price of a GPU hour usually includes electricity: configure and add both kinds only if you"
            " pay for them separately."
        ),
    ),
)
PHASE_ENERGY = FamilySpec(
    name="training_phase_energy_joules_total",
    type="counter",
    unit="joules",
    labels=("run", "phase", "component", "method"),
    help=(
        "Energy of the run on this machine by phase, component and method. The sum over all phases, including"
        " unattributed, is the run's energy since the job reports training."
    ),
    absent=_WORK_ABSENT,
    source="energy of an interval * integral of power in the phase / integral of power",
    details=(
        (
            "`power_samples`: the driver's samples of GPU power, usually every 20 ms, are integrated over the phases of"
            " the ranks on the GPU and scaled to the energy counter. Needs a GPU that no other run uses, and samples at"
            " most 200 ms apart on average."
        ),
        "`exclusive`: the interval contains a single phase.",
        "`time_share`: in proportion to the time in each phase.",
    ),
)
PHASE_QUALITY = FamilySpec(
    name="training_phase_energy_quality_ratio",
    type="gauge",
    unit="ratio",
    labels=("run", "phase"),
    help=(
        "Share of a phase's energy, by method power_samples, in intervals of at least 2.5 power samples (50 ms if"
        " the driver samples every 20 ms)."
    ),
    absent="without power samples",
    source="1 - energy in short intervals / energy",
    details=(
        (
            "The energy of shorter intervals is inaccurate, because power samples overlap the neighboring"
            " phases."
        ),
    ),
)
PRODUCTIVE_ENERGY = FamilySpec(
    name="training_productive_energy_joules_total",
    type="counter",
    unit="joules",
    labels=("run",),
    help="Energy of work that a successful save covers, or of a process that completed the training.",
    absent=_WORK_ABSENT,
    source="energy of work * share of the work that became productive",
    details=("With `goodput.validation=productive`, the energy of validation is productive too.",),
)
WASTED_ENERGY = FamilySpec(
    name="training_wasted_energy_joules_total",
    type="counter",
    unit="joules",
    labels=("run", "cause"),
    help="Energy without lasting progress, by the causes of training_badput_seconds_total.",
    absent=_WORK_ABSENT,
    source="energy of phases, energy of work * share of the work that was lost or hung",
    details=(
        "`other` includes the energy outside all phases.",
        (
            "The run's energy since the job reports training is the sum of productive energy, wasted energy"
            " and the energy of uncommitted work."
        ),
    ),
)
SPECS = (
    *(COUNTING, SOURCE_INFO, GAP, GAP_JOULES, RESETS, CROSSCHECK, GPU_IDLE),
    *(ENERGY, SHARE, PUE, INTENSITY, INTENSITY_TIME, CARBON, PRICE, GPU_PRICE, COST),
    *(PHASE_ENERGY, PHASE_QUALITY, PRODUCTIVE_ENERGY, WASTED_ENERGY),
)


def add_devices(collected: Collected, devices: Iterable[DeviceEnergy]) -> None:
    """Add the families of the devices."""
    corrections: Counter[tuple[str, str]] = Counter()
    for device in devices:
        reading = device.reading
        measured_label = "true" if reading.is_measured else "false"
        identity = (reading.component, reading.device, reading.source)
        collected.add(SOURCE_INFO, 1.0, *identity, measured_label, reading.name, reading.index)
        if reading.component == "gpu":
            for method, watts in device.idle.by_method().items():
                collected.add(GPU_IDLE, watts, reading.index, reading.device, method)
        collected.add(CROSSCHECK, device.crosscheck(), reading.device)
        for reason, seconds in reading.gap_seconds.items():
            collected.add(GAP, seconds, reading.component, reading.device, reason)
        for reason, joules in {**reading.gap_joules, **device.gap_joules}.items():
            collected.add(GAP_JOULES, joules, reading.component, reading.device, reason)
        for reason, count in reading.corrections.items():
            corrections[reading.device, reason] += int(count)
    for labels, total in (+corrections).items():
        collected.add(RESETS, total, *labels)


def add_tariffs(collected: Collected, options: EnergyOptions, intensity: Intensity | None) -> None:
    """Add the families of the PUE, the carbon intensity and the prices."""
    collected.add(PUE, options.pue, "config")
    if intensity is not None:
        zone, source = options.carbon_zone, intensity.source
        labels = (zone, source, options.carbon_factor or "", options.carbon_kind or "")
        collected.add(INTENSITY, intensity.grams_per_joule, *labels)
        collected.add(INTENSITY_TIME, intensity.modified_at, zone, source)
    currency = options.currency or ""
    collected.add(PRICE, options.price_per_joule, currency, "config")
    collected.add(GPU_PRICE, options.gpu_price_per_second, currency)
