"""Loop tracker: opens and closes blocks of `exporter.training` according to the hooks on a training loop.

Used in the training process, on the thread that trains. Hooks miss some starts and ends, for example when an exception
passes or an epoch is cut short. The tracker therefore stores the open blocks, and the end of a block closes the inner blocks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from exporter import training
from exporter.bridges.batches import samples_and_tokens
from exporter.bridges.loss import SampledTensors, readable
from exporter.bridges.sources import EXIT
from exporter.patching import Around
from exporter.training import api
from exporter.training.iterations import IterationBlock
from exporter.training.kinds import TRAINING_ITERATION
from exporter.training.recorder import TRAINING
from exporter.training.successions import Phases


class Level(Enum):
    """Kind of an open block."""

    LOOP = "training loop"
    ITERATION = "training iteration"
    EVALUATION = "validation or test"
    BATCH = "batch of a validation or test"
    SAVE = "save of a checkpoint"
    LOAD = "load of a checkpoint"


@dataclass(slots=True)
class _OpenBlock:
    level: Level
    block: AbstractContextManager[Any]


class Discarded(GeneratorExit):
    """Exception that discards a block: an iteration without a step, or a loop whose end was not reported."""


class LoopTracker:
    """Open blocks of one training, closed in order whatever the order of the calls.

    An inferred loop yields to blocks of the job.
    """

    def __init__(self, *, inferred: bool = False) -> None:
        self._loop: Any = api.inferred_loop if inferred else api.training_loop
        self._iteration = api.inferred_iteration() if inferred else IterationBlock(TRAINING_ITERATION)
        self._sampled = SampledTensors()
        self._open: list[_OpenBlock] = []
        self.phases = Phases(self._iteration)
        self.phase = self.phases.switch_to

    def is_open(self, level: Level) -> bool:
        """Return True if a block of this level is open."""
        for each in self._open:  # noqa: SIM110  # called in every step: a generator costs twice as much
            if each.level is level:
                return True
        return False

    def begin(self, level: Level, block: AbstractContextManager[Any]) -> None:
        """End the open phase, and enter a block inside the open blocks."""
        self._end_phase()
        block.__enter__()
        self._open.append(_OpenBlock(level, block))

    def end(self, level: Level, error: BaseException | None = None) -> None:
        """Close the innermost block of this level and all inner blocks, if open."""
        if self.is_open(level):
            while self._close(error) is not level:
                pass

    def end_all(self, error: BaseException | None = None) -> None:
        """Close everything."""
        while self._open:
            self._close(error)
        self._end_phase(error)

    def _end_phase(self, error: BaseException | None = None) -> None:
        self.phases.end(error)

    def begin_loop(self, step: int, target: int | None = None) -> None:
        """Begin a training loop, and discard the blocks that an earlier loop left open."""
        self.end_all(Discarded())
        EXIT.begin_application()
        self.begin(Level.LOOP, self._loop(step, None, target))

    def begin_iteration(self) -> None:
        """Begin an iteration unless an iteration is open."""
        if not self.is_open(Level.ITERATION):
            self.begin(Level.ITERATION, self._iteration)

    def next_iteration(self) -> None:
        """End the iteration and begin the next one."""
        if self._open[-1].level is Level.ITERATION:  # the usual case
            self.phases.next_iteration()
        else:
            self.end(Level.ITERATION)
            self.begin_iteration()

    def discard_iteration(self) -> None:
        """Close the iteration without counting a step or lost work."""
        if self.is_open(Level.ITERATION):
            while self._open[-1].level is not Level.ITERATION:
                self._close(None)
            self._end_phase()
            TRAINING.discard_iteration()
            self._close(Discarded())  # an iteration outside of the main thread is still open

    def begin_evaluation(self, mode: str = "validation") -> None:
        """Begin a validation or a test."""
        is_test = mode == "test"
        self.begin(Level.EVALUATION, training.testing_loop() if is_test else training.validation_loop())

    def begin_batch(self, mode: str = "validation") -> None:
        """Begin a batch of a validation or of a test."""
        is_test = mode == "test"
        self.begin(Level.BATCH, training.testing_iteration() if is_test else training.validation_iteration())

    def begin_save(self, step: int, *, whole: bool = True, at_once: bool = True) -> None:
        """Begin to save a checkpoint. A file that is not whole, or is written later, is recorded as time only."""
        if whole and at_once:
            self.begin(Level.SAVE, training.checkpoint_save(global_step=step))
        else:
            self.begin(Level.SAVE, training.phase(f"checkpoint_save_{'sync' if at_once else 'async'}"))

    def save(self, step: int, *, whole: bool = True) -> Around:
        """Record the save of a checkpoint around the call that saves."""
        self.begin_save(step, whole=whole)
        _, error = yield
        self.end(Level.SAVE, error)

    def load(self) -> Around:
        """Record the load of a checkpoint around the call that loads."""
        self.begin(Level.LOAD, training.checkpoint_load())
        _, error = yield
        self.end(Level.LOAD, error)

    def record(self, field: str, value: Any) -> None:
        """Record a loss or a gradient norm; tensors on a GPU are sampled."""
        if self._sampled.is_due(field, value):
            training.record(**{field: readable(value)})

    def record_batch(self, batch: Any, *, rows_per_sample: int = 1) -> None:
        """Record the size of a batch that is trained on."""
        samples, tokens = samples_and_tokens(batch)
        TRAINING.numbers.add_batch(None if samples is None else samples // rows_per_sample, tokens)

    def _close(self, error: BaseException | None) -> Level:
        self._end_phase(error)
        closed = self._open.pop()
        leave(closed.block, error)
        return closed.level


def leave(block: AbstractContextManager[Any], error: BaseException | None = None) -> None:
    """Leave a block normally or with an exception."""
    if error is None:
        block.__exit__(None, None, None)
    else:
        block.__exit__(type(error), error, error.__traceback__)
