"""Source of loops without a framework: the inferred steps and validations, and the checkpoints that torch writes.

Used in the training process, on the thread that trains.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from exporter.bridges.checkpoints import AsyncSave, holds_optimizer, steps_of
from exporter.bridges.loop import Level
from exporter.bridges.torch_loop import InferredLoop
from exporter.bridges.training_thread import EVALUATING, READY
from exporter.patching import Around


class LoopSource(InferredLoop):
    """Inferred loop with checkpoints."""

    def optimizer_loaded(self, state: Any) -> None:
        """Continue the number of steps of an earlier process, which the state of the optimizer contains."""
        self.progress.resume_at(steps_of(state))

    def save(self, contents: Any, *, is_sync: bool) -> Around:
        """Record a file that torch writes. The job can resume from the file if its contents have the state of an optimizer."""
        return self.checkpoint(is_resumable=holds_optimizer(contents), is_sync=is_sync)

    def checkpoint(self, *, is_resumable: bool, is_sync: bool = True) -> Around:
        """Record a checkpoint around the call that saves. *is_resumable* is True if the job can resume from the checkpoint.

        Not recorded are saves on a thread other than the thread that trains, saves outside of the loop, and saves inside a save.
        """
        tracker = self._tracker
        if tracker is None or self._thread != get_ident():
            return
        if tracker.is_open(Level.SAVE) or not tracker.is_open(Level.LOOP):
            return
        if self._state is not EVALUATING:
            self._pause(tracker)
        tracker.begin_save(self.progress.step, is_resumable=is_resumable, is_sync=is_sync)
        save = AsyncSave(self.progress.step)
        future, error = yield
        if self._tracker is tracker:
            tracker.end(Level.SAVE, error)
            if self._state is not EVALUATING:
                self._enter(tracker, READY)
            if is_resumable and not is_sync:
                save.report_when_done(future, error)

    def load(self) -> Around:
        """Record the load of a checkpoint around the call that loads. A load inside a load is not recorded."""
        tracker = self._current_tracker()
        if tracker is None or tracker.is_open(Level.LOAD):
            yield
        else:
            yield from tracker.load()
