"""DeepSpeed with ZeRO stage 1 and accumulated batches, on the CPU."""

import time

import deepspeed
import torch
from own_log import DIRECTORY, SECONDS, begin_step, end_job, end_step, log
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATED_BATCHES = 2
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATED_BATCHES,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    },
)
loader = DataLoader(TensorDataset(torch.randn(160, 8), torch.randn(160, 1)), batch_size=4)
losses = []
begin_step()
for inputs, targets in loader:
    time.sleep(SECONDS)
    loss = torch.nn.functional.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    if len(losses) == ACCUMULATED_BATCHES:
        end_step(sum(losses) / ACCUMULATED_BATCHES, 4 * ACCUMULATED_BATCHES)
        losses = []
        begin_step()
log("epoch")
engine.save_checkpoint(str(DIRECTORY / "saved"))
log("save")
end_job()
