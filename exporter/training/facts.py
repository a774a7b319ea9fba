"""Facts about the run, from the launcher's environment, the configuration and `describe`: names, versions, sizes, FLOPs."""

from __future__ import annotations

import os
from collections.abc import Mapping

from exporter.recording.conversion import safe_repr
from exporter.recording.identity import clean_text
from exporter.training.metrics import Families, to_amount

_TEXTS = frozenset(
    {
        "job_name",
        "framework",
        "framework_version",
        "model",
        "precision",
        "flops_method",
        "application",
        "session_tag",
        "perf_tag",
    }
)
"""Facts that are texts."""
FLOP_FACTS = ("flops_per_token", "hardware_flops_per_token", "flops_per_sample", "peak_flops")
"""Facts that are numbers of floating-point operations."""
_ENVIRONMENT = {
    "job_id": ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID"),
    "job_name": ("SLURM_JOB_NAME", "LSB_JOBNAME", "PBS_JOBNAME"),
    "nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "user": ("SLURM_JOB_USER", "USER", "LOGNAME"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
}
"""Environment variables of launchers by fact; the first variable that is set takes precedence. Reported facts replace them."""


class Facts:
    """Facts about the run. A number is None until the job reports it."""

    world_size: int | None = None
    peak_flops: float | None = None
    flops_per_token: float | None = None
    hardware_flops_per_token: float | None = None
    flops_per_sample: float | None = None

    def __init__(self, families: Families, environment: Mapping[str, str] = os.environ) -> None:
        self._families = families
        self._texts: dict[str, str] = {}
        for fact, variables in _ENVIRONMENT.items():
            for variable in reversed(variables):
                self._set(fact, environment.get(variable))

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return the facts with a text, as pairs of name and text sorted by name."""
        return tuple(sorted(self._texts.items()))

    def describe(self, values: Mapping[str, object]) -> list[tuple[str, str]]:
        """Record facts reported by the job. Return the name and the expected value of each invalid fact."""
        problems = []
        for name, value in values.items():
            if value is None:
                continue
            number = to_amount(value, 1e308)
            if name in _TEXTS:
                self._set(name, value)
            elif name == "is_baseline":
                self._set(name, str(bool(value)).lower())
            elif not number or (name not in FLOP_FACTS and type(value) is not int):
                expected = {"step_target": "a step above 0", "world_size": "a number of ranks"}
                problems.append((name, f"to be {expected.get(name, 'a number above 0')}"))
            elif name in FLOP_FACTS:
                setattr(self, name, number)
            elif name == "world_size":
                self.world_size = int(number)
                self._set(name, self.world_size)
            elif name == "step_target":
                self._families.gauge("training.step_target").set(number)
        return problems

    def _set(self, name: str, value: object) -> None:
        text = value if type(value) is str else safe_repr(value) if type(value) in {int, float, bool} else ""
        if clean_text(text):
            self._texts[name] = clean_text(text)
