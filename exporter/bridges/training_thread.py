"""Thread that trains in a job with an inferred loop: its choice, the state of the loop, and the tracker of the open blocks.

Used in the training process, on any thread that calls torch.
"""

from __future__ import annotations

import os
import threading
from enum import Enum
from threading import get_ident

from exporter import training
from exporter.bridges.loop import Discarded, LoopTracker
from exporter.bridges.sources import Source, world_size
from exporter.patching import version_of
from exporter.training.iteration_phases import IterationPhases
from exporter.training.iterations import IterationBlock
from exporter.training.kinds import TRAINING_ITERATION
from exporter.training.recorder import TRAINING


class LoopState(Enum):
    """State of the inferred loop: its meaning, and the phase that is open during the state.

    A training step passes through READY, FETCHING, FORWARD, BACKWARD, GRADIENTS and OPTIMIZER, with an open iteration. In the
    other states, an iteration is open only between a backward pass and the step of the optimizer, as at a checkpoint in between.
    """

    INSTRUMENTED = ("the job reports its loop itself", None)
    UNSEEN = ("the optimizer is not one of torch", None)
    WATCHING = ("before the first backward pass", None)
    EVALUATING = ("during a validation", None)
    PAUSED = ("after an epoch, a validation or a checkpoint", None)
    READY = ("before the batch of a step", None)
    FETCHING = ("while a batch is fetched", "data_loading")
    FORWARD = ("after a batch was fetched", "forward")
    BACKWARD = ("during a backward pass", "backward")
    GRADIENTS = ("after a backward pass", None)
    OPTIMIZER = ("during a step of an optimizer", "optimizer")

    def __init__(self, meaning: str, phase: str | None) -> None:
        self.meaning = meaning
        self.phase = phase


# Constants of the module, because the look-up of a member of an Enum takes four times as long.
WATCHING, EVALUATING, PAUSED = LoopState.WATCHING, LoopState.EVALUATING, LoopState.PAUSED
READY, FETCHING, FORWARD = LoopState.READY, LoopState.FETCHING, LoopState.FORWARD
BACKWARD, GRADIENTS, OPTIMIZER = LoopState.BACKWARD, LoopState.GRADIENTS, LoopState.OPTIMIZER
# In an inactive state, the source reports nothing. In the states between steps, no step is in progress.
INACTIVE = (LoopState.INSTRUMENTED, LoopState.UNSEEN)
BETWEEN_STEPS = (WATCHING, EVALUATING, PAUSED)
_NO_PHASES = IterationPhases(IterationBlock(TRAINING_ITERATION))


class TrainingThread(Source):
    """Source that reports a single thread: the first thread with a backward pass or a step of an optimizer."""

    def __init__(self) -> None:
        # True with EXPORTER_AUTO=1: this source is inactive while the job reports its loop itself.
        self._is_replaceable = os.environ.get("EXPORTER_AUTO") == "1"
        self.reset()

    def reset(self) -> None:
        """Return to the initial state."""
        self._state = WATCHING
        self._tracker: LoopTracker | None = None  # None before the first event, and in an inactive state
        self._phases = _NO_PHASES  # of the tracker
        # Identifier of the thread that trains; None before the first backward pass.
        self._thread: int | None = None

    @property
    def is_reporting(self) -> bool:
        """True if this source reports the loop of the calling thread."""
        return self._current_tracker() is not None

    def has_phases(self) -> bool:
        """Return True on the thread that trains."""
        return self.is_reporting

    def _current_tracker(self) -> LoopTracker | None:
        """Return the tracker on the thread that trains or, while that thread is unknown, on the main thread.

        On other threads and in an inactive state, return None. With `EXPORTER_AUTO=1`, become inactive if the job reports its loop itself.
        """
        # Fast path of the thread that trains.
        if self._thread == get_ident() and not (self._is_replaceable and TRAINING.job_is_instrumented):
            return self._tracker
        if self._state in INACTIVE:
            return None
        if self._thread is None:
            if threading.current_thread() is not threading.main_thread():
                return None
        elif self._thread != get_ident():
            return None
        if self._is_replaceable and TRAINING.job_is_instrumented:
            self._deactivate(LoopState.INSTRUMENTED)
        elif self._tracker is None:
            self._begin_tracker()
        return self._tracker

    def _claim_thread(self) -> LoopTracker | None:
        """Make the calling thread the thread that trains, unless that thread is known or the source is inactive.

        Returns the tracker if the calling thread trains, otherwise None.
        """
        if self._thread is None and self._state not in INACTIVE:
            self._thread = get_ident()
            if self._tracker is None:
                self._begin_tracker()
        return self._current_tracker()

    def _begin_tracker(self) -> None:
        """Create the tracker, and record the framework, its version and the number of ranks."""
        self._tracker = LoopTracker(is_replaceable=self._is_replaceable)
        self._phases = self._tracker.phases
        self._phases.defers = True
        training.describe(framework="pytorch", framework_version=version_of("torch"), world_size=world_size())

    def _may_become_training_thread(self) -> bool:
        """Return True on a thread other than the main thread, if the thread that trains is unknown and the source is active."""
        is_undecided = self._thread is None and self._state not in INACTIVE
        return is_undecided and threading.current_thread() is not threading.main_thread()

    def _deactivate(self, state: LoopState) -> None:
        """Discard the open blocks, and stop reporting."""
        if self._tracker is not None:
            self._tracker.end_all(Discarded())
        self._tracker, self._state = None, state
