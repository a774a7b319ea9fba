"""Replayed machine: GPUs, readings over time, faults and events.

Used in the NVML child, by the replay library. The values depend only on the description (`MachineDescription.plain`), the
files with process ids and the time. Two child processes with the same origin therefore return the same values at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import cos, inf, nan, pi, sin
from pathlib import Path
from typing import Any, NamedTuple

EVERY_CALL = "*"
"""Name for all functions of a GPU, in the faults of the timeline."""

_MAX_PID_BYTES = 20  # number of bytes that are read from a pid file; no pid has more digits
_RIPPLE_SECONDS = 3.1  # period of the ripple of a load
SHIFT_SECONDS = 1.7
"""Seconds by which the load of each GPU runs ahead of the previous GPU's load."""

_NAMED_VALUES = {"nan": nan, "infinity": inf}
"""Values that JSON cannot represent as numbers, by their names in a description."""


class LoadStep(NamedTuple):
    """Part of the load's cycle."""

    seconds: float
    level: float  # load from 0 to 1, without the ripple


class LoadCurve:
    """Load of a GPU, from 0 to 1: a repeated cycle of steps, plus a sine wave (ripple). The cycle starts `shift_seconds` ahead."""

    def __init__(self, description: dict[str, Any], *, shift_seconds: float) -> None:
        self._steps = [LoadStep(**step) for step in description["steps"]] or [LoadStep(1.0, 0.0)]
        self._cycle_seconds = sum(step.seconds for step in self._steps)
        self._ripple = description["ripple"]
        self._shift_seconds = shift_seconds

    def level_at(self, moment: float) -> float:
        """Return the load at a time."""
        # Seconds since the start of the cycle, then of the step.
        position = (moment + self._shift_seconds) % self._cycle_seconds
        for seconds, level in self._steps:
            if position < seconds:
                return float(level + self._amplitude(level) * sin(2 * pi * position / _RIPPLE_SECONDS))
            position -= seconds
        return float(self._steps[-1].level)  # the differences above were rounded

    def total(self, moment: float) -> float:
        """Return the integral of the load, in seconds at full load, from the start of the timeline to a time."""
        return self._total_until(moment + self._shift_seconds) - self._total_until(self._shift_seconds)

    def _total_until(self, moment: float) -> float:
        """Return the integral from the start of the first cycle, which is `shift_seconds` before the start of the timeline."""
        cycle_count, position = divmod(moment, self._cycle_seconds)
        total = 0.0
        for seconds, level in self._steps:
            total += cycle_count * self._step_total(level, seconds)
            total += self._step_total(level, min(max(position, 0.0), seconds))
            position -= seconds
        return float(total)

    def _step_total(self, level: float, seconds: float) -> float:
        """Return the integral of the load over the first seconds of a step."""
        wave = 1 - cos(2 * pi * seconds / _RIPPLE_SECONDS)
        return level * seconds + self._amplitude(level) * _RIPPLE_SECONDS / (2 * pi) * wave

    def _amplitude(self, level: float) -> float:
        """Return the amplitude of the ripple: smaller near 0 and 1, so that the load stays between them."""
        return float(min(self._ripple, level, 1 - level))


@dataclass(frozen=True, slots=True)
class ValueChange:
    """Value of a reading from a start until an end on the timeline, in the form of the description."""

    start: float
    end: float
    value: Any


