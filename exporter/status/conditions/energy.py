"""Conditions of energy: counters that contradict power, gaps, an old carbon intensity."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.status.condition import Condition, Found
from exporter.status.numbers import duration
from exporter.status.view import View

LOWEST_RATIO, HIGHEST_RATIO = 0.8, 1.25
GAP_SECONDS, MOST_GAP_SECONDS = 3600.0, 60.0
OLD_SECONDS = 7200.0


def _suspect(seen: View) -> Iterator[Found]:
    titles = {gpu.uuid: gpu.title for gpu in seen.gpus}
    for labels, ratio in seen.readings.rows("exporter_energy_crosscheck"):
        if not LOWEST_RATIO <= ratio <= HIGHEST_RATIO:
            device = labels["device"]
            facts = {"device": titles.get(device, device), "ratio": f"{ratio:.2f}"}
            yield Found((device,), facts)


def _gap(seen: View) -> Iterator[Found]:
    for (component,) in seen.past.owners("energy gap"):
        increase = seen.past.increase("energy gap", component, seconds=GAP_SECONDS)
        if increase is not None and increase.count > MOST_GAP_SECONDS:
            facts = {"component": component, "seconds": duration(increase.count)}
            yield Found((component,), facts, since=increase.first)


def _old_intensity(seen: View) -> Iterator[Found]:
    family = "training_carbon_intensity_last_update_timestamp_seconds"
    for labels, at in seen.readings.rows(family):
        if labels.get("source") in {"live", "file"} and seen.about.now - at > OLD_SECONDS:
            yield Found((), {}, since=at)


CONDITIONS = (
    Condition(
        alert="EnergyCounterSuspect",
        condition="counter and power outside 0.8 to 1.25 of each other",
        sentence="the energy counter of {device} counts {ratio} times the integral of its power",
        remedy="exclude the joules of the card from reports; try another driver",
        find=_suspect,
    ),
    Condition(
        alert="EnergyGap",
        condition="more than 60 s of an hour without a reading",
        sentence="energy of {component} could not be read for {seconds} of the last hour",
        remedy="see exporter_energy_gap_seconds_total by reason; for permission, install the udev rule",
        find=_gap,
    ),
    Condition(
        alert="CarbonIntensityStale",
        condition="a carbon intensity from a file older than 7200 s",
        sentence="the carbon intensity is out of date",
        remedy="repair the program that writes the file of energy.carbon_intensity",
        find=_old_intensity,
    ),
)
