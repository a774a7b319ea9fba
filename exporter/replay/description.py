"""The description of a machine that can be replayed instead of NVIDIA's library: what may be in the YAML file.

Used in the sidecar, when it starts with a replay (`machines`). A file comes in; a `MachineDescription` goes out, or one
`ConfigurationError` with the place of every mistake. `MachineDescription.plain` is what the NVML child is given. No threads, no state. docs/replay.md is the guide.

Numbers are what NVML returns, in its units: a replay stands below everything that converts them.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from exporter.collectors.gpu.nvml.device import ARCHITECTURES
from exporter.collectors.gpu.nvml.events import EVENTS, MIG_CONFIG
from exporter.collectors.gpu.nvml.library import CODES
from exporter.collectors.gpu.nvml.visible import MOST_GPUS
from exporter.config.loader import suggest
from exporter.config.options import Duration, Range, Ratio
from exporter.replay.library import COST_KEYS, SYMBOLS
from exporter.replay.readings import READINGS
from exporter.replay.timeline import EVERY_CALL


class _Unchanged(enum.Enum):
    UNCHANGED = "unchanged"


UNCHANGED: Any = _Unchanged.UNCHANGED
"""What is not mentioned; `null` means *not supported*."""


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, slots=True)
class Signal:
    """A number that moves with the load, or a counter that grows with it."""

    idle: float = field(
        default=0.0, metadata=_help("The number without any load; of a counter, what it grows a second.")
    )
    busy: float | None = field(
        default=None, metadata=_help("The same at full load; the same as idle where it is left out.")
    )
    counter_from: int | None = field(default=None, metadata=_help("Makes it a counter that begins here."))
    bits: Literal[16, 32, 64] | None = field(
        default=None, metadata=_help("The counter's width, beyond which it begins at 0 again.")
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether the parts fit together."""
        if self.bits is not None and self.counter_from is None:
            yield "bits", "only a counter has a width; add counter_from"


Number = int | float | Signal | Literal["nan", "infinity"] | None
"""A constant, something that moves, garbage, or null: not supported."""

Readings: Any = dataclasses.make_dataclass(
    "Readings",
    [(name, Number, field(default=UNCHANGED, metadata=_help(text))) for name, text in READINGS.items()],
    frozen=True,
    slots=True,
)
"""Readings by name, those that are mentioned."""


@dataclass(frozen=True, slots=True)
class Step:
    """A part of the load's cycle."""

    seconds: Duration = field(metadata=_help("How long."))
    level: Ratio = field(metadata=_help("How busy, from 0 to 1."))


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a GPU is: steps that repeat. Each GPU runs 1.7 seconds ahead of the one before it."""

    steps: tuple[Step, ...] = field(default=(), metadata=_help("One after the other; none means idle."))
    ripple: Annotated[float, Range(0, 0.5)] = field(
        default=0.0, metadata=_help("How far it goes up and down within a step.")
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether it takes any time."""
        if self.steps and sum(step.seconds for step in self.steps) <= 0:
            yield "steps", "the steps take no time"


@dataclass(frozen=True, slots=True)
class Instance:
    """A compute instance of a divided GPU (MIG)."""

    gi: Annotated[int, Range(0, 14)] = field(metadata=_help("Id of its GPU instance."))
    profile: str = field(metadata=_help("Such as 1g.10gb."))
    memory: Annotated[int, Range(0)] = field(metadata=_help("Bytes."))
    ci: Annotated[int, Range(0, 7)] = field(default=0, metadata=_help("Id of the compute instance."))


@dataclass(frozen=True, slots=True)
class Process:
    """A process that holds the GPU."""

    pid: Annotated[int, Range(1, 0xFFFFFFFF)] = field(metadata=_help("Process id."))
    memory: Annotated[int, Range(0)] | None = field(
        default=None, metadata=_help("Bytes; null where the driver does not tell.")
    )
    sm: Annotated[float, Range(0)] | None = field(
        default=None, metadata=_help("Percent of the SMs at full load; null for no samples.")
    )
    memory_bandwidth: Annotated[float, Range(0)] = field(
        default=0.0, metadata=_help("Percent of the time at full load.")
    )


