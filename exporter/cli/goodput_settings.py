"""The configuration of goodput: what counts as what, and what devices could do.

Used in the sidecar, as a section of the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from exporter.config.options import Duration, Range
from exporter.ledger.families.run_info import PeakSetting
from exporter.ledger.goodput.session import GoodputOptions


@dataclass(frozen=True, slots=True)
class PeakFlopsSetting:
    """What a device could do at best."""

    device: str = field(
        metadata={
            "help": "Name of the device as gpu_info has it, * for any characters. The first that fits wins, and goes "
            "before the table.",
            "example": "*H100*",
        }
    )
    flops: Annotated[float, Range(1, 1e21)] = field(
        metadata={"help": "Dense floating-point operations per second.", "example": 9.89e14}
    )
    dtype: Literal["bf16", "fp16", "fp8", "tf32"] | None = field(
        default=None,
        metadata={"help": "Of which data type; null for whatever the run uses.", "example": "bf16"},
    )


@dataclass(frozen=True, slots=True)
class Goodput:
    """How the time of a training is counted."""

    validation: Literal["badput", "productive"] = field(
        default="badput",
        metadata={
            "help": "Whether validation and test are time lost or part of the work; holds from the next attempt on."
        },
    )
    new_task_after: Annotated[Duration, Range(0, 365 * 86400)] = field(
        default=3600.0,
        metadata={
            "help": "Without a session tag, a process that begins so long after the end of the last one of its run, at "
            "step 0 and without loading a checkpoint, begins another task; the time between is nobody's."
        },
    )
    hang_after: Annotated[Duration, Range(1, 86400)] = field(
        default=60.0,
        metadata={
            "help": "When no step has ended for so long, and for hang_steps usual steps, the run hangs: its last values "
            "(loss, learning rate, ...) are absent until the next step. Phases that take long by nature have five times "
            "as long."
        },
    )
    hang_steps: Annotated[float, Range(1, 1000)] = field(
        default=10.0, metadata={"help": "See hang_after.", "example": 20.0}
    )
    peak_flops: tuple[PeakFlopsSetting, ...] = field(
        default=(),
        metadata={"help": "What devices could do at best, where the table of the exporter lacks them."},
    )

    def options(self) -> GoodputOptions:
        """What the ledger is given."""
        return GoodputOptions(
            validation_is_productive=self.validation == "productive",
            new_after_seconds=self.new_task_after,
            hang_seconds=self.hang_after,
            hang_steps=self.hang_steps,
        )

    def peaks(self) -> tuple[PeakSetting, ...]:
        """What is configured of devices."""
        return tuple(PeakSetting(each.device, each.dtype or "", each.flops) for each in self.peak_flops)
