"""Progress: loops and their position, steps and what they took, what was trained in them, and facts about the run."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

from exporter.recording.identity import clean_text
from exporter.recording.windows import median
from exporter.training.attributes import shown
from exporter.training.metrics import LARGEST, Families, Series, amount

LONGEST_OF = 100
IDEAL_OF = 200
COMPUTE_OF = 50
FEWEST = 5
"""Steps after which a slow one can be told."""
SKIPPED = ("overflow", "nonfinite")
"""Reasons for which a step did not change the model."""
_NONFINITE = {"loss": "loss", "grad_norm": "grad"}
_GAUGES = frozenset({"loss", "grad_norm", "learning_rate", "loss_scale"})

_TEXTS = ("job_name", "framework", "framework_version", "model", "precision", "flops_method")
RATES = ("flops_per_token", "hardware_flops_per_token", "flops_per_sample", "peak_flops")
_ENVIRONMENT = {
    "job_id": ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID"),
    "job_name": ("SLURM_JOB_NAME", "LSB_JOBNAME", "PBS_JOBNAME"),
    "nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "user": ("SLURM_JOB_USER", "USER", "LOGNAME"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
}
"""What launchers say; the job's own word goes before it."""

_CLASSES = {
    "user": ("KeyboardInterrupt",),
    "gpu_memory": ("OutOfMemoryError",),
    "gpu": ("AcceleratorError",),
    "nccl_timeout": ("DistBackendError",),
    "network": ("DistNetworkError", "DistStoreError", "ConnectionError", "TimeoutError"),
    "host": ("MemoryError",),
    "storage": ("EOFError",),
}
"""Why the job ends, by the class of its exception."""
_TEXTS_OF_ERRORS = {
    "gpu_memory": ("out of memory",),
    "nccl_timeout": ("NCCL",),
    "gpu": ("CUDA error", "CUDNN", "cuBLAS", "CUBLAS"),
    "storage": ("No space left",),
    "network": ("Connection reset", "Connection refused", "Connection closed"),
    "host": ("DataLoader worker",),
}
_STORAGE = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE})


def is_count(value: object) -> bool:
    """Tell whether a value can be a number of steps or samples."""
    return isinstance(value, int) and amount(value) is not None


@dataclass(eq=False, slots=True)
class Loop:
    """One training loop."""

    number: int  # of the loop in this process, from 1
    start: int  # steps that the job had done before
    values: dict[str, Any]  # what the configuration and the call say of it: `global_batch_size`, targets …
    completed: int  # steps, those before included

    def ask(self, values: Mapping[str, Any]) -> None:
        """Take what the configuration says now; what it does not know stays as it was."""
        self.values.update({name: value for name, value in values.items() if value is not None})

    @property
    def samples(self) -> int:
        """Samples of a step, of all ranks together; 0 where that is not known."""
        return self.values.get("global_batch_size") or 0

    @property
    def tokens(self) -> int | None:
        """Tokens of a step, of all ranks together; None where that is not known."""
        length = self.values.get("seq_length")
        return self.samples * length if length else None


