"""Loss of a step, determined from the tensors at which the backward passes of the step start.

A job may scale its loss before the backward pass: by 1/n for n accumulated batches, by the share of a microbatch, or by a factor
against underflow. The factors are read from the autograd graph. If they do not identify the loss, no loss is recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod
from time import monotonic
from typing import Any

READ_SECONDS = 0.1
"""Minimum interval between two reads of a tensor.

A read on a GPU starts a copy. On the host, a step whose loss is read takes up to 35 µs longer: 10 µs for the read, and 25 µs because the
hooks do not use their fast path. A short step takes 200 µs. The feed is written only once a second.
"""
INITIAL_STEPS = 100
"""Number of first steps in which every loss on the host is read. A short training then ends with the loss of its last step."""
_MAX_NODES = 8
"""Number of nodes of the graph that are searched for factors."""
_TOLERANCE = 1e-4
"""Tolerance for numbers that should be 1: a factor times the number of passes, and the sum of the shares of a mean."""
_SCALING_NODES = frozenset({"DivBackward0", "MulBackward0"})
"""Nodes of the autograd graph that multiply or divide by a factor."""
_REDUCING_NODES = frozenset(
    {"MeanBackward0", "MeanBackward1", "SelectBackward0", "SumBackward0", "SumBackward1"}
)
"""Nodes that do not change the absolute value if their input has a single element."""
_NEUTRAL_NODES = frozenset(
    {
        "AliasBackward0",
        "CloneBackward0",
        "NegBackward0",
        "SqueezeBackward0",
        "ToCopyBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
"""Nodes that do not change the absolute value of a scalar."""
_SEARCHED_NODES = _SCALING_NODES | _REDUCING_NODES | _NEUTRAL_NODES
"""Nodes that can lie between a scaled loss and the unscaled loss. The search for factors ends at any other node."""


class TensorReadLimit:
    """Rate limit for reads of tensors on a GPU, by name."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def start_read(self, name: str, value: Any) -> bool:
        """Return True if a value may be read now. A tensor on a GPU may be read ten times a second, and any other value always.

        For a tensor on a GPU, the result True counts as a read.
        """
        if not getattr(value, "is_cuda", False):
            return True
        now = monotonic()
        if now < self._due.get(name, 0.0):
            return False
        self._due[name] = now + READ_SECONDS
        return True


@dataclass(slots=True)
class _Pass:
    """Backward pass of a step.

    Attributes:
        value: Loss at which the pass starts. None if unknown.
        factors: Constants by which the loss was multiplied, the last one first. None if unknown.
    """

    value: Any
    factors: Sequence[float] | None


class StepLoss:
    """Loss of a step of the optimizer.

    Attributes:
        batches: Number of batches of the step; 0 if the loss is not read.
        is_read: True if the loss of this step is read: in each of the first steps, later at most ten times a second. In other
            steps, `add_pass` and `add_unscaled_loss` have no effect.
        due: Monotonic time. The first step that ends after this time is followed by a step whose loss is read.
    """

    def __init__(self) -> None:
        self._read_limit = TensorReadLimit()
        self._tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        self._max_passes = 1  # highest number of backward passes of a step so far
        self._steps = 0  # steps so far, at most `INITIAL_STEPS` - 1
        self.due = 0.0
        # True if the loss of the next backward pass was added before the pass.
        self._has_unscaled_loss = False
        self.is_read = True
        self.begin()

    def begin(self) -> None:
        """Discard the backward passes of the step, and start a new step."""
        self._passes: list[_Pass] = []
        self.batches = 0
        self._is_known = True  # False if the loss of a backward pass was not read

    def add_unscaled_loss(self, loss: Any) -> None:
        """Add the loss of the next backward pass, which a library is about to scale. Later losses of that pass are ignored."""
        if self.is_read and not self._has_unscaled_loss:
            self._has_unscaled_loss = True
            self._read(loss)

    def add_pass(self, tensors: Any, batches: int) -> None:
        """Add the loss at which the backward pass of some batches starts, unless `add_unscaled_loss` has added the loss."""
        if not self.is_read:
            return
        self.batches += batches
        if self._has_unscaled_loss:
            self._has_unscaled_loss = False
            return
        self._read(tensors)

    def _read(self, loss: Any) -> None:
        """Append a backward pass with its loss, or without one if the loss cannot be read now.

        In the initial steps, a loss on a GPU is read at most ten times a second. Later, `take` limits the rate.
        """
        if type(loss) is self._tensor and loss.is_cpu and loss.numel() == 1:  # fast path
            self._passes.append(_Pass(loss.item(), _factors(loss)))
            return
        if not self._passes and self._steps < INITIAL_STEPS - 1:
            self._is_known = self._read_limit.start_read("loss", loss)
        value = readable(loss) if self._is_known and hasattr(loss, "grad_fn") else None
        if value is None:
            self._is_known = False
            self._passes.append(_Pass(None, None))
        else:
            value = value.detach() if hasattr(value, "detach") else value
            self._passes.append(_Pass(value, _factors(loss)))

    def read_next(self, now: float) -> None:
        """Read the loss of the next step. *now* is as in `take`."""
        self.is_read = True
        self.due = now + READ_SECONDS

    def take(self, now: float) -> Any:
        """End the step and return its loss, or None if unknown. Later backward passes belong to the next step.

        *now*, in monotonic seconds, limits the rate of the reads. It may be the start of the step.
        """
        if not self.is_read:
            if now >= self.due:
                self.read_next(now)
            return None
        if not self._passes:
            return None
        self._max_passes = max(self._max_passes, len(self._passes))
        loss = self._step_loss()
        if self._steps < INITIAL_STEPS - 1:
            self._steps += 1
        elif now < self.due:
            self.is_read = False
            return loss
        self.read_next(now)
        return loss

    def _step_loss(self) -> Any:
        """Return the loss of the step that ends, or None if unknown, and start a new step."""
        passes, batches, is_known = self._passes, self.batches, self._is_known
        self.begin()
        if len(passes) == 1 and (passes[0].factors == () or _is_nonfinite(passes[0].value)):
            return passes[0].value
        return _combined(passes, batches, self._max_passes) if is_known else None