class ReadingCurves:
    """Readings of a GPU over time.

    The value of a reading is None (not supported), a number, the text `nan` or `infinity`, or the fields of a `Signal`.
    """

    def __init__(self, description: Mapping[str, Any], load: LoadCurve) -> None:
        self.load = load
        # By name. Of the changes in effect, the change with the latest start applies.
        self._changes = {name: [ValueChange(-inf, inf, value)] for name, value in description.items()}

    def change(self, name: str, start: float, end: float, value: Any) -> None:
        """Change a reading from `start` until `end`. Afterwards the previous value applies."""
        self._changes.setdefault(name, []).append(ValueChange(start, end, value))

    def value_at(self, name: str, moment: float) -> float | None:
        """Return a reading at a time, or None if the GPU does not support the reading."""
        since, value = self._current(name, moment)
        if not isinstance(value, dict):
            number: float | None = _NAMED_VALUES[value] if isinstance(value, str) else value
            return number
        if value["counter_from"] is None:
            return _signal_total(value, self.load.level_at(moment))
        increase = _signal_total(value, self.load.total(moment) - self.load.total(since), moment - since)
        total = int(value["counter_from"] + increase)
        return total % (1 << value["bits"]) if value["bits"] else total

    def mean(self, name: str, start: float, end: float) -> float | None:
        """Return the mean of a signal between two times, or the value of another reading at the second time."""
        _, value = self._current(name, end)
        if not isinstance(value, dict) or value["counter_from"] is not None:
            return self.value_at(name, end)
        return _signal_total(value, (self.load.total(end) - self.load.total(start)) / (end - start))

    def _current(self, name: str, moment: float) -> tuple[float, Any]:
        """Return the value in effect, and the time since which the value applies."""
        changes = [change for change in self._changes.get(name, ()) if change.start <= moment < change.end]
        if not changes:
            return 0.0, None
        latest = max(reversed(changes), key=lambda change: change.start)
        return max(latest.start, 0.0), latest.value


def _signal_total(signal: dict[str, Any], load_total: float, seconds: float = 1.0) -> float:
    """Return the integral of a signal over a time, from the integral of the load. Over one second, both integrals are means."""
    busy = signal["idle"] if signal["busy"] is None else signal["busy"]
    return float(signal["idle"] * seconds + (busy - signal["idle"]) * load_total)


class Fault:
    """Entry of the timeline: changes of readings, processes, MIG instances and the driver, and failures of calls."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.entry = entry  # as described
        self.start: float = entry["at"]
        self.end: float = inf if entry["until"] is None else entry["until"]
        # NVML's names of errors by call.
        self.errors = {call: name.lower() for call, name in entry["errors"].items()}
        if entry["lost"]:
            self.errors[EVERY_CALL] = "gpu_is_lost"
        self.xids: list[int] = entry["xid"]  # reported by the driver at the start of the fault

    def applies_to(self, index: int | None) -> bool:
        """Return True if the fault applies to a GPU, or to calls without a GPU."""
        return not self.entry["gpus"] or index in self.entry["gpus"]


class ReplayedGpu:
    """GPU of a replayed machine."""

    def __init__(self, index: int, description: dict[str, Any], faults: list[Fault]) -> None:
        self.index = index  # position in the description; NVML's index while all GPUs are listed
        self.description = description  # of the model, with the GPU's uuid
        load = LoadCurve(description["load"], shift_seconds=index * SHIFT_SECONDS)
        # By name; field values have the names `field.<id>`, GPM metrics `gpm.<id>`.
        self.readings = ReadingCurves(dict(all_readings(description["values"], description)), load)
        self.faults = [fault for fault in faults if fault.applies_to(index)]
        # All compute instances of the whole timeline.
        self.all_instances: list[dict[str, Any]] = list(description["mig"])
        for fault in self.faults:
            new_instances = [
                instance for instance in fault.entry["mig"] or () if instance not in self.all_instances
            ]
            self.all_instances += new_instances
            for name, value in all_readings(fault.entry["set"], fault.entry):
                self.readings.change(name, fault.start, fault.end, value)

    def instances(self, moment: float) -> list[dict[str, Any]]:
        """Return the compute instances of the GPU, none unless MIG is enabled."""
        if self.readings.value_at("mig_mode", moment) != 1:
            return []
        return self._current_entries("mig", moment)

    def processes(self, moment: float) -> list[dict[str, Any]]:
        """Return the compute processes of the GPU, without a process whose file has no id."""
        entries = self._current_entries("processes", moment)
        processes = [entry | {"pid": entry["pid"] or _read_pid(entry["pid_file"])} for entry in entries]
        return [process for process in processes if process["pid"]]

    def _current_entries(self, key: str, moment: float) -> list[dict[str, Any]]:
        """Return the entries of `mig` or `processes` at a time."""
        for fault in reversed(self.faults):
            if fault.entry[key] is not None and fault.start <= moment < fault.end:
                return list(fault.entry[key])
        return list(self.description[key])


def _read_pid(path: str) -> int | None:
    try:
        return int(Path(path).read_bytes()[:_MAX_PID_BYTES])
    except (OSError, ValueError):
        return None


class ReplayedMachine:
    """Replayed machine with GPUs and a timeline."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.description = description  # see `description.MachineDescription.plain`
        self.faults = [Fault(entry) for entry in description["timeline"]]  # in the order of the timeline
        # All GPUs of the timeline, also while they are removed.
        self.gpus = [ReplayedGpu(index, gpu, self.faults) for index, gpu in enumerate(description["gpus"])]

    def driver(self, moment: float) -> str:
        """Return the version of the loaded driver. A driver of the timeline stays until a later entry names another driver."""
        version: str = self.description["driver"]
        for fault in self.faults:
            if fault.entry["driver"] is not None and fault.start <= moment:
                version = fault.entry["driver"]
        return version

    def listed_gpus(self, moment: float) -> list[ReplayedGpu]:
        """Return the GPUs that NVML lists."""
        return [
            gpu
            for gpu in self.gpus
            if not any(fault.entry["removed"] for fault in self.active_faults(gpu.index, moment))
        ]

    def active_faults(self, index: int | None, moment: float) -> Iterator[Fault]:
        """Yield the active faults of a GPU, or of calls without a GPU, latest first."""
        for fault in reversed(self.faults):
            if fault.start <= moment < fault.end and fault.applies_to(index):
                yield fault


