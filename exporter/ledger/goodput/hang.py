"""Hang rule: the time without a finished step after which a step is overdue, and the phases in which an overdue step is a hang."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.recording.values import TrainingReading
from exporter.training.phases import PHASES

HANG_AFTER_SECONDS = 300.0
"""Default of `HangRule.min_seconds`."""
HANG_STEPS = 5.0
"""Default of `HangRule.step_factor`."""

LONG_PHASES = frozenset(
    name
    for name, phase in PHASES.items()
    if phase.badput in {"init", "compile", "validation", "checkpoint_load", "checkpoint_save"}
)
"""Phases that often last longer than a step. In these phases, the limit is multiplied by `LONG_PHASE_FACTOR`."""
WAITING_PHASES = LONG_PHASES | {"data_loading"}
"""Phases in which a run with an overdue step is stalled, not hung."""
LONG_PHASE_FACTOR = 5.0
"""Factor of the limit in `LONG_PHASES`."""


@dataclass(frozen=True, slots=True)
class HangRule:
    """Limit of the time without a finished step: the larger of a fixed time and a multiple of the longest of the last 100 steps.

    In `LONG_PHASES`, a step is overdue after `LONG_PHASE_FACTOR` times this limit.
    """

    min_seconds: float = HANG_AFTER_SECONDS
    step_factor: float = HANG_STEPS  # multiple of the longest of the last 100 steps

    def limit_seconds(self, reading: TrainingReading) -> float:
        """Return the limit without the factor of long phases, from the longest of the last 100 steps or else from the mean step."""
        step_seconds = reading.longest_step_seconds
        if step_seconds is None and reading.steps:
            step_seconds = reading.work_seconds / reading.steps
        return max(self.min_seconds, self.step_factor * (step_seconds or 0.0))

    def is_overdue(self, reading: TrainingReading | None, seconds_without_step: float) -> bool:
        """Return True if a step is overdue. Returns False without a reading, and before the first finished step."""
        if reading is None or reading.steps < 1:
            return False
        factor = LONG_PHASE_FACTOR if reading.phase in LONG_PHASES else 1.0
        return seconds_without_step > factor * self.limit_seconds(reading)

    def is_hung(self, reading: TrainingReading | None, seconds_without_step: float) -> bool:
        """Return True if a step is overdue and the phase is not one of `WAITING_PHASES`."""
        is_overdue = self.is_overdue(reading, seconds_without_step)
        return is_overdue and reading is not None and reading.phase not in WAITING_PHASES
