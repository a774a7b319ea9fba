"""The loop tracker: spans of `exporter.training` opened and closed from what hooks see of a training loop.

Used in the training process, on the thread that trains. Hooks miss some begins and ends: when an exception passes, when an
epoch is cut short. So the tracker keeps what is open, innermost last, and whatever ends closes what is open inside of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

from exporter import training
from exporter.bridges.sources import EXIT
from exporter.patching import Around, never_raises
from exporter.training import api
from exporter.training.recording import TRAINING

LOOP, ITERATION, PHASE, EVALUATION, BATCH = "loop", "iteration", "phase", "evaluation", "batch"
SAVE, LOAD = "save", "load"
"""Kinds of what may be open; validation and test are both evaluations."""
DEVICE_SECONDS = 0.1
"""How often a number is taken from a device: each takes a copy there."""
_DEEPEST_BATCH = 4
MOST_VALUES = 64
"""Values of a dictionary among which an optimizer's state is looked for."""


class Discarded(GeneratorExit):
    """Ends what turned out not to have begun: an iteration without data or without a step, a loop that nobody ended."""


class LoopTracker:
    """Opens and closes spans, in whatever order its methods are called; what the job reports goes before what is guessed."""

    def __init__(self, *, guesses: bool = False) -> None:
        self._loop: Any = api.guessed_loop if guesses else api.training_loop
        self._iteration: Any = api.guessed_iteration if guesses else api.training_iteration
        self._due = {"loss": 0.0, "grad_norm": 0.0}
        self._open: list[tuple[str, str, AbstractContextManager[Any]]] = []

    def is_open(self, kind: str) -> bool:
        """Tell whether one of this kind is open."""
        return kind in [each[0] for each in self._open]

    def begin(self, kind: str, span: AbstractContextManager[Any], name: str = "") -> None:
        """Open a span inside of what is open; the phase before it is over."""
        if self._open and self._open[-1][0] == PHASE:
            self._close(None)
        span.__enter__()
        self._open.append((kind, name, span))

    def end(self, kind: str, error: BaseException | None = None) -> None:
        """Close the innermost of this kind, and what is inside of it first; harmless when there is none."""
        if self.is_open(kind):
            while self._close(error) != kind:
                pass

    def end_all(self, error: BaseException | None = None) -> None:
        """Close everything."""
        while self._open:
            self._close(error)

    def phase(self, name: str | None) -> None:
        """Begin a phase where the last one ends; None ends it only."""
        if self._open and self._open[-1][:2] == (PHASE, name):
            return
        if name is not None:
            self.begin(PHASE, training.phase(name), name)
        elif self._open and self._open[-1][0] == PHASE:
            self._close(None)

    def begin_loop(self, step: int, target: int | None = None) -> None:
        """Begin a training loop; whatever an earlier one left open is discarded."""
        self.end_all(Discarded())
        EXIT.begin_application()
        self.begin(LOOP, self._loop(step, None, target))

    def begin_iteration(self) -> None:
        """Begin an iteration, unless one is under way."""
        if not self.is_open(ITERATION):
            self.begin(ITERATION, self._iteration())

    def discard_iteration(self) -> None:
        """Close the iteration as none at all: neither work nor lost."""
        if self.is_open(ITERATION):
            while self._open[-1][0] != ITERATION:
                self._close(None)
            TRAINING.discard_iteration()
            self._close(None)

    def begin_evaluation(self, mode: str = "validation") -> None:
        """Begin a validation or a test."""
        is_test = mode == "test"
        self.begin(EVALUATION, training.testing_loop() if is_test else training.validation_loop())

    def begin_batch(self, mode: str = "validation") -> None:
        """Begin a batch of a validation or of a test."""
        is_test = mode == "test"
        self.begin(BATCH, training.testing_iteration() if is_test else training.validation_iteration())

    def begin_save(self, step: int, *, whole: bool = True, at_once: bool = True) -> None:
        """Begin to save a checkpoint; of one that is not whole, or is written later, it is time only."""
        if whole and at_once:
            self.begin(SAVE, training.checkpoint_save(global_step=step))
        else:
            self.begin(SAVE, training.phase(f"checkpoint_save_{'sync' if at_once else 'async'}"))

    def save(self, step: int, *, whole: bool = True) -> Around:
        """Save a checkpoint, around the call that does it."""
        self.begin_save(step, whole=whole)
        _, error = yield
        self.end(SAVE, error)

    def load(self) -> Around:
        """Read a checkpoint, likewise."""
        self.begin(LOAD, training.checkpoint_load())
        _, error = yield
        self.end(LOAD, error)

    def record(self, field: str, value: Any) -> None:
        """Record a loss or a gradient norm, if it is due."""
        if self.is_due(field, value):
            training.record(**{field: readable(value)})

    def record_batch(self, batch: Any) -> None:
        """Count a batch that something is trained on."""
        samples, tokens = samples_and_tokens(batch)
        training.record(samples=samples, tokens=tokens, microbatches=1)

    def is_due(self, field: str, value: Any) -> bool:
        """Tell whether a number is to be recorded now: always, unless it is on a GPU; then some."""
        if not getattr(value, "is_cuda", False):
            return True
        now = monotonic()
        if now < self._due[field]:
            return False
        self._due[field] = now + DEVICE_SECONDS
        return True

    def _close(self, error: BaseException | None) -> str:
        kind, _, span = self._open.pop()
        leave(span, error)
        return kind


