"""Ray Train with two workers that report each epoch."""

import os
import time

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset

JOB = os.environ["JOB_SOURCES"]


def loop(config):
    import sys

    sys.path.insert(0, JOB)
    from own_log import SECONDS, begin_step, end_step, log

    torch.manual_seed(0)
    rank = train.get_context().get_world_rank()
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    examples = TensorDataset(torch.randn(160, 8), torch.randn(160, 1))
    loader = prepare_data_loader(DataLoader(examples, batch_size=4))
    for _ in range(2):
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
        train.report({"loss": loss.item()})
    time.sleep(3)


ray.init(num_cpus=2, include_dashboard=False)
TorchTrainer(
    loop,
    scaling_config=train.ScalingConfig(num_workers=2, use_gpu=False),
    run_config=train.RunConfig(storage_path=os.environ["JOB_DIRECTORY"]),
).fit()
ray.shutdown()
