"""The events of a replayed machine: who has asked for which, and what has been told.

Used in the NVML child, by the replay's library. As with NVML, events before a registration are lost, and a GPU that is
lost makes every wait for its set fail: from then on nothing is heard of the others in it either.
"""

from __future__ import annotations

from exporter.collectors.nvml.codes import CODES
from exporter.collectors.nvml.replay_machine import EVERY_CALL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from exporter.collectors.nvml.replay_machine import Happening, ReplayedGpu, ReplayedMachine

_XID = 0x8
_LOST = CODES["gpu_is_lost"]


class ReplayedEvents:
    """What is told to those who wait.

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
            for place, happening in enumerate(self._machine.happenings):
                if not since <= happening.at <= end or not happening.is_of(gpu.index):
                    continue
                for which, (bit, data) in enumerate(_reports(happening)):
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


def _reports(happening: Happening) -> Iterator[tuple[int, int]]:
    for xid in happening.xids:
        yield _XID, xid
    for place in range(16):
        if happening.events & (1 << place):
            yield 1 << place, 0
