"""DistributedDataParallel on gloo, with a DistributedSampler, for torchrun."""

import time

import torch
import torch.distributed as dist
from own_log import DIRECTORY, SECONDS, begin_step, end_job, end_step, log
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
examples = TensorDataset(torch.randn(80, 8), torch.randn(80, 1))
sampler = DistributedSampler(examples)
loader = DataLoader(examples, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    begin_step()
    for inputs, targets in loader:
        time.sleep(SECONDS)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            end_step(loss.item(), len(inputs))
        begin_step()
    if rank == 0:
        log("epoch")
        torch.save(
            {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, DIRECTORY / "last.pt"
        )
        log("save")
    dist.barrier()
dist.destroy_process_group()
if rank == 0:
    end_job()
