"""Leading optimizer: decides which optimizer's step ends a step of an inferred loop."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any
from weakref import WeakSet, ref

UNSEEN_SECONDS = 10.0
"""Time of backward passes without a step of any optimizer after which the log reports an unseen optimizer."""
UNSEEN = """backward passes, but no step of a torch optimizer, in the first 10 s: the training is not recorded. Add:
    from exporter import training
    training.step()                                     # after each step of the optimizer
    training.record(loss=loss, samples=len(batch))      # if wanted"""


def _nobody() -> None:
    """Return None, as the reference to a missing leader."""


class LeadingOptimizer:
    """Optimizer whose steps end the steps of the loop: the first optimizer that steps.

    Steps of other optimizers, as in a GAN, are parts of the same step. An optimizer becomes the leader at its second step
    without a step of the leader in between, or at its first step if a batch was fetched since the last step of an optimizer.
    """

    def __init__(self) -> None:
        self._leader: Callable[[], Any] = _nobody
        self._others: set[int] = set()
        self._known: WeakSet[Any] = WeakSet()
        self._waiting_since: float | None = None

    def is_missing(self) -> bool:
        """Return True if backward passes have waited too long for the first step of an optimizer."""
        now = monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since > UNSEEN_SECONDS

    def ends_step(self, optimizer: Any, *, has_new_data: bool) -> bool:
        """Record that an optimizer has stepped. Return True if a step of the loop ends.

        *has_new_data* is True if a batch was fetched since the last step of an optimizer.
        """
        leader = self._leader()
        if leader is not optimizer:
            is_new = optimizer not in self._known
            self._known.add(optimizer)
            if leader is not None and id(optimizer) not in self._others and not (is_new and has_new_data):
                self._others.add(id(optimizer))
                return False
            self._leader = ref(optimizer)
        if self._others:
            self._others.clear()
        return True

    def trains(self, module: Any) -> bool:
        """Return True if a module holds most of the parameters of an optimizer."""
        held = {id(parameter) for parameter in module.parameters()} if self._known else None
        if not held:
            return False
        for optimizer in tuple(self._known):
            if module is optimizer or module is getattr(optimizer, "module", None):  # a library's engine
                return True
            changed = [
                id(each) for group in _groups(optimizer) for each in group["params"] if each.requires_grad
            ]
            if 2 * sum(each in held for each in changed) > len(changed):
                return True
        return False


def _groups(optimizer: Any) -> Any:
    """Return the parameter groups of an optimizer, or of the optimizer in a library's engine."""
    groups = getattr(optimizer, "param_groups", None)
    return (
        groups if groups is not None else getattr(getattr(optimizer, "optimizer", None), "param_groups", ())
    )


def learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate of the first parameter group, or None if the rate is not a number on the host."""
    groups = _groups(optimizer)
    rate = groups[0].get("lr") if groups else None
    return rate if type(rate) is float or type(rate) is int else None
