"""Queries of a GPU, each in a single row: call or field value, reading, and tier.

Runs in the NVML child. `card_families.py`, `link_families.py` and `health_families.py` define the family of a reading.
Readings are in base units; counters have NVML's units (nanoseconds, KiB); the sidecar converts and adds them. A query that
costs more than microseconds, or that changes only by configuration, is in a slower tier.
"""

from __future__ import annotations

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
    """Period of queries; the value is the number of seconds between two passes."""

    FAST = 1.0
    CLOSE = 2.0
    MEDIUM = 10.0  # the energy counter costs milliseconds of processor time
    SLOW = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledReading:
    """Reading with the labels after `gpu` and `uuid`."""

    reading: str
    labels: Labels = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderCall:
    """Call for drivers without the present call."""

    call: str
    arguments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallQuery:
    """NVML function with one or more result values."""

    tier: Tier
    call: str  # pynvml's function
    arguments: tuple[int, ...] = ()  # after the handle
    targets: tuple[LabelledReading, ...]
    convert: Callable[[Any], Sequence[float]]  # returns a value for each target
    older: OlderCall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverRange:
    """Driver versions, both ends included."""

    since: tuple[int, int]
    until: tuple[int, int] = (1 << 30, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldQuery:
    """Field value of a whole GPU."""

    tier: Tier
    field: int  # NVML's id
    target: LabelledReading
    convert: Convert = count
    drivers: DriverRange | None = None  # drivers with this meaning of the id; None for all


Query = CallQuery | FieldQuery


def one(convert: Convert) -> Callable[[Any], Sequence[float]]:
    """Return a conversion of a result with a single value."""
    return lambda result: (convert(result),)


MEMORY_V2 = 0x02000028
"""Version of the structure with the driver's reserved memory."""

MEMORY = CallQuery(
    tier=Tier.FAST,
    call="nvmlDeviceGetMemoryInfo",
    arguments=(MEMORY_V2,),
    targets=(LabelledReading(reading="memory_total_bytes"), LabelledReading(reading="memory_used_bytes")),
    convert=lambda info: (size(info.total), size(info.used)),
    older=OlderCall(call="nvmlDeviceGetMemoryInfo"),  # counts the driver's reserve as used
)


def _clocks_event(
    field: int, reason: str, *, since: tuple[int, int] | None = None, until: tuple[int, int] = (1 << 30, 0)
) -> FieldQuery:
    return FieldQuery(
        tier=Tier.FAST,
        field=field,
        target=LabelledReading(reading="clocks_event_nanoseconds", labels=(reason,)),
        drivers=None if since is None else DriverRange(since=since, until=until),
    )


def _ecc(kind: str, kind_number: int, location: str, location_number: int) -> CallQuery:
    volatile = 0  # since the driver was loaded
    return CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetMemoryErrorCounter",
        arguments=(kind_number, volatile, location_number),
        targets=(LabelledReading(reading="ecc_errors", labels=(kind, location)),),
        convert=one(count),
    )


def _pcie_link(reading: str, kind: str, call: str) -> CallQuery:
    return CallQuery(
        tier=Tier.SLOW,
        call=call,
        targets=(LabelledReading(reading=reading, labels=(kind,)),),
        convert=one(small),
    )


def _pcie_error(field: int, kind: str) -> FieldQuery:
    return FieldQuery(
        tier=Tier.SLOW, field=field, target=LabelledReading(reading="pcie_errors", labels=(kind,))
    )


