# mypy: ignore-errors
# This file is written as users write jobs, without types.
"""Job with Accelerate, which divides the loss and skips optimizer steps during accumulation."""

import time

import diary
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(diary.attempt)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=diary.BATCHES_PER_STEP)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
examples = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model, optimizer, training, validation = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=diary.LEARNING_RATES[0]),
    DataLoader(examples, batch_size=4),
    DataLoader(examples, batch_size=16),
)
completed_steps = 0
if diary.CHECKPOINT.exists():
    accelerator.load_state(str(diary.CHECKPOINT))
    completed_steps = int((diary.CHECKPOINT / "step").read_text())
diary.write("attempt", start_step=completed_steps)
batches = (batch for _ in range(100) for batch in training)

while completed_steps < diary.STEPS:
    start_time, losses, norm = time.monotonic(), [], 0.0
    for group in optimizer.param_groups:
        group["lr"] = diary.LEARNING_RATES[completed_steps]
    for _ in range(diary.BATCHES_PER_STEP):
        inputs, targets = next(batches)
        diary.write("batch", samples=len(inputs))
        time.sleep(diary.BATCH_SECONDS)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                diary.crash_if_due(completed_steps)
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
    completed_steps += 1
    diary.write(
        "step",
        step=completed_steps,
        loss=sum(losses) / len(losses),
        norm=norm,
        rate=diary.LEARNING_RATES[completed_steps - 1],
        seconds=time.monotonic() - start_time,
    )
    if completed_steps % diary.STEPS_BETWEEN_VALIDATIONS == 0:
        model.eval()
        with torch.no_grad():
            for inputs, targets in validation:
                start_time = time.monotonic()
                time.sleep(diary.BATCH_SECONDS)
                torch.nn.functional.mse_loss(model(inputs), targets)
                diary.write("validation", seconds=time.monotonic() - start_time)
        model.train()
    if completed_steps % diary.STEPS_BETWEEN_SAVES == 0:
        accelerator.save_state(str(diary.CHECKPOINT))
        (diary.CHECKPOINT / "step").write_text(str(completed_steps))
        diary.write("save", step=completed_steps)
diary.wait_for_the_end()
