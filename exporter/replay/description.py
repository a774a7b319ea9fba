"""Schema of the YAML file that describes a machine for a replay.

Used in the sidecar if a replay is configured. docs/replay.md explains the keys. Numbers have NVML's units,
because a replay runs below all unit conversions.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from exporter.collectors.gpu.nvml.device import ARCHITECTURES
from exporter.collectors.gpu.nvml.library import CODES
from exporter.collectors.gpu.options import MAX_GPUS
from exporter.config.expectation import suggest
from exporter.config.options import Duration, Notation, Range, Ratio
from exporter.replay.library import COST_KEYS, SYMBOLS
from exporter.replay.machine import EVERY_CALL
from exporter.replay.readings import READINGS

KeyProblems = Iterator[tuple[str, str]]
"""Problems of a configuration dataclass, for the loader: pairs of key and message."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Number that follows the load, or a counter that grows with the load."""

    idle: float = 0.0  # value, or increase per second of a counter, at a load of 0
    busy: float | None = None  # at a load of 1; None for the value of `idle`
    counter_from: int | None = None  # first value of a counter; None for a number that is not a counter
    bits: Literal[16, 32, 64] | None = None  # width at which a counter wraps; None for no wrap

    def problems(self) -> KeyProblems:
        """Yield a width without a counter."""
        if self.bits is not None and self.counter_from is None:
            yield "bits", "only a counter has a width; add counter_from"


Number = int | float | Signal | Literal["nan", "infinity"] | None
"""Reading: a constant, a signal, not a number (`nan`, `infinity`), or null if not supported."""

Numbers = Mapping[str, Number]
Version = Annotated[str, Notation('a version such as "580.95"', r"^[0-9]+\.[0-9]+(\..*)?$")]


@dataclass(frozen=True, slots=True)
class Step:
    """Part of the load's cycle."""

    seconds: Duration
    level: Ratio


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a GPU: a repeated cycle of steps. Each GPU runs 1.7 seconds ahead of the previous GPU."""

    steps: tuple[Step, ...] = ()
    ripple: Annotated[float, Range(0, 0.5)] = 0.0

    def problems(self) -> KeyProblems:
        """Yield a problem for a cycle without a duration. A load without steps is idle."""
        if self.steps and not any(step.seconds for step in self.steps):
            yield "steps", "last 0s in total; at least one step needs a duration above 0s"


@dataclass(frozen=True, slots=True)
class Instance:
    """Compute instance of a divided GPU (MIG)."""

    gi: Annotated[int, Range(0, 14)]  # id of the GPU instance
    profile: str  # such as 1g.10gb
    memory: Annotated[int, Range(0)]  # bytes
    ci: Annotated[int, Range(0, 7)] = 0  # id of the compute instance in the GPU instance


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Process that holds the GPU, with its id or with a file that has the id."""

    pid: Annotated[int, Range(1, 0xFFFFFFFF)] | None = None
    pid_file: str | None = None
    memory: Annotated[int, Range(0)] | None = None  # bytes; None if the driver does not report the memory
    sm: Annotated[float, Range(0)] | None = None  # SM utilization at full load in %; None if not reported

    def problems(self) -> KeyProblems:
        """Yield a problem unless the process has either an id or a file."""
        if (self.pid is None) == (self.pid_file is None):
            yield "pid", "set either pid or pid_file"


@dataclass(frozen=True, slots=True)
class Model:
    """Model of a GPU."""

    name: str
    architecture: Literal[tuple(ARCHITECTURES.values())]  # type: ignore[valid-type]  # made from a table
    compute_capability: str = "8.0"
    serial: str | None = None
    vbios: str | None = None
    board: str | None = None
    load: Load = Load()
    values: Numbers = field(default_factory=dict)  # by name of the reading
    fields: Numbers = field(default_factory=dict)  # by field id as text, in place of the named readings
    gpm: Numbers = field(default_factory=dict)  # by metric id as text; empty for a GPU without GPM
    mig: tuple[Instance, ...] = ()  # visible while the reading `mig_mode` is 1
    processes: tuple[GpuProcess, ...] = ()

    def problems(self) -> KeyProblems:
        """Yield unknown readings and invalid ids."""
        yield from _unknown_readings("values", self.values)
        yield from _invalid_ids(self)


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """Group of GPUs of the same model."""

    model: str
    count: Annotated[int, Range(1, MAX_GPUS)] = 1
    uuid: str | None = None  # of a single GPU; None for generated UUIDs
    values: Numbers = field(default_factory=dict)  # readings that differ from the model's
    processes: tuple[GpuProcess, ...] | None = None  # None for the processes of the model

    def problems(self) -> KeyProblems:
        """Yield unknown readings."""
        yield from _unknown_readings("values", self.values)


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """Change or fault at a time of the replay."""

    at: Duration = 0.0
    until: Duration | None = None  # None for no end
    gpus: tuple[Annotated[int, Range(0, MAX_GPUS - 1)], ...] = ()  # affected GPUs by index; empty for all
    lost: bool = False  # True if every call on the GPUs fails with GPU_IS_LOST
    removed: bool = False  # True if NVML no longer lists the GPUs
    errors: Mapping[str, str] = field(default_factory=dict)  # NVML's error by C function
    hang: tuple[str, ...] = ()  # C functions that do not return before the end
    delay: Mapping[str, Duration] = field(default_factory=dict)  # additional duration by C function
    crash: tuple[str, ...] = ()  # C functions that kill the process
    set: Numbers = field(default_factory=dict)  # changed readings by name
    fields: Numbers = field(default_factory=dict)
    gpm: Numbers = field(default_factory=dict)
    mig: tuple[Instance, ...] | None = None
    processes: tuple[GpuProcess, ...] | None = None
    xid: tuple[Annotated[int, Range(0, 100_000)], ...] = ()  # Xids that the driver reports at the start
    driver: Version | None = None  # version of the new driver, which stays after the end

    def problems(self) -> KeyProblems:
        """Yield functions that no replay has, errors that NVML does not have, unknown readings, and an end before the start."""
        if self.until is not None and self.until <= self.at:
            yield "until", f"is not after the start, {self.at:g}s"
        for name in ("errors", "hang", "delay", "crash"):
            for symbol in getattr(self, name):
                if symbol not in SYMBOLS and not (symbol == EVERY_CALL and name in {"errors", "hang"}):
                    yield name, f'no function "{symbol}" is replayed, {_suggest_symbol(symbol)}'
        for symbol, error in self.errors.items():
            if error.lower() not in CODES and error.lower() != "success":
                codes = [code.upper() for code in (*CODES, "success")]
                yield "errors", f'{symbol}: no error "{error}", {suggest(error.upper(), codes)}'
        yield from _unknown_readings("set", self.set)
        yield from _invalid_ids(self)


