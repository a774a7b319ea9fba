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
"""Upper bound of all grids; a larger number has a different unit."""

Watts = Annotated[float, Range(0, 1e6)]
Amount = Annotated[float, Range(0, 1e9)]
Currency = Annotated[str, Notation("a currency by its three letters, such as EUR", "^[A-Z]{3}$")]


@dataclass(frozen=True, slots=True)
class Intensity:
    """Current carbon intensity."""

    grams_per_joule: float
    source: Literal["config", "file"]
    since: float | None = None  # modification time of the file, Unix time


@dataclass(frozen=True, slots=True)
class EnergyOptions:
    """Attribution of energy to runs, carbon intensity and prices."""

    enabled: bool = option(True, "Attribute energy to the runs. collectors.rapl reads the CPUs' counters.")
    interval: Annotated[Duration, Range(0.1, 300)] = option(5.0, "Interval of the attribution.")
    whole_machine: bool = option(
        False,
        "Attribute all of the machine's energy to a run while it is alone on the machine. Otherwise a run "
        "is attributed the share of its processes.",
    )
    lock_dir: Path = option(
        Path("/dev/shm"),  # noqa: S108  (see exporter.ledger.energy.node_lock)
        "Directory of the lock by which one exporter of a machine counts its energy. Containers must share it.",
        restart=True,
    )
    cpu_idle_watts: Watts | None = option(
        None, "Measured power of one CPU package without work.", restart=True
    )
    cpu_tdp_watts: Watts | None = option(
        None,
        "Thermal design power of all CPU packages together. Enables a model where no counter is readable, "
        "with source=tdp_model. Such models are wrong by up to 40 %.",
        restart=True,
    )
    pue: Annotated[float, Range(1, 10)] | None = option(
        None, "Power usage effectiveness: joules of the site for each joule of the machines."
    )
    carbon_intensity: Annotated[float, Range(0, MAX_GRAMS_PER_KWH)] | None = option(
        None, "Grams of CO2 equivalent per kWh of electricity."
    )
    carbon_intensity_file: Path | None = option(
        None, "File with the carbon intensity as a number instead. The file is read again when it changes."
    )
    carbon_zone: str = option("", "Name of the grid; a label.")
    carbon_factor: Literal["direct", "lifecycle"] | None = option(
        None, "Emissions in the intensity: of operation, or of the whole life cycle."
    )
    carbon_kind: Literal["average", "marginal"] | None = option(
        None, "Whether the intensity is of the average kWh or of an additional kWh."
    )
    currency: Currency | None = option(None, "Currency of the prices; a label.")
    electricity_price: Amount | None = option(None, "Price of a kWh.")
    gpu_hour_price: Amount | None = option(None, "Price of a GPU for an hour.", example=2.5)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield contradictions: prices without a currency, two carbon intensities."""
        if self.currency is None and (self.electricity_price is not None or self.gpu_hour_price is not None):
            yield "currency", "is needed for prices"
        if self.carbon_intensity is not None and self.carbon_intensity_file is not None:
            yield "carbon_intensity_file", "and carbon_intensity are both given: choose one"

    @property
    def configured_intensity(self) -> Intensity | None:
        """Carbon intensity from the configuration, or None."""
        configured = self.carbon_intensity
        return None if configured is None else Intensity(configured / JOULES_PER_KWH, "config")

    @property
    def price_per_joule(self) -> float | None:
        """Price of electricity; None if not configured."""
        return None if self.electricity_price is None else self.electricity_price / JOULES_PER_KWH

    @property
    def gpu_price_per_second(self) -> float | None:
        """Price of a GPU; None if not configured."""
        return None if self.gpu_hour_price is None else self.gpu_hour_price / SECONDS_PER_HOUR
