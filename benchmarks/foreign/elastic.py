"""A job of two ranks that torchrun restarts once, and that resumes from its checkpoint."""

import os
import sys
import time

import torch
import torch.distributed as dist
from own_log import DIRECTORY, SECONDS, begin_step, end_job, end_step, log

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
# A store for each attempt. In torchrun's own store, the second attempt may find gloo's addresses of the first.
store = f"file://{DIRECTORY.absolute()}/store-{attempt}"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
checkpoint, completed_steps = DIRECTORY / "last.pt", 0
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    completed_steps = state["step"]
dist.barrier()
while completed_steps < 30:
    begin_step()
    inputs, targets = torch.randn(4, 8), torch.randn(4, 1)
    time.sleep(SECONDS)
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    completed_steps += 1
    if rank == 0:
        end_step(loss.item(), len(inputs), step=completed_steps)
    if rank == 0 and completed_steps % 10 == 0:
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": completed_steps,
        }
        torch.save(state, checkpoint)
        log("save")
    dist.barrier()
    if attempt == 0 and completed_steps == 14:
        if rank == 1:
            time.sleep(1.0)
            sys.exit(1)
        log("crash", step=completed_steps, saved=10)
        time.sleep(60)  # until torchrun ends this rank, too
dist.destroy_process_group()
if rank == 0:
    end_job()
