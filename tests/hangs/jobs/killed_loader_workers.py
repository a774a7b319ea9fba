"""Job that kills the workers of a DataLoader. torch reports the loss of the workers as an exception in the training process."""

import multiprocessing

import torch
from torch.utils.data import DataLoader, Dataset

from exporter import training


class Ones(Dataset[torch.Tensor]):  # type: ignore[misc]  # torch is not type-checked here
    """Data set of ones."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


for step, _batch in enumerate(training.batches(DataLoader(Ones(), num_workers=2))):
    with training.training_iteration():
        if step == 5:
            for worker in multiprocessing.active_children():
                worker.kill()
