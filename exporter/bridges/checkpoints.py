"""Checkpoints: contents of saved objects, and saves completed on a background thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

from exporter import training
from exporter.patching import never_raises

MAX_VALUES = 64
"""Values of a dictionary that are searched for an optimizer's state."""


def holds_optimizer(contents: Any, depth: int = 3) -> bool:
    """Return True if a dictionary, or a nested dictionary, is an optimizer's state."""
    if not isinstance(contents, Mapping):
        return False
    if "state" in contents and ("param_groups" in contents or "hypers" in contents):  # of torch or of fastai
        return True
    if not depth:
        return False
    return any(
        holds_optimizer(element, depth - 1)
        for value in islice(contents.values(), MAX_VALUES)
        for element in (value[:MAX_VALUES] if isinstance(value, list) else (value,))
    )


def steps_of(state: Any) -> int:
    """Return the number of steps in an optimizer's state; 0 if the optimizer does not count them."""
    first = next(iter(state.get("state", {}).values()), None)
    return int(first.get("step", 0)) if isinstance(first, Mapping) else 0


@dataclass(slots=True)
class AsyncSave:
    """Checkpoint written on a background thread during training."""

    step: int
    began: float = field(default_factory=monotonic)
    blocking_seconds: float | None = None  # None during the blocking part

    def note_return(self) -> None:
        """Note that the training continues."""
        self.blocking_seconds = monotonic() - self.began

    def report(self, *, ok: bool) -> None:
        """Report that the checkpoint is written, or that the write failed."""
        seconds, blocking = monotonic() - self.began, self.blocking_seconds
        training.checkpoint_saved(self.step, kind="async", ok=ok, seconds=seconds, blocking_seconds=blocking)

    def report_when_done(self, future: Any, error: BaseException | None) -> None:
        """Report from the thread to which `torch.distributed.checkpoint.async_save` has passed the checkpoint."""
        self.note_return()

        @never_raises
        def report_write(write: Any) -> None:
            self.report(ok=write.exception() is None)

        future = getattr(future, "upload_completion", future)
        if error is None and hasattr(future, "add_done_callback"):
            future.add_done_callback(report_write)
        else:
            self.report(ok=False)
