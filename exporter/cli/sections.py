"""The sections of the configuration about energy, goodput and GPUs.

Used in the sidecar by `configuration`. Nothing has a default that stands for a place, a supplier or a device: what is
not said is absent from the metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from exporter.collectors.gpu.options import GpuOptions
from exporter.config.options import REQUIRED, Duration, Notation, Range, option
from exporter.ledger.energy.tariffs import DevicePrice, EmbodiedCarbon, Tariffs
from exporter.ledger.families.run_info import PeakSetting
from exporter.ledger.goodput.sessions import GoodputOptions
from exporter.replay.machines import is_machine_file, unknown_machine

Watts = Annotated[float, Range(0, 1e6)]
Amount = Annotated[float, Range(0, 1e9)]
Litres = Annotated[float, Range(0, 1000)]
Currency = Annotated[str, Notation("a currency by its three letters, such as EUR", "^[A-Z]{3}$")]

_DEVICE = (
    "Name of the device as exporter_energy_source_info has it, * for any characters; or node for the machine "
    "as a whole. The first that fits wins."
)


@dataclass(frozen=True, slots=True)
class DevicePriceSetting:
    """What a device is rented for."""

    device: str = option(REQUIRED, _DEVICE, example="*H100*")
    per_hour: Amount = option(REQUIRED, "Price of one for an hour.", example=2.5)


@dataclass(frozen=True, slots=True)
class EmbodiedCarbonSetting:
    """What making a device has emitted."""

    device: str = option(REQUIRED, _DEVICE, example="*H100*")
    kilograms: Amount = option(REQUIRED, "CO2 equivalent of one.", example=164.0)
    lifetime: Annotated[Duration, Range(3600)] = option(
        REQUIRED, "Time of use over which it is spread.", example=4 * 365 * 86400.0
    )


@dataclass(frozen=True, slots=True)
class Energy:
    """What energy is, and what it costs."""

    enabled: bool = option(
        True, "Whether energy is divided among the runs; collectors.rapl reads the CPUs' counters."
    )
    interval: Annotated[Duration, Range(0.1, 300)] = option(
        5.0, "Time from the start of one division to the next."
    )
    whole_machine: bool = option(
        False,
        "true: while one run is alone on the machine, all of its energy is that run's. Otherwise what "
        "its processes are seen to use.",
    )
    lock_dir: Path = option(
        Path("/dev/shm"),  # noqa: S108  (see exporter.ledger.energy.node_lock)
        "Directory in which the exporters of a machine agree on the one that counts its energy; "
        "containers must share it.",
        restart=True,
    )
    cpu_idle_watts: Watts | None = option(
        None, "Power of one CPU package without work, where somebody has measured it.", restart=True
    )
    cpu_tdp_watts: Watts | None = option(
        None,
        "Thermal design power of all CPU packages together. Makes a model stand in where no counter can "
        "be read, with source=tdp_model; such models are wrong by up to 40 %.",
        restart=True,
    )
    pue: Annotated[float, Range(1, 10)] | None = option(
        None, "Power usage effectiveness: what the site draws for each joule here."
    )
    carbon_intensity: Annotated[float, Range(0, 10_000)] | None = option(
        None, "Grams of CO2 equivalent per kWh of electricity."
    )
    carbon_intensity_file: Path | None = option(
        None,
        "File with the same instead, read whenever it changes: one number, or CSV lines or a JSON list of "
        "time and number; times in ISO 8601 with a zone, or Unix seconds.",
    )
    carbon_zone: str = option("", "Whose grid that is; a label.")
    carbon_factor: Literal["direct", "lifecycle"] | None = option(
        None, "What that counts: emissions when made, or of the whole life."
    )
    carbon_kind: Literal["average", "marginal"] | None = option(
        None, "Of which kWh: an average one, or one more."
    )
    currency: Currency | None = option(None, "Of all prices; a label.")
    electricity_price: Amount | None = option(None, "Price of a kWh.")
    device_prices: tuple[DevicePriceSetting, ...] = option(
        (), "Rent of devices, for the time in which a run has them."
    )
    site_water: Litres | None = option(None, "Litres of water per kWh that the machines use (WUE).")
    source_water: Litres | None = option(
        None, "Litres of water per kWh of electricity where it is made (EWIF)."
    )
    embodied_carbon: tuple[EmbodiedCarbonSetting, ...] = option(
        (), "Carbon of making the devices, spread over their lifetime."
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


@dataclass(frozen=True, slots=True)
class PeakFlopsSetting:
    """What a device could do at best."""

    device: str = option(
        REQUIRED,
        "Name of the device as gpu_info has it, * for any characters. The first that fits wins, and goes "
        "before the table.",
        example="*H100*",
    )
    flops: Annotated[float, Range(1, 1e21)] = option(
        REQUIRED, "Dense floating-point operations per second.", example=9.89e14
    )
    dtype: Literal["bf16", "fp16", "fp8", "tf32"] | None = option(
        None, "Of which data type; null for whatever the run uses.", example="bf16"
    )


@dataclass(frozen=True, slots=True)
class Goodput:
    """How the time of a training is counted."""

    validation: Literal["badput", "productive"] = option(
        "badput",
        "Whether validation and test are time lost or part of the work; holds from the next attempt on.",
    )
    new_task_after: Annotated[Duration, Range(0, 365 * 86400)] = option(
        3600.0,
        "Without a session tag, a process that begins so long after the end of the last one of its run, at "
        "step 0 and without loading a checkpoint, begins another task; the time between is nobody's.",
    )
    hang_after: Annotated[Duration, Range(1, 86400)] = option(
        60.0,
        "When no step has ended for so long, and for hang_steps usual steps, the run hangs: its last values "
        "(loss, learning rate, ...) are absent until the next step. Phases that take long by nature have five times "
        "as long.",
    )
    hang_steps: Annotated[float, Range(1, 1000)] = option(10.0, "See hang_after.", example=20.0)
    peak_flops: tuple[PeakFlopsSetting, ...] = option(
        (), "What devices could do at best, where the table of the exporter lacks them."
    )

    def options(self) -> GoodputOptions:
        """What the ledger is given."""
        return GoodputOptions(
            validation_is_productive=self.validation == "productive",
            new_after_seconds=self.new_task_after,
            hang_seconds=self.hang_after,
            hang_steps=self.hang_steps,
        )

    def peaks(self) -> tuple[PeakSetting, ...]:
        """What is configured of devices."""
        return tuple(PeakSetting(each.device, each.dtype or "", each.flops) for each in self.peak_flops)


@dataclass(frozen=True, slots=True)
class GpuSection(GpuOptions):
    """Which GPUs are watched, how closely, and when they are published."""

    enabled: bool = option(True, "false: never start the process that loads NVIDIA's library.")
    interval: Annotated[Duration, Range(0.1, 3600)] = option(
        2.0,
        "Time from one publication to the next, up to 5 s while the next scrape is known to be far;"
        " a GPU that is lost or returns is published at once.",
    )
    deadline: Annotated[Duration, Range(0.1, 3600)] = option(
        5.0, "A publication that takes longer has failed; nothing else waits for it."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether there is such a machine to replay; what is in a file is seen when it is read."""
        if self.replay is not None and not is_machine_file(self.replay):
            problem = unknown_machine(self.replay)
            if problem:
                yield "replay", problem
