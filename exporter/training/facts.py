"""Facts: what describes the run, and is told once or rarely.

Used by the recording thread of the training process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import isfinite

from exporter.recording.identity import clean_text
from exporter.training.progress import Progress
from exporter.training.series import Families

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.training.configuration import OneLoggerConfig

_TEXTS = ("job_name", "framework", "framework_version", "model", "precision", "flops_method")
_ENVIRONMENT = {
    "job_id": ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID"),
    "job_name": ("SLURM_JOB_NAME", "LSB_JOBNAME", "PBS_JOBNAME"),
    "nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "user": ("SLURM_JOB_USER", "USER", "LOGNAME"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
}
"""What launchers say; the job's own word goes before it."""
_RATES = ("flops_per_token", "hardware_flops_per_token", "flops_per_sample", "peak_flops")


class Facts:
    """What is known of the run.

    Args:
        families: Where the target is told.
        progress: What multiplies by the FLOP.
        environment: Of the process.

    Attributes:
        world_size: Ranks as the job said; None while it is not known.
        peak_flops: FLOP/s of this rank's device; None while nobody said.
    """

    def __init__(
        self, families: Families, progress: Progress, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._families = families
        self._progress = progress
        self._texts: dict[str, str] = {}
        for fact, variables in _ENVIRONMENT.items():
            for variable in reversed(variables):
                self._say(fact, environment.get(variable))
        self.world_size: int | None = None
        self.peak_flops: float | None = None

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Give all texts, sorted by name."""
        return tuple(sorted(self._texts.items()))

    def application(self, settings: OneLoggerConfig, values: Mapping[str, Any]) -> None:
        """Take what the configuration says of the application.

        Args:
            settings: The configuration.
            values: Its fields that may be callables, asked.
        """
        self._say("application", settings.application_name)
        self._say("session_tag", values.get("session_tag"))
        if values.get("is_baseline_run") is not None:
            self._say("is_baseline", str(bool(values["is_baseline_run"])).lower())
        self._set_world_size(values.get("world_size"))

    def training(self, values: Mapping[str, Any]) -> None:
        """Take what the configuration says of the training."""
        tag = values.get("perf_tag")
        self._say("perf_tag", ",".join(tag) if isinstance(tag, list) else tag)
        self.ask(values)
        self.target(values.get("train_iterations_target"))

    def ask(self, values: Mapping[str, Any]) -> None:
        """Take what the job's callables say."""
        flops = values.get("flops_per_sample")
        if flops:
            self._progress.flops_per_sample = float(flops)

    def target(self, step: object) -> None:
        """Take the step at which the training is to end."""
        number = _positive(step)
        if number is not None:
            self._families.gauge("training.step_target").set(number)

    def describe(self, values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Take what the job says by itself.

        Returns:
            What is wrong: the field, and what was expected.
        """
        wrong = []
        for name, value in values.items():
            if name in _TEXTS:
                self._say(name, value)
            elif name == "step_target":
                if not isinstance(value, int) or _positive(value) is None:
                    wrong.append((name, "to be a step above 0"))
                else:
                    self.target(value)
            elif name == "world_size":
                if not isinstance(value, int) or _positive(value) is None:
                    wrong.append((name, "to be a number of ranks"))
                else:
                    self._set_world_size(value)
            elif name in _RATES:
                number = _positive(value)
                if number is None:
                    wrong.append((name, "to be a number above 0"))
                elif name == "peak_flops":
                    self.peak_flops = number
                else:
                    setattr(self._progress, name, number)
        return wrong

    def _say(self, name: str, value: object) -> None:
        if value is not None:
            text = value if isinstance(value, str) else str(value) if isinstance(value, int | float) else ""
            if clean_text(text):
                self._texts[name] = clean_text(text)

    def _set_world_size(self, value: object) -> None:
        if isinstance(value, int) and value > 0:
            self.world_size = value
            self._texts["world_size"] = str(value)


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if isfinite(number) and number > 0 else None
