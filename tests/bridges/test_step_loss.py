"""Loss of a step, inferred from the tensors of its backward passes."""

from __future__ import annotations

import time

import pytest
from bridges_support import needs

from exporter.bridges import loss

pytestmark = needs("torch")


def test_the_mean_of_accumulated_losses_is_known_after_steps_whose_loss_was_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch  # only where torch is installed

    monkeypatch.setattr(loss, "INITIAL_STEPS", 1)
    monkeypatch.setattr(loss, "READ_SECONDS", 0.05)
    step_loss, weight, losses = loss.StepLoss(), torch.ones(2, requires_grad=True), []
    for step in range(4):
        for factor in (1.0, 2.0):
            step_loss.add_pass((weight + factor).sum(), 1)
        if step == 2:
            time.sleep(0.06)
        losses.append(step_loss.take(time.monotonic()))

    assert losses == [5.0, 5.0, None, 5.0]


class LossOnGpu:
    """Stand-in for a loss on a GPU."""

    is_cuda = True
    is_cpu = False
    grad_fn = None


def test_a_loss_on_a_gpu_is_read_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(loss, "monotonic", lambda: now)
    step_loss, read_times = loss.StepLoss(), []
    for step in range(1000):
        start = step * 0.01
        now = start + (step * 5 % 9) / 1000  # the loss is computed early or late in the step
        step_loss.add_pass(LossOnGpu(), 1)
        if step_loss.take(start) is not None:
            read_times.append(now)

    # The thousand steps last ten seconds. A loss is read at the end of a step, so that some reads are a step late.
    assert 90 <= len(read_times) <= 101
