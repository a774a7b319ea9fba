"""Lightning Fabric with a checkpoint for each epoch."""

import time

import torch
from lightning.fabric import Fabric
from own_log import DIRECTORY, SECONDS, begin_step, end_job, end_step, log
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(0)
model = torch.nn.Linear(8, 1)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
loader = fabric.setup_dataloaders(
    DataLoader(TensorDataset(torch.randn(80, 8), torch.randn(80, 1)), batch_size=4)
)
for _ in range(2):
    begin_step()
    for inputs, targets in loader:
        time.sleep(SECONDS)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        end_step(loss.item(), len(inputs))
        begin_step()
    log("epoch")
    fabric.save(DIRECTORY / "last.ckpt", {"model": model, "optimizer": optimizer})
    log("save")
end_job()
