"""Loop tracker: blocks of `exporter.training` that the hooks on a training loop open and close.

Used in the training process, on the thread that trains. Hooks miss some starts and ends, for example after an exception or in an
epoch that ends early. The tracker therefore keeps a list of the open blocks. Before a block closes, its inner blocks close.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from exporter import training
from exporter.bridges.batches import samples_and_tokens
from exporter.bridges.loss import TensorReadLimit, readable
from exporter.bridges.sources import EXIT
from exporter.patching import Around
from exporter.training import api
from exporter.training.iteration_phases import IterationPhases
from exporter.training.iterations import IterationBlock
from exporter.training.kinds import TRAINING_ITERATION
from exporter.training.recorder import TRAINING


class Level(Enum):
    """Level of an open block."""

    LOOP = "training loop"
    ITERATION = "training iteration"
    EVALUATION = "validation or test"
    BATCH = "batch of a validation or test"
    SAVE = "save of a checkpoint"
    LOAD = "load of a checkpoint"


_ITERATION = Level.ITERATION  # the look-up of a member of an Enum takes four times as long


@dataclass(slots=True)
class _OpenBlock:
    """Open block and its level."""

    level: Level
    block: AbstractContextManager[Any]


class Discarded(GeneratorExit):
    """Exception that is passed to a block to discard it: an iteration without a step, or a loop whose end was not reported."""


class LoopTracker:
    """Open blocks of a training. A block is always closed after its inner blocks, regardless of the order of the calls.

    Args:
        is_replaceable: True if the job's own blocks replace the loop and its iterations, as with `EXPORTER_AUTO=1`.

    Attributes:
        phases: Phases of the open iteration.
        phase: Function that ends the open phase and begins a phase, given by name. For None, the time counts as the time of the iteration
            outside of its phases.
    """

    def __init__(self, *, is_replaceable: bool = False) -> None:
        self._loop: Any = api.inferred_loop if is_replaceable else api.training_loop
        self._is_replaceable = is_replaceable
        self._was_instrumented = False  # True if the job reported its own loop before the loop of this bridge
        self._iteration = api.inferred_iteration() if is_replaceable else IterationBlock(TRAINING_ITERATION)
        self._read_limit = TensorReadLimit()
        self._open: list[_OpenBlock] = []
        self.phases = IterationPhases(self._iteration)
        self.phase = self.phases.switch_to

    def is_open(self, level: Level) -> bool:
        """Return True if a block of this level is open."""
        for open_block in self._open:  # noqa: SIM110  # called in every step, and a generator takes twice as long
            if open_block.level is level:
                return True
        return False

    def begin(self, level: Level, block: AbstractContextManager[Any]) -> None:
        """End the open phase, and enter a block inside the open blocks."""
        self._end_phase()
        block.__enter__()
        self._open.append(_OpenBlock(level, block))

    def end(self, level: Level, error: BaseException | None = None) -> None:
        """Close the innermost block of this level and all blocks inside it. Has no effect if no such block is open."""
        if self.is_open(level):
            while self._close(error) is not level:
                pass

    def end_all(self, error: BaseException | None = None) -> None:
        """Close all open blocks and the open phase."""
        while self._open:
            self._close(error)
        self._end_phase(error)

    def _end_phase(self, error: BaseException | None = None) -> None:
        self.phases.end(error)

    def begin_loop(self, step: int, target: int | None = None) -> None:
        """Start a training loop, and at the first call an application. Discard the blocks that an earlier loop has left open."""
        self.end_all(Discarded())
        EXIT.begin_application()
        self._was_instrumented = TRAINING.job_is_instrumented
        self.begin(Level.LOOP, self._loop(step, None, target))

    def begin_iteration(self) -> None:
        """Start an iteration, unless an iteration is open."""
        if not self.is_open(Level.ITERATION):
            self.begin(Level.ITERATION, self._iteration)

    def next_iteration(self) -> None:
        """End the iteration and start the next iteration."""
        if self._open[-1].level is _ITERATION:  # no inner block is open
            self.phases.next_iteration()
        else:
            self.end(Level.ITERATION)
            self.begin_iteration()

    def discard_iteration(self) -> None:
        """Close the iteration and the blocks inside it without counting a step or lost work."""
        if self.is_open(Level.ITERATION):
            while self._open[-1].level is not Level.ITERATION:
                self._close(None)
            self._end_phase()
            TRAINING.discard_iteration()
            self._close(Discarded())  # ends the iteration of a thread other than the main thread

    def begin_evaluation(self, mode: str = "validation") -> None:
        """Start a validation or a test."""
        is_test = mode == "test"
        self.begin(Level.EVALUATION, training.testing_loop() if is_test else training.validation_loop())

    def begin_batch(self, mode: str = "validation") -> None:
        """Start a batch of a validation or of a test."""
        is_test = mode == "test"
        self.begin(Level.BATCH, training.testing_iteration() if is_test else training.validation_iteration())

    def begin_save(self, step: int, *, is_resumable: bool = True, is_sync: bool = True) -> None:
        """Start the save of a checkpoint.

        The save is counted if the job can resume from the checkpoint (*is_resumable*) and the call writes the checkpoint (*is_sync*).
        Otherwise, only the time of the call is recorded.
        """
        if is_resumable and is_sync:
            self.begin(Level.SAVE, training.checkpoint_save(global_step=step))
        else:
            self.begin(Level.SAVE, training.phase(f"checkpoint_save_{'sync' if is_sync else 'async'}"))

    def save(self, step: int, *, is_resumable: bool = True) -> Around:
        """Record the save of a checkpoint around the call that saves."""
        self.begin_save(step, is_resumable=is_resumable)
        _, error = yield
        self.end(Level.SAVE, error)

    def load(self) -> Around:
        """Record the load of a checkpoint around the call that loads."""
        self.begin(Level.LOAD, training.checkpoint_load())
        _, error = yield
        self.end(Level.LOAD, error)

    def record(self, field: str, value: Any) -> None:
        """Record a loss or a gradient norm. Tensors on a GPU are recorded at most ten times a second."""
        if self._read_limit.start_read(field, value):
            training.record(**{field: readable(value)})

    def record_batch(self, batch: Any, *, rows_per_sample: int = 1) -> None:
        """Record the size of a batch that is trained on."""
        samples, tokens = samples_and_tokens(batch)
        TRAINING.numbers.add_batch(None if samples is None else samples // rows_per_sample, tokens)

    def _close(self, error: BaseException | None) -> Level:
        """Close the open phase and the innermost block. Return the level of the block."""
        self._end_phase(error)
        open_block = self._open.pop()
        leave(open_block.block, error)
        if open_block.level is Level.LOOP and not self._is_replaceable:
            # A later loop of the job may be inferred again.
            TRAINING.job_is_instrumented = self._was_instrumented
        return open_block.level


def leave(block: AbstractContextManager[Any], error: BaseException | None = None) -> None:
    """Leave a block normally or with an exception."""
    if error is None:
        block.__exit__(None, None, None)
    else:
        block.__exit__(type(error), error, error.__traceback__)
