"""Refusals: values that could not be recorded, counted by reason in `training_elastic_refused_total`.

Used in the training process and in torchrun's agent, by any thread; never raises.
"""

from __future__ import annotations

from collections.abc import Callable

from exporter.errors import DefinitionError
from exporter.recording.plain import plain

_REFUSE: dict[str, Callable[[object], None]] = {}


def refuse(reason: str) -> Callable[[object], None]:
    """Give the function that takes values which are not recorded, and counts them."""
    found = _REFUSE.get(reason)
    if found is None:
        found = _REFUSE[reason] = _counting(reason)
    return found


def _counting(reason: str) -> Callable[[object], None]:
    try:
        add = plain("counter", "training.elastic.refused", labels={"reason": reason})
    except DefinitionError:  # a defect of ours, which must not reach the job
        return lambda value: None  # noqa: ARG005  # it takes what it is given
    return lambda value: add(1)  # noqa: ARG005  # likewise
