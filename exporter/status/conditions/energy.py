"""Conditions of energy: counters that contradict the power, gaps in the readings, and a stale carbon intensity."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.status.condition import Condition, Match
from exporter.status.formatting import duration
from exporter.status.view import View

# An energy counter is suspect if its ratio to the integral of the power is outside of this range.
MIN_RATIO = 0.8
MAX_RATIO = 1.25
RANGE_SECONDS = 3600.0
"""Time range of the gaps in the readings."""
MAX_GAP_SECONDS = 60.0
"""Time without a reading in `RANGE_SECONDS` above which the gaps need attention."""
STALE_INTENSITY_SECONDS = 7200.0
"""Age above which a carbon intensity is stale."""


def _suspect_counters(view: View) -> Iterator[Match]:
    titles = {gpu.uuid: gpu.title for gpu in view.gpus}
    for labels, ratio in view.samples.select("exporter_energy_crosscheck"):
        if not MIN_RATIO <= ratio <= MAX_RATIO:
            device = labels["device"]
            facts = {"device": titles.get(device, device), "ratio": f"{ratio:.2f}"}
            yield Match((device,), facts)


def _energy_gaps(view: View) -> Iterator[Match]:
    for (component,) in view.history.list_owners("energy gap"):
        increase = view.history.compute_increase(
            "energy gap", component, seconds=RANGE_SECONDS, starts_at_zero=False
        )
        if increase is not None and increase.amount > MAX_GAP_SECONDS:
            facts = {"component": component, "seconds": duration(increase.amount)}
            yield Match((component,), facts, start=increase.first_at)


def _stale_intensity(view: View) -> Iterator[Match]:
    family = "training_carbon_intensity_last_update_timestamp_seconds"
    for labels, updated_at in view.samples.select(family):
        if labels.get("source") == "file" and view.exporter.now - updated_at > STALE_INTENSITY_SECONDS:
            yield Match((), {}, start=updated_at)


CONDITIONS = (
    Condition(
        alert_name="EnergyCounterSuspect",
        criterion="counter and power outside 0.8 to 1.25 of each other",
        sentence="the energy counter of {device} counts {ratio} times the integral of its power",
        remedy="exclude the joules of the GPU from reports; try another driver",
        find_matches=_suspect_counters,
    ),
    Condition(
        alert_name="EnergyGap",
        criterion="more than 60 s without a reading in an hour, summed over the devices of a component",
        sentence="energy of {component} could not be read for {seconds} of the last hour",
        remedy="see exporter_energy_gap_seconds_total by reason; for permission, install the udev rule",
        find_matches=_energy_gaps,
    ),
    Condition(
        alert_name="CarbonIntensityStale",
        criterion="a carbon intensity from a file older than 7200 s",
        sentence="the carbon intensity is out of date",
        remedy="repair the program that writes the file of energy.carbon_intensity",
        find_matches=_stale_intensity,
    ),
)
