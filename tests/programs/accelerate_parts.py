"""Parts of training jobs of Accelerate: a training loop."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from programs.torch_parts import loader, model_and_optimizer


def train(epochs: int = 1, *, fail: bool = False, **options: Any) -> tuple[Any, Any]:
    """Train a linear model on four batches an epoch, and return the accelerator and the model.

    Prints the loss of the last step as the job computes it: the mean over the batches of the step. With *fail*, raises ZeroDivisionError in the third batch.
    """
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer, batches = accelerator.prepare(*model_and_optimizer(), loader(16))
    losses = []
    for _ in range(epochs):
        for index, (batch,) in enumerate(batches):
            with accelerator.accumulate(model):
                loss = model(batch).pow(2).mean()
                if fail and index == 2:
                    raise ZeroDivisionError("amid an iteration")
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    losses_of_last_step = losses[-accelerator.gradient_accumulation_steps :]
    print("own loss", sum(losses_of_last_step) / len(losses_of_last_step))
    return accelerator, model
