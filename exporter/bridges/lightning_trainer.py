"""What one Lightning Trainer does, told turn by turn.

Used in the training process, on the thread that trains; called by the callback in `exporter.bridges.lightning`.

An iteration is an optimizer step, from the fetch of its first batch on. In manual optimization it is a batch, as it is
for Lightning's own loggers: what several optimizers mean to each other is known to the job alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from exporter.bridges.batches import samples_and_tokens
from exporter.bridges.claims import LEADING, Teller
from exporter.bridges.course import BATCH, EVALUATION, ITERATION, LOAD, SAVE, Course
from exporter.bridges.lightning_saves import AsyncSave, AsyncSaves
from exporter.bridges.ranks import tell_rank


class TrainerTeller(Teller):
    """Tells of a Trainer, from `setup` of one of its functions to its end.

    Attributes:
        trainer: The Trainer.
    """

    strength = LEADING

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._course = Course()
        self._training: Any = self._course.training
        self._manual = not trainer.lightning_module.automatic_optimization
        self._in_batch = False
        self._batches_in_turn = 0
        self._step_at_turn = 0
        epoch_loop = getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)
        self._fetches_are_seen = hasattr(epoch_loop, "_on_before_fetch") and hasattr(
            epoch_loop, "_on_after_fetch"
        )
        self._async_saves = AsyncSaves(self._training)

    @property
    def step(self) -> int:
        """Optimizer steps so far, those of earlier processes included; in manual optimization, batches."""
        if self._manual:
            return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        return int(self.trainer.global_step)

    def tells_phases(self) -> bool:
        """There is a course from the begin."""
        return True

    def gradient_norm_is(self, norm: Any) -> None:
        """Lightning, or the module, has clipped gradients."""
        self._course.record_norm(norm)

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step is over."""
        del optimizer
        self.module_goes_on()

    def module_goes_on(self) -> None:
        """The backward pass or the optimizer is done; in manual optimization anything may come next."""
        if self._in_batch:
            self._course.phase("forward" if self._manual else None)

    def phase(self, name: str) -> None:
        """Another part of a batch's work begins."""
        if self._in_batch:
            self._course.phase(name)

    def describe(self) -> None:
        """Say what is trained, and where."""
        trainer = self.trainer
        package = next(
            base.__module__.split(".")[0] for base in type(trainer).__mro__ if base.__name__ == "Trainer"
        )
        tell_rank(int(trainer.global_rank))
        self._training.describe(
            framework="lightning",
            framework_version=str(getattr(sys.modules.get(package), "__version__", "")) or None,
            model=type(trainer.lightning_module).__name__,
            precision=str(trainer.precision),
            world_size=int(trainer.world_size),
        )

    # The training loop ------------------------------------------------------------------------------------------

    def train_begins(self) -> None:
        """The loop is about to take its first turn."""
        self._course.begin_loop(self.step, self._target())

    def train_ends(self) -> None:
        """The loop has taken its last turn."""
        self.turn_ends()
        self._course.end_all()

    def fails(self, error: BaseException) -> None:
        """An exception ends whatever is open; a step that is made stays made, if only a callback failed after it."""
        self._in_batch = self._in_batch and self._manual
        self.turn_ends()
        self._course.end_all(error)

    def epoch_begins(self) -> None:
        """An epoch begins."""
        self._training.record(epoch=int(self.trainer.current_epoch))
        if not self._fetches_are_seen:
            self.fetch_of_batch_begins()

    def epoch_ends(self) -> None:
        """An epoch is over, perhaps amid a batch: Lightning leaves its end out when the module gives the epoch up."""
        self._in_batch = False
        self.turn_ends()
        self._course.abandon_iteration()
        self._training.record(epoch=int(self.trainer.current_epoch) + 1)

    def fetch_of_batch_begins(self) -> None:
        """A batch is asked for: one turn ends there, and the next one begins."""
        if not self._in_batch:
            self.turn_ends()
            if not self._course.is_open(ITERATION):
                self._turn_begins()
        self._course.phase("data_loading")

    def fetch_of_batch_ends(self) -> None:
        """The batch is there; where the module itself has asked for it, the module goes on."""
        if self._in_batch:
            self._course.phase("forward")

    def batch_begins(self) -> None:
        """A batch has been brought to its device, or the module will fetch it itself."""
        if self._batches_in_turn:
            self.turn_ends()
        if not self._course.is_open(ITERATION):
            self._turn_begins()
        self._course.phase("forward")
        self._batches_in_turn += 1
        self._in_batch = True

    def batch_ends(self, outputs: Any, batch: Any) -> None:
        """All is done with a batch."""
        self._in_batch = False
        self._course.phase(None)
        self._course.record_loss(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
        samples, tokens = samples_and_tokens(batch)
        self._training.record(
            samples=samples,
            tokens=tokens,
            microbatches=1,
            learning_rate=self._learning_rate(),
        )
        if not self._fetches_are_seen:
            self.fetch_of_batch_begins()

    def _turn_begins(self) -> None:
        self._batches_in_turn, self._step_at_turn = 0, self.step
        self._course.begin_iteration()

    def turn_ends(self) -> None:
        """Close the iteration if its optimizer step is made; else more batches belong to it."""
        if self._in_batch or not self._course.is_open(ITERATION):
            return
        if not self._batches_in_turn:
            self._course.abandon_iteration()
        elif self._manual or self.step != self._step_at_turn:
            self._course.end(ITERATION)

    def _target(self) -> int | None:
        trainer = self.trainer
        if trainer.max_steps > 0:
            return int(trainer.max_steps)
        batches, epochs = trainer.num_training_batches, trainer.max_epochs
        if epochs is None or epochs < 1 or not math.isfinite(batches):
            return None
        return int(epochs * math.ceil(batches / trainer.accumulate_grad_batches))

    def _learning_rate(self) -> Any:
        optimizers = self.trainer.optimizers
        return optimizers[0].param_groups[0].get("lr") if optimizers else None

    # Evaluation -------------------------------------------------------------------------------------------------

    def evaluation_begins(self, mode: str) -> None:
        """A validation or a test begins; the few batches of the sanity check are no validation."""
        self.turn_ends()
        if self.trainer.sanity_checking:
            self._course.begin(EVALUATION, self._training.phase("validation"))
        elif mode == "validation":
            self._course.begin(EVALUATION, self._training.validation_loop())
        else:
            self._course.begin(EVALUATION, self._training.testing_loop())

    def evaluation_ends(self) -> None:
        """It is over."""
        self._course.end(EVALUATION)

    def evaluation_batch_begins(self, mode: str) -> None:
        """One batch of it begins; Lightning does not tell the end of every one."""
        self._course.end(BATCH)
        if not self.trainer.sanity_checking:
            training = self._training
            span = training.validation_iteration() if mode == "validation" else training.testing_iteration()
            self._course.begin(BATCH, span)

    def evaluation_batch_ends(self) -> None:
        """It is done."""
        self._course.end(BATCH)

    # Checkpoints ------------------------------------------------------------------------------------------------

    def save_of_checkpoint_begins(self, *, whole: bool) -> AsyncSave | None:
        """A checkpoint is about to be written; only from a whole one can the job go on."""
        self.turn_ends()
        save = self._async_saves.begins(self.trainer.strategy.checkpoint_io, self.step) if whole else None
        if save is not None:
            self._course.begin(SAVE, self._training.phase("checkpoint_save_async"))
        elif whole:
            self._course.begin_save(self.step)
        else:
            self._course.begin(SAVE, self._training.phase("checkpoint_save_sync"))
        return save

    def save_of_checkpoint_ends(self, save: AsyncSave | None, error: BaseException | None) -> None:
        """It is written, handed over to be written, or has failed."""
        self._course.end(SAVE, error)
        if save is not None:
            self._async_saves.returns(save, error)

    def load_of_checkpoint_begins(self) -> None:
        """A checkpoint is about to be read."""
        self._course.begin(LOAD, self._training.checkpoint_load())

    def load_of_checkpoint_ends(self, error: BaseException | None) -> None:
        """It is read, or cannot be."""
        self._course.end(LOAD, error)