QUERIES: tuple[Query, ...] = (
    CallQuery(
        tier=Tier.FAST,
        call="nvmlDeviceGetUtilizationRates",
        targets=(
            LabelledReading(reading="utilization_ratio"),
            LabelledReading(reading="memory_bandwidth_utilization_ratio"),
        ),
        convert=lambda rates: (ratio(rates.gpu), ratio(rates.memory)),
    ),
    MEMORY,
    CallQuery(
        tier=Tier.FAST,
        call="nvmlDeviceGetPowerUsage",
        targets=(LabelledReading(reading="power_watts"),),
        convert=one(watts),
    ),
    _clocks_event(74, "sw_power_cap"),
    _clocks_event(75, "thermal"),
    _clocks_event(76, "sync_boost"),
    _clocks_event(77, "board_limit"),
    _clocks_event(78, "low_utilization"),
    _clocks_event(79, "reliability"),
    # Three counters were added in driver 575, under ids that were settings of power smoothing in 570. Between 580.65 and
    # 580.82 NVIDIA returned these ids to power smoothing and moved the counters. On other drivers the ids
    # are different metrics, so nothing is read before 575 and between the two.
    # Source: NVML's change log (570 to 575, 575 to 580); pynvml 12.570, 12.575, 13.580.65, 13.580.82.
    _clocks_event(251, "sw_thermal", since=(575, 0), until=(580, 65)),
    _clocks_event(252, "hw_thermal", since=(575, 0), until=(580, 65)),
    _clocks_event(253, "hw_power_brake", since=(575, 0), until=(580, 65)),
    _clocks_event(269, "sw_thermal", since=(580, 82)),
    _clocks_event(270, "hw_thermal", since=(580, 82)),
    _clocks_event(271, "hw_power_brake", since=(580, 82)),
    CallQuery(
        tier=Tier.CLOSE,
        call="nvmlDeviceGetTemperatureV",
        arguments=(0,),
        targets=(LabelledReading(reading="temperature_celsius", labels=("gpu",)),),
        convert=one(temperature),
        older=OlderCall(call="nvmlDeviceGetTemperature", arguments=(0,)),
    ),
    CallQuery(
        tier=Tier.CLOSE,
        call="nvmlDeviceGetClockInfo",
        arguments=(1,),
        targets=(LabelledReading(reading="clock_hertz", labels=("sm",)),),
        convert=one(hertz),
    ),
    CallQuery(
        tier=Tier.CLOSE,
        call="nvmlDeviceGetClockInfo",
        arguments=(2,),
        targets=(LabelledReading(reading="clock_hertz", labels=("memory",)),),
        convert=one(hertz),
    ),
    FieldQuery(
        tier=Tier.MEDIUM,
        field=82,
        target=LabelledReading(reading="temperature_celsius", labels=("memory",)),
        convert=temperature,
    ),
    FieldQuery(
        tier=Tier.MEDIUM, field=230, target=LabelledReading(reading="recovery_action"), convert=bounded(0, 63)
    ),
    CallQuery(
        tier=Tier.MEDIUM,
        call="nvmlDeviceGetMarginTemperature",
        targets=(LabelledReading(reading="temperature_margin_celsius", labels=("nearest",)),),
        convert=one(celsius),
    ),
    CallQuery(
        tier=Tier.MEDIUM,
        call="nvmlDeviceGetTotalEnergyConsumption",
        targets=(LabelledReading(reading=ENERGY),),
        convert=one(count),
    ),
    CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetEnforcedPowerLimit",
        targets=(LabelledReading(reading="power_limit_watts", labels=("enforced",)),),
        convert=one(watts),
    ),
    CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetPowerManagementDefaultLimit",
        targets=(LabelledReading(reading="power_limit_watts", labels=("default",)),),
        convert=one(watts),
    ),
    CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetTemperatureThreshold",
        arguments=(1,),
        targets=(LabelledReading(reading="temperature_threshold_celsius", labels=("slowdown",)),),
        convert=one(temperature),
    ),
    _ecc("corrected", 0, "dram", 2),
    _ecc("corrected", 0, "sram", 7),
    _ecc("uncorrected", 1, "dram", 2),
    _ecc("uncorrected", 1, "sram", 7),
    CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetRemappedRows",
        targets=(
            LabelledReading(reading="remapped_rows", labels=("correctable",)),
            LabelledReading(reading="remapped_rows", labels=("uncorrectable",)),
            LabelledReading(reading="remapped_rows_pending"),
            LabelledReading(reading="remapped_rows_failed"),
        ),
        convert=lambda rows: (small(rows[0]), small(rows[1]), flag(rows[2]), flag(rows[3])),
    ),
    _pcie_link("pcie_link_generation", "current", "nvmlDeviceGetCurrPcieLinkGeneration"),
    _pcie_link("pcie_link_generation", "max", "nvmlDeviceGetMaxPcieLinkGeneration"),
    _pcie_link("pcie_link_width", "current", "nvmlDeviceGetCurrPcieLinkWidth"),
    _pcie_link("pcie_link_width", "max", "nvmlDeviceGetMaxPcieLinkWidth"),
    CallQuery(
        tier=Tier.SLOW,
        call="nvmlDeviceGetPcieReplayCounter",
        targets=(LabelledReading(reading="pcie_replays"),),
        convert=one(small),
    ),
    _pcie_error(173, "correctable"),
    _pcie_error(179, "non_fatal"),
    _pcie_error(180, "fatal"),
)
"""All queries of every GPU; processes, samples, GPM, NVLink and MIG have separate modules."""


def queries_of(driver_version: str) -> dict[Tier, tuple[Query, ...]]:
    """Return the queries for a driver, by tier."""
    parts = driver_version.split(".")
    is_parsable = len(parts) > 1 and parts[0].isdecimal() and parts[1].isdecimal()
    version = (int(parts[0]), int(parts[1])) if is_parsable else (0, 0)

    def fits(query: Query) -> bool:
        drivers = query.drivers if isinstance(query, FieldQuery) else None
        return drivers is None or drivers.since <= version <= drivers.until

    return {tier: tuple(query for query in QUERIES if query.tier is tier and fits(query)) for tier in Tier}


def read(device: NvmlDevice, queries: Sequence[Query], readings: PassReadings) -> None:
    """Make queries; a reading without a value now is None."""
    fields = [query for query in queries if isinstance(query, FieldQuery)]
    values = device.read_fields({field.field: field.convert for field in fields})
    for field in fields:
        readings.put(field.target.reading, values.get(field.field), *field.target.labels)
    for query in queries:
        if isinstance(query, CallQuery):
            answer = make(device, query)
            for position, target in enumerate(query.targets):
                readings.put(target.reading, None if answer is None else answer[position], *target.labels)


def make(device: NvmlDevice, query: CallQuery) -> Sequence[float] | None:
    """Query by the call, or by the call of older drivers; return the values, or None."""
    item = f"{query.call}{query.arguments or ''}"
    answer: Sequence[float] | None = device.query(item, query.call, *query.arguments, convert=query.convert)
    older = query.older
    if answer is None and older is not None and device.is_unsupported(item):
        item = f"{older.call}{older.arguments or ''}"
        answer = device.query(item, older.call, *older.arguments, convert=query.convert)
    return answer
