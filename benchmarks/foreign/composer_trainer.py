"""A MosaicML Composer Trainer with microbatches, evaluation and a checkpoint for each epoch."""

import time

import torch
from composer import Callback, ComposerModel, Trainer
from own_log import DIRECTORY, SECONDS, begin_step, end_job, end_step, log
from torch.utils.data import DataLoader, TensorDataset


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, batch):
        time.sleep(SECONDS)
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])

    def eval_forward(self, batch, outputs=None):
        return self.layer(batch[0])

    def get_metrics(self, is_train=False):
        return {}


class Log(Callback):
    def batch_start(self, state, logger):
        begin_step()

    def batch_end(self, state, logger):
        end_step(float(state.total_loss_dict["loss/train/total"]), 8)

    def epoch_end(self, state, logger):
        log("epoch")

    def epoch_checkpoint(self, state, logger):
        log("save")


def loader_of(samples):
    return DataLoader(TensorDataset(torch.randn(samples, 8), torch.randn(samples, 1)), batch_size=8)


torch.manual_seed(0)
model = Model()
Trainer(
    model=model,
    train_dataloader=loader_of(80),
    eval_dataloader=loader_of(16),
    max_duration="2ep",
    optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
    device="cpu",
    device_train_microbatch_size=4,
    save_folder=str(DIRECTORY / "saved"),
    save_interval="1ep",
    callbacks=[Log()],
    progress_bar=False,
).fit()
end_job()
