"""Totals of a phase: exclusive seconds, entries and durations."""

from __future__ import annotations

from bisect import bisect_left

from exporter.training.durations import CELLS
from exporter.training.phases import Phase


class PhaseTotals:
    """Exclusive seconds, entries and durations of a phase.

    Attributes:
        bin_seconds: The seconds at the start of the current bin of the history.
        cells: Number of durations in each cell (see `durations.py`); empty for a phase without a histogram.
        is_entered: True after the first entry of the phase in this process.
    """

    __slots__ = (
        "row",
        "name",
        "seconds",
        "bin_seconds",
        "entries",
        "cells",
        "duration_seconds",
        "is_entered",
    )

    def __init__(self, row: Phase) -> None:
        self.row = row
        self.name = row.name
        self.is_entered = False
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.seconds = self.bin_seconds = self.duration_seconds = 0.0
        self.entries = 0
        self.cells = [0] * (len(CELLS) + 1) if self.row.recurring else []

    def count_duration(self, seconds: float) -> None:
        """Count the duration of an entry that was counted before."""
        if self.cells:
            self.duration_seconds += seconds
            self.cells[bisect_left(CELLS, seconds)] += 1

    def count_entry(self, seconds: float) -> None:
        """Count an entry and its duration."""
        self.entries += 1
        self.count_duration(seconds)