def _is_nonfinite(value: Any) -> bool:
    """Return True for a NaN or an infinity on the host. Its factors do not matter, because the unscaled loss is not finite either."""
    return type(value) is float and not isfinite(value)


def _combined(passes: list[_Pass], batches: int, max_passes: int) -> Any:
    """Return the loss of a step from its backward passes, or None if the factors of the passes do not identify the loss.

    Without any factor, the loss is the mean of the passes, if each pass has one batch. Example with factors: two passes of
    `scaler.scale(loss / 2)` have the factors (65536, 0.5), the last factor first. The second factors are the shares of a mean, because
    their sum is 1. The loss of the step is therefore the sum of the values of both passes, each divided by 65536.

    Args:
        passes: Backward passes of the step.
        batches: Number of batches of the step.
        max_passes: Highest number of backward passes of a step so far.
    """
    scales = [backward.factors for backward in passes if backward.factors is not None]
    if len(scales) < len(passes):
        return None
    if not any(scales):
        return sum(backward.value for backward in passes) / len(passes) if batches == len(passes) else None
    for index in range(min(map(len, scales))):
        parts = [backward.value / prod(scale[:index]) for backward, scale in zip(passes, scales, strict=True)]
        factors = [scale[index] for scale in scales]
        if abs(sum(factors) - 1.0) < _TOLERANCE:  # the shares of a mean
            return sum(parts)
        if max_passes > 1 and all(abs(factor * max_passes - 1.0) < _TOLERANCE for factor in factors):
            # The factor is 1/n for n batches in a step. The last step of an epoch may have fewer batches.
            return sum(part / factor for part, factor in zip(parts, factors, strict=True)) / len(passes)
    return None


def _factors(loss: Any) -> Sequence[float] | None:
    """Return the constants other than 1 by which a loss was multiplied, the last one first, from its autograd graph.

    The search ends at the first node that does more than multiply by a constant. Returns None if a constant cannot be read.
    """
    node = loss.grad_fn
    if type(node).__name__ not in _SEARCHED_NODES:  # the loss is not scaled
        return ()
    factors: list[float] = []
    for _ in range(_MAX_NODES):
        name = type(node).__name__
        if name in _SCALING_NODES:
            inputs = [function for function, _ in node.next_functions]
            if inputs[-1] is None:
                constant, node_before = node._saved_other, inputs[0]  # noqa: SLF001  # torch's name
            elif inputs[0] is None and name == "MulBackward0":
                constant, node_before = node._saved_self, inputs[1]  # noqa: SLF001  # torch's name
            else:
                break
            factor = _number(constant)
            if factor is None:
                return None
            if factor != 1.0:
                factors.append(1.0 / factor if name == "DivBackward0" else factor)
            node = node_before
        elif name in _NEUTRAL_NODES or (name in _REDUCING_NODES and prod(node._saved_self_sym_sizes) == 1):  # noqa: SLF001
            node = node.next_functions[0][0]
        else:
            break
    return tuple(factors)


def _number(constant: Any) -> float | None:
    """Return a constant of the graph as a number. Return None if the constant is 0, is not finite or is not on the host."""
    if constant is None or not constant.is_cpu or constant.numel() != 1:
        return None
    number = float(constant.item())
    return number if number and isfinite(number) else None


def readable(value: Any) -> Any:
    """Return a value in a form that `training.record` can read without a wait.

    For a tensor on the host, the form is its number. A tensor on a GPU and any other object are returned unchanged. The result is None for
    a tensor that cannot be read: with several elements, distributed and not replicated, on another device, or during the capture of a
    CUDA graph.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or any(
        not placement.is_replicate() for placement in getattr(value, "placements", ())
    ):
        return None
    if value.is_cpu:
        return value.item() if type(value) is torch.Tensor else value
    return value if value.is_cuda and not torch.cuda.is_current_stream_capturing() else None
