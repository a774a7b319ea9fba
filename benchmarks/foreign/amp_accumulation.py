"""A plain loop with autocast, a GradScaler, accumulated batches, clipping and a checkpoint for each epoch."""

import sys
import time

import torch
from own_log import DIRECTORY, SECONDS, begin_step, end_job, end_step, log
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATED_BATCHES = 4
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
loader = DataLoader(TensorDataset(torch.randn(80, 8), torch.randn(80, 1)), batch_size=4, shuffle=True)
for _ in range(3):
    losses = []
    begin_step()
    for index, (inputs, targets) in enumerate(loader):
        time.sleep(SECONDS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss / ACCUMULATED_BATCHES).backward()
        losses.append(loss.item())
        if (index + 1) % ACCUMULATED_BATCHES == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            end_step(sum(losses) / ACCUMULATED_BATCHES, 4 * ACCUMULATED_BATCHES)
            losses = []
            begin_step()
    log("epoch")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, DIRECTORY / "last.pt")
    log("save")
end_job(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
