"""Checkpoints of a job without a framework: which of what torch writes is one, and when it is safe.

Used in the training process, on the thread that trains; a checkpoint that a thread writes is told by that thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from exporter.bridges.brackets import never_raises

MOST_LOOKED_AT = 64
"""Values of a dictionary among which an optimizer's state is looked for."""


def tell_when_written(
    training: Any, step: int, began: float, future: Any, error: BaseException | None
) -> None:
    """Tell of a checkpoint that a thread writes, on that thread."""
    blocking_seconds = monotonic() - began

    @never_raises
    def written(done: Any) -> None:
        training.checkpoint_saved(
            step,
            kind="async",
            ok=done is not None and done.exception() is None,
            seconds=monotonic() - began,
            blocking_seconds=blocking_seconds,
        )

    future = getattr(future, "upload_completion", future)
    if error is None and hasattr(future, "add_done_callback"):
        future.add_done_callback(written)
    else:
        written(None)


def holds_optimizer(saved: Any, depth: int = 3) -> bool:
    """Tell whether an optimizer's state is in a dictionary, or in one in it."""
    if not isinstance(saved, Mapping):
        return False
    if "param_groups" in saved and "state" in saved:
        return True
    if not depth:
        return False
    for place, value in enumerate(saved.values()):
        if place >= MOST_LOOKED_AT:
            break
        values = value[:MOST_LOOKED_AT] if isinstance(value, list) else (value,)
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
