"""Parts of training jobs of DeepSpeed: an engine on the CPU and a training loop."""

from __future__ import annotations

import os
import socket
from typing import Any

with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(listener.getsockname()[1])  # a free port

import deepspeed
import torch

from programs.torch_parts import loader

# The compilation of this operation lasts a minute, and a single process needs no all-reduce.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed refuses fp16 on CPUs, although torch supports it.
deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


class Model(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch: Any) -> Any:
        return self.layer(batch).pow(2).mean()


def engine_of(**options: Any) -> Any:
    """Return the engine of a linear model that accumulates four batches."""
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        **options,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=True
    )
    return engine


def train(engine: Any, dtype: Any = torch.float32) -> None:
    """Train twelve batches, and print the loss, the gradient norm and the loss scale of the last step."""
    losses = []
    for (batch,) in loader(48):
        loss = engine(batch.to(dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print("own loss", sum(losses[-4:]) / 4)
    print("own norm", float(engine.get_global_grad_norm() or 0))
    print("own scale", engine.optimizer.cur_scale if engine.fp16_enabled() else 0)