class Progress:
    """The steps of this process."""

    def __init__(self, families: Families, facts: Facts) -> None:
        self._families = families
        self._facts = facts
        self.reset()
        self._recent: deque[float] = deque(maxlen=IDEAL_OF)
        self._compute: deque[float] = deque(maxlen=COMPUTE_OF)
        self._slow = self.ideal = 0.0  # seconds of a slow step, and of an ordinary one; 0 while nobody knows
        self._changed = False
        self._train: tuple[Series, Series] | None = None
        self._given: set[str] = set()
        self._gauges: dict[tuple[str, str], Series] = {}
        self._expected: dict[str, float] = {}
        self._epoch: float | None = None

    def reset(self) -> None:
        """Count from zero."""
        self.steps = 0  # training steps that were completed
        self.last: float | None = None  # when the latest step or validation batch ended, monotonic time
        self.over = False  # the training loop has ended: no progress is due while a process exports its model

    def step(self, mode: str, seconds: float | None, at: float, compute: float | None = None) -> None:
        """Count a step that has ended; what it took, and of that the time without waiting, is None where not known."""
        if mode != "test":
            self.last = at
        if mode != "train":
            self._families.counter("training.steps", mode=mode).add()
            if seconds is not None:
                self._families.histogram("training.step_duration", mode=mode).observe(seconds)
            return
        self.over = False
        self.steps += 1
        steps, durations = self._train or self._begin()
        steps.add()
        if seconds is None:
            return
        durations.observe(seconds)
        if compute is not None:
            self._compute.append(compute)
        if self.steps == 1:  # it compiles and warms up
            return
        if len(self._recent) >= FEWEST and seconds > self._slow:
            self._families.counter("training.slow_step_excess", "seconds").add(seconds - self.ideal)
        self._recent.append(seconds)
        if len(self._recent) == FEWEST:
            self._update_ideal()
        self._changed = True

    def _begin(self) -> tuple[Series, Series]:
        # Counters that say that something is wrong are there from the first step, so that their first rise is seen.
        for reason in SKIPPED:
            self._families.counter("training.skipped_steps", reason=reason)
        self._families.counter("training.slow_step_excess", "seconds")
        steps = self._families.counter("training.steps", mode="train")
        self._train = steps, self._families.histogram("training.step_duration", mode="train")
        return self._train

    def _update_ideal(self) -> None:
        """Say anew what an ordinary step takes, and which one is slow."""
        middle = median(self._recent)
        self._slow = middle + 3 * median([abs(seconds - middle) for seconds in self._recent])
        ordinary = [seconds for seconds in self._recent if seconds <= self._slow]
        self.ideal = sum(ordinary) / len(ordinary)

    def expect(self, samples: float, tokens: float | None) -> None:
        """Note what a step has trained according to the configuration; the job may yet say so itself."""
        self.count_expected()
        self._expected = {"samples": samples, "tokens": tokens or 0.0}

    def count_expected(self) -> None:
        """Count what is noted, unless the job says such numbers itself."""
        expected, self._expected = self._expected, {}
        for field, number in expected.items():
            if number and field not in self._given:
                self._add(field, number, "train")

    def number(self, field: str, mode: str, value: object) -> str | None:
        """Take a number that the job recorded; gives what is wrong with it, None where nothing is."""
        if field in _GAUGES:
            return self._gauge(field, mode, value)
        number = amount(value)
        if number is None:
            return f"to be a number of 0 or more and below {LARGEST:g}"
        if field == "epoch":
            if self._epoch is not None and number > self._epoch:
                self._families.counter("training.epochs").add(number - self._epoch)
            self._epoch = number
            self._families.gauge("training.epoch").set(number)
        elif field == "microbatches":
            self._families.counter("training.microbatches").add(number)
        else:
            if mode == "train":
                self._given.add(field)
            self._add(field, number, mode)
        return None

    def _gauge(self, field: str, mode: str, value: object) -> str | None:
        """Keep the latest finite value; count one of a loss or norm that is not finite."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "to be a number"
        gauge, kind = self._gauges.get((field, mode)), _NONFINITE.get(field)
        if gauge is None:
            labels = {"mode": mode} if field == "loss" else {}
            gauge = self._gauges[field, mode] = self._families.gauge(f"training.{field}", **labels)
            for name in ("nan", "inf") if kind is not None else ():
                self._families.counter("training.nonfinite", kind=str(kind), value=name)
        if amount(abs(value), 1e308) is not None:
            gauge.set(float(value))
        elif kind is None or isinstance(value, int):
            return "to be finite"
        else:
            name = "nan" if isnan(value) else "inf"
            self._families.counter("training.nonfinite", kind=kind, value=name).add()
        return None

    def _add(self, field: str, number: float, mode: str) -> None:
        self._families.counter(f"training.{field}", mode=mode).add(number)
        facts = self._facts
        if mode != "train":
            return
        model = hardware = None
        if field == "tokens":
            model, hardware = facts.flops_per_token, facts.hardware_flops_per_token
        elif facts.flops_per_token is None:
            model = facts.flops_per_sample
        if model is not None:
            self._families.counter("training.model_flops").add(model * number)
            if hardware is not None:
                self._families.counter("training.hardware_flops").add(hardware * number)

    @property
    def longest(self) -> float | None:
        """The longest of the last steps, the first of all left out; None before."""
        return max(list(self._recent)[-LONGEST_OF:], default=None)

    def publish(self, offset: float) -> None:
        """Bring the gauges up to date, with the offset of the wall clock from the monotonic one."""
        if self.last is not None:
            gauge = self._families.gauge("training.last_progress_timestamp", "seconds")
            gauge.set(None if self.over else round(self.last + offset, 3))
        if not self._changed:
            return
        self._changed = False
        if len(self._recent) >= FEWEST:
            self._update_ideal()
            self._families.gauge("training.step_ideal", "seconds").set(self.ideal)
        self._families.gauge("training.step_longest", "seconds").set(self.longest)
        if self._compute:
            self._families.gauge("training.rank_compute", "seconds").set(median(self._compute))


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

    def ask(self, values: Mapping[str, Any]) -> None:
        """Take what the configuration says, and the job's callables; what they do not say stays as it was."""
        tag, baseline = values.get("perf_tag"), values.get("is_baseline_run")
        self._say("application", values.get("application_name"))
        self._say("session_tag", values.get("session_tag"))
        self._say("perf_tag", ",".join(tag) if isinstance(tag, list) else tag)
        self._say("is_baseline", "" if baseline is None else str(bool(baseline)).lower())
        if values.get("flops_per_sample"):
            self.flops_per_sample = float(values["flops_per_sample"])
        world, target = values.get("world_size"), amount(values.get("train_iterations_target"), 1e308)
        if isinstance(world, int) and world > 0:
            self.world_size = world
            self._say("world_size", world)
        if target:
            self._families.gauge("training.step_target").set(target)

    def describe(self, values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Take what the job says by itself; gives what is wrong: the field, and what was expected."""
        wrong = []
        for name, value in values.items():
            number = amount(value, 1e308)
            if name in _TEXTS:
                self._say(name, value)
            elif not number or (name not in RATES and not isinstance(value, int)):
                what = {"step_target": "a step above 0", "world_size": "a number of ranks"}
                wrong.append((name, f"to be {what.get(name, 'a number above 0')}"))
            elif name in RATES:
                setattr(self, name, number)
            else:
                self.ask({"train_iterations_target" if name == "step_target" else name: value})
        return wrong

    def _say(self, name: str, value: object) -> None:
        text = value if isinstance(value, str) else shown(value) if isinstance(value, int | float) else ""
        if clean_text(text):
            self._texts[name] = clean_text(text)


def reason_of(exception: BaseException) -> str:
    """Tell why an exception ends the job, one of `END_REASONS`, "" where it does not; never raises."""
    if isinstance(exception, SystemExit):
        code = exception.code
        return "" if code is None or (isinstance(code, int) and code == 0) else "exit"
    if isinstance(exception, GeneratorExit):
        return ""
    for each in type(exception).__mro__:
        for reason, names in _CLASSES.items():
            if each.__name__ in names:
                return reason
    if isinstance(exception, OSError) and exception.errno in _STORAGE:
        return "storage"
    try:
        text = str(exception) if isinstance(exception, RuntimeError) else ""
    except Exception:  # noqa: BLE001  # the job's own class
        text = ""
    found = (reason for reason, parts in _TEXTS_OF_ERRORS.items() if any(part in text for part in parts))
    return next(found, "exit")
