"""Tariffs: what a joule and a device's second cost, in money, carbon and water, as far as somebody has said so.

Runs in the sidecar, on the energy ledger's thread. The configuration comes in; factors in base units come out.
Nothing has a default: what was not said is None, and what would need it is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from exporter.collectors.job import EnergyReading
from exporter.ledger.energy.carbon_file import CarbonFile

JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0

NODE = "node"
"""The device type of a price for the machine as a whole."""


@dataclass(frozen=True, slots=True)
class DevicePrice:
    """Rent of each device whose name fits a pattern, or of the machine (`node`)."""

    device: str
    per_hour: float


@dataclass(frozen=True, slots=True)
class EmbodiedCarbon:
    """What making each device whose name fits a pattern, or the machine (`node`), has emitted."""

    device: str
    kilograms: float
    lifetime_seconds: float  # over which it is spread


@dataclass(frozen=True, slots=True)
class Tariffs:
    """All of it; of prices and embodied carbon the first that fits a device is its."""

    pue: float | None = None  # what the site draws for each joule of its machines
    carbon_intensity: float | None = None  # grams per kWh
    carbon_intensity_file: Path | None = None  # a file that has it, instead
    carbon_zone: str = ""
    carbon_factor: Literal["direct", "lifecycle", ""] = ""
    carbon_kind: Literal["average", "marginal", ""] = ""
    electricity_price: float | None = None  # per kWh
    currency: str = ""
    device_prices: tuple[DevicePrice, ...] = ()
    site_water: float | None = None  # litres per kWh of the machines (WUE)
    source_water: float | None = None  # litres per kWh of electricity, where it is made (EWIF)
    embodied: tuple[EmbodiedCarbon, ...] = ()


@dataclass(frozen=True, slots=True)
class Intensity:
    """Carbon intensity in force."""

    grams_per_joule: float
    source: Literal["config", "file"]
    since: float | None = None  # Unix time of the file's entry


class TariffsInForce:
    """The tariffs at the present moment."""

    def __init__(self, tariffs: Tariffs, *, clock: Callable[[], float]) -> None:
        self.tariffs = tariffs
        path = tariffs.carbon_intensity_file
        self._file = None if path is None else CarbonFile(path, clock=clock)

    def look(self) -> None:
        """Bring it up to date.

        Raises:
            CollectError: As `CarbonFile.look`.
        """
        if self._file is not None:
            self._file.look()

    @property
    def intensity(self) -> Intensity | None:
        """Carbon intensity; None where it is not known."""
        if self._file is not None:
            found = self._file.now()
            return None if found is None else Intensity(found[0] / JOULES_PER_KWH, "file", found[1])
        configured = self.tariffs.carbon_intensity
        return None if configured is None else Intensity(configured / JOULES_PER_KWH, "config")

    @property
    def price_per_joule(self) -> float | None:
        """Price of electricity; None where it is not known."""
        price = self.tariffs.electricity_price
        return None if price is None else price / JOULES_PER_KWH

    def device_price(self, reading: EnergyReading | None) -> float | None:
        """Price per second of a device, or of the machine for None; None where it has none."""
        fitting = (price for price in self.tariffs.device_prices if _fits(price.device, reading))
        return next((price.per_hour / SECONDS_PER_HOUR for price in fitting), None)

    def embodied_rate(self, reading: EnergyReading | None) -> float | None:
        """Grams per second of a device's lifetime, or of the machine's for None; None where nobody knows."""
        fitting = (each for each in self.tariffs.embodied if _fits(each.device, reading))
        return next((1000.0 * each.kilograms / each.lifetime_seconds for each in fitting), None)


def _fits(pattern: str, reading: EnergyReading | None) -> bool:
    if reading is None:
        return pattern == NODE
    # Memory goes with its package, and has its name only by chance.
    return pattern != NODE and reading.component != "dram" and fnmatchcase(reading.name, pattern)
