"""Numbers that the job records: the latest loss, gradient norm and learning rate, and totals of samples and tokens.

`training.record` updates the numbers on the job's thread, and the recording thread reads them at each flush. An update contains
no call between read and write, so CPython does not switch threads in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite, isnan

from exporter.recording.conversion import is_asynchronous, safe_repr, to_scalar
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.tensors import TensorReader
from exporter.training.metrics import MAX_AMOUNT, to_amount
from exporter.training.misuse import report

MODES = ("train", "validation", "test")
NONFINITE_KINDS = {"loss": "loss", "grad_norm": "grad"}
"""Label `kind` of the counter of non-finite values, by the gauge that has such a counter."""
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
        is_used: True after the first recorded number.
        recorded_counters: Names of the numbers of the mode `train` that the job has recorded, except the gauges.
        nonfinite_kinds: Kinds of values of the mode `train` whose latest value is not finite.
    """

    __slots__ = (
        *("is_used", "modes", "train", "grad_norm", "learning_rate", "loss_scale", "microbatches", "epoch"),
        *("epochs", "recorded_counters", "nonfinite", "nonfinite_kinds", "_tensors", "_nonfinite_began"),
    )

    def __init__(self, nonfinite_began: Callable[[str], None] = lambda _: None) -> None:
        self._tensors: dict[tuple[str, str], TensorReader] = {}  # by name and mode
        # Called with the kind of the first of consecutive values of the mode `train` that are not finite.
        self._nonfinite_began = nonfinite_began
        self._clear()

    def _clear(self) -> None:
        """Discard all numbers."""
        self.is_used = False
        self.modes = {mode: ModeNumbers() for mode in MODES}
        self.train = self.modes["train"]
        self.microbatches = 0.0
        self.recorded_counters: set[str] = set()
        self.nonfinite: dict[tuple[str, str], int] = {}
        self._clear_gauges()

    def _clear_gauges(self) -> None:
        """Discard the epochs and the latest values other than the losses."""
        self.nonfinite_kinds: set[str] = set()
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None
        self.loss_scale: float | None = None
        self.epoch: float | None = None
        self.epochs: float | None = None  # completed epochs; None before the first number of an epoch

    def reset(self, published_totals: Mapping[tuple[str, str], float]) -> None:
        """Start new numbers for a new identity. *published_totals* are the totals in the last recording, by name and mode.

        A thread of the job may have added to the totals since that recording. Therefore the published part is subtracted. The value of
        a tensor whose copy has not arrived is recorded later.
        """
        # Each published total is read before the subtraction, which then contains no call.
        for mode, numbers in self.modes.items():
            numbers.loss = None
            published_samples = published_totals.get(("samples", mode), 0.0)
            published_tokens = published_totals.get(("tokens", mode), 0.0)
            numbers.samples -= published_samples
            numbers.tokens -= published_tokens
        published_microbatches = published_totals.get(("microbatches", "train"), 0.0)
        self.microbatches -= published_microbatches
        for kind_and_value in list(self.nonfinite):
            published_count = int(published_totals.get(kind_and_value, 0))
            self.nonfinite[kind_and_value] -= published_count
        self._clear_gauges()
        self.is_used = False
        self.recorded_counters = set()
        for name, total in (
            ("samples", self.train.samples),
            ("tokens", self.train.tokens),
            ("microbatches", self.microbatches),
        ):
            if total:
                self.is_used = True
                self.recorded_counters.add(name)

    def after_fork(self) -> None:
        """Discard all numbers and the tensors of the parent."""
        for tensors in self._tensors.values():
            tensors.after_fork()
        self._clear()

    def collect_tensors(self) -> None:
        """Record the calling thread's tensors whose values are available. Never raises, and never waits for a device."""
        for (field, _), tensors in list(self._tensors.items()):
            try:
                tensors.collect()
            except Exception as error:  # noqa: PERF203  # any error of CUDA
                if is_from_signal_handler(error):
                    raise
                _report_tensor(field, "error")

    def refuse_unread_tensors(self, *, is_process_ending: bool) -> None:
        """Drop the tensors of ended threads whose values have not been read, and count each as misuse.

        At the end of the process, do so for all threads.
        """
        for tensors in list(self._tensors.values()):
            tensors.refuse_unread(is_process_ending=is_process_ending)

    def add_batch(self, samples: int | None, tokens: int | None) -> None:
        """Count a training batch, with its samples and tokens if known.

        After the first batch, the numbers are added here, because a call of `record` would take longer than the addition.
        """
        train = self.train
        if samples is not None:
            if train.samples:
                train.samples += samples
            else:
                self.record("samples", "train", samples)
        if tokens is not None:
            if train.tokens:
                train.tokens += tokens
            else:
                self.record("tokens", "train", tokens)
        if self.microbatches:
            self.microbatches += 1
        else:
            self.record("microbatches", "train", 1)

    def record(self, field: str, mode: str, value: object) -> None:
        """Record a number of any class. An invalid value is reported as misuse. The value of a tensor is recorded when it arrives."""
        if type(value) is not float and type(value) is not int:
            if is_asynchronous(value):
                self._record_tensor(field, mode, value)
                return
            value = to_scalar(value)
        problem = self._record_plain(field, mode, value)
        if problem is not None:
            report("record", field, f"{field} {problem}, not {safe_repr(value)}")

    def _record_tensor(self, field: str, mode: str, value: object) -> None:
        tensors = self._tensors.get((field, mode))
        if tensors is None:
            reader = TensorReader(partial(self.record, field, mode), partial(_report_tensor, field))
            tensors = self._tensors.setdefault((field, mode), reader)
        tensors.add(value)

    def _record_plain(self, field: str, mode: str, value: object) -> str | None:
        """Record a Python number. Return the expected value if the value is invalid, else None."""
        self.is_used = True
        if field in GAUGES:
            return self._record_gauge(field, mode, value)
        number = to_amount(value)
        if number is None:
            return f"to be a number of 0 or more and below {MAX_AMOUNT:g}"
        if field == "epoch":
            self._record_epoch(number)
        elif field == "microbatches":
            self.microbatches += number
        elif field == "samples":
            self.modes[mode].samples += number
        else:
            self.modes[mode].tokens += number
        if mode == "train" and field not in self.recorded_counters:
            self.recorded_counters.add(field)
        return None

    def _record_epoch(self, number: float) -> None:
        previous = self.epoch
        self.epoch = number
        if self.epochs is None:
            self.epochs = 0.0
        if previous is not None and number > previous:
            self.epochs += number - previous

    def _record_gauge(self, field: str, mode: str, value: object) -> str | None:
        """Set a gauge. Return the expected value if the value is invalid, else None.

        A loss or gradient norm that is not finite is counted, and replaces the latest value by None.
        """
        if type(value) is not float and type(value) is not int:
            return "to be a number"
        kind = NONFINITE_KINDS.get(field)
        if kind is not None:
            for name in ("nan", "inf"):
                self.nonfinite.setdefault((kind, name), 0)
        if to_amount(abs(value), 1e308) is not None:
            self._set(field, mode, float(value))
            if kind is not None and mode == "train":
                self.nonfinite_kinds.discard(kind)
            return None
        if kind is None or type(value) is int or isfinite(value):
            return "to be finite"
        self.nonfinite[kind, "nan" if isnan(value) else "inf"] += 1
        # `training.record` sets the next finite value by this function too, because the latest value is None.
        self._set(field, mode, None)
        if mode == "train" and kind not in self.nonfinite_kinds:
            self.nonfinite_kinds.add(kind)
            self._nonfinite_began(kind)
        return None

    def _set(self, field: str, mode: str, value: float | None) -> None:
        if field == "loss":
            self.modes[mode].loss = value
        elif field == "grad_norm":
            self.grad_norm = value
        elif field == "learning_rate":
            self.learning_rate = value
        else:
            self.loss_scale = value


def _report_tensor(field: str, reason: str) -> None:
    """Report a tensor whose value is lost as misuse. *reason* is from `TensorReader`."""
    # The last tensor of a job is often in flight when the process ends, which is no mistake of the job: no log line.
    is_logged = reason != "thread_ended"
    expected = f"{field} to be a number, or a tensor of one element that can be copied" if is_logged else ""
    report("record", f"tensor_{reason}", expected)
