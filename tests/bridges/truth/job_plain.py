# mypy: ignore-errors
# This file is written as users write jobs, without types.
"""Job without a framework: a warm-up of the learning rate, accumulated batches, validation, checkpoints, a crash and a resume."""

import time

import diary
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(diary.attempt)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=diary.LEARNING_RATES[0])
completed_steps = 0
if diary.CHECKPOINT.exists():
    state = torch.load(diary.CHECKPOINT)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    completed_steps = state["step"]
diary.write("attempt", start_step=completed_steps)
examples = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
training, validation = DataLoader(examples, batch_size=4), DataLoader(examples, batch_size=16)
batches = (batch for _ in range(100) for batch in training)

while completed_steps < diary.STEPS:
    start_time, losses = time.monotonic(), []
    for group in optimizer.param_groups:
        group["lr"] = diary.LEARNING_RATES[completed_steps]
    for _ in range(diary.BATCHES_PER_STEP):
        inputs, targets = next(batches)
        diary.write("batch", samples=len(inputs))
        time.sleep(diary.BATCH_SECONDS)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        (loss / diary.BATCHES_PER_STEP).backward()
        losses.append(loss.item())
    diary.crash_if_due(completed_steps)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
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
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": completed_steps},
            diary.CHECKPOINT,
        )
        diary.write("save", step=completed_steps)
diary.wait_for_the_end()
