"""Table of the queries of a GPU: call or field value, reading, and tier.

Runs in the NVML child. `device_families.py`, `link_families.py` and `health_families.py` define the family of each
reading. Gauges are in base units; counters are in NVML's units (nanoseconds, KiB), and the sidecar converts them.
Queries that take more than microseconds, or whose values rarely change, are in a slower tier.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.nvml.device import NvmlDevice
from exporter.collectors.gpu.nvml.readings import ENERGY, Labels, PassReadings
from exporter.collectors.gpu.nvml.units import (
    Convert,
    bounded,
    celsius,
    count,
    flag,
    hertz,
    ratio,
    size,
    small,
    temperature,
    watts,
)


class Tier(enum.Enum):
    """Group of queries with a common period. The value is the period in seconds."""

    FAST = 1.0
    FREQUENT = 2.0
    MEDIUM = 10.0  # among others the energy counter, which costs milliseconds of CPU time
    SLOW = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledReading:
    """Name of a reading, and its labels after `gpu` and `uuid`."""

    reading: str
    labels: Labels = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderCall:
    """Call for drivers that do not support the newer call."""

    call: str
    arguments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallQuery:
    """Query by an NVML function that returns one or more values."""

    tier: Tier
    call: str  # pynvml's function
    arguments: tuple[int, ...] = ()  # after the handle
    targets: tuple[LabeledReading, ...]
    convert: Callable[[Any], Sequence[float]]  # returns a value for each target
    older: OlderCall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverVersions:
    """Range of driver versions, both ends included."""

    first_version: tuple[int, int]
    last_version: tuple[int, int] = (1 << 30, 0)  # the default is above all versions


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldQuery:
    """Query by a field value of the whole GPU."""

    tier: Tier
    field: int  # NVML's id
    target: LabeledReading
    convert: Convert = count
    drivers: DriverVersions | None = None  # driver versions in which the id has this meaning; None for all


Query = CallQuery | FieldQuery


def single_value(convert: Convert) -> Callable[[Any], Sequence[float]]:
    """Return a conversion of a result that is a single value."""
    return lambda result: (convert(result),)


MEMORY_V2 = 0x02000028
"""Version of nvmlMemory_v2_t, which reports the memory reserved by the driver separately."""

MEMORY = CallQuery(
    tier=Tier.FAST,
    call="nvmlDeviceGetMemoryInfo",
    arguments=(MEMORY_V2,),
    targets=(LabeledReading(reading="memory_total_bytes"), LabeledReading(reading="memory_used_bytes")),
    convert=lambda info: (size(info.total), size(info.used)),
    older=OlderCall(call="nvmlDeviceGetMemoryInfo"),  # counts the reserved memory as used
)


def _clocks_event(
    field: int,
    reason: str,
    *,
    first_version: tuple[int, int] | None = None,
    last_version: tuple[int, int] = (1 << 30, 0),
) -> FieldQuery:
    """Return the query for the time in which the clocks were reduced for a reason; without `first_version` for all drivers."""
    drivers = None
    if first_version is not None:
        drivers = DriverVersions(first_version=first_version, last_version=last_version)
    return FieldQuery(
        tier=Tier.FAST,
        field=field,
        target=LabeledReading(reading="clocks_event_nanoseconds", labels=(reason,)),
        drivers=drivers,
    )


def _ecc(error_kind: str, location: str, *, error_kind_number: int, location_number: int) -> CallQuery:
    """Return the query for the ECC errors of a kind and location, which have a label value and a number of NVML each."""
    volatile = 0  # since the driver was loaded
    return CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetMemoryErrorCounter",
        arguments=(error_kind_number, volatile, location_number),
        targets=(LabeledReading(reading="ecc_errors", labels=(error_kind, location)),),
        convert=single_value(count),
    )


def _remapped_rows(result: Any) -> tuple[float, ...]:
    """Return the numbers of rows after correctable and uncorrectable errors, and the flags for pending and failed."""
    correctable, uncorrectable, is_pending, has_failed = result
    return small(correctable), small(uncorrectable), flag(is_pending), flag(has_failed)


def _pcie_link(reading: str, label: str, call: str) -> CallQuery:
    return CallQuery(
        tier=Tier.SLOW,
        call=call,
        targets=(LabeledReading(reading=reading, labels=(label,)),),
        convert=single_value(small),
    )


def _pcie_error(field: int, error_kind: str) -> FieldQuery:
    return FieldQuery(
        tier=Tier.SLOW, field=field, target=LabeledReading(reading="pcie_errors", labels=(error_kind,))
    )


QUERIES: tuple[Query, ...] = (
    CallQuery(
        tier=Tier.FREQUENT,
        call="nvmlDeviceGetUtilizationRates",
        targets=(
            LabeledReading(reading="utilization_ratio"),
            LabeledReading(reading="memory_bandwidth_utilization_ratio"),
        ),
        convert=lambda rates: (ratio(rates.gpu), ratio(rates.memory)),
    ),
    MEMORY,
    CallQuery(
        tier=Tier.FAST,
        call="nvmlDeviceGetPowerUsage",
        targets=(LabeledReading(reading="power_watts"),),
        convert=single_value(watts),
    ),
    _clocks_event(74, "sw_power_cap"),
    _clocks_event(75, "thermal"),
    _clocks_event(76, "sync_boost"),
    _clocks_event(77, "board_limit"),
    _clocks_event(78, "low_utilization"),
    _clocks_event(79, "reliability"),
    # Driver 575 added three counters under ids that had been settings of power smoothing in driver 570. Driver 580.82 has
    # the counters under new ids and the settings under the old ids again. The ids have these meanings only in the driver
    # versions given here; other versions are not queried.
    # Source: NVML's change log (570 to 575, 575 to 580); pynvml 12.570, 12.575, 13.580.65, 13.580.82.
    _clocks_event(251, "sw_thermal", first_version=(575, 0), last_version=(580, 65)),
    _clocks_event(252, "hw_thermal", first_version=(575, 0), last_version=(580, 65)),
    _clocks_event(253, "hw_power_brake", first_version=(575, 0), last_version=(580, 65)),
    _clocks_event(269, "sw_thermal", first_version=(580, 82)),
    _clocks_event(270, "hw_thermal", first_version=(580, 82)),
    _clocks_event(271, "hw_power_brake", first_version=(580, 82)),
    CallQuery(
        tier=Tier.FREQUENT,
        call="nvmlDeviceGetTemperatureV",
        arguments=(0,),
        targets=(LabeledReading(reading="temperature_celsius", labels=("gpu",)),),
        convert=single_value(temperature),
        older=OlderCall(call="nvmlDeviceGetTemperature", arguments=(0,)),
    ),
    CallQuery(
        tier=Tier.FREQUENT,
        call="nvmlDeviceGetClockInfo",
        arguments=(1,),
        targets=(LabeledReading(reading="clock_hertz", labels=("sm",)),),
        convert=single_value(hertz),
    ),
    CallQuery(
        tier=Tier.FREQUENT,
        call="nvmlDeviceGetClockInfo",
        arguments=(2,),
        targets=(LabeledReading(reading="clock_hertz", labels=("memory",)),),
        convert=single_value(hertz),
    ),
    FieldQuery(
        tier=Tier.MEDIUM,
        field=82,
        target=LabeledReading(reading="temperature_celsius", labels=("memory",)),
        convert=temperature,
    ),
    FieldQuery(
        tier=Tier.MEDIUM, field=230, target=LabeledReading(reading="recovery_action"), convert=bounded(0, 63)
    ),
    CallQuery(
        tier=Tier.MEDIUM,
        call="nvmlDeviceGetMarginTemperature",
        targets=(LabeledReading(reading="temperature_margin_celsius", labels=("nearest",)),),
        convert=single_value(celsius),
    ),
    CallQuery(
        tier=Tier.MEDIUM,
        call="nvmlDeviceGetTotalEnergyConsumption",
        targets=(LabeledReading(reading=ENERGY),),
        convert=single_value(count),
    ),
    CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetEnforcedPowerLimit",
        targets=(LabeledReading(reading="power_limit_watts", labels=("enforced",)),),
        convert=single_value(watts),
    ),
    CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetPowerManagementDefaultLimit",
        targets=(LabeledReading(reading="power_limit_watts", labels=("default",)),),
        convert=single_value(watts),
    ),
    CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetTemperatureThreshold",
        arguments=(1,),
        targets=(LabeledReading(reading="temperature_threshold_celsius", labels=("slowdown",)),),
        convert=single_value(temperature),
    ),
    _ecc("corrected", "dram", error_kind_number=0, location_number=2),
    _ecc("corrected", "sram", error_kind_number=0, location_number=7),
    _ecc("uncorrected", "dram", error_kind_number=1, location_number=2),
    _ecc("uncorrected", "sram", error_kind_number=1, location_number=7),
    CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetRemappedRows",
        targets=(
            LabeledReading(reading="remapped_rows", labels=("correctable",)),
            LabeledReading(reading="remapped_rows", labels=("uncorrectable",)),
            LabeledReading(reading="remapped_rows_pending"),
            LabeledReading(reading="remapped_rows_failed"),
        ),
        convert=_remapped_rows,
    ),
    _pcie_link("pcie_link_generation", "current", "nvmlDeviceGetCurrPcieLinkGeneration"),
    _pcie_link("pcie_link_generation", "max", "nvmlDeviceGetMaxPcieLinkGeneration"),
    _pcie_link("pcie_link_width", "current", "nvmlDeviceGetCurrPcieLinkWidth"),
    _pcie_link("pcie_link_width", "max", "nvmlDeviceGetMaxPcieLinkWidth"),
    CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetPcieReplayCounter",
        targets=(LabeledReading(reading="pcie_replays"),),
        convert=single_value(small),
    ),
    _pcie_error(173, "correctable"),
    _pcie_error(179, "non_fatal"),
    _pcie_error(180, "fatal"),
)
"""Queries of a GPU. SRAM errors have the function `sram_threshold_exceeded`. Processes, driver samples, GPM, NVLink and MIG have modules
of their own."""


def queries_of(driver_version: str) -> dict[Tier, tuple[Query, ...]]:
    """Return the queries by tier, without field ids that have another meaning in this driver version."""
    major, minor, *_ = [*driver_version.split("."), "", ""]
    version = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)

    def applies(query: Query) -> bool:
        drivers = query.drivers if isinstance(query, FieldQuery) else None
        return drivers is None or drivers.first_version <= version <= drivers.last_version

    return {tier: tuple(query for query in QUERIES if query.tier is tier and applies(query)) for tier in Tier}


def read(device: NvmlDevice, queries: Sequence[Query], readings: PassReadings) -> None:
    """Execute queries and set their readings. The reading of a query without a value is set to None."""
    fields = [query for query in queries if isinstance(query, FieldQuery)]
    values = device.read_fields({field.field: field.convert for field in fields})
    for field in fields:
        readings.set_value(field.target.reading, values.get(field.field), *field.target.labels)
    for query in queries:
        if isinstance(query, CallQuery):
            results = execute(device, query)
            for position, target in enumerate(query.targets):
                value = None if results is None else results[position]
                readings.set_value(target.reading, value, *target.labels)
                if target.reading == ENERGY:
                    readings.energy_delay = device.last_call_delay


def execute(device: NvmlDevice, query: CallQuery) -> Sequence[float] | None:
    """Execute a query, by the older call if the driver does not support the newer one. Return the values, or None on failure."""
    query_name = f"{query.call}{query.arguments or ''}"
    values: Sequence[float] | None = device.query(
        query_name, query.call, *query.arguments, convert=query.convert
    )
    older = query.older
    if values is None and older is not None and device.is_unsupported(query_name):
        query_name = f"{older.call}{older.arguments or ''}"
        values = device.query(query_name, older.call, *older.arguments, convert=query.convert)
    return values


def sram_threshold_exceeded(device: NvmlDevice) -> int | None:
    """Return 1 if the SRAM errors exceed the threshold for a replacement of the GPU, else 0.

    Returns None if the driver or pynvml does not report the status. NVML fills a structure, unlike the calls of `CallQuery`.
    """
    structure = getattr(device.library.binding, "c_nvmlEccSramErrorStatus_v1_t", None)
    if structure is None:  # pynvml is older than the function
        return None
    status = structure()
    answer = device.query("sram", "nvmlDeviceGetSramEccErrorStatus", ctypes.byref(status))
    return None if answer is None else int(status.bThresholdExceeded != 0)
