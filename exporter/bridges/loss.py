"""Loss of a step: found from the tensors at which the step's backward passes begin.

A job scales its loss before the backward pass: by 1/n for n accumulated batches, by the share of a microbatch, by a factor
against underflow. Factors are read from the graph. No loss is published if the factors do not identify the job's loss.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod
from time import monotonic
from typing import Any

DEVICE_SECONDS = 0.1
"""Minimum interval of reads from a device: each read is a copy on the device."""
EVERY_STEP = 1000
"""Steps of which each loss is read, so that the loss of a short training is the loss of the last step."""
HOST_SECONDS = 0.005
"""Minimum interval of reads on the host after `EVERY_STEP` steps: a read takes up to 10 µs, in a step of 200 µs."""
_DEEPEST = 8
_TOLERANCE = 1e-4
_SCALING = frozenset({"DivBackward0", "MulBackward0"})
_REDUCING = frozenset({"MeanBackward0", "MeanBackward1", "SelectBackward0", "SumBackward0", "SumBackward1"})
"""Nodes that do not change the size of a number if their input has a single element."""
_UNCHANGED = frozenset(
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
"""Nodes of torch's graph that do not change the size of a scalar."""
_READ = _SCALING | _REDUCING | _UNCHANGED


class SampledTensors:
    """Rate limit for numbers on a GPU."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def is_due(self, name: str, value: Any) -> bool:
        """Return True if a number is to be recorded now: always, or for a tensor on a GPU ten times a second."""
        if not getattr(value, "is_cuda", False):
            return True
        now = monotonic()
        if now < self._due.get(name, 0.0):
            return False
        self._due[name] = now + DEVICE_SECONDS
        return True


@dataclass(slots=True)
class _Pass:
    """A backward pass: the scalar at the root, and the constant factors of the scalar, last factor first."""

    value: Any
    factors: Sequence[float] | None  # None if a factor cannot be read


class StepLoss:
    """The loss of a step of the optimizer.

    Attributes:
        batches: Batches of the step.
        is_read: True if the loss of this step is read: always in the first steps, later at most 200 times a second.
    """

    def __init__(self) -> None:
        self._sampled = SampledTensors()
        self._tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        self._longest = 1
        self._steps = 0
        self._due = 0.0
        self._is_given = False
        self.is_read = True
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._passes: list[_Pass] = []
        self._count = 0
        self.batches = 0
        self._is_known = True

    def give(self, loss: Any) -> None:
        """Add the loss of the next backward pass, before a library scales the loss."""
        if not self._is_given:
            self._is_given = True
            self._count += 1
            if self.is_read:
                self._read(loss)

    def add(self, tensors: Any) -> None:
        """Add the loss at which a backward pass begins, unless the loss was given."""
        if self._is_given:
            self._is_given = False
            return
        self._count += 1
        if self.is_read:
            self._read(tensors)

    def _read(self, loss: Any) -> None:
        if type(loss) is self._tensor and loss.is_cpu and loss.numel() == 1:  # the usual case
            self._passes.append(_Pass(loss.item(), _factors(loss)))
            return
        if not self._passes:
            self._is_known = self._sampled.is_due("loss", loss)
        value = readable(loss) if self._is_known and hasattr(loss, "grad_fn") else None
        if value is None:
            self._is_known = False
            self._passes.append(_Pass(None, None))
        else:
            value = value.detach() if hasattr(value, "detach") else value
            self._passes.append(_Pass(value, _factors(loss)))

    def take(self) -> Any:
        """Return the loss of the step, or None if unknown. Later passes belong to the next step."""
        count = self._count
        if not count:
            return None
        if count > self._longest:  # noqa: PLR1730  # called in every step: `max` costs a call
            self._longest = count
        self._steps += 1
        loss = self._step_loss() if self._passes else None
        self._count = self.batches = 0
        now = monotonic()
        self.is_read = now >= self._due or self._steps < EVERY_STEP
        if self.is_read:
            self._due = now + HOST_SECONDS
        return loss

    def _step_loss(self) -> Any:
        passes, batches, is_known = self._passes, self.batches, self._is_known
        self.begin()
        if len(passes) == 1 and (passes[0].factors == () or _is_nonfinite(passes[0].value)):
            return passes[0].value
        return _combined(passes, batches, self._longest) if is_known else None


def _is_nonfinite(value: Any) -> bool:
    """Return True for a NaN or an infinite number on the host, which no factor hides."""
    return type(value) is float and not isfinite(value)


def _combined(passes: list[_Pass], batches: int, longest: int) -> Any:
    """Return the loss of which the passes are parts, or None if their factors do not show the loss."""
    scales = [each.factors for each in passes if each.factors is not None]
    if len(scales) < len(passes):
        return None
    if not any(scales):
        return sum(each.value for each in passes) / len(passes) if batches == len(passes) else None
    for place in range(min(map(len, scales))):
        parts = [each.value / prod(scale[:place]) for each, scale in zip(passes, scales, strict=True)]
        factors = [scale[place] for scale in scales]
        if abs(sum(factors) - 1.0) < _TOLERANCE:  # the shares of a mean
            return sum(parts)
        if longest > 1 and all(abs(factor * longest - 1.0) < _TOLERANCE for factor in factors):
            # The last step of an epoch may have fewer batches.
            return sum(part / factor for part, factor in zip(parts, factors, strict=True)) / len(passes)
    return None


def _factors(loss: Any) -> Sequence[float] | None:
    """Read the constants other than 1 by which a loss was multiplied last, from its graph. Return None if a constant cannot be read."""
    node = loss.grad_fn
    if type(node).__name__ not in _READ:  # the usual case
        return ()
    factors: list[float] = []
    for _ in range(_DEEPEST):
        name = type(node).__name__
        if name in _SCALING:
            inputs = [each[0] for each in node.next_functions]
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
        elif name in _UNCHANGED or (name in _REDUCING and prod(node._saved_self_sym_sizes) == 1):  # noqa: SLF001
            node = node.next_functions[0][0]
        else:
            break
    return tuple(factors)


def _number(constant: Any) -> float | None:
    """Return a constant of the graph, or None if the constant is not a finite number on the host, or is 0."""
    if constant is None or not constant.is_cpu or constant.numel() != 1:
        return None
    number = float(constant.item())
    return number if number and isfinite(number) else None


def readable(value: Any) -> Any:
    """Return the number in a tensor, or the tensor itself on a GPU, or None if reading would wait or the tensor has several."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or any(not each.is_replicate() for each in getattr(value, "placements", ())):
        return None
    if value.is_cpu:
        return value.item() if type(value) is torch.Tensor else value
    return value if value.is_cuda and not torch.cuda.is_current_stream_capturing() else None
