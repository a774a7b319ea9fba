"""The sections of the configuration: what a user may set, with its defaults and its comment in the example.

Used in the sidecar by `configuration`. Nothing has a default that stands for a place, a supplier or a device: what is
not said is absent from the metrics. Durations are seconds here and `500ms 15s 1m30s 1h` in the file, sizes are bytes here
and `64KiB 10MB` in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from exporter.cli.flags import DEFAULT_ADDRESS
from exporter.cli.logs import Form, Level
from exporter.collectors.gpu.options import GpuOptions
from exporter.config.options import REQUIRED, Duration, Notation, Range, option
from exporter.ledger.energy.tariffs import DevicePrice, EmbodiedCarbon, Tariffs
from exporter.ledger.families.run_info import PeakSetting
from exporter.ledger.goodput.sessions import GoodputOptions
from exporter.replay.machines import is_machine_file, unknown_machine
from exporter.web.listen import ADDRESS, parse_address

_ADDRESS = "an address such as :20909, 127.0.0.1:20909 or [::1]:20909 (port 0 for a free one)"
Address = Annotated[str, Notation(_ADDRESS, ADDRESS, lambda text: parse_address(text).text)]
Watts = Annotated[float, Range(0, 1e6)]
Amount = Annotated[float, Range(0, 1e9)]
Litres = Annotated[float, Range(0, 1000)]
Currency = Annotated[str, Notation("a currency by its three letters, such as EUR", "^[A-Z]{3}$")]


@dataclass(frozen=True, slots=True)
class Web:
    """The HTTP server."""

    listen_address: tuple[Address, ...] = option(
        (DEFAULT_ADDRESS,),
        "Addresses to listen on. An address without a host means all interfaces.",
        restart=True,
    )
    config_file: Path | None = option(
        None,
        "File with TLS certificates and passwords, in the format of Prometheus' exporter-toolkit. "
        "Read again whenever it changes.",
        restart=True,
    )
    enable_lifecycle: bool = option(
        False, "Let POST /-/reload read this file again, as SIGHUP does.", restart=True
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether there is an address, and none twice."""
        if not self.listen_address:
            yield "listen_address", "needs at least one address"
        fixed = [address for address in self.listen_address if not address.endswith(":0")]
        for address in sorted({address for address in fixed if fixed.count(address) > 1}):
            yield "listen_address", f'"{address}" is listed twice'


@dataclass(frozen=True, slots=True)
class Feed:
    """Data from the training processes."""

    dir: Path | None = option(
        None,
        "Directory through which training processes hand over what they record: the value of their "
        "EXPORTER_FEED_DIR. The default is /dev/shm/exporter-<uid>.",
        restart=True,
    )
    interval: Annotated[Duration, Range(0.1, 60)] = option(
        1.0, "How often to read the directory. While no scrape is due soon, every 5 s."
    )
    stale_after: Annotated[Duration, Range(1, 3600)] = option(
        10.0,
        "Age of its file at which the windowed values of a living process are dropped.",
        restart=True,
    )
    linger: Annotated[Duration, Range(0, 30 * 86400)] = option(
        900.0,
        "How long to keep the totals of a process after its end, unless its rank restarts.",
        restart=True,
    )


@dataclass(frozen=True, slots=True)
class State:
    """State that outlives the exporter."""

    dir: Path | None = option(
        None,
        "Directory for totals that continue over restarts. Use shared storage if jobs move between "
        "nodes. The default is the feed directory.",
        restart=True,
    )


@dataclass(frozen=True, slots=True)
class Log:
    """Log lines on standard error."""

    level: Level = option("info", "Lowest level to log.")
    format: Form = option("logfmt", "Format of a line.")


@dataclass(frozen=True, slots=True)
class Exposition:
    """Limits of a scrape."""

    max_series: Annotated[int, Range(100, 1_000_000)] = option(
        15_000,
        "Largest number of series in a scrape. The rest is dropped and counted in "
        "exporter_series_dropped_total, so that a runaway label does not fail the whole scrape.",
        restart=True,
    )


_DEVICE = "Pattern of the device's name in exporter_energy_source_info, or node for the whole machine. The first match wins."


