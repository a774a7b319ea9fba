"""State records of the energy ledger, and the conversion of records of older releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from exporter.ledger.state.codec import decoding, from_json, parse

_OldRows = dict[tuple[str, ...], tuple[float | None, ...]]
"""Record of an older release: rows of numbers by name, such as {("cost", "electricity", "EUR"): (1.5,)}."""


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """Last reading of a device, and the energy that is not yet divided among the runs."""

    JSON_KEYS: ClassVar[Mapping[str, str]] = {"read_at": "at"}
    component: str
    device: str
    source: str
    register_joules: float | None = None
    read_at: float = 0.0  # monotonic time
    watts: float | None = None
    pending_joules: float = 0.0


@dataclass(frozen=True, slots=True)
class GpuTimeRecord:
    """Share of a GPU that a run uses, and the time until which its cost is counted."""

    run: str
    device: str
    ratio: float  # share of the GPU
    charged_until: float  # monotonic time


@dataclass(frozen=True, slots=True)
class DevicesRecord:
    """State of all devices of a machine, valid until a reboot."""

    boot: str = ""
    passed_at: float | None = None  # monotonic time of the last pass
    devices: tuple[DeviceRecord, ...] = ()
    gpu_times: tuple[GpuTimeRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class EnergyLabels:
    """Labels of a run's energy, as in `training_energy_joules_total`."""

    component: str
    method: str


@dataclass(frozen=True, slots=True)
class CostLabels:
    """Labels of a run's cost, as in `training_cost_total`."""

    kind: str
    currency: str


@dataclass(frozen=True, slots=True)
class PhaseEnergyLabels:
    """Labels of a run's energy by phase, as in `training_phase_energy_joules_total`."""

    phase: str
    component: str
    method: str


@dataclass(frozen=True, slots=True)
class WorkOutcomes:
    """Total seconds of productive, lost and hung work of a session, up to the account that was applied last."""

    JSON_KEYS: ClassVar[Mapping[str, str]] = {
        "productive_seconds": "productive",
        "lost_seconds": "lost",
        "hung_seconds": "hung",
    }
    session: str
    productive_seconds: float
    lost_seconds: float
    hung_seconds: float


@dataclass(slots=True)
class RunRecord:
    """Saved state of a run: counters of joules, grams and money, and the energy of uncommitted work."""

    JSON_KEYS: ClassVar[Mapping[str, str]] = {
        "energy_joules": "energy",
        "carbon_grams": "carbon",
        "phase_joules": "phases",
        "inaccurate_joules": "blurred",
        "productive_joules": "productive",
        "wasted_joules": "wasted",
        "is_split": "splits",
        "uncommitted_joules": "pool",
        "applied_outcomes": "settled",
    }
    energy_joules: dict[EnergyLabels, float] = field(default_factory=dict)
    carbon_grams: dict[str, float] = field(default_factory=dict)  # by component
    cost: dict[CostLabels, float] = field(default_factory=dict)  # in the currency of the key
    phase_joules: dict[PhaseEnergyLabels, float] = field(default_factory=dict)
    # by phase, in intervals of fewer power samples than `MIN_ACCURATE_SAMPLES`
    inaccurate_joules: dict[str, float] = field(default_factory=dict)
    productive_joules: float = 0.0
    wasted_joules: dict[str, float] = field(default_factory=dict)  # by cause
    is_split: bool = False  # True once energy was divided among phases, because the job reports training
    uncommitted_joules: float = 0.0
    applied_outcomes: WorkOutcomes | None = None  # None before the first account
    boot: str = ""
    alive_at: float | None = None  # monotonic time of the last pass with the run, in this boot


def decode_devices(content: bytes) -> DevicesRecord:
    """Return the record of the devices. Raises ValueError."""
    with decoding():
        body = parse(content)
        record: DevicesRecord = (
            _devices_of_rows(_rows(body)) if isinstance(body, list) else from_json(DevicesRecord, body)
        )
        return record


def decode_run(content: bytes) -> RunRecord:
    """Return the record of a run. Raises ValueError."""
    with decoding():
        body = parse(content)
        record: RunRecord = (
            _run_of_rows(_rows(body)) if isinstance(body, list) else from_json(RunRecord, body)
        )
        return record


def _rows(body: Any) -> _OldRows:
    """Return the rows of an older record by name."""
    rows: _OldRows = from_json(_OldRows, body)
    return rows


def _devices_of_rows(rows: _OldRows) -> DevicesRecord:
    """Return the devices of ("pass", boot): (time,) and ("pending", boot, component, device, source): (joules,)."""
    boot, passed_at = "", None
    for (kind, *labels), (value, *_) in rows.items():
        if kind == "pass":
            (boot,), passed_at = labels, value
    # The registers of these records are corrected totals, which cannot be compared with raw registers.
    devices: list[DeviceRecord] = []
    for (kind, *labels), (value, *_) in rows.items():
        if kind == "pending":
            device_boot, component, device, source = labels
            if device_boot == boot:
                devices.append(DeviceRecord(component, device, source, pending_joules=value or 0.0))
    return DevicesRecord(boot, passed_at, tuple(devices))


def _run_of_rows(rows: _OldRows) -> RunRecord:
    """Return the run of rows whose name starts with the kind of the value, followed by its labels."""
    record = RunRecord()
    for (kind, *labels), values in rows.items():
        value = values[0] or 0.0
        match kind:
            case "energy":
                record.energy_joules[EnergyLabels(*labels)] = value
            case "carbon":
                record.carbon_grams[labels[0]] = value
            case "cost":
                record.cost[CostLabels(*labels)] = value
            case "phase":
                record.phase_joules[PhaseEnergyLabels(*labels)] = value
            case "blurred":
                record.inaccurate_joules[labels[0]] = value
            case "productive":
                record.productive_joules = value
            case "wasted":
                record.wasted_joules[labels[0]] = value
            case "pool":
                record.uncommitted_joules, record.is_split = value, True
            case "flow":
                record.applied_outcomes = WorkOutcomes(labels[0], *[seconds or 0.0 for seconds in values])
            case "alive":
                record.boot, record.alive_at = labels[0], values[0]
    return record
