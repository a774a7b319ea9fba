"""Which model is the one that is trained, told from what optimizers change.

Used in the training process, on the thread that trains.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def is_trained(module: Any, optimizers: Iterable[Any]) -> bool:
    """Tell whether a module holds most of what one of these optimizers changes.

    A teacher holds nothing of it, and a layer that stays as it is, such as a batch norm while its model is trained, is a
    small part of it.
    """
    held = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        changed = [
            id(parameter) in held
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        if 2 * sum(changed) > len(changed):
            return True
    return False
