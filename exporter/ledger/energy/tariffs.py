"""Tariffs: what a joule and a device's second cost, in money, carbon and water, as far as somebody has said so.

Runs in the sidecar, on the energy ledger's thread. The configuration comes in; factors in base units come out.
Nothing has a default: what was not said is None, and what would need it is absent.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from exporter.collectors.job import EnergyReading
from exporter.config.options import REQUIRED, Duration, Notation, Range, option
from exporter.errors import CollectError

JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0

MAX_BYTES = 4 << 20
HIGHEST = 10_000.0
"""Grams per kWh that no grid has; a larger number is in another unit."""
EARLIEST, LATEST = 946_684_800.0, 4_102_444_800.0
"""2000 and 2100 in Unix time: what lies outside is no time in seconds. `327,5` is a number with a comma for its point."""
CARBON_FILE = "carbon_file"
NODE = "node"
"""The device type of a price for the machine as a whole."""


Watts = Annotated[float, Range(0, 1e6)]
Amount = Annotated[float, Range(0, 1e9)]
Litres = Annotated[float, Range(0, 1000)]
Currency = Annotated[str, Notation("a currency by its three letters, such as EUR", "^[A-Z]{3}$")]
_DEVICE = "Pattern of the device's name in exporter_energy_source_info, or node for the whole machine. The first match wins."


@dataclass(frozen=True, slots=True)
class DevicePrice:
    """Rent of a device."""

    device: str = option(REQUIRED, _DEVICE, example="*H100*")
    per_hour: Amount = option(REQUIRED, "Price of one device for an hour.", example=2.5)


@dataclass(frozen=True, slots=True)
class EmbodiedCarbon:
    """Carbon emitted by making a device."""

    device: str = option(REQUIRED, _DEVICE, example="*H100*")
    kilograms: Amount = option(REQUIRED, "Kilograms of CO2 equivalent of one device.", example=164.0)
    lifetime: Annotated[Duration, Range(3600)] = option(
        REQUIRED, "Time in use over which to spread them.", example=4 * 365 * 86400.0
    )


@dataclass(frozen=True, slots=True)
class Intensity:
    """Carbon intensity in force."""

    grams_per_joule: float
    source: Literal["config", "file"]
    since: float | None = None  # Unix time of the file's entry


@dataclass(frozen=True, slots=True)
class EnergyOptions:
    """What is divided, and all tariffs; of prices and embodied carbon the first that fits a device is its."""

    enabled: bool = option(True, "Divide energy among the runs. collectors.rapl reads the CPUs' counters.")
    interval: Annotated[Duration, Range(0.1, 300)] = option(5.0, "How often to divide it.")
    whole_machine: bool = option(
        False,
        "Attribute all of the machine's energy to a run while it is alone on the machine. Otherwise a run "
        "is attributed what its processes use.",
    )
    lock_dir: Path = option(
        Path("/dev/shm"),  # noqa: S108  (see exporter.ledger.energy.collector)
        "Directory in which the exporters of a machine agree on the one that counts its energy. "
        "Containers must share it.",
        restart=True,
    )
    cpu_idle_watts: Watts | None = option(
        None, "Measured power of one CPU package without work.", restart=True
    )
    cpu_tdp_watts: Watts | None = option(
        None,
        "Thermal design power of all CPU packages together. Enables a model where no counter can be read, "
        "with source=tdp_model. Such models are wrong by up to 40 %.",
        restart=True,
    )
    pue: Annotated[float, Range(1, 10)] | None = option(
        None, "Power usage effectiveness: joules that the site draws for each joule of the machines."
    )
    carbon_intensity: Annotated[float, Range(0, 10_000)] | None = option(
        None, "Grams of CO2 equivalent per kWh of electricity."
    )
    carbon_intensity_file: Path | None = option(
        None,
        "File with the carbon intensity instead, read whenever it changes: one number, or lines of time and "
        "number with a comma between. Times are ISO 8601 with a zone, or Unix seconds.",
    )
    carbon_zone: str = option("", "Name of the grid; a label.")
    carbon_factor: Literal["direct", "lifecycle"] | None = option(
        None, "Emissions that the intensity counts: those of operation, or of the whole life cycle."
    )
    carbon_kind: Literal["average", "marginal"] | None = option(
        None, "Whether the intensity is that of the average kWh or of one more."
    )
    currency: Currency | None = option(None, "Currency of all prices; a label.")
    electricity_price: Amount | None = option(None, "Price of a kWh.")
    device_prices: tuple[DevicePrice, ...] = option(
        (), "Rent of devices for the time in which a run uses them."
    )
    site_water: Litres | None = option(None, "Litres of water per kWh of the machines (WUE).")
    source_water: Litres | None = option(
        None, "Litres of water per kWh of electricity at the power plant (EWIF)."
    )
    embodied_carbon: tuple[EmbodiedCarbon, ...] = option(
        (), "Carbon emitted by making the devices, spread over their lifetime."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether prices have a currency, and carbon one source."""
        if self.currency is None and (self.electricity_price is not None or self.device_prices):
            yield "currency", "is needed for prices"
        if self.carbon_intensity is not None and self.carbon_intensity_file is not None:
            yield "carbon_intensity_file", "and carbon_intensity are both given: choose one"

    def intensity(self, file: CarbonFile | None) -> Intensity | None:
        """Carbon intensity in force; None where it is not known."""
        if file is not None:
            found = file.now()
            return None if found is None else Intensity(found[0] / JOULES_PER_KWH, "file", found[1])
        configured = self.carbon_intensity
        return None if configured is None else Intensity(configured / JOULES_PER_KWH, "config")

    @property
    def price_per_joule(self) -> float | None:
        """Price of electricity; None where it is not known."""
        return None if self.electricity_price is None else self.electricity_price / JOULES_PER_KWH

    def device_price(self, reading: EnergyReading | None) -> float | None:
        """Price per second of a device, or of the machine for None; None where it has none."""
        fitting = (price for price in self.device_prices if _fits(price.device, reading))
        return next((price.per_hour / SECONDS_PER_HOUR for price in fitting), None)

    def embodied_rate(self, reading: EnergyReading | None) -> float | None:
        """Grams per second of a device's lifetime, or of the machine's for None; None where nobody knows."""
        fitting = (each for each in self.embodied_carbon if _fits(each.device, reading))
        return next((1000.0 * each.kilograms / each.lifetime for each in fitting), None)


