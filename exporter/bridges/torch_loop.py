"""The bridge to a training loop without a framework: what can be concluded from what it asks torch to do.

Used in the training process, on the thread that trains. What turns, validations, checkpoints and losses are concluded from
is in docs/bridges.md. A job that reports its loop itself, or uses a framework with a bridge of its own, is left to them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, WeakSet, ref

from exporter import training
from exporter.bridges import torch_hooks
from exporter.bridges.loop import (
    BATCH,
    EVALUATION,
    ITERATION,
    LOAD,
    LOOP,
    SAVE,
    AsyncSave,
    Discarded,
    LoopTracker,
    TurnLoss,
    holds_optimizer,
    samples_and_tokens,
    steps_made,
)
from exporter.bridges.sources import ACTIVE, EXIT, Source
from exporter.patching import Around, never_raises, patch_existing, version_of
from exporter.training.recording import TRAINING

MOST_FETCHED = 64
"""Batches that are kept until something is trained."""
WITHIN_BACKWARD = 0
"""Stands for all optimizers that step within a backward pass, on its thread."""


class _LoopSource(Source):
    """Reports the loop of a job's own; with `EXPORTER_AUTO=1` a job that uses `exporter.training` itself is left to it."""

    batches_ahead = 0  # that the job's loaders fetch before they are trained on

    def __init__(self) -> None:
        self._courteous = os.environ.get("EXPORTER_AUTO") == "1"
        self.forget()

    def forget(self) -> None:
        self._tracker: LoopTracker | None = None
        self._thread: int | None = None
        self._silent = self._worked = self.is_evaluating = False
        self._start = self._turns = self._epochs = self._turns_at_epoch = 0
        self._in_optimizer = self._in_backward = self._stepped_in_backward = False
        self._loss = TurnLoss()
        self._optimizers: WeakSet[Any] = WeakSet()
        self._changed_by_hand: ReferenceType[Any] | None = None
        self._stepped: set[int] = set()
        self._leader: int | None = None
        self._asked_since_step = False
        self._fetched: deque[Any] = deque(maxlen=MOST_FETCHED)
        self._is_exhausted = False

    @property
    def tracker(self) -> LoopTracker | None:
        """Where the loop is, made when something is reported first; None where the job reports it itself."""
        if self._silent:
            return None
        if self._tracker is None:
            self._tracker = LoopTracker(guesses=self._courteous)
            world_size = _world_size()
            training.describe(
                framework="pytorch", framework_version=version_of("torch"), world_size=world_size
            )
        elif self._courteous and TRAINING.job_tells:
            self._silent = True
            self._tracker.end_all(Discarded())
            return None
        return self._tracker

    @property
    def step(self) -> int:
        """Turns so far, those of earlier processes included where they are known."""
        return self._start + self._turns

    def yields(self) -> None:
        if self._tracker is not None:
            self._tracker.end(EVALUATION)
            self._tracker.end_all(Discarded())
        self.forget()

    def has_phases(self) -> bool:
        return self._mine(training=False) is not None

    # Data -------------------------------------------------------------------------------------------------------

    def fetch(self, *, begins: bool = False) -> Around:
        tracker = self._mine(training=False)
        if tracker is None:
            return
        if self.is_evaluating or not sys.modules["torch"].is_grad_enabled():
            self._evaluation_begins(tracker)
            tracker.end(BATCH)
        else:
            self._asked_since_step = True
            if tracker.is_open(LOOP):  # before the first backward pass it may be a look at the data
                self._training_goes_on(tracker)
            tracker.phase("data_loading")
        batch, error = yield
        has_batch = error is None and batch is not None and not begins
        if self._tracker is not tracker:
            return
        if tracker.is_open(EVALUATION):
            if error is not None:
                self._evaluation_ends(tracker, None if isinstance(error, StopIteration) else error)
            elif has_batch:
                tracker.begin_batch()
            return
        self._is_exhausted = error is not None
        tracker.phase("forward" if has_batch and tracker.is_open(LOOP) else None)
        if has_batch:
            self._fetched.append(samples_and_tokens(batch))
        elif not tracker.is_open(LOOP):
            self._fetched.clear()
        if isinstance(error, StopIteration):
            self._idle(tracker)
            if self._turns > self._turns_at_epoch:
                self._turns_at_epoch = self._turns
                self._epochs += 1
                training.record(epoch=self._epochs)

    # Evaluation -------------------------------------------------------------------------------------------------

    def evaluates(self, module: Any) -> None:
        """A module has been set to evaluate: the model that is trained, a part of it, or another."""
        tracker = self._mine(training=False) if self._optimizers or self._changed_by_hand else None
        if tracker is not None and self._is_trained(module):
            self.is_evaluating = True
            if tracker.is_open(LOOP):
                self._evaluation_begins(tracker)

    def trains(self, module: Any) -> None:
        tracker = self._mine(training=False)
        if tracker is not None and self._is_trained(module):
            self._evaluation_ends(tracker, None)
            if tracker.is_open(LOOP):
                self._turn_begins(tracker)

    def _is_trained(self, module: Any) -> bool:
        """Tell whether the job changes a module by hand, or it holds most of what one of its optimizers changes."""
        if self._changed_by_hand is not None and self._changed_by_hand() is module:
            return True
        held = {id(parameter) for parameter in module.parameters()}
        for optimizer in tuple(self._optimizers):
            changed = [
                each for group in optimizer.param_groups for each in group["params"] if each.requires_grad
            ]
            if 2 * sum(id(each) in held for each in changed) > len(changed):
                return True
        return False

    def _evaluation_begins(self, tracker: LoopTracker) -> None:
        if not tracker.is_open(EVALUATION):
            self._idle(tracker)
            tracker.begin_evaluation()

    def _evaluation_ends(self, tracker: LoopTracker, error: BaseException | None) -> None:
        self.is_evaluating = False
        tracker.end(EVALUATION, error)

    # Turns ------------------------------------------------------------------------------------------------------

    def loss_is(self, loss: Any) -> None:
        tracker = self._mine(training=True)
        if tracker is not None:
            self._training_goes_on(tracker)
            self._loss.add(loss, begins=False)

    def backward(self, tensors: Any) -> Around:
        """A backward pass is made; an optimizer with a closure goes on after it."""
        tracker = self._mine(training=True)
        if tracker is None:
            return
        self._training_goes_on(tracker)
        self._worked = True
        ahead = 0 if self._is_exhausted else self.batches_ahead
        while len(self._fetched) > ahead:
            samples, tokens = self._fetched.popleft()
            training.record(samples=samples, tokens=tokens, microbatches=1)
        again = self._in_optimizer and not self._loss.is_empty  # LBFGS calls its closure until it is content
        if not self._stepped and not again:  # what follows an optimizer's step is another's loss
            self._loss.add(tensors, begins=True)
        tracker.phase("backward")
        self._in_backward = True
        _, error = yield
        stepped, self._in_backward, self._stepped_in_backward = self._stepped_in_backward, False, False
        if self._tracker is tracker and error is None:
            tracker.phase("optimizer" if self._in_optimizer else None)
            if stepped:
                self._optimizer_done(tracker, WITHIN_BACKWARD)

    def gradient_norm_is(self, norm: Any) -> None:
        tracker = self._mine(training=True)
        if tracker is not None:
            tracker.record("grad_norm", norm)

    def optimizer_begins(self, optimizer: Any) -> None:
        tracker = self._mine(training=True)
        if tracker is None:
            return
        if optimizer not in self._optimizers and self._asked_since_step:
            self._leader = None  # another loop has begun, with an optimizer of its own
            self._stepped.clear()
        self._optimizers.add(optimizer)
        self._training_goes_on(tracker)
        self._in_optimizer = self._worked = True
        tracker.phase("optimizer")

    def optimizer_ends(self, optimizer: Any) -> None:
        """It is over; hooks of gradients run on a thread of the backward pass where there is a GPU."""
        tracker = self._mine(training=True)
        if tracker is None:
            self._stepped_in_backward = self._in_backward
            return
        self._in_optimizer = False
        tracker.phase(None)
        rate = optimizer.param_groups[0].get("lr")
        if isinstance(rate, (int, float)):
            training.record(learning_rate=rate)
        self._optimizer_done(tracker, id(optimizer))

    def _optimizer_done(self, tracker: LoopTracker, key: int) -> None:
        self._asked_since_step = False
        if self._leader in {None, key} or key in self._stepped:
            self._leader = key
            self._stepped.clear()
            self._turn_ends(tracker)
        else:
            self._stepped.add(key)
            self._loss.record(tracker)

    def _turn_ends(self, tracker: LoopTracker) -> None:
        self._loss.record(tracker)
        self._turns += 1
        tracker.end(ITERATION)
        self._turn_begins(tracker)

    def gradients_cleared(self, module: Any) -> None:
        """The gradients of a model have been cleared in a job without an optimizer: the job changes the model itself."""
        tracker = self._mine(training=False)
        if tracker is None or not module.training:
            return
        if self._changed_by_hand is None or self._changed_by_hand() is None:
            self._changed_by_hand = ref(module)
        if self._changed_by_hand() is module:
            self._end_by_hand(tracker)

    def _end_by_hand(self, tracker: LoopTracker) -> None:
        """End a turn of a job without an optimizer, if it has had a backward pass."""
        by_hand = self._changed_by_hand is not None and not self._optimizers
        if by_hand and self._worked and tracker.is_open(ITERATION):
            self._turn_ends(tracker)

    def optimizer_skipped(self, optimizer: Any) -> None:
        """The scaler has found no finite gradients: the turn is one all the same, as frameworks count them."""
        tracker = self._mine(training=True)
        if tracker is not None and tracker.is_open(ITERATION):
            self._optimizer_done(tracker, id(optimizer))

    def optimizer_loaded(self, state: Any) -> None:
        if self._turns == 0:
            self._start = max(self._start, steps_made(state))

    def _mine(self, *, training: bool) -> LoopTracker | None:
        """Return the tracker on the thread that trains."""
        here = threading.get_ident()
        if self._thread is None:
            if not training:
                return self.tracker if threading.current_thread() is threading.main_thread() else None
            self._thread = here
            if self.tracker is not None and self._courteous:
                TRAINING.drain()
                self._silent = TRAINING.job_tells
        return self.tracker if self._thread == here else None

    def _training_goes_on(self, tracker: LoopTracker) -> None:
        self._evaluation_ends(tracker, None)
        if not tracker.is_open(LOOP):
            tracker.begin_loop(self.step)
            training.record(epoch=self._epochs)
        self._turn_begins(tracker)

    def _turn_begins(self, tracker: LoopTracker) -> None:
        if not tracker.is_open(ITERATION):
            self._worked = False
            self._loss.begin()
            tracker.begin_iteration()

    def _idle(self, tracker: LoopTracker) -> None:
        """Something else than a turn begins: one in which nothing was trained yet is none."""
        self._end_by_hand(tracker)
        if not self._worked:
            tracker.discard_iteration()

    # Checkpoints ------------------------------------------------------------------------------------------------

    def save(self, saved: Any, *, at_once: bool) -> Around:
        return self.checkpoint(whole=holds_optimizer(saved), at_once=at_once)

    def checkpoint(self, *, whole: bool, at_once: bool = True) -> Around:
        """A checkpoint is written, if the training has begun; only from a whole one can the job go on."""
        tracker = self._tracker
        if tracker is None or self._thread != threading.get_ident():
            return
        if tracker.is_open(SAVE) or not tracker.is_open(LOOP):
            return
        self._idle(tracker)
        tracker.begin_save(self.step, whole=whole, at_once=at_once)
        save = AsyncSave(self.step)
        future, error = yield
        if self._tracker is tracker:
            tracker.end(SAVE, error)
            if not tracker.is_open(EVALUATION):  # it goes on until the model is trained again
                self._turn_begins(tracker)
            if whole and not at_once:
                save.report_when_done(future, error)

    def load(self) -> Around | None:
        tracker = self._mine(training=False)
        return None if tracker is None or tracker.is_open(LOAD) else tracker.load()

    # The end ----------------------------------------------------------------------------------------------------

    @never_raises
    def exits(self, error: BaseException | None) -> None:
        tracker = self._tracker
        if tracker is None:
            return
        if self._thread not in {None, threading.get_ident()}:
            # What another thread left open cannot be closed from here one by one; where it has ended, so has the loop.
            runs = any(thread.ident == self._thread for thread in threading.enumerate())
            if error is None and not runs and tracker.is_open(LOOP):
                training.on_train_end()
                self.forget()
            return
        if error is None:
            tracker.end(EVALUATION)
            self._end_by_hand(tracker)
            tracker.discard_iteration()
        tracker.end_all(error)


def _world_size() -> int | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) if ranks.isascii() and ranks.isdigit() else None


# What is installed ----------------------------------------------------------------------------------------------


def install() -> None:
    """Report the job's own loop whenever no other source does. Raises ImportError: There is no torch."""
    torch_hooks.install()
    if isinstance(ACTIVE.fallback, _LoopSource):
        return
    source = _LoopSource()
    ACTIVE.fall_back_to(source)
    EXIT.register()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=never_raises(source.forget))


def active_loop() -> _LoopSource | None:
    """Return the source while it reports."""
    source = ACTIVE.source
    return source if isinstance(source, _LoopSource) and source.tracker is not None else None


def watch(owner: Any, name: str, hook: Callable[..., Around | None]) -> None:
    """Patch a class's method, if this version has it; the hook gets the source that reports, and the arguments."""

    def watched(*args: Any, **kwargs: Any) -> Around | None:
        source = active_loop()
        return None if source is None else hook(source, *args, **kwargs)

    patch_existing(owner, (name,), watched)
