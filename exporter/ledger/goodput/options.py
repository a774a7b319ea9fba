"""Options of goodput and of the hang rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from exporter.config.options import Duration, Range, option
from exporter.ledger.families.run_info import PeakFlops
from exporter.ledger.goodput.hang import HANG_AFTER_SECONDS, HANG_STEPS, HangRule


@dataclass(frozen=True, slots=True)
class GoodputOptions:
    """Accounting of training time."""

    validation: Literal["badput", "productive"] = option(
        "badput",
        "Whether validation and test count as lost time or as work, from the next attempt on.",
    )
    new_task_after: Annotated[Duration, Range(0, 365 * 86400)] = option(
        3600.0,
        "Without a session tag, a process begins a new task if the run's last process ended longer ago than this, "
        "the process starts at step 0 and loads no checkpoint. The time between belongs to no task.",
    )
    hang_after: Annotated[Duration, Range(1, 86400)] = option(
        HANG_AFTER_SECONDS,
        "A run hangs if no step has finished for this time and for hang_steps times the longest recent step. Until the next "
        "step, last values (loss, learning rate, ...) are absent and the open step counts as badput. No run hangs "
        "before the first step, nor while compiling, loading, saving, validating or waiting for data.",
    )
    hang_steps: Annotated[float, Range(1, 1000)] = option(HANG_STEPS, "See hang_after.", example=20.0)
    peak_flops: tuple[PeakFlops, ...] = option(
        (), "Peak performance of devices missing in the built-in table."
    )

    @property
    def hang(self) -> HangRule:
        """Hang rule of these options."""
        return HangRule(self.hang_after, self.hang_steps)