@dataclass(frozen=True, slots=True)
class DevicePriceSetting(DevicePrice):
    """Rent of a device."""

    device: str = option(REQUIRED, _DEVICE, example="*H100*")
    per_hour: Amount = option(REQUIRED, "Price of one device for an hour.", example=2.5)


@dataclass(frozen=True, slots=True)
class EmbodiedCarbonSetting:
    """Carbon emitted by making a device."""

    device: str = option(REQUIRED, _DEVICE, example="*H100*")
    kilograms: Amount = option(REQUIRED, "Kilograms of CO2 equivalent of one device.", example=164.0)
    lifetime: Annotated[Duration, Range(3600)] = option(
        REQUIRED, "Time in use over which to spread them.", example=4 * 365 * 86400.0
    )


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy of the runs, and what it costs."""

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
    device_prices: tuple[DevicePriceSetting, ...] = option(
        (), "Rent of devices for the time in which a run uses them."
    )
    site_water: Litres | None = option(None, "Litres of water per kWh of the machines (WUE).")
    source_water: Litres | None = option(
        None, "Litres of water per kWh of electricity at the power plant (EWIF)."
    )
    embodied_carbon: tuple[EmbodiedCarbonSetting, ...] = option(
        (), "Carbon emitted by making the devices, spread over their lifetime."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether prices have a currency, and carbon one source."""
        if self.currency is None and (self.electricity_price is not None or self.device_prices):
            yield "currency", "is needed for prices"
        if self.carbon_intensity is not None and self.carbon_intensity_file is not None:
            yield "carbon_intensity_file", "and carbon_intensity are both given: choose one"

    def tariffs(self) -> Tariffs:
        """What the ledger is given."""
        given = {each.name: getattr(self, each.name, None) for each in fields(Tariffs)}
        given["embodied"] = tuple(
            EmbodiedCarbon(each.device, each.kilograms, each.lifetime) for each in self.embodied_carbon
        )
        return Tariffs(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class PeakFlopsSetting:
    """Peak performance of a device."""

    device: str = option(
        REQUIRED,
        "Pattern of the device's name in gpu_info. The first match wins over the built-in table.",
        example="*H100*",
    )
    flops: Annotated[float, Range(1, 1e21)] = option(
        REQUIRED, "Dense floating-point operations per second.", example=9.89e14
    )
    dtype: Literal["bf16", "fp16", "fp8", "tf32"] | None = option(
        None, "Data type that they are of. null means any that the run uses.", example="bf16"
    )


@dataclass(frozen=True, slots=True)
class Goodput:
    """How the time of a training is counted."""

    validation: Literal["badput", "productive"] = option(
        "badput",
        "Whether validation and test count as lost time or as work. Takes effect at the next attempt.",
    )
    new_task_after: Annotated[Duration, Range(0, 365 * 86400)] = option(
        3600.0,
        "Without a session tag, a process begins a new task if it starts this long after the end of its run's last "
        "process, at step 0 and without loading a checkpoint. The time between belongs to no task.",
    )
    hang_after: Annotated[Duration, Range(1, 86400)] = option(
        60.0,
        "A run hangs if no step has ended for this long and for hang_steps usual steps. Its last values (loss, "
        "learning rate, ...) are then absent until the next step. Phases that take long by nature have five times "
        "as long.",
    )
    hang_steps: Annotated[float, Range(1, 1000)] = option(10.0, "See hang_after.", example=20.0)
    peak_flops: tuple[PeakFlopsSetting, ...] = option(
        (), "Peak performance of devices that the built-in table lacks."
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
    """Which GPUs to watch, and how closely."""

    enabled: bool = option(True, "Start the process that loads NVIDIA's library.")
    interval: Annotated[Duration, Range(0.1, 3600)] = option(
        2.0,
        "How often to publish. While no scrape is due soon, every 5 s. A GPU that is lost or returns is published "
        "at once.",
    )
    deadline: Annotated[Duration, Range(0.1, 3600)] = option(
        5.0, "A publication that takes longer has failed. Nothing else waits for it."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether there is such a machine to replay; what is in a file is seen when it is read."""
        if self.replay is not None and not is_machine_file(self.replay):
            problem = unknown_machine(self.replay)
            if problem:
                yield "replay", problem
