# mypy: ignore-errors
# as people write their jobs
"""The same loop with Accelerate, which divides the loss and skips optimizer steps during accumulation."""

import time

import diary
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(diary.attempt)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=diary.ACCUMULATED)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
examples = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model, optimizer, training, validation = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=diary.WARM_UP[0]),
    DataLoader(examples, batch_size=4),
    DataLoader(examples, batch_size=16),
)
done = 0
if diary.CHECKPOINT.exists():
    accelerator.load_state(str(diary.CHECKPOINT))
    done = int((diary.CHECKPOINT / "step").read_text())
diary.write("attempt", begins_at=done)
batches = (batch for _ in range(100) for batch in training)

while done < diary.STEPS:
    began, losses, norm = time.monotonic(), [], 0.0
    for group in optimizer.param_groups:
        group["lr"] = diary.WARM_UP[done]
    for _ in range(diary.ACCUMULATED):
        inputs, targets = next(batches)
        diary.write("batch", samples=len(inputs))
        time.sleep(diary.SECONDS)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                diary.crash_if_due(done)
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
    done += 1
    diary.write(
        "step",
        step=done,
        loss=sum(losses) / len(losses),
        norm=norm,
        rate=diary.WARM_UP[done - 1],
        seconds=time.monotonic() - began,
    )
    if done % diary.VALIDATED_EVERY == 0:
        model.eval()
        with torch.no_grad():
            for inputs, targets in validation:
                began = time.monotonic()
                time.sleep(diary.SECONDS)
                torch.nn.functional.mse_loss(model(inputs), targets)
                diary.write("validation", seconds=time.monotonic() - began)
        model.train()
    if done % diary.SAVED_EVERY == 0:
        accelerator.save_state(str(diary.CHECKPOINT))
        (diary.CHECKPOINT / "step").write_text(str(done))
        diary.write("save", step=done)
diary.wait_for_the_end()
