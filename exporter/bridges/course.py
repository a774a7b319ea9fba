"""The course of a training loop, put together from what a framework's hooks tell of it.

Used in the training process, on the thread that trains. Hooks tell of beginnings and ends one by one, and leave ends out:
when an exception passes, when an epoch is cut short, when a hook has another order in another version. So what is open
is kept here, innermost last, and whatever ends closes what is still open inside of it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from time import monotonic
from types import ModuleType
from typing import Any

from exporter.bridges.ending import ENDING

LOOP, ITERATION, PHASE, EVALUATION, BATCH = "loop", "iteration", "phase", "evaluation", "batch"
SAVE, LOAD = "save", "load"
"""Kinds of what may be open; of an evaluation and its batches, validation and test are two."""


_BLOCKS = {
    "data_loading": "data_loading",
    "forward": "model_forward",
    "backward": "model_backward",
    "optimizer": "optimizer_update",
    "zero_grad": "zero_grad",
}
"""Phases that have a function of their own, which finds its handle at once."""
WORK = frozenset({"iteration", "forward", "backward", "grad_sync", "optimizer", "zero_grad"})
"""Phases within an iteration."""
DEVICE_SECONDS = 0.1
"""How often a number is taken from a device: each takes a copy there."""


class Abandoned(GeneratorExit):
    """What has begun was given up: an iteration for which there is no data, a loop that nobody has ended."""


class Course:
    """Opens and closes the spans of `exporter.training`; none of its methods minds being called out of order.

    Attributes:
        training: `exporter.training`.
        loops: Training loops that bridges have begun in this process.
    """

    loops = 0

    def __init__(self) -> None:
        from exporter import training  # noqa: PLC0415  # a bridge that is installed may never be used

        self.training: ModuleType = training
        self._blocks: dict[str, Any] = {name: getattr(training, block) for name, block in _BLOCKS.items()}
        self._next_loss = self._next_norm = 0.0
        self._depth = dict.fromkeys((LOOP, ITERATION, PHASE, EVALUATION, BATCH, SAVE, LOAD), 0)
        self._open: list[tuple[str, str, AbstractContextManager[Any]]] = []

    def is_open(self, kind: str) -> bool:
        """Tell whether one of this kind is open."""
        return self._depth[kind] > 0

    def begin(self, kind: str, span: AbstractContextManager[Any], name: str = "") -> None:
        """Open a span inside of what is open; a phase of before is over then."""
        if self._open and self._open[-1][0] == PHASE:
            self._close(None)
        span.__enter__()
        self._open.append((kind, name, span))
        self._depth[kind] += 1

    def end(self, kind: str, error: BaseException | None = None) -> None:
        """Close the innermost of this kind, and what is inside of it first; harmless when there is none."""
        if self._depth[kind]:
            while self._close(error) != kind:
                pass

    def end_all(self, error: BaseException | None = None) -> None:
        """Close everything."""
        while self._open:
            self._close(error)

    def phase(self, name: str | None) -> None:
        """Say which phase has begun where the last one ends; None when no other has."""
        if self._open and self._open[-1][0] == PHASE:
            if self._open[-1][1] == name:
                return
            self._close(None)
        if name is not None:
            block = self._blocks.get(name)
            span = self.training.phase(name) if block is None else block()
            span.__enter__()
            self._open.append((PHASE, name, span))
            self._depth[PHASE] += 1

    def job_tells(self) -> bool:
        """Tell whether the job itself has begun a training loop, or is in an iteration, or has told of steps."""
        from exporter.training.recording import TRAINING  # noqa: PLC0415  # as above

        TRAINING.drain()
        told = TRAINING.reading()
        if told is None:
            return False
        return told.loop > Course.loops or told.phase in WORK or (told.steps > 0 and not Course.loops)

    def begin_loop(self, step: int, target: int | None = None) -> None:
        """Begin a training loop; whatever an earlier one left open has been given up."""
        self.end_all(Abandoned())
        ENDING.begin_application(self.training)
        span = self.training.training_loop(train_iterations_start=step, train_iterations_target_or_fn=target)
        self.begin(LOOP, span)
        Course.loops += 1

    def begin_iteration(self) -> None:
        """Begin an iteration, unless one is under way."""
        if not self._depth[ITERATION]:
            self.begin(ITERATION, self.training.training_iteration())

    def abandon_iteration(self) -> None:
        """Take back the beginning of an iteration: there is no data for it."""
        self.end(ITERATION, Abandoned())

    def begin_save(self, step: int) -> None:
        """Begin to save a checkpoint from which the job can go on."""
        self.begin(SAVE, self.training.checkpoint_save(global_step=step))

    def record_loss(self, loss: Any) -> None:
        """Record a loss; of those on a GPU, some."""
        value = _readable(loss)
        if value is not loss or not getattr(loss, "is_cuda", False):
            self.training.record(loss=value)
        elif monotonic() >= self._next_loss:
            self._next_loss = monotonic() + DEVICE_SECONDS
            self.training.record(loss=loss)

    def record_norm(self, norm: Any) -> None:
        """Record the norm of a gradient likewise."""
        value = _readable(norm)
        if value is not norm or not getattr(norm, "is_cuda", False):
            self.training.record(grad_norm=value)
        elif monotonic() >= self._next_norm:
            self._next_norm = monotonic() + DEVICE_SECONDS
            self.training.record(grad_norm=norm)

    def _close(self, error: BaseException | None) -> str:
        kind, _, span = self._open.pop()
        self._depth[kind] -= 1
        if error is None:
            span.__exit__(None, None, None)
        else:
            span.__exit__(type(error), error, error.__traceback__)
        return kind


def _readable(value: Any) -> Any:
    """Give what can be recorded of a value: that of a tensor in memory, a tensor on a GPU itself, None of any other.

    Others are on devices whose values cannot be had without waiting, are being captured into a graph, or are spread over
    ranks.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or any(not each.is_replicate() for each in getattr(value, "placements", ())):
        return None
    if value.is_cpu:
        return value.item() if type(value) is torch.Tensor else value
    return value if value.is_cuda and not torch.cuda.is_current_stream_capturing() else None
