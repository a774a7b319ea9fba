"""The loop tracker: spans of `exporter.training` opened and closed from what hooks see of a training loop.

Used in the training process, on the thread that trains. Hooks see begins and ends one by one and miss some: when an
exception passes, when an epoch is cut short, when another version calls them in another order. So the tracker keeps what
is open, innermost last, and whatever ends closes what is still open inside of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

from exporter import training
from exporter.bridges.sources import EXIT
from exporter.patching import Around
from exporter.training import api
from exporter.training.recording import TRAINING

LOOP, ITERATION, PHASE, EVALUATION, BATCH = "loop", "iteration", "phase", "evaluation", "batch"
SAVE, LOAD = "save", "load"
"""Kinds of what may be open; validation and test are both evaluations."""

_BLOCKS = {
    "forward": "model_forward",
    "backward": "model_backward",
    "optimizer": "optimizer_update",
    "data_loading": "data_loading",
    "zero_grad": "zero_grad",
}
"""Phases that are spans of one-logger's, by the name of their blocks in `exporter.training`."""
DEVICE_SECONDS = 0.1
"""How often a number is taken from a device: each takes a copy there."""
_DEEPEST_BATCH = 4


class Discarded(GeneratorExit):
    """Ends what turned out not to have begun: an iteration without data or without a step, a loop that nobody ended."""


class LoopTracker:
    """Opens and closes spans; none of its methods minds being called out of order.

    Where it guesses, the loop and its iterations are concluded; where the job reports its own, those take their place.
    """

    def __init__(self, *, guesses: bool = False) -> None:
        self._loop: Any = api.guessed_loop if guesses else api.training_loop
        self._iteration: Any = api.guessed_iteration if guesses else api.training_iteration
        self._due = {"loss": 0.0, "grad_norm": 0.0}
        self._open: list[tuple[str, str, AbstractContextManager[Any]]] = []

    def is_open(self, kind: str) -> bool:
        """Tell whether one of this kind is open."""
        return any(each[0] == kind for each in self._open)

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
            block = _BLOCKS.get(name)
            span = getattr(training, block)() if block else training.phase(name)
            self.begin(PHASE, span, name)
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
        """Close the iteration as none at all: what it took is outside of iterations, neither work nor lost."""
        if self.is_open(ITERATION):
            while self._open[-1][0] != ITERATION:
                self._close(None)
            TRAINING.discard_iteration()
            self._close(None)

    def begin_evaluation(self, mode: str = "validation") -> None:
        """Begin a validation or a test."""
        self.begin(
            EVALUATION, training.validation_loop() if mode == "validation" else training.testing_loop()
        )

    def begin_batch(self, mode: str = "validation") -> None:
        """Begin a batch of a validation or of a test."""
        span = training.validation_iteration() if mode == "validation" else training.testing_iteration()
        self.begin(BATCH, span)

    def begin_save(self, step: int, *, whole: bool = True) -> None:
        """Begin to save a checkpoint; from one that is not whole the job could not go on, and it is time only."""
        span = training.checkpoint_save(global_step=step) if whole else training.phase("checkpoint_save_sync")
        self.begin(SAVE, span)

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
        """Record a loss or a gradient norm; of those on a GPU, some."""
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

    def job_reports(self, *, until_now: bool = False) -> bool:
        """Tell whether the job itself has begun a loop or an iteration, or has reported steps; until now, or as is known."""
        if until_now:
            TRAINING.drain()
        return TRAINING.job_tells

    def _close(self, error: BaseException | None) -> str:
        kind, _, span = self._open.pop()
        if error is None:
            span.__exit__(None, None, None)
        else:
            span.__exit__(type(error), error, error.__traceback__)
        return kind


class TurnLoss:
    """The loss of one turn, from what its backward passes begin from.

    Of several passes before the first optimizer's step it is the mean. With `(loss / 4).backward()`, the usual idiom where
    four batches are accumulated, a pass begins from the divided loss. The divisor is in the graph: where it is the number
    of passes in this turn or in the longest one before (the last turn of an epoch may be shorter), it is undone. Any other
    constant, such as a number of tokens, makes shares, of which the loss is the sum.
    """

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
    """Return what can be recorded of a value: that of a tensor in memory, a tensor on a GPU itself, else None.

    Other tensors are on devices whose values cannot be had without waiting, are being captured into a graph, or are spread
    over ranks.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or any(not each.is_replicate() for each in getattr(value, "placements", ())):
        return None
    if value.is_cpu:
        return value.item() if type(value) is torch.Tensor else value
    return value if value.is_cuda and not torch.cuda.is_current_stream_capturing() else None


def samples_and_tokens(batch: Any) -> tuple[int | None, int | None]:
    """Count a batch by its shapes; nothing is read from a device.

    Returns:
        The samples: the length of the first dimension of the first tensor, or of a list of what is no tensor; and the
        tokens, padding included, of a batch with `input_ids`, the Hugging Face libraries' name. None for what it does
        not say.
    """
    try:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        shape = getattr(ids, "shape", None)
        if shape is not None and len(shape) == 2:
            return int(shape[0]), int(shape[0]) * int(shape[1])
        return _samples(batch, _DEEPEST_BATCH), None
    except Exception:  # noqa: BLE001  # a batch is the job's own object
        return None, None


def _samples(batch: Any, depth: int) -> int | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    is_mapping = isinstance(batch, Mapping)
    if not depth or not (is_mapping or _is_list(batch)):
        return None
    for value in batch.values() if is_mapping else batch:
        holds_more = hasattr(value, "shape") or isinstance(value, Mapping) or _is_list(value)
        found = _samples(value, depth - 1) if is_mapping or holds_more else len(batch)
        if found:
            return found
    return None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