def _fits(pattern: str, reading: EnergyReading | None) -> bool:
    if reading is None:
        return pattern == NODE
    # Memory goes with its package, and has its name only by chance.
    return pattern != NODE and reading.component != "dram" and fnmatchcase(reading.name, pattern)


class CarbonFile:
    """Carbon intensity of electricity, from a file that somebody else keeps up to date.

    The file is read in every pass. One of

        327.5                                   grams per kWh, as of the file's time of change

        time,grams_per_kwh                      the heading may be left out
        2026-03-01T12:00:00Z,327.5              ISO 8601 with a time zone, or Unix seconds
        2026-03-01T13:00:00+01:00,310

    The last entry whose time has come is in force; entries of the future are a forecast, and wait. A file that
    cannot be understood leaves the last one that could in force, and its age shows. No network, no guessed region:
    before the first entry, and without a file, there is no intensity.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._entries: list[tuple[float, float]] = []

    def look(self) -> None:
        """Read it; raises a CollectError where it cannot be read or understood, and what was in force stays so."""
        try:
            found = self._path.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:  # nobody waits for a pipe
                raise ValueError(f"not a file of at most {MAX_BYTES} bytes")  # noqa: TRY301  # one way out
            self._entries = _entries(self._path.read_text(encoding="utf-8-sig"), found.st_mtime)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            raise CollectError(f"{self._path}: {why or error}", reason=CARBON_FILE) from error

    def now(self) -> tuple[float, float] | None:
        """Give the intensity in force, grams per kWh, and since when, Unix time; None before the first."""
        now = self._clock()
        since, value = max((each for each in self._entries if each[0] <= now), default=(0.0, 0.0))
        return (value, since) if since else None


def _entries(text: str, modified: float) -> list[tuple[float, float]]:
    lines = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    if len(lines) == 1 and len(lines[0]) == 1:
        return [(modified, _grams(lines[0][0]))]
    if lines and math.isnan(_number(lines[0][-1])):
        del lines[0]  # the heading
    if not lines or any(len(line) != 2 for line in lines):
        raise ValueError("expected a number, or lines of time,grams_per_kwh")
    return [(_time(time), _grams(value)) for time, value in lines]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _grams(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= HIGHEST:
        raise ValueError(f"expected grams per kWh from 0 to {HIGHEST:g}, found {text[:40]!r}")
    return value


def _time(text: str) -> float:
    seconds = _number(text)
    if math.isnan(seconds):
        # CPython before 3.11 does not know the Z.
        moment = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
        seconds = math.nan if moment.tzinfo is None else moment.timestamp()
    if not EARLIEST <= seconds < LATEST:
        expected = "a time from 2000 to 2100 with its zone, or Unix seconds"
        raise ValueError(f"expected {expected}, found {text[:40]!r}")
    return seconds
