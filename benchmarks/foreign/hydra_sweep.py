"""A Hydra job for `-m`: one training for each value of `lr`, one after the other in the same process."""

import os
import time

import hydra
import torch
from own_log import SECONDS, begin_step, end_step, log
from torch.utils.data import DataLoader, TensorDataset


@hydra.main(version_base=None, config_path=None)
def main(config):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    loader = DataLoader(TensorDataset(torch.randn(80, 8), torch.randn(80, 1)), batch_size=4)
    begin_step()
    for inputs, targets in loader:
        time.sleep(SECONDS)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_step(loss.item(), len(inputs))
        begin_step()
    log("epoch")


if __name__ == "__main__":
    main()
    time.sleep(3)
    log("end", pid=os.getpid())
