"""Facts: what describes the run, told once or rarely, and what an exception says of why it ends.

Facts are kept by the recording thread of the training process; exceptions are looked at on the thread on which they were
raised: their class, their text and their operating-system error only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from math import isfinite
from typing import Any

from exporter.recording.identity import clean_text
from exporter.training.metrics import Families

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


_BY_CLASS = {
    "KeyboardInterrupt": "user",
    "OutOfMemoryError": "gpu_memory",
    "AcceleratorError": "gpu",
    "DistNetworkError": "network",
    "DistStoreError": "network",
    "DistBackendError": "nccl_timeout",
    "MemoryError": "host",
    "ConnectionError": "network",
    "TimeoutError": "network",
    "EOFError": "storage",
}
_BY_TEXT = {
    "out of memory": "gpu_memory",
    "NCCL": "nccl_timeout",
    "CUDA error": "gpu",
    "CUDNN": "gpu",
    "cuBLAS": "gpu",
    "CUBLAS": "gpu",
    "No space left": "storage",
    "Connection reset": "network",
    "Connection refused": "network",
    "Connection closed": "network",
    "DataLoader worker": "host",
}
_STORAGE = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE})


class Facts:
    """What is known of the run; a number is None while nobody said. They are those of `describe`."""

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
                self._say(fact, environment.get(variable))

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Give all texts, sorted by name."""
        return tuple(sorted(self._texts.items()))

    def application(self, name: str, values: Mapping[str, Any]) -> None:
        """Take what the configuration says of the application, callables asked."""
        self._say("application", name)
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
        if values.get("flops_per_sample"):
            self.flops_per_sample = float(values["flops_per_sample"])
        self._set_world_size(values.get("world_size"))

    def target(self, step: object) -> None:
        """Take the step at which the training is to end."""
        number = _positive(step)
        if number is not None:
            self._families.gauge("training.step_target").set(number)

    def describe(self, values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Take what the job says by itself; gives what is wrong: the field, and what was expected."""
        wrong = []
        for name, value in values.items():
            number = _positive(value)
            if name in _TEXTS:
                self._say(name, value)
            elif number is None or (name not in _RATES and not isinstance(value, int)):
                what = {"step_target": "a step above 0", "world_size": "a number of ranks"}
                wrong.append((name, f"to be {what.get(name, 'a number above 0')}"))
            elif name == "step_target":
                self.target(value)
            elif name == "world_size":
                self._set_world_size(value)
            else:
                setattr(self, name, number)
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


def reason_of(exception: BaseException) -> str:
    """Tell why an exception ends the job, one of `END_REASONS`, "" where it does not; never raises."""
    if isinstance(exception, SystemExit):
        code = exception.code
        return "" if code is None or (isinstance(code, int) and code == 0) else "exit"
    if isinstance(exception, GeneratorExit):
        return ""
    for each in type(exception).__mro__:
        if each.__name__ in _BY_CLASS:
            return _BY_CLASS[each.__name__]
    if isinstance(exception, OSError) and exception.errno in _STORAGE:
        return "storage"
    try:
        text = str(exception) if isinstance(exception, RuntimeError) else ""
    except Exception:  # noqa: BLE001  # the job's own class
        text = ""
    return next((reason for part, reason in _BY_TEXT.items() if part in text), "exit")
