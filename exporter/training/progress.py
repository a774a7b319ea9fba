"""Progress: steps, what they took, and what was trained in them.

Used by the recording thread of the training process.
"""

from __future__ import annotations

from collections import deque
from math import isfinite, isnan

from exporter.training.medians import median
from exporter.training.series import LARGEST, Counter, Families, Histogram

LONGEST_OF = 100
IDEAL_OF = 200
COMPUTE_OF = 50
FEWEST = 5
"""Steps after which a slow one can be told."""
SKIPPED = ("overflow", "nonfinite")
"""Reasons for which a step did not change the model."""
_NONFINITE = {"loss": "loss", "grad_norm": "grad"}
_SUMMED = frozenset({"samples", "tokens", "microbatches"})
_GAUGES = {
    "grad_norm": "training.grad_norm",
    "learning_rate": "training.learning_rate",
    "loss_scale": "training.loss_scale",
}


class Progress:
    """The steps of this process.

    Args:
        families: Where they are counted.

    Attributes:
        steps: Training steps that were completed.
        last: Monotonic time at which the latest step or validation batch ended; None before.
        over: Whether the training loop has ended, so that no progress is due: a process may export its model.
        flops_per_token: Model FLOP of a token; None while nobody said.
        hardware_flops_per_token: The same with what is computed again.
        flops_per_sample: Model FLOP of a sample.
    """

    def __init__(self, families: Families) -> None:
        self._families = families
        self.steps = 0
        self.last: float | None = None
        self.over = False
        self.flops_per_token: float | None = None
        self.hardware_flops_per_token: float | None = None
        self.flops_per_sample: float | None = None
        self._recent: deque[float] = deque(maxlen=IDEAL_OF)
        self._compute: deque[float] = deque(maxlen=COMPUTE_OF)
        self._slow: float | None = None
        self._ideal: float | None = None
        self._stale = False
        self._known: dict[str, tuple[Counter, Histogram]] = {}
        self._told: set[str] = set()
        self._watched: set[str] = set()
        self._owed = (0.0, 0.0)
        self._epoch: float | None = None

    @property
    def _steps(self) -> Counter:
        return self._train[0]

    @property
    def _durations(self) -> Histogram:
        return self._train[1]

    @property
    def _train(self) -> tuple[Counter, Histogram]:
        found = self._known.get("train")
        if found is None:
            # Counters that say that something is wrong are there from the first step, so that their first rise is seen.
            for reason in SKIPPED:
                self._families.counter("training.skipped_steps", reason=reason)
            self._families.counter("training.slow_step_excess", "seconds")
            steps = self._families.counter("training.steps", mode="train")
            durations = self._families.histogram("training.step_duration", mode="train")
            found = self._known["train"] = (steps, durations)
        return found

    @property
    def _excess(self) -> Counter:
        return self._families.counter("training.slow_step_excess", "seconds")

    def reset(self) -> None:
        """Count from zero."""
        self.steps = 0
        self.last = None
        self.over = False

    def step(self, mode: str, seconds: float, at: float, compute: float | None = None) -> None:
        """Count a step that has ended.

        Args:
            mode: One of `MODES`.
            seconds: What it took.
            at: When it ended.
            compute: Of it, without waiting for data and other ranks; None where that is not known.
        """
        if mode != "test":
            self.last = at
        if mode != "train":
            self._families.counter("training.steps", mode=mode).add()
            self._families.histogram("training.step_duration", mode=mode).observe(seconds)
            return
        self.over = False
        self._steps.add()
        self._durations.observe(seconds)
        self.steps += 1
        if compute is not None:
            self._compute.append(compute)
        if self.steps == 1:  # it compiles and warms up
            return
        if self._slow is not None and self._ideal is not None and seconds > self._slow:
            self._excess.add(seconds - self._ideal)
        self._recent.append(seconds)
        if len(self._recent) == FEWEST:
            self.judge()
        self._stale = True

    def fold(self, durations: list[float], waits: list[list[float]], at: float) -> None:
        """Count training steps that ended one after another; not the first of all.

        Args:
            durations: What each took.
            waits: Of each, what it waited, kind by kind.
            at: When the last ended.
        """
        self._steps.add_many(len(durations))
        longest = max(durations)
        self._durations.observe_all(durations, sum(durations), longest)
        self.last, self.over = at, False
        self.steps += len(durations)
        for place in range(max(len(durations) - COMPUTE_OF, 0), len(durations)):
            waited = sum([times[place] for times in waits])
            self._compute.append(max(durations[place] - waited, 0.0))
        slow, ideal = self._slow, self._ideal
        if slow is not None and ideal is not None and longest > slow:
            self._excess.add(sum([seconds - ideal for seconds in durations if seconds > slow]))
        self._recent.extend(durations[-IDEAL_OF:])
        if self._slow is None and len(self._recent) >= FEWEST:
            self.judge()
        self._stale = True

    def numbers(self, field: str, mode: str, column: list[float], total: float) -> None:
        """Take plain numbers that were recorded one after another.

        Args:
            field: Of `record`.
            mode: One of `MODES`.
            column: All of them.
            total: Their sum.
        """
        if field == "epoch":
            for number in column:
                self._enter_epoch(float(number))
        elif field in _SUMMED:
            self.number(field, mode, total)
        else:
            self.number(field, mode, column[-1])

    def judge(self) -> None:
        """Say anew what an ordinary step takes."""
        middle = median(self._recent)
        deviation = median([abs(seconds - middle) for seconds in self._recent])
        self._slow = middle + 3 * deviation
        ordinary = [seconds for seconds in self._recent if seconds <= self._slow]
        self._ideal = sum(ordinary) / len(ordinary)

    def owe(self, samples: float, tokens: float | None, *, times: int = 1) -> None:
        """Note what a step has trained according to the configuration; the job may yet say so itself.

        Args:
            samples: Of it.
            tokens: Of it; None where that is not known.
            times: Steps that have ended, each like this; of those before the last, the job has said nothing.
        """
        self.settle()
        if times > 1:
            self._owed = (samples * (times - 1), (tokens or 0.0) * (times - 1))
            self.settle()
        self._owed = (samples, tokens or 0.0)

    def settle(self) -> None:
        """Count what is noted, unless the job says such numbers itself."""
        samples, tokens = self._owed
        self._owed = (0.0, 0.0)
        if samples and "samples" not in self._told:
            self._add("samples", samples, "train")
        if tokens and "tokens" not in self._told:
            self._add("tokens", tokens, "train")

    def number(self, field: str, mode: str, value: object) -> str | None:
        """Take a number that the job recorded.

        Returns:
            What is wrong with it; None where nothing is.
        """
        if not isinstance(value, float | int) or isinstance(value, bool):
            return "to be a number"
        try:
            number = float(value)
        except OverflowError:
            return "to be within the range of floating-point numbers"
        kind = _NONFINITE.get(field)
        if kind is not None and kind not in self._watched:
            self._watched.add(kind)
            for name in ("nan", "inf"):
                self._families.counter("training.nonfinite", kind=kind, value=name)
        if not isfinite(number):
            if kind is None:
                return "to be finite"
            name = "nan" if isnan(number) else "inf"
            self._families.counter("training.nonfinite", kind=kind, value=name).add()
            return None
        if field == "loss":
            self._families.gauge("training.loss", mode=mode).set(number)
        elif field in _GAUGES:
            self._families.gauge(_GAUGES[field]).set(number)
        elif not 0 <= number < LARGEST:
            return f"to be 0 or more and below {LARGEST:g}"
        elif field == "epoch":
            self._enter_epoch(number)
        elif field == "microbatches":
            self._families.counter("training.microbatches").add(number)
        else:
            if mode == "train":
                self._told.add(field)
            self._add(field, number, mode)
        return None

    def publish(self, offset: float) -> None:
        """Bring the gauges up to date.

        Args:
            offset: Of the wall clock from the monotonic one.
        """
        if self.last is not None:
            gauge = self._families.gauge("training.last_progress_timestamp", "seconds")
            gauge.set(None if self.over else round(self.last + offset, 3))
        if not self._stale:
            return
        self._stale = False
        if len(self._recent) >= FEWEST:
            self.judge()
            self._families.gauge("training.step_ideal", "seconds").set(self._ideal)
        self._families.gauge("training.step_longest", "seconds").set(self.longest)
        if self._compute:
            self._families.gauge("training.rank_compute", "seconds").set(median(self._compute))

    @property
    def longest(self) -> float | None:
        """The longest of the last steps, the first of all left out; None before."""
        return max(list(self._recent)[-LONGEST_OF:], default=None)

    def _add(self, field: str, number: float, mode: str) -> None:
        self._families.counter(f"training.{field}", mode=mode).add(number)
        if mode != "train":
            return
        model = hardware = None
        if field == "tokens" and self.flops_per_token is not None:
            model, hardware = self.flops_per_token, self.hardware_flops_per_token
        elif field == "samples" and self.flops_per_token is None and self.flops_per_sample is not None:
            model = self.flops_per_sample
        if model is not None:
            self._families.counter("training.model_flops").add(model * number)
        if hardware is not None:
            self._families.counter("training.hardware_flops").add(hardware * number)

    def _enter_epoch(self, epoch: float) -> None:
        if self._epoch is not None and epoch > self._epoch:
            self._families.counter("training.epochs").add(epoch - self._epoch)
        self._epoch = epoch
        self._families.gauge("training.epoch").set(epoch)