class XidDelivery(NamedTuple):
    """Xid of a fault that an event set has delivered."""

    event_set: int
    gpu_index: int
    fault_index: int
    xid_index: int  # position in the Xids of the fault


class ReplayedEvents:
    """Delivery of Xid events to event sets.

    As with NVML, events before a registration are lost, and each set delivers the events of all its GPUs. If a GPU of a set is
    lost, every wait for this set fails and the set delivers no later events, not even for healthy GPUs.
    """

    def __init__(self, machine: ReplayedMachine) -> None:
        self._machine = machine
        self._registrations: dict[int, list[tuple[ReplayedGpu, float]]] = {}  # GPU and time, by event set
        self._deliveries: set[XidDelivery] = set()

    def register(self, gpu: ReplayedGpu, moment: float, *, event_set: int) -> None:
        """Register an event set for the Xids of a GPU after a time."""
        self._registrations.setdefault(event_set, []).append((gpu, moment))

    def next(self, event_set: int, moment: float) -> tuple[ReplayedGpu, int] | None:
        """Return the GPU and the number of the next Xid that the event set has not delivered, or None."""
        broken_at = self.broken_since(event_set, moment)
        end = moment if broken_at is None else broken_at
        for gpu, since in self._registrations.get(event_set, ()):
            for fault_index, fault in enumerate(gpu.faults):
                for xid_index, xid in enumerate(fault.xids if since < fault.start <= end else ()):
                    delivery = XidDelivery(event_set, gpu.index, fault_index, xid_index)
                    if delivery not in self._deliveries:
                        self._deliveries.add(delivery)
                        return gpu, xid
        return None

    def broken_since(self, event_set: int, moment: float) -> float | None:
        """Return the time at which the first GPU of a set was lost, or None if no GPU is lost."""
        loss_times = [
            fault.start
            for gpu, _ in self._registrations.get(event_set, ())
            for fault in self._machine.active_faults(gpu.index, moment)
            if fault.entry["removed"] or fault.errors.get(EVERY_CALL) == "gpu_is_lost"
        ]
        return min(loss_times, default=None)


def all_readings(values: Mapping[str, Any], description: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all readings of a description: named readings, field values and performance counters."""
    yield from values.items()
    for key, prefix in (("fields", "field"), ("gpm", "gpm")):
        yield from ((f"{prefix}.{number}", value) for number, value in description[key].items())
