"""A replayed machine: its GPUs, what happens to them as time goes by, and the events that are told of it.

Used in the NVML child, by the replay's library. A description (plain dictionaries, see `description`) comes in;
answers about a moment go out: which GPUs there are, what a call on one of them must do, what a reading is.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from exporter.collectors.gpu.nvml.library import CODES
from exporter.replay.signals import Readings, load_of

EVERY_CALL = "*"

_XID = 0x8
_LOST = CODES["gpu_is_lost"]


class Fault:
    """One entry of the timeline, as far as calls must know of it.

    Attributes:
        at: From when.
        until: Until when; infinity for good.
        gpus: Indices; None for all, and for calls on no GPU.
        errors: Codes by call.
        delays: Seconds by call.
        hangs: Calls that do not return while it lasts.
        crashes: Calls that end the process.
        returns: What calls give, whatever the readings say.
        removed: Whether the GPUs are not even listed.
        xids: Error numbers that the driver reports when it begins.
        events: Bits of events that the driver reports when it begins.
        driver: Another driver from now on; whoever uses the old one gets nothing any more.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        get = description.get
        self.at: float = get("at", 0.0)
        self.until: float = inf if get("until") is None else description["until"]
        self.gpus: frozenset[int] | None = frozenset(get("gpus") or ()) or None
        names: dict[str, str] = get("errors") or {}
        self.errors = {call: code_of(name) for call, name in names.items()}
        if get("lost"):
            self.errors[EVERY_CALL] = CODES["gpu_is_lost"]
        self.delays: dict[str, float] = get("delay") or {}
        self.hangs = frozenset(get("hang") or ())
        self.crashes = frozenset(get("crash") or ())
        self.returns: dict[str, float] = get("returns") or {}
        self.removed: bool = bool(get("removed"))
        self.xids: list[int] = get("xid") or []
        self.events: int = get("event_bits") or 0
        self.driver: str | None = get("driver")

    def concerns(self, index: int | None, moment: float) -> bool:
        """Whether it is under way for a GPU, or for calls on none."""
        return self.at <= moment < self.until and self.is_of(index)

    def is_of(self, index: int | None) -> bool:
        """Whether it is about a GPU, or about calls on none."""
        return self.gpus is None or (index is not None and index in self.gpus)


class ReplayedGpu:
    """One GPU of the machine.

    Attributes:
        index: Its place when all are there.
        description: Of its model, with its uuid.
        readings: What NVML would give, by name; field values are `field.<id>`, GPM metrics `gpm.<id>`.
        all_instances: Compute instances that there ever are.
    """

    def __init__(self, index: int, description: dict[str, Any]) -> None:
        self.index = index
        self.description = description
        readings: dict[str, Any] = dict(description["values"])
        readings.update((f"field.{number}", value) for number, value in description["fields"].items())
        readings.update((f"gpm.{number}", value) for number, value in description["gpm"].items())
        self.readings = Readings(readings, load_of(description["load"], index))
        self.all_instances: list[dict[str, Any]] = list(description["mig"])
        self._lists: list[tuple[Fault, dict[str, Any]]] = []  # the latest first

    def expect(self, fault: Fault, description: dict[str, Any]) -> None:
        """Learn which lists an entry of the timeline changes."""
        self._lists.insert(0, (fault, description))
        self.all_instances += [
            each for each in description.get("mig") or () if each not in self.all_instances
        ]

    def instances(self, moment: float) -> list[dict[str, Any]]:
        """The compute instances of the GPU while it is divided."""
        return self._listed("mig", moment) if self.readings.at("mig_mode", moment) == 1 else []

    def processes(self, moment: float) -> list[dict[str, Any]]:
        """The processes that compute on it."""
        return self._listed("processes", moment)

    def _listed(self, name: str, moment: float) -> list[dict[str, Any]]:
        for fault, description in self._lists:
            if description.get(name) is not None and fault.concerns(self.index, moment):
                return list(description[name])
        return list(self.description[name])


