"""Leading optimizer: the optimizer whose steps end the steps of an inferred loop."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any
from weakref import WeakSet, ref

UNSEEN_SECONDS = 10.0
"""Time since the first backward pass, without a step of an optimizer, above which the missing step is logged."""
UNSEEN_OPTIMIZER_MESSAGE = """no step of a torch optimizer within 10 s of the first backward pass: the training is not recorded. Add:
    from exporter import training
    training.step()                                     # after each step of the optimizer
    training.record(loss=loss, samples=len(batch))      # optional"""


def _no_leader() -> None:
    """Return None, like the weak reference to an optimizer that was deleted."""


class LeadingOptimizer:
    """Choice of the optimizer whose steps end the steps of the loop: initially the first optimizer that steps.

    Steps of other optimizers, as in a GAN, are parts of the same step. Another optimizer becomes the leader in two cases: it steps twice
    without a step of the leader in between, or it steps for the first time and a batch was fetched since the last step of any optimizer.

    Attributes:
        single_id: `id()` of the leader. 0 if another optimizer has stepped since the leader's last step, or without a leader.
    """

    def __init__(self) -> None:
        self._leader: Callable[[], Any] = _no_leader  # weak reference
        self._leader_id = self.single_id = 0
        # Ids of the other optimizers that have stepped since the leader's last step.
        self._other_ids: set[int] = set()
        self._known_optimizers: WeakSet[Any] = WeakSet()  # optimizers that have stepped
        self._waiting_since: float | None = None  # monotonic time of the first backward pass

    def is_overdue(self) -> bool:
        """Return True if the first call was more than `UNSEEN_SECONDS` ago. Not called after the first step of an optimizer."""
        now = monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since > UNSEEN_SECONDS

    def ends_step(self, optimizer: Any, *, has_new_data: bool) -> bool:
        """Record that an optimizer has stepped. Return True if a step of the loop ends.

        *has_new_data* is True if a batch was fetched since the last step of an optimizer.
        """
        # A new optimizer may have the id of a leader that was deleted. The new optimizer then becomes the leader here.
        if id(optimizer) != self._leader_id:
            leader = self._leader()
            is_new = optimizer not in self._known_optimizers
            self._known_optimizers.add(optimizer)
            if leader is not None and id(optimizer) not in self._other_ids and not (is_new and has_new_data):
                self._other_ids.add(id(optimizer))
                self.single_id = 0
                return False
            self._leader = ref(optimizer)
            self._leader_id = id(optimizer)
        self._other_ids.clear()
        self.single_id = self._leader_id
        return True

    def trains(self, module: Any) -> bool:
        """Return True if a module has more than half of the trainable parameters of an optimizer that has stepped.

        Also return True for the engine of a library that steps as an optimizer, and for the module of the engine.
        """
        module_parameters = (
            {id(parameter) for parameter in module.parameters()} if self._known_optimizers else None
        )
        if not module_parameters:
            return False
        for optimizer in tuple(self._known_optimizers):
            # An optimizer with a module is, for example, DeepSpeed's engine.
            if module is optimizer or module is getattr(optimizer, "module", None):
                return True
            trained_parameters = [
                id(parameter)
                for group in _groups(optimizer)
                for parameter in group["params"]
                if parameter.requires_grad
            ]
            shared_count = sum(parameter in module_parameters for parameter in trained_parameters)
            if 2 * shared_count > len(trained_parameters):
                return True
        return False


def _groups(optimizer: Any) -> Any:
    """Return the parameter groups of an optimizer, or of the optimizer inside the engine of a library."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        groups = getattr(getattr(optimizer, "optimizer", None), "param_groups", ())
    return groups


def learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate of the first parameter group, or None without a group or if the rate is not a Python number."""
    groups = _groups(optimizer)
    rate = groups[0].get("lr") if groups else None
    return rate if type(rate) is float or type(rate) is int else None
