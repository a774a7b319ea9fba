"""Parts of training loops of plain torch: a data loader, a model with an optimizer, and a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loader(samples: int, size: int = 4, **options: Any) -> Any:
    """Return a data loader of random samples with four features."""
    return DataLoader(TensorDataset(torch.randn(samples, 4)), batch_size=size, **options)


def model_and_optimizer(kind: Any = torch.optim.Adam, **options: Any) -> tuple[Any, Any]:
    """Return a linear model and an optimizer of its parameters."""
    model = nn.Linear(4, 1)
    return model, kind(model.parameters(), lr=0.125, **options)


def train_step(model: Any, optimizer: Any, batch: Any) -> None:
    """Run a step: clear the gradients, run the forward and backward pass, and update the parameters."""
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
