"""Options of goodput and of the hang rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from exporter.config.options import Duration, Range, option
from exporter.ledger.families.run_info import ConfiguredPeak
from exporter.ledger.goodput.hang import HANG_AFTER_SECONDS, HANG_STEPS, HangRule


@dataclass(frozen=True, slots=True)
class GoodputOptions:
    """Accounting of training time."""

    validation: Literal["badput", "productive"] = option(
        "badput",
        "Count validation and test as lost time (badput) or as work (productive). A change takes effect with the next attempt.",
    )
    new_task_after: Annotated[Duration, Range(0, 365 * 86400)] = option(
        3600.0,
        "Pause after which a process starts a new task. The option applies to a process without a session tag that starts "
        "at step 0 and loads no checkpoint. The pause counts for neither the old nor the new task.",
    )
    hang_after: Annotated[Duration, Range(1, 86400)] = option(
        HANG_AFTER_SECONDS,
        "Minimum time without a finished step after which a run counts as hung; the time must also exceed hang_steps times the "
        "longest of the last 100 steps. Until the next step, last values (loss, learning rate, ...) are absent, and the time of the "
        "unfinished step counts as badput. A run does not count as hung before the first step, nor in the phases that initialize, "
        "compile, load, save, validate or wait for data.",
    )
    hang_steps: Annotated[float, Range(1, 1000)] = option(
        HANG_STEPS,
        "Factor of the longest of the last 100 steps that the time without a step must also exceed; see hang_after.",
        example=20.0,
    )
    peak_flops: tuple[ConfiguredPeak, ...] = option(
        (), "Peak performance of devices that are not in the built-in table."
    )

    @property
    def hang_rule(self) -> HangRule:
        """Hang rule of these options."""
        return HangRule(self.hang_after, self.hang_steps)
