"""Inferred training loop: steps and validations of a loop without a framework, as a state machine.

The hooks on torch call this source on any thread of the training process, and the source reports the loop of a single thread.
docs/bridges.md describes the rules. The source is inactive while a framework with a bridge is used and, with `EXPORTER_AUTO=1`, if
the job reports its loop.

The methods that are called in every step begin with a fast path, which stores the time in `step_edges` and sets the state. The clock
counts the phases at the end of the step. From `step_edges.limit` on, which is 20 to 40 ms after the start of the step, the methods
take the general path.
"""

from __future__ import annotations

import sys
import threading
from threading import get_ident
from time import monotonic
from typing import Any

from exporter import training
from exporter.bridges import torch_hooks
from exporter.bridges.leading_optimizer import UNSEEN_OPTIMIZER_MESSAGE, LeadingOptimizer, learning_rate
from exporter.bridges.loop import Discarded, Level, LoopTracker
from exporter.bridges.loop_progress import LoopProgress
from exporter.bridges.loss import StepLoss
from exporter.bridges.pending_batches import PendingBatch, PendingBatches
from exporter.bridges.training_thread import (
    BACKWARD,
    BETWEEN_STEPS,
    EVALUATING,
    FETCHING,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    PAUSED,
    READY,
    WATCHING,
    LoopState,
    TrainingThread,
)
from exporter.patching import Around, never_raises
from exporter.recording.notices import log_once
from exporter.training.recorder import TRAINING


