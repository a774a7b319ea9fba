"""Checkpoints: which of what is written is one, and when one that a thread writes is safe.

Used in the training process, on the thread that trains; a checkpoint that a thread writes is reported by that thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Any

from exporter.bridges.patching import never_raises, patch

MOST_VALUES = 64
"""Values of a dictionary among which an optimizer's state is looked for."""


def holds_optimizer(saved: Any, depth: int = 3) -> bool:
    """Tell whether an optimizer's state is in a dictionary, or in one in it."""
    if not isinstance(saved, Mapping):
        return False
    if "param_groups" in saved and "state" in saved:
        return True
    if not depth:
        return False
    for place, value in enumerate(saved.values()):
        if place >= MOST_VALUES:
            break
        values = value[:MOST_VALUES] if isinstance(value, list) else (value,)
        if any(holds_optimizer(each, depth - 1) for each in values):
            return True
    return False


def steps_made(state: Any) -> int:
    """Read from an optimizer's state how many steps it has made; 0 of one that does not count them."""
    counts = [
        int(each["step"])
        for each in list(state.get("state", {}).values())[:1]
        if isinstance(each, Mapping) and "step" in each
    ]
    return max(counts, default=0)


def report_when_written(
    training: Any, step: int, began: float, future: Any, error: BaseException | None
) -> None:
    """Report a checkpoint that `torch.distributed.checkpoint.async_save` has handed to a thread, on that thread."""
    blocking_seconds = monotonic() - began

    @never_raises
    def written(done: Any) -> None:
        ok = done is not None and done.exception() is None
        report_async(training, step, began, blocking_seconds, ok=ok)

    future = getattr(future, "upload_completion", future)
    if error is None and hasattr(future, "add_done_callback"):
        future.add_done_callback(written)
    else:
        written(None)


def report_async(training: Any, step: int, began: float, blocking_seconds: float | None, *, ok: bool) -> None:
    """Report a checkpoint that was written, or not, while the training went on."""
    training.checkpoint_saved(
        step, kind="async", ok=ok, seconds=monotonic() - began, blocking_seconds=blocking_seconds
    )


class AsyncSave:
    """One save that another thread writes.

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
    """The saves of one Lightning Trainer that are under way.

    `AsyncCheckpointIO` hands each checkpoint to another `CheckpointIO`, on one thread and in order; that one's
    `save_checkpoint` is patched on the instance, once the first save comes.

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
        patch(inner, "save_checkpoint", self._writing_begins, self._writing_ends)
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
                report_async(self._training, save.step, save.began, save.blocking_seconds, ok=False)

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
        report_async(self._training, save.step, save.began, save.blocking_seconds, ok=error is None)