Numbers = Mapping[str, Number]


@dataclass(frozen=True, slots=True)
class Model:
    """A kind of GPU."""

    name: str = field(metadata=_help("What NVML calls it."))
    architecture: Literal[
        "kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "rubin"
    ] = field(metadata=_help("Its generation."))
    compute_capability: str = field(default="8.0", metadata=_help('Such as "9.0".'))
    serial: str | None = field(default=None, metadata=_help("Serial number."))
    vbios: str | None = field(default=None, metadata=_help("Version of the VBIOS."))
    board: str | None = field(default=None, metadata=_help("Part number of the board."))
    load: Load = field(default=Load(), metadata=_help("How busy it is."))
    values: Readings = field(default=Readings(), metadata=_help("Readings by name."))
    fields: Numbers = field(
        default_factory=dict, metadata=_help('Field values by id ("186"), whatever the readings say.')
    )
    gpm: Numbers = field(
        default_factory=dict,
        metadata=_help('Performance counters by metric id ("2"); with none the GPU has no GPM.'),
    )
    mig: tuple[Instance, ...] = field(default=(), metadata=_help("Instances, while mig_mode is 1."))
    processes: tuple[Process, ...] = field(default=(), metadata=_help("Compute processes."))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether names and ids can be."""
        yield from _number_keys(self)
        major, _, minor = self.compute_capability.partition(".")
        if not (major.isdecimal() and minor.isdecimal()):
            yield "compute_capability", 'is two numbers such as "9.0"'


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """GPUs of one model."""

    model: str = field(metadata=_help("Key of `models`."))
    count: Annotated[int, Range(1, MOST_GPUS)] = field(default=1, metadata=_help("How many of them."))
    uuid: str | None = field(default=None, metadata=_help("Of a single one; else made up."))
    values: Readings = field(default=Readings(), metadata=_help("Readings that differ from the model's."))
    processes: tuple[Process, ...] | None = field(
        default=None,
        metadata=_help("Compute processes in place of the model's; pids count up over the GPUs."),
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether each can have its own name."""
        if self.uuid is not None and self.count > 1:
            yield "uuid", "several GPUs cannot have one UUID"


