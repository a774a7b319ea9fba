"""Checkpoints that a library writes and reads for a loop of the job's own, as Accelerate and Fabric do.

Used in the training process, on the thread that trains; told to whoever concludes what the loop does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exporter.bridges.brackets import bracket_what_exists
from exporter.bridges.plain_torch import LoopTeller, telling


def watch_saves(owner: Any, name: str, is_whole: Callable[..., bool]) -> None:
    """Tell of a method that writes a checkpoint.

    Args:
        owner: The class that has it, if this version does.
        name: The method's name.
        is_whole: Gets its arguments, and tells whether the job could go on from what it writes.
    """

    def begins(*args: Any, **kwargs: Any) -> LoopTeller | None:
        teller = telling()
        told = teller is not None and teller.checkpoint_begins(whole=is_whole(*args, **kwargs))
        return teller if told else None

    bracket_what_exists(owner, (name,), begins, LoopTeller.save_ends)


def watch_loads(owner: Any, name: str) -> None:
    """Tell of a method that reads one."""
    bracket_what_exists(owner, (name,), _load_begins, _load_ends)


def _load_begins(*_args: Any, **_kwargs: Any) -> LoopTeller | None:
    teller = telling()
    return teller if teller is not None and teller.load_begins() else None


def _load_ends(teller: LoopTeller, _result: Any, error: BaseException | None) -> None:
    teller.load_ends(error)
