"""The configuration of energy, carbon, water and cost.

Used in the sidecar, as a section of the configuration. Nothing has a default that stands for a place, a supplier
or a device: what is not said is absent from the metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from exporter.config.options import Duration, Notation, Range
from exporter.ledger.energy.tariffs import DevicePrice, EmbodiedCarbon, Tariffs

Watts = Annotated[float, Range(0, 1e6)]
Amount = Annotated[float, Range(0, 1e9)]


def _parse_currency(text: str) -> str:
    if len(text) != 3 or not (text.isascii() and text.isalpha() and text.isupper()):
        raise ValueError(text)
    return text


Currency = Annotated[
    str, Notation("a currency by its three letters, such as EUR", "^[A-Z]{3}$", _parse_currency, str)
]


_DEVICE = {
    "help": "Name of the device as exporter_energy_source_info has it, * for any characters; or node for the machine "
    "as a whole. The first that fits wins.",
    "example": "*H100*",
}


@dataclass(frozen=True, slots=True)
class DevicePriceSetting:
    """What a device is rented for."""

    device: str = field(metadata=_DEVICE)
    per_hour: Amount = field(metadata={"help": "Price of one for an hour.", "example": 2.5})


@dataclass(frozen=True, slots=True)
class EmbodiedCarbonSetting:
    """What making a device has emitted."""

    device: str = field(metadata=_DEVICE)
    kilograms: Amount = field(metadata={"help": "CO2 equivalent of one.", "example": 164.0})
    lifetime: Annotated[Duration, Range(3600)] = field(
        metadata={"help": "Time of use over which it is spread.", "example": 4 * 365 * 86400.0}
    )


@dataclass(frozen=True, slots=True)
class Energy:
    """What energy is, and what it costs."""

    enabled: bool = field(
        default=True,
        metadata={
            "help": "Whether energy is divided among the runs; collectors.rapl reads the CPUs' counters."
        },
    )
    interval: Annotated[Duration, Range(0.1, 300)] = field(
        default=5.0, metadata={"help": "Time from the start of one division to the next."}
    )
    whole_machine: bool = field(
        default=False,
        metadata={
            "help": "true: while one run is alone on the machine, all of its energy is that run's. Otherwise what "
            "its processes are seen to use."
        },
    )
    lock_dir: Path = field(
        default=Path("/dev/shm"),  # noqa: S108  (see exporter.ledger.energy.node_lock)
        metadata={
            "help": "Directory in which the exporters of a machine agree on the one that counts its energy; "
            "containers must share it.",
            "restart": True,
        },
    )
    cpu_idle_watts: Watts | None = field(
        default=None,
        metadata={
            "help": "Power of one CPU package without work, where somebody has measured it.",
            "restart": True,
        },
    )
    cpu_tdp_watts: Watts | None = field(
        default=None,
        metadata={
            "help": "Thermal design power of all CPU packages together. Makes a model stand in where no counter can "
            "be read, with source=tdp_model; such models are wrong by up to 40 %.",
            "restart": True,
        },
    )
    pue: Annotated[float, Range(1, 10)] | None = field(
        default=None, metadata={"help": "Power usage effectiveness: what the site draws for each joule here."}
    )
    carbon_intensity: Annotated[float, Range(0, 10_000)] | None = field(
        default=None, metadata={"help": "Grams of CO2 equivalent per kWh of electricity."}
    )
    carbon_intensity_file: Path | None = field(
        default=None,
        metadata={
            "help": "File with the same instead, read whenever it changes: one number, or CSV lines or a JSON list of "
            "time and number; times in ISO 8601 with a zone, or Unix seconds."
        },
    )
    carbon_zone: str = field(default="", metadata={"help": "Whose grid that is; a label."})
    carbon_factor: Literal["direct", "lifecycle"] | None = field(
        default=None, metadata={"help": "What that counts: emissions when made, or of the whole life."}
    )
    carbon_kind: Literal["average", "marginal"] | None = field(
        default=None, metadata={"help": "Of which kWh: an average one, or one more."}
    )
    currency: Currency | None = field(default=None, metadata={"help": "Of all prices; a label."})
    electricity_price: Amount | None = field(default=None, metadata={"help": "Price of a kWh."})
    device_prices: tuple[DevicePriceSetting, ...] = field(
        default=(), metadata={"help": "Rent of devices, for the time in which a run has them."}
    )
    site_water: Annotated[float, Range(0, 1000)] | None = field(
        default=None, metadata={"help": "Litres of water per kWh that the machines use (WUE)."}
    )
    source_water: Annotated[float, Range(0, 1000)] | None = field(
        default=None, metadata={"help": "Litres of water per kWh of electricity where it is made (EWIF)."}
    )
    embodied_carbon: tuple[EmbodiedCarbonSetting, ...] = field(
        default=(), metadata={"help": "Carbon of making the devices, spread over their lifetime."}
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether prices have a currency, and carbon one source."""
        if self.currency is None and (self.electricity_price is not None or self.device_prices):
            yield "currency", "is needed for prices"
        if self.carbon_intensity is not None and self.carbon_intensity_file is not None:
            yield "carbon_intensity_file", "and carbon_intensity are both given: choose one"

    def tariffs(self) -> Tariffs:
        """What the ledger is given."""
        return Tariffs(
            pue=self.pue,
            carbon_intensity=self.carbon_intensity,
            carbon_intensity_file=self.carbon_intensity_file,
            carbon_zone=self.carbon_zone,
            carbon_factor=self.carbon_factor or "",
            carbon_kind=self.carbon_kind or "",
            electricity_price=self.electricity_price,
            currency=self.currency or "",
            device_prices=tuple(DevicePrice(each.device, each.per_hour) for each in self.device_prices),
            site_water=self.site_water,
            source_water=self.source_water,
            embodied=tuple(
                EmbodiedCarbon(each.device, each.kilograms, each.lifetime) for each in self.embodied_carbon
            ),
        )
