"""Checkpoints that Lightning writes on a thread of its own: when they are safe, or have failed.

Used in the training process. `AsyncCheckpointIO` hands each checkpoint to another `CheckpointIO`, on one thread and in
order; that one's `save_checkpoint` is bracketed on the instance, once the first save comes.
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic
from typing import Any

from exporter.bridges.brackets import bracket


class AsyncSave:
    """One save.

    Args:
        step: Steps that it holds.

    Attributes:
        began: When it was begun.
        blocking_seconds: How long the training waited for it; None while it still does.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.began = monotonic()
        self.blocking_seconds: float | None = None


class AsyncSaves:
    """The saves under way of one Trainer.

    Args:
        training: `exporter.training`.
    """

    def __init__(self, training: Any) -> None:
        self._training = training
        self._lock = threading.Lock()
        self._handed_over: deque[AsyncSave] = deque()

    def begins(self, checkpoint_io: Any, step: int) -> AsyncSave | None:
        """Watch a save; None when this CheckpointIO writes at once."""
        inner = getattr(checkpoint_io, "checkpoint_io", None)
        if inner is None or not hasattr(checkpoint_io, "_executor"):
            return None
        bracket(inner, "save_checkpoint", self._writing_begins, self._writing_ends)
        save = AsyncSave(step)
        with self._lock:
            self._handed_over.append(save)
        return save

    def returns(self, save: AsyncSave, error: BaseException | None) -> None:
        """The training goes on; with an error, nothing is written, or what was written before has failed."""
        save.blocking_seconds = monotonic() - save.began
        if error is not None:
            with self._lock:
                waits = save in self._handed_over
                if waits:
                    self._handed_over.remove(save)
            if waits:
                self._tell(save, ok=False)

    def _writing_begins(self, *_args: Any, **_kwargs: Any) -> object:
        with self._lock:
            save = self._handed_over.popleft() if self._handed_over else None
        if save is None:
            return None
        span = self._training.background("checkpoint_finalize")
        span.__enter__()
        return save, span

    def _writing_ends(self, kept: Any, _result: Any, error: BaseException | None) -> None:
        save, span = kept
        span.__exit__(None, None, None)
        self._tell(save, ok=error is None)

    def _tell(self, save: AsyncSave, *, ok: bool) -> None:
        self._training.checkpoint_saved(
            save.step,
            kind="async",
            ok=ok,
            seconds=monotonic() - save.began,
            blocking_seconds=save.blocking_seconds,
        )
