"""Phases of a training step that the clock has not counted yet.

In a usual step of a plain loop (see `IterationPhases.end_usual_step`), a hook on torch stores the start of a phase here. At the end of
the step, the clock counts all phases of the step at once. Counting each phase in its hook would cost the job 10 µs more per step: when a
hook runs, the caches of the processor contain torch's code and data, and no longer those of the exporter.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from exporter.training.totals import PhaseTotals

Edge = tuple[PhaseTotals, float]
"""Phase, and the time at which the phase starts."""


class StepEdges:
    """Start times of the phases of the open iteration, in monotonic seconds.

    A phase is pending if it starts after the time up to which the clock has counted.

    Attributes:
        limit: Time from which the hooks store no start times and the clock counts each phase immediately, which keeps the history up to
            date in a long step. -inf if the clock always counts immediately.
        fetch_began: Start of the phase `data_loading`.
        forward_began: Start of the phase `forward`, when the batch has arrived.
        backward_began: Start of the phase `backward`.
        backward_ended: End of the phase `backward`, after which the time counts for the phase `iteration`.
        optimizer_began: Start of the phase `optimizer`.
    """

    __slots__ = (
        "limit",
        "fetch_began",
        "forward_began",
        "backward_began",
        "backward_ended",
        "optimizer_began",
    )

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Discard the start times."""
        self.limit = self.fetch_began = self.forward_began = -inf
        self.backward_began = self.backward_ended = self.optimizer_began = -inf

    def after(self, last: float, phases: Mapping[str, PhaseTotals]) -> list[Edge]:
        """Return the phases that start after *last*, in the order of a step."""
        edges = (
            (phases["data_loading"], self.fetch_began),
            (phases["forward"], self.forward_began),
            (phases["backward"], self.backward_began),
            (phases["iteration"], self.backward_ended),
            (phases["optimizer"], self.optimizer_began),
        )
        return [edge for edge in edges if edge[1] > last]
