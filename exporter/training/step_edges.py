"""Edges of a usual training step: times at which its parts begin, before the clock counts them."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from exporter.training.totals import PhaseTotals

Edge = tuple[PhaseTotals, float]
"""Phase in which a block continues, and the time from which it does."""


class StepEdges:
    """Deferred edges of the open iteration, whose batch is fetched, passes forward and backward, and is followed by the optimizer.

    An edge is pending if it is later than the latest edge of the clock.

    Attributes:
        limit: Time from which no edge is deferred; -inf unless the clock defers edges.
        fetch: Start of the fetch of the batch.
        forward: Arrival of the batch.
        backward: Start of the backward pass.
        ready: End of the backward pass.
        optimizer: Start of the optimizer's step.
    """

    __slots__ = ("limit", "fetch", "forward", "backward", "ready", "optimizer")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the edges."""
        self.limit = self.fetch = self.forward = self.backward = self.ready = self.optimizer = -inf

    def after(self, last: float, phases: Mapping[str, PhaseTotals]) -> list[Edge]:
        """Return the edges after the latest edge of the clock, in order."""
        edges = (
            (phases["data_loading"], self.fetch),
            (phases["forward"], self.forward),
            (phases["backward"], self.backward),
            (phases["iteration"], self.ready),
            (phases["optimizer"], self.optimizer),
        )
        return [edge for edge in edges if edge[1] > last]
