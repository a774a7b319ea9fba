"""The families of energy, carbon, water and cost.

PUE, carbon intensity and prices are families of their own, never part of energy or power; what is not set is absent.
"""

from __future__ import annotations

from dataclasses import replace

from exporter.families import rows

_ABSENT = {
    "": "",
    "run's": " Absent as long as nothing of it could be attributed, a while after the run's end, and while it cannot"
    " be kept.",
    "work's": " Absent where the job does not tell its training, where no source of energy is read, and as"
    " training_energy_joules_total.",
}

SPECS = tuple(
    replace(spec, help=spec.help + _ABSENT[words])
    for spec, words in rows("""
exporter_energy_counting: Whether this exporter counts the energy of its machine (1), or another one on it
    does (0). <- record lock in shared memory
exporter_energy_source_info{component,device,source,measured,name,index}: What the energy of a device is read
    from; measured is false for a model. <- collectors of energy
exporter_energy_gap_seconds_total{component,device,reason}: Time without a reading of the device's energy;
    what was used in it is counted where the counter tells later. Reasons: permission, lost, error. <-
    collectors of energy
exporter_energy_resets_total{device,reason}: Corrections of the device's energy counter: wrap (nothing is
    lost), reset, backwards and jump (bridged with the last power). Absent before the first of its reason. <-
    collectors of energy
exporter_energy_crosscheck_ratio{device}: Energy by the device's counter divided by its power over time, over
    5 minutes; 1 where both agree. Absent without two independent sources, and in the first 5 minutes. <-
    energy counter / integral of power
gpu_power_idle_watts{gpu,uuid,method}: Power of a GPU without work, by the way in which it is known:
    before_start (tenth percentile while no process held it), min_seen (once the most seen was twice as much).
    A method is absent as long as it knows nothing. <- energy / time
training_energy_joules_total{run,component,method} [run's]: Energy of the run on this machine, by the way in
    which its share was found: exclusive, sm_share, memory_share, cpu_share, whole. <-
    sum of share * energy of each device
training_energy_share_ratio{run,component,device}: The run's share of a device's energy in the last interval.
    Absent where it has none or none could be found. <- see training_energy_joules_total
training_pue_ratio{source}: Energy of the site for each joule of its machines. Absent when not configured. <-
    configuration
training_carbon_intensity_grams_per_joule{zone,source,factor,kind}: Carbon intensity of electricity in force.
    Absent when not configured, and before the first entry of the file. <- configuration or its file,
    g/kWh / 3.6e6
training_carbon_intensity_last_update_timestamp_seconds{zone,source}: Since when the carbon intensity in force
    applies, Unix time. Absent for a number of the configuration. <- the file's entry in force, or its time of
    change
training_carbon_grams_total{run,component} [run's]: CO2 equivalent of the run's energy, at the PUE (where
    configured) and the carbon intensity of each moment. <- sum of energy * PUE * carbon intensity
training_embodied_carbon_grams_total{run,component} [run's]: The run's part of what making the devices has
    emitted. <- sum of embodied carbon / lifetime * time * share
training_water_liters_total{run,scope} [run's]: Water for the run's energy: site (cooling, of the machines'
    energy alone) and source (making electricity, times the PUE). <- sum of energy * WUE; sum of energy * PUE
    * EWIF
training_electricity_price_per_joule{currency,source}: Price of electricity in force. Absent when not
    configured. <- configuration, per kWh / 3.6e6
training_device_price_per_second{currency,device_type}: Rent of a device, or of the machine (node). Absent
    when not configured. <- configuration, per hour / 3600
training_cost_total{run,kind,currency} [run's]: Money for the run on this machine: electricity (times the PUE,
    where configured) and device_time. <- sum of energy * PUE * price; sum of time * price * share
training_phase_energy_joules_total{run,phase,component,method} [work's]: Energy of the run on this machine by
    what its processes did. Methods: power_samples (a GPU's power every 20 ms, integrated over the phases of
    the ranks on it and scaled to its counter; where the run has the GPU for itself), exclusive (of an
    interval in one phase), time_share (by the time in each). With the phase unattributed it sums to the run's
    energy. <- energy of an interval * integral of power in the phase / integral of power
training_phase_energy_quality_ratio{run,phase}: Part of a phase's energy of method power_samples in stays of
    50 ms and more (two and a half samples); the rest is mixed with that of the phases before and after, so
    that differences between phases are too small. Absent where nothing was measured. <-
    1 - energy in short stays / energy
training_productive_energy_joules_total{run} [work's]: Energy of work that a successful save covers, or whose
    process did all that it was to do. <- energy of work * share of it that became productive
training_wasted_energy_joules_total{run,cause} [work's]: Energy of the run that did not advance the training
    for good, by the causes of training_badput_seconds_total; other has what could be attributed to no phase.
    With productive energy, and that of work whose fate is open, it sums to the run's energy. <- energy of
    phases, energy of work * share of it that was lost
""").items()
)
(COUNTING, SOURCE_INFO, GAP, RESETS, CROSSCHECK, GPU_IDLE) = SPECS[:6]
(ENERGY, SHARE, PUE, INTENSITY, INTENSITY_TIME, CARBON, EMBODIED) = SPECS[6:13]
(WATER, PRICE, DEVICE_PRICE, COST) = SPECS[13:17]
(PHASE_ENERGY, PHASE_QUALITY, PRODUCTIVE_ENERGY, WASTED_ENERGY) = SPECS[17:]
