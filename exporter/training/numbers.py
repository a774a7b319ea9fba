"""Numbers of the present step: the latest loss, norm and rates, and totals of samples and tokens.

`training.record` updates the numbers on the job's thread; the recording thread reads at each flush. Each update is a single
operation, so that threads do not lose updates.
"""

from __future__ import annotations

from math import isfinite, isnan

from exporter.training.metrics import LARGEST, amount

MODES = ("train", "validation", "test")
NONFINITE_KINDS = {"loss": "loss", "grad_norm": "grad"}
"""Gauges with a counter of values that are not finite, and the counter's label `kind`."""
GAUGES = frozenset({"loss", "grad_norm", "learning_rate", "loss_scale"})


class ModeNumbers:
    """Numbers of training, validation or test."""

    __slots__ = ("loss", "samples", "tokens")

    def __init__(self) -> None:
        self.loss: float | None = None
        self.samples = 0.0
        self.tokens = 0.0


class Numbers:
    """All numbers of a process.

    Attributes:
        given: Names of the counters of training that the job itself has recorded.
    """

    __slots__ = (
        *("is_used", "modes", "train", "grad_norm", "learning_rate", "loss_scale", "microbatches", "epoch"),
        *("epochs", "given", "nonfinite"),
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all numbers."""
        self.is_used = False
        self.modes = {mode: ModeNumbers() for mode in MODES}
        self.train = self.modes["train"]
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None
        self.loss_scale: float | None = None
        self.microbatches = 0.0
        self.epoch: float | None = None
        self.epochs: float | None = None  # completed epochs; None before the first number of an epoch
        self.given: set[str] = set()
        self.nonfinite: dict[tuple[str, str], int] = {}

    def take(self, field: str, mode: str, value: object) -> str | None:
        """Record a number; returns the problem of a value that is not recorded."""
        self.is_used = True
        if field in GAUGES:
            return self._take_gauge(field, mode, value)
        number = amount(value)
        if number is None:
            return f"to be a number of 0 or more and below {LARGEST:g}"
        if field == "epoch":
            self._take_epoch(number)
        elif field == "microbatches":
            self.microbatches += number
        elif field == "samples":
            self.modes[mode].samples += number
        else:
            self.modes[mode].tokens += number
        if mode == "train" and field not in self.given:
            self.given.add(field)
        return None

    def _take_epoch(self, number: float) -> None:
        before = self.epoch
        self.epoch = number
        if self.epochs is None:
            self.epochs = 0.0
        if before is not None and number > before:
            self.epochs += number - before

    def _take_gauge(self, field: str, mode: str, value: object) -> str | None:
        if type(value) is not float and type(value) is not int:
            return "to be a number"
        kind = NONFINITE_KINDS.get(field)
        if kind is not None:
            for name in ("nan", "inf"):
                self.nonfinite.setdefault((kind, name), 0)
        if amount(abs(value), 1e308) is not None:
            self._set(field, mode, float(value))
            return None
        if kind is None or type(value) is int or isfinite(value):
            return "to be finite"
        self.nonfinite[kind, "nan" if isnan(value) else "inf"] += 1
        return None

    def _set(self, field: str, mode: str, value: float) -> None:
        if field == "loss":
            self.modes[mode].loss = value
        elif field == "grad_norm":
            self.grad_norm = value
        elif field == "learning_rate":
            self.learning_rate = value
        else:
            self.loss_scale = value
