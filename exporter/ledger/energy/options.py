"""Options of the energy ledger: attribution, carbon and cost.

No option about carbon or cost has a default: a value that is not configured is absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from exporter.config.options import Duration, Notation, Range, option

JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0
MAX_GRAMS_PER_KWH = 10_000.0
"""Maximum carbon intensity. A larger number is probably in a different unit."""

Watts = Annotated[float, Range(0, 1e6)]
Amount = Annotated[float, Range(0, 1e9)]
Currency = Annotated[str, Notation("a currency by its three letters, such as EUR", "^[A-Z]{3}$")]


@dataclass(frozen=True, slots=True)
class Intensity:
    """Carbon intensity of electricity."""

    grams_per_joule: float
    source: Literal["config", "file"]
    modified_at: float | None = None  # modification time of the file, Unix time


@dataclass(frozen=True, slots=True)
class EnergyOptions:
    """Attribution of energy to runs, carbon intensity and prices."""

    enabled: bool = option(
        True, "Attribute energy to the runs. collectors.rapl reads the energy counters of the CPUs."
    )
    interval: Annotated[Duration, Range(0.1, 300)] = option(5.0, "Interval of the attribution.")
    whole_machine: bool = option(
        False,
        "Attribute all energy of the machine to the run, if there is a single run on the machine. Otherwise, a run "
        "receives the share of its processes.",
    )
    lock_dir: Path = option(
        Path("/dev/shm"),  # noqa: S108  (the lock file contains no data, see exporter.ledger.energy.node_lock)
        "Directory of the lock that lets a single exporter count the energy of a machine. Exporters in different containers "
        "must share the directory.",
        restart=True,
    )
    cpu_idle_watts: Watts | None = option(None, "Measured power of an idle CPU package.", restart=True)
    cpu_tdp_watts: Watts | None = option(
        None,
        "Thermal design power of all CPU packages together. If no energy counter is readable, a model estimates the energy "
        "from this power, with source=tdp_model. The error of the model is up to 40 %.",
        restart=True,
    )
    pue: Annotated[float, Range(1, 10)] | None = option(
        None, "Power usage effectiveness (PUE): energy of the site per joule of the machines."
    )
    carbon_intensity: Annotated[float, Range(0, MAX_GRAMS_PER_KWH)] | None = option(
        None, "Grams of CO2 equivalent per kWh of electricity."
    )
    carbon_intensity_file: Path | None = option(
        None,
        "File with the carbon intensity as a number, instead of carbon_intensity. Reloaded after each change.",
    )
    carbon_zone: str = option("", "Name of the grid, published as a label.")
    carbon_factor: Literal["direct", "lifecycle"] | None = option(
        None, "Emissions that the intensity includes: direct emissions, or emissions of the whole life cycle."
    )
    carbon_kind: Literal["average", "marginal"] | None = option(
        None, "Kind of the intensity: of the average kWh, or of an additional kWh (marginal)."
    )
    currency: Currency | None = option(None, "Currency of the prices, published as a label.")
    electricity_price: Amount | None = option(None, "Price of electricity per kWh.")
    gpu_hour_price: Amount | None = option(None, "Price of a GPU per hour.", example=2.5)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield contradictions: prices without a currency, two carbon intensities."""
        if self.currency is None and (self.electricity_price is not None or self.gpu_hour_price is not None):
            yield "currency", "is needed for prices"
        if self.carbon_intensity is not None and self.carbon_intensity_file is not None:
            yield "carbon_intensity_file", "cannot be combined with carbon_intensity: choose one"

    @property
    def configured_intensity(self) -> Intensity | None:
        """Carbon intensity from the configuration, or None."""
        grams_per_kwh = self.carbon_intensity
        return None if grams_per_kwh is None else Intensity(grams_per_kwh / JOULES_PER_KWH, "config")

    @property
    def price_per_joule(self) -> float | None:
        """Price of electricity; None if not configured."""
        return None if self.electricity_price is None else self.electricity_price / JOULES_PER_KWH

    @property
    def gpu_price_per_second(self) -> float | None:
        """Price of a GPU; None if not configured."""
        return None if self.gpu_hour_price is None else self.gpu_hour_price / SECONDS_PER_HOUR