_EVENT_BITS = {name: bit for bit, name in EVENTS.items()} | {"mig_config": MIG_CONFIG}


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """Something that happens while the machine is replayed."""

    at: Duration = field(default=0.0, metadata=_help("When, from the beginning of the replay."))
    until: Duration | None = field(
        default=None, metadata=_help("When it is over, and everything as before; for good where left out.")
    )
    gpus: tuple[Annotated[int, Range(0, MOST_GPUS - 1)], ...] = field(
        default=(), metadata=_help("Indices of the GPUs that it concerns; none means all.")
    )
    lost: bool = field(
        default=False, metadata=_help("Every call on the GPUs, and on their handles, says GPU_IS_LOST.")
    )
    removed: bool = field(default=False, metadata=_help("The GPUs are no longer listed."))
    errors: Mapping[str, str] = field(
        default_factory=dict,
        metadata=_help(
            'NVML error by function, as in nvml.h without NVML_ERROR_; "*" for every function of a GPU.'
        ),
    )
    hang: tuple[str, ...] = field(
        default=(),
        metadata=_help('Functions that do not return until it is over; "*" for every one of a GPU.'),
    )
    delay: Mapping[str, Duration] = field(
        default_factory=dict, metadata=_help("How much longer functions take.")
    )
    crash: tuple[str, ...] = field(
        default=(), metadata=_help("Functions that end the process as a fault in the library would.")
    )
    returns: Numbers = field(
        default_factory=dict, metadata=_help("What functions give, as NVML would, whatever the readings say.")
    )
    set: Readings = field(default=Readings(), metadata=_help("Readings that are different from now on."))
    fields: Numbers = field(default_factory=dict, metadata=_help("Field values by id."))
    gpm: Numbers = field(default_factory=dict, metadata=_help("Performance counters by metric id."))
    mig: tuple[Instance, ...] | None = field(
        default=None, metadata=_help("Instances in place of those before.")
    )
    processes: tuple[Process, ...] | None = field(
        default=None, metadata=_help("Compute processes in place of those before.")
    )
    xid: tuple[Annotated[int, Range(0, 100_000)], ...] = field(
        default=(), metadata=_help("Xid errors that the driver reports when it begins.")
    )
    event: tuple[Literal[tuple(sorted(_EVENT_BITS))], ...] = field(  # type: ignore[valid-type]  # made from a table
        default=(), metadata=_help("Other events that it reports when it begins.")
    )
    driver: str | None = field(
        default=None,
        metadata=_help("The driver is replaced: who has used the old one gets LIB_RM_VERSION_MISMATCH."),
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether its functions and errors are NVML's."""
        if self.until is not None and self.until <= self.at:
            yield "until", f"is over before it begins, at {self.at:g}s"
        for name in ("errors", "hang", "delay", "crash", "returns"):
            for symbol in getattr(self, name):
                if symbol not in SYMBOLS and not (symbol == EVERY_CALL and name in {"errors", "hang"}):
                    yield name, f'no function "{symbol}" is replayed, {_nearest(symbol)}'
        for symbol, error in self.errors.items():
            if error.lower() not in CODES and error.lower() != "success":
                known = [known.upper() for known in (*CODES, "success")]
                yield "errors", f'{symbol}: no error "{error}", {suggest(error.upper(), known)}'
        for symbol, number in self.returns.items():
            if isinstance(number, Signal) or number is None:
                yield "returns", f"{symbol}: a function returns a plain number; readings can move"
        if self.driver is not None and not _is_version(self.driver):
            yield "driver", 'is a version such as "580.95.05"'
        yield from _number_keys(self)


@dataclass(frozen=True, slots=True)
class MachineDescription:
    """A machine with, or without, NVIDIA's GPUs."""

    description: str = field(default="", metadata=_help("What it shows."))
    library: bool = field(default=True, metadata=_help("Whether it has NVIDIA's library."))
    driver: str = field(default="580.95.05", metadata=_help("Version of the driver."))
    nvml: str = field(default="13.580.95.05", metadata=_help("Version of the library."))
    cuda: str = field(default="13.0", metadata=_help("Version of CUDA that the driver supports."))
    missing: tuple[str, ...] = field(default=(), metadata=_help("Functions that the library does not have."))
    newest_field: Annotated[int, Range(0)] | None = field(
        default=None, metadata=_help("Greater field ids are invalid; none are where it is left out.")
    )
    newest_metric: Annotated[int, Range(0)] | None = field(
        default=None,
        metadata=_help(
            "Greater ids of performance counters are invalid, and so is every request with one; none are where it is left out."
        ),
    )
    shared: bool = field(
        default=False,
        metadata=_help(
            "Whether the exporters of a machine share these GPUs, so that one of them counts their energy, as with real "
            "ones; else each has its own."
        ),
    )
    costs: Mapping[str, Annotated[float, Range(0, 1000)]] = field(
        default_factory=dict,
        metadata=_help(
            'Milliseconds of processor time that calls take, by function, by field id ("186"), for the sample buffers '
            'nvmlDeviceGetSamples/power and /utilization, "*" for all others; none where it is left out.'
        ),
    )
    models: Mapping[str, Model] = field(default_factory=dict, metadata=_help("Kinds of GPUs by a key."))
    gpus: tuple[GpuGroup, ...] = field(default=(), metadata=_help("The GPUs in NVML's order."))
    timeline: tuple[TimelineEntry, ...] = field(default=(), metadata=_help("What happens to them."))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether what is named is there."""
        if not _is_version(self.driver):
            yield "driver", 'is a version such as "580.95.05"'
        if not _is_version(self.cuda):
            yield "cuda", 'is a version such as "13.0"'
        for symbol in self.missing:
            if symbol not in SYMBOLS:
                yield "missing", f'no function "{symbol}" is replayed, {_nearest(symbol)}'
        for key in self.costs:
            if not key.isdecimal() and key not in COST_KEYS:
                yield "costs", f'no function "{key}" is replayed, {_nearest(key)}'
        for place, group in enumerate(self.gpus):
            if group.model not in self.models:
                yield (
                    "gpus",
                    f'[{place}].model: no model "{group.model}", {suggest(group.model, self.models)}',
                )
        count = sum(group.count for group in self.gpus)
        if count > MOST_GPUS:
            yield "gpus", f"are {count}, of which no more than {MOST_GPUS} are watched"
        uuids = [group.uuid for group in self.gpus if group.uuid is not None]
        for uuid in {uuid for uuid in uuids if uuids.count(uuid) > 1}:
            yield "gpus", f'two of them cannot have one UUID, "{uuid}"'
        for place, entry in enumerate(self.timeline):
            for index in entry.gpus:
                if index >= count:
                    yield "timeline", f"[{place}].gpus: there is no GPU {index}, only {count} of them"

    def plain(self) -> dict[str, Any]:
        """What the NVML child is given: nothing but JSON's types."""
        gpus: list[dict[str, Any]] = []
        for group in self.gpus:
            first = len(gpus)
            gpus.extend(self._plain_gpu(group, first + number) for number in range(group.count))
        return {
            "library": self.library,
            "shared": self.shared,
            "costs": dict(self.costs),
            "driver": self.driver,
            "nvml": self.nvml,
            "cuda": self.cuda,
            "missing": list(self.missing),
            "newest_field": self.newest_field,
            "newest_metric": self.newest_metric,
            "gpus": gpus,
            "timeline": [_plain_entry(each) for each in self.timeline],
        }

    def _plain_gpu(self, group: GpuGroup, index: int) -> dict[str, Any]:
        model = self.models[group.model]
        values = {**_plain(model.values), **_plain(group.values)}
        values["architecture"] = {name: number for number, name in ARCHITECTURES.items()}[model.architecture]
        own = group.processes is not None
        processes = [
            _plain(each) for each in (group.processes if group.processes is not None else model.processes)
        ]
        for process in processes:
            process["pid"] += 0 if own and group.count == 1 else index
        return {
            "name": model.name,
            "uuid": group.uuid or f"GPU-00000000-0000-0000-0000-{index:012x}",
            "serial": model.serial,
            "vbios": model.vbios,
            "board": model.board,
            "compute_capability": model.compute_capability,
            "load": _plain(model.load),
            "values": values,
            "fields": _plain(model.fields),
            "gpm": _plain(model.gpm),
            "mig": [_plain(each) for each in model.mig],
            "processes": processes,
        }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
        return {name: _plain(inner) for name, inner in pairs if inner is not UNCHANGED}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return value


def _plain_entry(entry: TimelineEntry) -> dict[str, Any]:
    plain: dict[str, Any] = _plain(entry)
    plain["event_bits"] = sum(_EVENT_BITS[name] for name in set(plain.pop("event")))
    return plain


def _number_keys(described: Model | TimelineEntry) -> Iterator[tuple[str, str]]:
    for name in ("fields", "gpm"):
        found = getattr(described, name)
        for key in found if isinstance(found, Mapping) else ():  # it has failed, or says nothing
            if not key.isdecimal():
                yield name, f'"{key}" is no id; ids are numbers in quotes'


def _is_version(text: str) -> bool:
    parts = text.split(".")
    return len(parts) >= 2 and all(part.isdecimal() for part in parts[:2])


def _nearest(symbol: str) -> str:
    near = difflib.get_close_matches(symbol, SYMBOLS, 1, 0.6)
    return f'did you mean "{near[0]}"?' if near else "see docs/replay.md for those that are"
