"""A replayed machine: its GPUs, and what happens to them as time goes by.

Used in the NVML child, by the replay's library. A description (plain dictionaries, see `description`) comes in;
answers about a moment go out: which GPUs there are, what a call on one of them must do, what a reading is.
"""

from __future__ import annotations

from math import inf

from exporter.collectors.nvml.codes import CODES
from exporter.collectors.nvml.replay_values import Tracks, load_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

EVERY_CALL = "*"


class Happening:
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
        self.readings = Tracks(readings, load_of(description["load"], index))
        self.all_instances: list[dict[str, Any]] = list(description["mig"])
        self._lists: list[tuple[Happening, dict[str, Any]]] = []  # the latest first

    def expect(self, happening: Happening, description: dict[str, Any]) -> None:
        """Learn which lists an entry of the timeline changes."""
        self._lists.insert(0, (happening, description))
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
        for happening, description in self._lists:
            if description.get(name) is not None and happening.concerns(self.index, moment):
                return list(description[name])
        return list(self.description[name])


class ReplayedMachine:
    """The machine.

    Args:
        description: See `description.Machine.plain`.

    Attributes:
        gpus: All that ever are there.
        happenings: In the order of the timeline.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        self.description = description
        self.gpus = [ReplayedGpu(index, each) for index, each in enumerate(description["gpus"])]
        self.happenings = [Happening(each) for each in description["timeline"]]
        for each, happening in zip(description["timeline"], self.happenings, strict=True):
            for gpu in self.gpus:
                if happening.is_of(gpu.index):
                    gpu.expect(happening, each)
                    self._change(gpu, each)

    def library_is_there(self) -> bool:
        """Whether the machine has NVIDIA's library."""
        return bool(self.description["library"])

    def driver(self, moment: float) -> str:
        """The version of the driver that is loaded."""
        version: str = self.description["driver"]
        for happening in self.happenings:
            if happening.driver is not None and happening.at <= moment:
                version = happening.driver
        return version

    def present(self, moment: float) -> list[ReplayedGpu]:
        """The GPUs that are listed."""
        return [gpu for gpu in self.gpus if not any(h.removed for h in self.under_way(gpu.index, moment))]

    def under_way(self, index: int | None, moment: float) -> Iterator[Happening]:
        """What concerns a GPU, or calls on none, the latest first."""
        return (each for each in reversed(self.happenings) if each.concerns(index, moment))

    @staticmethod
    def _change(gpu: ReplayedGpu, description: dict[str, Any]) -> None:
        at, until = description.get("at", 0.0), description.get("until")
        changes = dict(description.get("set") or {})
        changes.update((f"field.{key}", value) for key, value in (description.get("fields") or {}).items())
        changes.update((f"gpm.{key}", value) for key, value in (description.get("gpm") or {}).items())
        for name, value in changes.items():
            gpu.readings.change(name, at, until, value)


def code_of(name: str) -> int:
    """The return code of NVML's name for it."""
    return 0 if name.lower() == "success" else CODES[name.lower()]