@dataclass(frozen=True, slots=True)
class MachineDescription:
    """Machine with or without NVIDIA GPUs."""

    description: str = ""
    library: bool = True  # False for a machine without NVML
    driver: Version = "580.95.05"
    cuda: Version = "13.0"
    missing: tuple[str, ...] = ()  # C functions that the library lacks
    newest_metric: int | None = None  # highest valid id of a GPM metric; None for all ids
    shared: bool = False  # True if only one exporter of the machine counts the energy
    # Milliseconds of CPU time by C function, field id or sample buffer (see `COST_KEYS`); `*` for all other calls.
    costs: Mapping[str, Annotated[float, Range(0, 1000)]] = field(default_factory=dict)
    models: Mapping[str, Model] = field(default_factory=dict)
    gpus: tuple[GpuGroup, ...] = ()
    timeline: tuple[TimelineEntry, ...] = ()

    def problems(self) -> KeyProblems:
        """Yield references to functions, models and GPUs that do not exist."""
        for symbol in self.missing:
            if symbol not in SYMBOLS:
                yield "missing", f'no function "{symbol}" is replayed, {_suggest_symbol(symbol)}'
        for key in self.costs:
            if not key.isdecimal() and key not in COST_KEYS:
                yield "costs", f'no function "{key}" is replayed, {_suggest_symbol(key)}'
        for position, group in enumerate(self.gpus):
            if group.model not in self.models:
                message = f'no model "{group.model}", {suggest(group.model, self.models)}'
                yield "gpus", f"[{position}].model: {message}"
        count = sum(group.count for group in self.gpus)
        if count > MAX_GPUS:
            yield "gpus", f"are {count}; at most {MAX_GPUS} are monitored"
        for position, entry in enumerate(self.timeline):
            for index in entry.gpus:
                if index >= count:
                    yield "timeline", f"[{position}].gpus: no GPU {index}; the machine has {count}"

    def plain(self) -> dict[str, Any]:
        """Return the description for the NVML child, in JSON types only: a list of GPUs in place of models and groups."""
        machine = dataclasses.asdict(self)
        machine["gpus"] = []
        for group in self.gpus:
            for _ in range(group.count):
                machine["gpus"].append(_plain_gpu(self.models[group.model], group, len(machine["gpus"])))
        del machine["models"], machine["description"]
        return machine


def _plain_gpu(model: Model, group: GpuGroup, index: int) -> dict[str, Any]:
    """Return a GPU in JSON types: the model with the changes of its group. *index* makes the UUID and the pids distinct."""
    gpu, changes = dataclasses.asdict(model), dataclasses.asdict(group)
    architecture_numbers = {name: number for number, name in ARCHITECTURES.items()}
    gpu["values"].update(changes["values"], architecture=architecture_numbers[gpu.pop("architecture")])
    gpu["uuid"] = group.uuid or f"GPU-00000000-0000-0000-0000-{index:012x}"
    if group.processes is not None:
        gpu["processes"] = changes["processes"]
    if group.processes is None or group.count > 1:  # the description is of several GPUs, whose pids differ
        for process in gpu["processes"]:
            if process["pid"] is not None:
                process["pid"] += index
    return gpu


def _unknown_readings(key: str, readings: Numbers) -> KeyProblems:
    """Yield a problem for each name that is no reading."""
    for name in readings:
        if name not in READINGS:
            yield key, f'no reading "{name}", {suggest(name, READINGS)}'


def _invalid_ids(section: Model | TimelineEntry) -> KeyProblems:
    """Yield a problem for each key of `fields` and `gpm` that is no number."""
    for name in ("fields", "gpm"):
        numbers = getattr(section, name)
        for key in numbers if isinstance(numbers, Mapping) else ():  # not a mapping: invalid or UNCHANGED
            if not key.isdecimal():
                yield name, f'"{key}" is not an id; ids are numbers in quotes'


def _suggest_symbol(symbol: str) -> str:
    matches = difflib.get_close_matches(symbol, SYMBOLS, n=1)
    return f'did you mean "{matches[0]}"?' if matches else "docs/replay.md lists the replayed functions"
