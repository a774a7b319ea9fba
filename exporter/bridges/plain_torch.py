"""The bridge to a training loop without a framework: what can be told from what it asks torch to do.

Used in the training process, on the thread that trains. Nobody says where this loop's turns begin and end, so it is
concluded:

- a *turn* begins with the fetch of a batch and holds every optimizer step up to the next fetch: accumulated batches and
  the several optimizers of a GAN are one turn. An optimizer that steps again without a fetch has begun another turn.
  Where no loader of torch's is used, turns follow each other from step to step of the first optimizer;
- batches that are fetched while gradients are off, or after `eval()` of the model that is trained, are a *validation*,
  until a loader is exhausted or something is trained again;
- a file in which an optimizer's state is written is a *checkpoint*: from nothing else could the job go on;
- the loss is what the turn's first backward pass begins from, before a loss scaler has scaled it.

A job that tells its loop itself (at its first backward pass it is known), or uses a framework with a bridge of its own, is
left to them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from time import monotonic
from typing import Any
from weakref import WeakSet

from exporter.bridges import torch_hooks
from exporter.bridges.batches import samples_and_tokens
from exporter.bridges.brackets import never_raises
from exporter.bridges.claims import CLAIMS, WATCHING, Teller
from exporter.bridges.course import BATCH, EVALUATION, ITERATION, LOAD, LOOP, SAVE, Abandoned, Course
from exporter.bridges.ending import ENDING
from exporter.bridges.plain_checkpoints import holds_optimizer, steps_made, tell_when_written
from exporter.bridges.trained import is_trained

MOST_LOOKED_AT = 64
"""Batches before the first turn that are kept."""


SKIPPED, WITHIN_BACKWARD = 0, 1
"""Stand for an optimizer whose step a scaler has left out, and for all that step within a backward pass, on its thread."""


class LoopTeller(Teller):
    """Tells of the loop of a job's own.

    Args:
        courteous: Whether a job that uses `exporter.training` itself is left to it.

    Attributes:
        courteous: The same.
    """

    strength = WATCHING

    def __init__(self, *, courteous: bool = False) -> None:
        self.courteous = courteous
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a forked child does."""
        self._course: Course | None = None
        self._thread: int | None = None
        self._silent = False
        self._start = 0
        self._turns = 0
        self._epochs = self._turns_at_epoch = 0
        self._fetches = 0
        self._evaluating = False
        self._in_optimizer = self._in_backward = self._stepped_in_backward = False
        self._loss_is_told = False
        self._worked = False
        self._optimizers: WeakSet[Any] = WeakSet()
        self._stepped: set[int] = set()
        self._leader: int | None = None
        self._handed_over: tuple[int, float] | None = None
        self._looked_at: deque[tuple[int | None, int | None]] = deque(maxlen=MOST_LOOKED_AT)

    @property
    def course(self) -> Course | None:
        """Where the loop is, made when something is told first; None where the job tells it itself."""
        if self._silent:
            return None
        if self._course is None:
            self._course = Course()
            self._describe(self._course)
        return self._course

    @staticmethod
    def _describe(course: Course) -> None:
        ranks = os.environ.get("WORLD_SIZE", "")
        world_size = int(ranks) if ranks.isascii() and ranks.isdigit() else None
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            world_size = int(distributed.get_world_size())
        course.training.describe(
            framework="pytorch",
            framework_version=str(sys.modules["torch"].__version__),
            world_size=world_size,
        )

    @property
    def step(self) -> int:
        """Turns so far, those of earlier processes included where they are known."""
        return self._start + self._turns

    def yields(self) -> None:
        """Whatever was concluded so far, somebody knows better."""
        if self._course is not None:
            self._turn_ends()
            self._course.end(EVALUATION)
            self._course.end_all(Abandoned())
        self.forget()

    def tells_phases(self) -> bool:
        """There is a course, unless the job tells its own."""
        return self._mine(training=False) is not None

    # Data -------------------------------------------------------------------------------------------------------

    def fetch_begins(self) -> bool:
        """A batch is asked for."""
        course = self._mine(training=False)
        if course is None:
            return False
        if self._is_evaluation():
            if not course.is_open(EVALUATION):
                self._turn_ends()
                course.begin(EVALUATION, course.training.validation_loop())
            course.end(BATCH)
            return True
        self._fetches += 1
        if course.is_open(LOOP):  # before the first backward pass it may be a look at the data
            self._training_goes_on(course)
            self._turn_ends()
            self._turn_begins(course)
        course.phase("data_loading")
        return True

    def fetch_ends(self, batch: Any, error: BaseException | None) -> None:
        """The batch is there, or none has come."""
        course = self._course
        if course is None:
            return
        if course.is_open(EVALUATION):
            if error is not None:
                self._evaluating = False
                course.end(EVALUATION, None if isinstance(error, StopIteration) else error)
            elif batch is not None:
                course.begin(BATCH, course.training.validation_iteration())
        elif error is not None or batch is None:
            course.phase(None)
            self._looked_at.clear()
            if isinstance(error, StopIteration):
                if not self._worked:
                    course.abandon_iteration()
                self._epoch_ends(course)
        else:
            found = samples_and_tokens(batch)
            if course.is_open(LOOP):
                course.phase("forward")
                self._count(course, found)
            else:
                course.phase(None)
                self._looked_at.append(found)

    @staticmethod
    def _count(course: Course, found: tuple[int | None, int | None]) -> None:
        samples, tokens = found
        course.training.record(samples=samples, tokens=tokens, microbatches=1)

    def _epoch_ends(self, course: Course) -> None:
        if self._turns > self._turns_at_epoch:
            self._turns_at_epoch = self._turns
            self._epochs += 1
            course.training.record(epoch=self._epochs)

    def evaluates(self, module: Any) -> None:
        """A module has been set to evaluate: the model that is trained, a part of it, or another."""
        optimizers = tuple(self._optimizers)
        if optimizers and self._mine(training=False) is not None and is_trained(module, optimizers):
            self._evaluating = True

    def _is_evaluation(self) -> bool:
        return self._evaluating or not sys.modules["torch"].is_grad_enabled()

    # Turns ------------------------------------------------------------------------------------------------------

    def loss_is(self, loss: Any) -> None:
        """Take the loss from before it is scaled."""
        course = self._mine(training=True)
        if course is None:
            return
        self._training_goes_on(course)
        self._turn_begins(course)
        if not self._loss_is_told:
            self._loss_is_told = True
            course.record_loss(loss)

    def backward_begins(self, tensors: Any) -> bool:
        """The backward pass begins."""
        course = self._mine(training=True)
        if course is None:
            return False
        self._training_goes_on(course)
        if WITHIN_BACKWARD in self._stepped:
            self._turn_ends()
        self._turn_begins(course)
        self._worked = True
        if not self._loss_is_told and hasattr(tensors, "numel") and tensors.numel() == 1:
            self._loss_is_told = True
            course.record_loss(tensors)
        course.phase("backward")
        self._in_backward = True
        return True

    def backward_ends(self, error: BaseException | None) -> None:
        """It is over; an optimizer with a closure goes on."""
        stepped, self._in_backward, self._stepped_in_backward = self._stepped_in_backward, False, False
        if self._course is not None and error is None:
            self._course.phase("optimizer" if self._in_optimizer else None)
            if stepped:
                self._optimizer_done(self._course, WITHIN_BACKWARD)

    def gradient_norm_is(self, norm: Any) -> None:
        """Take what gradients were clipped by."""
        course = self._mine(training=True)
        if course is not None:
            course.record_norm(norm)

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""
        course = self._mine(training=True)
        if course is None:
            return
        self._training_goes_on(course)
        if hasattr(optimizer, "param_groups"):  # one of torch's
            self._optimizers.add(optimizer)
        if self._fetches and id(optimizer) in self._stepped:
            self._turn_ends()
        self._turn_begins(course)
        self._in_optimizer = self._worked = True
        course.phase("optimizer")

    def optimizer_ends(self, optimizer: Any) -> None:
        """It is over; hooks of gradients run on a thread of the backward pass where there is a GPU."""
        course = self._mine(training=True)
        if course is None:
            self._stepped_in_backward = self._in_backward
            return
        self._in_optimizer = False
        course.phase(None)
        rate = optimizer.param_groups[0].get("lr") if hasattr(optimizer, "param_groups") else None
        if isinstance(rate, (int, float)):
            course.training.record(learning_rate=rate)
        self._optimizer_done(course, id(optimizer))

    def _optimizer_done(self, course: Course, key: int) -> None:
        if self._fetches:
            self._stepped.add(key)
        elif self._leader in {None, key} or key in self._stepped:
            self._leader = key
            self._stepped.clear()
            self._turns += 1
            course.end(ITERATION)
            self._turn_begins(course)
        else:
            self._stepped.add(key)

    def optimizer_skipped(self) -> None:
        """The scaler has found no finite gradients: the turn is one all the same, as frameworks count them."""
        course = self._mine(training=True)
        if course is not None and course.is_open(ITERATION):
            self._optimizer_done(course, SKIPPED)

    def optimizer_loaded(self, state: Any) -> None:
        """Most optimizers count their steps in their state."""
        if self._turns == 0:
            self._start = max(self._start, steps_made(state))

    def _mine(self, *, training: bool) -> Course | None:
        """Give the course on the thread that trains."""
        here = threading.get_ident()
        if self._thread is None:
            if not training:
                return self.course if threading.current_thread() is threading.main_thread() else None
            self._thread = here
            self._silent = self.courteous and self.course is not None and self.course.job_tells()
        return self.course if self._thread == here else None

    def _training_goes_on(self, course: Course) -> None:
        self._evaluating = False
        course.end(EVALUATION)
        if not course.is_open(LOOP):
            course.begin_loop(self.step)
            course.training.record(epoch=self._epochs)
            for found in self._looked_at:
                self._count(course, found)
            self._looked_at.clear()

    def _turn_begins(self, course: Course) -> None:
        if not course.is_open(ITERATION):
            self._worked = self._loss_is_told = False
            course.begin_iteration()

    def _turn_ends(self) -> None:
        course = self._course
        if course is not None and self._fetches and self._stepped and course.is_open(ITERATION):
            self._stepped.clear()
            self._turns += 1
            course.end(ITERATION)

    # Checkpoints ------------------------------------------------------------------------------------------------

    def save_begins(self, saved: Any, *, at_once: bool) -> bool:
        """Something is written."""
        return self.checkpoint_begins(whole=holds_optimizer(saved), at_once=at_once)

    def checkpoint_begins(self, *, whole: bool, at_once: bool = True) -> bool:
        """A checkpoint is written, if the training has begun; only from a whole one can the job go on."""
        course = self._course
        if course is None or self._thread != threading.get_ident():
            return False
        if course.is_open(SAVE) or not course.is_open(LOOP):
            return False
        self._turn_ends()
        self._handed_over = None
        if whole and at_once:
            course.begin_save(self.step)
        else:
            course.begin(SAVE, course.training.phase(f"checkpoint_save_{'sync' if at_once else 'async'}"))
            self._handed_over = (self.step, monotonic()) if whole else None
        return True

    def save_ends(self, result: Any, error: BaseException | None) -> None:
        """It is written, handed over to be written, or has failed."""
        course = self._course
        if course is None:
            return
        course.end(SAVE, error)
        if self._handed_over is not None:
            tell_when_written(course.training, *self._handed_over, result, error)
            self._handed_over = None

    def load_begins(self) -> bool:
        """A checkpoint is read."""
        course = self._mine(training=False)
        if course is None or course.is_open(LOAD):
            return False
        course.begin(LOAD, course.training.checkpoint_load())
        return True

    def load_ends(self, error: BaseException | None) -> None:
        """It is read, or cannot be."""
        if self._course is not None:
            self._course.end(LOAD, error)

    # The end ----------------------------------------------------------------------------------------------------

    @never_raises
    def exits(self, error: BaseException | None) -> None:
        """The process ends, with an exception that nobody has caught or in order."""
        course = self._course
        if course is None:
            return
        if self._thread not in {None, threading.get_ident()}:
            self._ends_elsewhere(course, error)
            return
        self._turn_ends()
        if error is None:
            course.end(EVALUATION)
            course.abandon_iteration()
        course.end_all(error)

    def _ends_elsewhere(self, course: Course, error: BaseException | None) -> None:
        """End the loop of another thread, which has ended: what it left open cannot be closed from here one by one."""
        runs = any(thread.ident == self._thread for thread in threading.enumerate())
        if error is None and not runs and course.is_open(LOOP):
            course.training.on_train_end()


def install() -> None:
    """Tell of the job's own loop whenever nobody else tells, except where the job itself does.

    Raises:
        ImportError: There is no torch.
    """
    standing(courteous=os.environ.get("EXPORTER_AUTO") == "1")


def standing(*, courteous: bool = False) -> LoopTeller:
    """Give the teller of this process, which tells whenever nobody else does; made at the first call.

    Args:
        courteous: Whether a job that uses `exporter.training` itself is left to it.

    Raises:
        ImportError: There is no torch.
    """
    torch_hooks.install()
    teller = CLAIMS.standing
    if isinstance(teller, LoopTeller):
        teller.courteous = teller.courteous and courteous
        return teller
    teller = LoopTeller(courteous=courteous)
    CLAIMS.stand(teller)
    ENDING.when_it_ends(teller.exits)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=never_raises(teller.forget))
    return teller


def telling() -> LoopTeller | None:
    """Give it while it tells."""
    holder = CLAIMS.holder
    return holder if isinstance(holder, LoopTeller) else None
