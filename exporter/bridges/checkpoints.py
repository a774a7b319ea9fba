"""Checkpoints: which of what is written is one, and when one that a thread writes is safe.

Used in the training process, on the thread that trains; a checkpoint that a thread writes is reported by that thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

from exporter import training
from exporter.patching import Around, never_raises, patch

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
    return any(
        holds_optimizer(each, depth - 1)
        for value in islice(saved.values(), MOST_VALUES)
        for each in (value[:MOST_VALUES] if isinstance(value, list) else (value,))
    )


def steps_made(state: Any) -> int:
    """Read from an optimizer's state how many steps it has made; 0 of one that does not count them."""
    first = next(iter(state.get("state", {}).values()), None)
    return int(first.get("step", 0)) if isinstance(first, Mapping) else 0


@dataclass
class AsyncSave:
    """A checkpoint that another thread writes while the training goes on."""

    step: int
    began: float = field(default_factory=monotonic)
    blocking_seconds: float | None = None  # None while the training waits

    def returned(self) -> None:
        """The training goes on."""
        self.blocking_seconds = monotonic() - self.began

    def report(self, *, ok: bool) -> None:
        """Report that it was written, or not."""
        training.checkpoint_saved(
            self.step,
            kind="async",
            ok=ok,
            seconds=monotonic() - self.began,
            blocking_seconds=self.blocking_seconds,
        )

    def report_when_done(self, future: Any, error: BaseException | None) -> None:
        """Report it from the thread to which `torch.distributed.checkpoint.async_save` has handed it."""
        self.returned()

        @never_raises
        def written(done: Any) -> None:
            self.report(ok=done.exception() is None)

        future = getattr(future, "upload_completion", future)
        if error is None and hasattr(future, "add_done_callback"):
            future.add_done_callback(written)
        else:
            self.report(ok=False)


class AsyncSaves:
    """The saves of one Lightning Trainer that are under way.

    `AsyncCheckpointIO` hands each checkpoint to another `CheckpointIO`, on one thread and in order; that one's
    `save_checkpoint` is patched on the instance, once the first save comes.
    """

    def __init__(self) -> None:
        self._handed_over: deque[AsyncSave] = deque()

    def begin(self, checkpoint_io: Any, step: int) -> AsyncSave | None:
        """Watch a save; None when this CheckpointIO writes at once."""
        inner = getattr(checkpoint_io, "checkpoint_io", None)
        if inner is None or not hasattr(checkpoint_io, "_executor"):
            return None
        patch(inner, "save_checkpoint", self._write)
        save = AsyncSave(step)
        self._handed_over.append(save)
        return save

    def returned(self, save: AsyncSave, error: BaseException | None) -> None:
        """The training goes on; with an error, nothing is written, or what was written before has failed."""
        save.returned()
        if error is not None and save in self._handed_over:
            self._handed_over.remove(save)
            save.report(ok=False)

    def _write(self, *_args: Any, **_kwargs: Any) -> Around:
        if self._handed_over:
            save = self._handed_over.popleft()
            with training.background("checkpoint_finalize"):
                _, error = yield
            save.report(ok=error is None)
