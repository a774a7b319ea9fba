"""Job with a DataLoader that hangs in a worker."""

import time

import torch
from torch.utils.data import DataLoader, Dataset

from exporter import training


class HangingDataset(Dataset[torch.Tensor]):  # type: ignore[misc]  # torch is not type-checked here
    """Data set in which reading any sample after the third hangs."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index > 2:
            time.sleep(600)
        return torch.ones(1)


for _batch in training.batches(DataLoader(HangingDataset(), batch_size=1, num_workers=1)):
    with training.training_iteration():
        pass
