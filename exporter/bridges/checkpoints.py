"""Checkpoints: contents of saved objects, and saves that a background thread completes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

from exporter import training
from exporter.patching import never_raises

MAX_VALUES = 64
"""Maximum number of values of a dictionary or list that are searched for the state of an optimizer."""


def holds_optimizer(contents: Any, depth: int = 3) -> bool:
    """Return True if a dictionary contains the state of an optimizer, or is such a state.

    Nested dictionaries, and dictionaries in lists, are searched up to *depth* levels deep.
    """
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
    """Return the number of steps in the state of an optimizer, from its first parameter; 0 if the optimizer counts no steps."""
    parameter_state = next(iter(state.get("state", {}).values()), None)
    return int(parameter_state.get("step", 0)) if isinstance(parameter_state, Mapping) else 0


@dataclass(slots=True)
class AsyncSave:
    """Checkpoint that a background thread writes while the training continues."""

    step: int
    started_at: float = field(default_factory=monotonic)  # monotonic time
    blocking_seconds: float | None = None  # None while the save blocks the training

    def end_blocking(self) -> None:
        """Record that the save no longer blocks the training."""
        self.blocking_seconds = monotonic() - self.started_at

    def report(self, *, ok: bool) -> None:
        """Report the success or the failure of the write."""
        training.checkpoint_saved(
            self.step,
            kind="async",
            ok=ok,
            seconds=monotonic() - self.started_at,
            blocking_seconds=self.blocking_seconds,
        )

    def report_when_done(self, future: Any, error: BaseException | None) -> None:
        """Report the result of a call of `torch.distributed.checkpoint.async_save`, once the checkpoint is written.

        The call has returned *future* or raised *error*.
        """
        self.end_blocking()

        @never_raises
        def report_write(write: Any) -> None:
            self.report(ok=write.exception() is None)

        future = getattr(future, "upload_completion", future)
        if error is None and hasattr(future, "add_done_callback"):
            future.add_done_callback(report_write)
        else:
            self.report(ok=False)