class InferredLoop(TrainingThread):
    """Source that infers steps and validations from calls of torch. See the module for the fast paths."""

    def __init__(self) -> None:
        self._is_grad_enabled = sys.modules["torch"].is_grad_enabled
        self._step_edges = TRAINING.clock.step_edges
        super().__init__()

    def reset(self) -> None:
        """Return to the initial state."""
        torch_hooks.watch_training_mode(enabled=False)
        super().reset()
        self.batches = PendingBatches()
        self._fetching_from: object = None  # outermost iterator or loader of a fetch in progress
        # Batch fetched before `eval()`, which may be the first batch of this validation.
        self._early_batch: PendingBatch | None = None
        self._optimizers = LeadingOptimizer()
        self._stepping_optimizer: object = None  # outermost optimizer of a step in progress
        self._has_new_data = False  # True if a batch was fetched since the latest step of an optimizer
        self._loss = StepLoss()
        # True if the open iteration had a backward pass or a step of an optimizer.
        self._is_iteration_kept = False
        self.is_evaluating = False  # True if the trained model is in evaluation mode
        self.progress = LoopProgress()

    def superseded(self) -> None:
        """Discard the open blocks, because a stronger source begins."""
        if self._tracker is not None:
            self._tracker.end(Level.EVALUATION)
            self._tracker.end_all(Discarded())
        self.reset()

    # Threads and states -----------------------------------------------------------------------------------------

    def _enter(self, tracker: LoopTracker, state: LoopState) -> None:
        """Enter a state of a step. Between steps, first end the validation, if any, and open the loop and an iteration."""
        if self._state in BETWEEN_STEPS:
            self._end_evaluation(tracker, None)
            if not tracker.is_open(Level.LOOP):
                tracker.begin_loop(self.progress.step)
            if not tracker.is_open(Level.ITERATION):
                self._is_iteration_kept = False
                self._loss.begin()
                tracker.begin_iteration()
        self._state = state
        tracker.phase(state.phase)

    def _pause(self, tracker: LoopTracker) -> None:
        """Leave the iteration. It stays open if it had a backward pass or a step of an optimizer, and is discarded otherwise."""
        self._stepping_optimizer = None
        if not self._is_iteration_kept:
            tracker.discard_iteration()
        tracker.phase(None)
        if tracker.is_open(Level.LOOP):
            self._state = PAUSED

    # Data -------------------------------------------------------------------------------------------------------

    def fetch_begins(self, fetcher: Any) -> None:
        """Begin the fetch of a batch. A fetch without gradients begins a validation. In a validation, end the previous batch."""
        is_grad_enabled, edges, state = self._is_grad_enabled, self._step_edges, self._state
        # Fast path:
        if (
            (state is READY or state is GRADIENTS)
            and self._fetching_from is None
            and self._thread == get_ident()
            and is_grad_enabled()
            and (now := monotonic()) < edges.limit
        ):
            if state is GRADIENTS:  # gradient accumulation: another batch of the same step
                self._phases.count_batch()
            edges.fetch_began = now
            self._state = FETCHING
            self._fetching_from = fetcher
            self._has_new_data = True
            return
        tracker = self._current_tracker()
        if tracker is None or self._fetching_from is not None:
            return  # a nested fetch is a part of the outer fetch
        self._fetching_from = fetcher
        if self.is_evaluating:
            self._end_batch(tracker, fetcher)
        elif not is_grad_enabled():
            self._begin_evaluation(tracker)
            self._end_batch(tracker, fetcher)
        else:
            self._has_new_data = True
            if self._state is READY or tracker.is_open(Level.LOOP):
                self._enter(tracker, FETCHING)
            else:  # before the first backward pass, the job may fetch a batch without training on it
                tracker.phase("data_loading")

    def iterator_created(self, fetcher: Any, _error: BaseException | None) -> None:
        """End the phase in which a loader creates an iterator."""
        if self._fetching_from is fetcher:
            self._fetching_from = None
            if self._state is FETCHING and self._tracker is not None:
                self._enter(self._tracker, READY)
        if self._state is WATCHING:
            self.batches.clear()  # the job did not train on the batches of an earlier iterator
            if self._tracker is not None and self._thread is None:
                self._tracker.phase(None)

    def fetch_ends(self, fetcher: Any, batch: Any, error: BaseException | None) -> None:
        """End the fetch: store a training batch until its backward pass, or begin a batch of the validation.

        The end of the loader ends the epoch or the validation. Any other error ends a validation as failed, and otherwise only the fetch.
        """
        # Fast path:
        if (
            self._state is FETCHING
            and self._fetching_from is fetcher
            and error is None
            and (now := monotonic()) < self._step_edges.limit
        ):
            self._step_edges.forward_began = now
            self._state = FORWARD
            self._fetching_from = None
            self.batches.add(fetcher, batch)
            return
        tracker = self._tracker
        if self._fetching_from is not fetcher or tracker is None:
            # Before the first backward pass, the fetches of other threads are not recorded, but their batches are stored.
            if error is None and self._may_become_training_thread():
                self.batches.add(fetcher, batch)
            return
        self._fetching_from = None
        if self._state is EVALUATING:
            if error is None:
                tracker.begin_batch()
            else:
                self._end_evaluation(tracker, None if isinstance(error, StopIteration) else error)
            return
        if error is None:
            self.batches.add(fetcher, batch)
        else:
            self.batches.is_exhausted = True
        if self._state is FETCHING:
            self._enter(tracker, FORWARD if error is None else READY)
        else:
            tracker.phase(None)
        if isinstance(error, StopIteration):
            self._end_epoch(tracker)

    def _end_epoch(self, tracker: LoopTracker) -> None:
        """Leave the iteration, and count the epoch if it had a step. Before the first backward pass, drop the batches."""
        if self._state is WATCHING:
            self.batches.clear()
            return
        self._pause(tracker)
        self.progress.end_epoch()

    # Evaluation -------------------------------------------------------------------------------------------------

    def evaluation_mode_set(self, module: Any) -> None:
        """Begin a validation if the trained model is set to evaluation mode, not for a submodule or a different model.

        A batch that is fetched and not trained on is recorded as the first batch, until the next fetch shows whether it was.
        """
        if self.is_evaluating:
            return
        tracker = self._current_tracker()
        if tracker is not None and tracker.is_open(Level.LOOP) and self._optimizers.trains(module):
            self.is_evaluating = True
            torch_hooks.watch_training_mode(enabled=True)
            self._begin_evaluation(tracker)
            self._early_batch = self.batches.latest()
            if self._early_batch is not None:
                tracker.begin_batch()

    def validation(self) -> Around:
        """Record a validation around a call of a library that validates."""
        tracker = self._current_tracker()
        if tracker is None or self._state is EVALUATING or not tracker.is_open(Level.LOOP):
            yield
            return
        self.is_evaluating = True
        self._begin_evaluation(tracker)
        _, error = yield
        if self._tracker is tracker:
            self._end_evaluation(tracker, error)

    def validation_batch_begins(self) -> None:
        """Begin a batch of the validation unless the hooks on torch's loaders have recorded the batch."""
        tracker = self._current_tracker()
        if tracker is not None and self._state is EVALUATING and not tracker.is_open(Level.BATCH):
            tracker.begin_batch()

    def validation_batch_ends(self) -> None:
        """End a batch of the validation."""
        tracker = self._current_tracker()
        if tracker is not None:
            tracker.end(Level.BATCH)

    def training_mode_set(self, module: Any) -> None:
        """End the validation if the trained model is set to training mode."""
        tracker = self._current_tracker()
        if tracker is not None and self._optimizers.trains(module):
            self._end_evaluation(tracker, None)
            if tracker.is_open(Level.LOOP):
                self._enter(tracker, READY)

    def _begin_evaluation(self, tracker: LoopTracker) -> None:
        """Leave the iteration and begin a validation, unless a validation is in progress."""
        if self._state is not EVALUATING:
            self._pause(tracker)
            tracker.begin_evaluation()
            self._state = EVALUATING

    def _end_batch(self, tracker: LoopTracker, fetcher: Any) -> None:
        """End a batch of the validation. Its first batch may have been fetched before `eval()`, if the same iterator fetches the next one."""
        early_batch, self._early_batch = self._early_batch, None
        belongs_to_validation = early_batch is None or early_batch.iterator_id == id(fetcher)
        tracker.end(Level.BATCH, None if belongs_to_validation else Discarded())
        if early_batch is not None and belongs_to_validation:
            self.batches.drop_latest()

    def _end_evaluation(self, tracker: LoopTracker, error: BaseException | None) -> None:
        """End the validation, if any. *error* is the exception that ended it, or None."""
        if self._early_batch is not None:
            self._early_batch = None
            tracker.end(Level.BATCH, Discarded())
        if self.is_evaluating:
            self.is_evaluating = False
            torch_hooks.watch_training_mode(enabled=False)
        if self._state is EVALUATING:
            tracker.end(Level.EVALUATION, error)
            self._state = PAUSED if tracker.is_open(Level.LOOP) else WATCHING

    # Steps ------------------------------------------------------------------------------------------------------

    def loss_computed(self, loss: Any) -> None:
        """Record the loss of the next backward pass before a library scales the loss."""
        tracker = self._claim_thread()
        if tracker is not None:
            if self._state in BETWEEN_STEPS:
                self._enter(tracker, READY)
            self._loss.add_unscaled_loss(loss)

    def backward_begins(self, tensors: Any) -> LoopState | None:
        """Begin a backward pass. Return the state after the pass.

        Returns None for a nested pass, and for a pass on another thread; neither is recorded. After a pass inside a step of an optimizer, as
        in L-BFGS, that step continues. The source logs a message and stops reporting if 10 s after the first backward pass no step was
        counted and no optimizer of torch exists.
        """
        state, edges = self._state, self._step_edges
        # Fast path:
        if state is FORWARD and self._thread == get_ident() and (now := monotonic()) < edges.limit:
            edges.backward_began = now
            self._state = BACKWARD
            self._is_iteration_kept = True
            batches = self.batches.count_trained(TRAINING.numbers)
            if self._loss.is_read:
                self._loss.add_pass(tensors, batches)
            return GRADIENTS
        tracker = self._claim_thread()
        if tracker is None or state is BACKWARD:
            return None
        self._enter(tracker, BACKWARD)
        self._is_iteration_kept = True
        self._loss.add_pass(tensors, self.batches.count_trained(TRAINING.numbers))
        if self.progress.steps == 0 and self._optimizers.is_overdue() and not torch_hooks.optimizer_exists():
            log_once("optimizer not seen", UNSEEN_OPTIMIZER_MESSAGE)
            self._deactivate(LoopState.UNSEEN)
        return OPTIMIZER if state is OPTIMIZER else GRADIENTS

    def backward_ends(self, next_state: LoopState, _error: BaseException | None) -> None:
        """End a backward pass."""
        if self._state is BACKWARD:
            self._state = next_state
            if next_state is GRADIENTS and (now := monotonic()) < self._step_edges.limit:  # fast path
                self._step_edges.backward_ended = now
            else:
                self._phases.switch_to(next_state.phase)

    def gradient_norm_computed(self, norm: Any) -> None:
        """Record the norm of the gradients."""
        tracker = self._claim_thread()
        if tracker is not None:
            tracker.record("grad_norm", norm)

    def optimizer_begins(self, optimizer: Any) -> None:
        """Begin an optimizer's step. A step that another optimizer makes inside this step is a part of this step.

        A source that has stopped reporting, because no optimizer had stepped, starts again.
        """
        edges = self._step_edges
        # Fast path:
        if self._state is GRADIENTS and self._thread == get_ident() and (now := monotonic()) < edges.limit:
            edges.optimizer_began = now
            self._state = OPTIMIZER
        else:
            if self._state is LoopState.UNSEEN:
                self.reset()
            tracker = self._claim_thread()
            if tracker is None or (self._state is OPTIMIZER and self._stepping_optimizer is not optimizer):
                return  # a nested step is a part of the outer optimizer's step
            self._enter(tracker, OPTIMIZER)
        self._is_iteration_kept = True
        self._stepping_optimizer = optimizer

    def optimizer_ends(self, optimizer: Any) -> None:
        """End an optimizer's step, which ends the step of the loop if the optimizer is the leading optimizer."""
        if self._stepping_optimizer is not optimizer:
            return
        loss = self._loss
        # Fast path:
        if (
            self._state is OPTIMIZER
            and not loss.is_read
            and self._optimizers.single_id == id(optimizer)
            and self._phases.end_usual_step()
        ):
            if self._step_edges.optimizer_began >= loss.due:
                loss.read_next(self._step_edges.optimizer_began)
            self.progress.steps += 1
            self._stepping_optimizer = None
            self._has_new_data = self._is_iteration_kept = False
            self._state = READY
            return
        tracker = self._current_tracker()
        if tracker is None:
            return
        self._stepping_optimizer = None
        current_learning_rate = learning_rate(optimizer) if loss.is_read else None
        if self._end_step(tracker, optimizer, current_learning_rate) and self._state is OPTIMIZER:
            self._state = READY
        else:
            self._enter(tracker, READY)

    def optimizer_skipped(self, optimizer: Any) -> None:
        """Count a step that a gradient scaler has skipped as a step of the loop, as frameworks do."""
        tracker = self._claim_thread()
        if tracker is not None and tracker.is_open(Level.ITERATION):
            self._end_step(tracker, optimizer, None)

    def _end_step(self, tracker: LoopTracker, optimizer: Any, current_learning_rate: float | None) -> bool:
        """End the optimizer's part of a step. Return True if the step of the loop ends, and with it the open phase."""
        loss = self._loss.take(self._phases.iteration.began)
        has_new_data, self._has_new_data = self._has_new_data, False
        if not self._optimizers.ends_step(optimizer, has_new_data=has_new_data):
            return False
        self.progress.steps += 1
        if current_learning_rate is not None or loss is not None:
            training.record(loss=loss, learning_rate=current_learning_rate)
        tracker.next_iteration()
        self._is_iteration_kept = False
        return True

    # The end ----------------------------------------------------------------------------------------------------

    @never_raises
    def process_exits(self, error: BaseException | None) -> None:
        """Close the open blocks at the end of the process."""
        tracker = self._tracker
        if tracker is None:
            return
        if self._thread not in {None, get_ident()}:
            # Blocks of other threads cannot be closed from here. A terminated thread has left the loop.
            is_thread_alive = any(thread.ident == self._thread for thread in threading.enumerate())
            if error is None and not is_thread_alive and tracker.is_open(Level.LOOP):
                training.on_train_end()
                self.reset()
            return
        if error is None:
            self._end_evaluation(tracker, None)
            tracker.discard_iteration()
        tracker.end_all(error)