class ReplayedMachine:
    """The machine.

    Args:
        description: See `description.Machine.plain`.

    Attributes:
        gpus: All that ever are there.
        faults: In the order of the timeline.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        self.description = description
        self.gpus = [ReplayedGpu(index, each) for index, each in enumerate(description["gpus"])]
        self.faults = [Fault(each) for each in description["timeline"]]
        for each, fault in zip(description["timeline"], self.faults, strict=True):
            for gpu in self.gpus:
                if fault.is_of(gpu.index):
                    gpu.expect(fault, each)
                    self._change(gpu, each)

    def library_is_there(self) -> bool:
        """Whether the machine has NVIDIA's library."""
        return bool(self.description["library"])

    def driver(self, moment: float) -> str:
        """The version of the driver that is loaded."""
        version: str = self.description["driver"]
        for fault in self.faults:
            if fault.driver is not None and fault.at <= moment:
                version = fault.driver
        return version

    def present(self, moment: float) -> list[ReplayedGpu]:
        """The GPUs that are listed."""
        return [gpu for gpu in self.gpus if not any(h.removed for h in self.under_way(gpu.index, moment))]

    def under_way(self, index: int | None, moment: float) -> Iterator[Fault]:
        """What concerns a GPU, or calls on none, the latest first."""
        return (each for each in reversed(self.faults) if each.concerns(index, moment))

    @staticmethod
    def _change(gpu: ReplayedGpu, description: dict[str, Any]) -> None:
        at, until = description.get("at", 0.0), description.get("until")
        changes = dict(description.get("set") or {})
        changes.update((f"field.{key}", value) for key, value in (description.get("fields") or {}).items())
        changes.update((f"gpm.{key}", value) for key, value in (description.get("gpm") or {}).items())
        for name, value in changes.items():
            gpu.readings.change(name, at, until, value)


class ReplayedEvents:
    """What is told to those who wait for events.

    As with NVML, events before a registration are lost, and a GPU that is lost makes every wait for its set fail: from
    then on nothing is heard of the others in it either.

    Args:
        machine: Whose events.
    """

    def __init__(self, machine: ReplayedMachine) -> None:
        self._machine = machine
        self._registered: dict[int, list[tuple[ReplayedGpu, int, float]]] = {}  # by set: GPU, mask, since
        self._told: set[tuple[int, int, int]] = set()

    def register(self, gpu: ReplayedGpu, mask: int, moment: float, *, event_set: int) -> None:
        """Ask for the events of a GPU from now on."""
        self._registered.setdefault(event_set, []).append((gpu, mask, moment))

    def next(self, event_set: int, moment: float) -> tuple[ReplayedGpu, int, int] | None:
        """The next one that has happened and was not told: its GPU, kind and data."""
        broken = self.broken_since(event_set, moment)
        end = moment if broken is None else broken
        for gpu, mask, since in self._registered.get(event_set, ()):
            for place, fault in enumerate(self._machine.faults):
                if not since <= fault.at <= end or not fault.is_of(gpu.index):
                    continue
                for which, (bit, data) in enumerate(_reports(fault)):
                    key = (gpu.index, place, which)
                    if mask & bit and key not in self._told:
                        self._told.add(key)
                        return gpu, bit, data
        return None

    def broken_since(self, event_set: int, moment: float) -> float | None:
        """Since when a GPU of a set is lost; None while none is."""
        since = [
            each.at
            for gpu, _, _ in self._registered.get(event_set, ())
            for each in self._machine.under_way(gpu.index, moment)
            if each.removed or each.errors.get(EVERY_CALL) == _LOST
        ]
        return min(since, default=None)


def _reports(fault: Fault) -> Iterator[tuple[int, int]]:
    for xid in fault.xids:
        yield _XID, xid
    for place in range(16):
        if fault.events & (1 << place):
            yield 1 << place, 0


def code_of(name: str) -> int:
    """The return code of NVML's name for it."""
    return 0 if name.lower() == "success" else CODES[name.lower()]