def leave(block: AbstractContextManager[Any], error: BaseException | None = None) -> None:
    """Leave a block, in order or by what was raised."""
    if error is None:
        block.__exit__(None, None, None)
    else:
        block.__exit__(type(error), error, error.__traceback__)


class TurnLoss:
    """The loss of one turn, from what its backward passes begin from; docs/bridges.md says how a divisor is undone."""

    def __init__(self) -> None:
        self._most_passes = 1
        self.begin()

    def begin(self) -> None:
        """Begin with a turn."""
        self._losses: list[Any] = []
        self._divisor = 1.0
        self._is_known = False

    @property
    def is_empty(self) -> bool:
        """No pass has begun in this turn."""
        return not self._losses

    def add(self, tensors: Any, *, begins: bool) -> None:
        """Take the loss of one pass: as it begins from it, or as it is before it is scaled."""
        if self._is_known:
            self._is_known = not begins
        elif getattr(tensors, "numel", lambda: 0)() == 1 and hasattr(tensors, "detach"):
            self._is_known = not begins
            self._losses.append(tensors.detach())
            self._divisor = _divisor(tensors)

    def record(self, tracker: LoopTracker) -> None:
        """Record it, once an optimizer has stepped."""
        losses, self._losses = self._losses, []
        passes = len(losses)
        self._most_passes = max(self._most_passes, passes)
        if not losses or not tracker.is_due("loss", losses[0]):
            return
        values = [readable(each) for each in losses]
        if any(each is None for each in values):
            return
        is_share = self._divisor != 1.0 and passes > 1
        undone = self._divisor if self._divisor in {passes, self._most_passes} else 1.0
        mean = sum(values) * undone / passes
        training.record(loss=sum(values) if undone == 1.0 and is_share else mean)


def _divisor(loss: Any) -> float:
    """Return the constant by which a loss was divided last, read from its graph; 1 for none."""
    last = loss.grad_fn
    kind = type(last).__name__
    if kind not in {"DivBackward0", "MulBackward0"} or last.next_functions[-1][0] is not None:
        return 1.0
    constant = last._saved_other  # noqa: SLF001  # torch's name for what a node of the graph keeps
    if constant is None or not constant.is_cpu or constant.numel() != 1 or not constant.item():
        return 1.0
    return float(constant.item()) if kind == "DivBackward0" else round(1.0 / float(constant.item()), 6)


def readable(value: Any) -> Any:
    """Return what can be recorded of a value: of a tensor its value, or itself on a GPU; None where that would wait."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or any(not each.is_replicate() for each in getattr(value, "placements", ())):
        return None
    if value.is_cpu:
        return value.item() if type(value) is torch.Tensor else value
    return value if value.is_cuda and not torch.cuda.is_current_stream_capturing() else None


def samples_and_tokens(batch: Any) -> tuple[int | None, int | None]:
    """Count a batch by its shapes: the samples, and the tokens of one with `input_ids`; None for what it does not say."""
    try:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        shape = getattr(ids, "shape", None)
        if shape is not None and len(shape) == 2:
            return int(shape[0]), int(shape[0]) * int(shape[1])
        return _samples(batch, _DEEPEST_BATCH), None
    except Exception:  # noqa: BLE001  # a batch is the job's own object
        return None, None


def _samples(batch: Any, depth: int) -> int | None:
    """Find the length of the first tensor in a batch, or else of a list in it."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    is_mapping = isinstance(batch, Mapping)
    if not depth or isinstance(batch, (str, bytes)) or not (is_mapping or isinstance(batch, Sequence)):
        return None
    values = batch.values() if is_mapping else batch
    found = next(filter(None, (_samples(value, depth - 1) for value in values)), None)
    return found if found or is_mapping else len(batch) or None


# Checkpoints ----------------------------------------------------------------------------------------------------


def holds_optimizer(saved: Any, depth: int = 3) -> bool:
    """Tell whether an optimizer's state is in a dictionary, or in one in it."""
    if not isinstance(saved, Mapping):
        return False
    if "param_groups" in saved and "state" in saved:
        return True
    if not depth:
        return False
    return any(
        holds_optimizer(each, depth - 1)
        for value in islice(saved.values(), MOST_VALUES)
        for each in (value[:MOST_VALUES] if isinstance(value, list) else (value,))
    )


def steps_made(state: Any) -> int:
    """Read from an optimizer's state how many steps it has made; 0 of one that does not count them."""
    first = next(iter(state.get("state", {}).values()), None)
    return int(first.get("step", 0)) if isinstance(first, Mapping) else 0


@dataclass
class AsyncSave:
    """A checkpoint that another thread writes while the training goes on."""

    step: int
    began: float = field(default_factory=monotonic)
    blocking_seconds: float | None = None  # None while the training waits

    def returned(self) -> None:
        """The training goes on."""
        self.blocking_seconds = monotonic() - self.began

    def report(self, *, ok: bool) -> None:
        """Report that it was written, or not."""
        seconds, blocking = monotonic() - self.began, self.blocking_seconds
        training.checkpoint_saved(self.step, kind="async", ok=ok, seconds=seconds, blocking_seconds=blocking)

    def report_when_done(self, future: Any, error: BaseException | None) -> None:
        """Report it from the thread to which `torch.distributed.checkpoint.async_save` has handed it."""
        self.returned()

        @never_raises
        def written(done: Any) -> None:
            self.report(ok=done.exception() is None)

        future = getattr(future, "upload_completion", future)
        if error is None and hasattr(future, "add_done_callback"):
            future.add_done_callback(written)
        else:
            self.report(ok=False)
