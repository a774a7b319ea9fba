"""A fastai Learner with one cycle of two epochs and SaveModelCallback."""

import time

import torch
from fastai.basics import Callback, DataLoaders, Learner
from fastai.callback.schedule import fit_one_cycle  # noqa: F401  # adds the method to Learner
from own_log import DIRECTORY, SECONDS, begin_step, end_job, end_step, log
from torch.utils.data import DataLoader, TensorDataset


class Log(Callback):
    def before_batch(self):
        if self.training:
            begin_step()
            time.sleep(SECONDS)

    def after_batch(self):
        if self.training:
            end_step(self.learn.loss.item(), len(self.xb[0]))

    def after_epoch(self):
        log("epoch")


def loader_of(samples):
    return DataLoader(TensorDataset(torch.randn(samples, 8), torch.randn(samples, 1)), batch_size=4)


torch.manual_seed(0)
learner = Learner(
    DataLoaders(loader_of(80), loader_of(20)),
    torch.nn.Linear(8, 1),
    loss_func=torch.nn.MSELoss(),
    path=DIRECTORY,
    cbs=[Log()],
)
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(2, 0.01)
learner.save("last")
log("save")
end_job()
