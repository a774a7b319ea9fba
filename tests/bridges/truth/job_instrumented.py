# mypy: ignore-errors
# ruff: noqa: ANN201  # written as users write jobs
"""Job with an instrumented loop and a Stat, after a warm-up of three uninstrumented steps."""

import time

import diary
import torch

from exporter import Stat, training

torch.manual_seed(diary.attempt)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=diary.LEARNING_RATES[0])
loss_stat = Stat("truth.loss", ["mean", "value", "max", "count"], window_seconds=None, window_samples=4)


def forward_and_backward():
    inputs, targets = torch.randn(4, 8), torch.randn(4, 1)
    time.sleep(diary.BATCH_SECONDS)
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    (loss / diary.BATCHES_PER_STEP).backward()
    return loss.item()


warm_up_seconds = []
for _ in range(3):  # a warm-up, in which torch chooses kernels and reserves memory
    start_time = time.monotonic()
    forward_and_backward()
    optimizer.step()
    optimizer.zero_grad()
    warm_up_seconds.append(time.monotonic() - start_time)

completed_steps = 0
if diary.CHECKPOINT.exists():
    with training.checkpoint_load():
        state = torch.load(diary.CHECKPOINT)
        model.load_state_dict(state["model"])
        completed_steps = state["step"]
diary.write("attempt", start_step=completed_steps)
for seconds in warm_up_seconds:
    diary.write("warm-up", seconds=seconds)

with training.training_loop(
    train_iterations_start=completed_steps, train_iterations_target_or_fn=diary.STEPS
):
    while completed_steps < diary.STEPS:
        with training.training_iteration():
            start_time, losses = time.monotonic(), []
            for group in optimizer.param_groups:
                group["lr"] = diary.LEARNING_RATES[completed_steps]
            for _ in range(diary.BATCHES_PER_STEP):
                diary.write("batch", samples=4)
                losses.append(forward_and_backward())
                training.record(samples=4, microbatches=1)
            diary.crash_if_due(completed_steps)
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            loss = sum(losses) / len(losses)
            training.record(loss=loss, grad_norm=norm, learning_rate=diary.LEARNING_RATES[completed_steps])
            loss_stat.add(loss)
        completed_steps += 1
        diary.write(
            "step",
            step=completed_steps,
            loss=loss,
            norm=norm,
            rate=diary.LEARNING_RATES[completed_steps - 1],
            seconds=time.monotonic() - start_time,
        )
        if completed_steps % diary.STEPS_BETWEEN_VALIDATIONS == 0:
            with training.validation_loop():
                for _ in range(4):
                    with training.validation_iteration():
                        start_time = time.monotonic()
                        time.sleep(diary.BATCH_SECONDS)
                    diary.write("validation", seconds=time.monotonic() - start_time)
        if completed_steps % diary.STEPS_BETWEEN_SAVES == 0:
            with training.checkpoint_save(global_step=completed_steps):
                torch.save({"model": model.state_dict(), "step": completed_steps}, diary.CHECKPOINT)
            diary.write("save", step=completed_steps)
diary.wait_for_the_end()
