"""An Ignite trainer with an evaluator after each epoch and ModelCheckpoint."""

import time

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from own_log import DIRECTORY, SECONDS, begin_step, end_job, end_step, log
from torch.utils.data import DataLoader, TensorDataset


def slow_loss(output, target):
    time.sleep(SECONDS)
    return torch.nn.functional.mse_loss(output, target)


def loader_of(samples):
    return DataLoader(TensorDataset(torch.randn(samples, 8), torch.randn(samples, 1)), batch_size=4)


torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = create_supervised_trainer(model, optimizer, slow_loss)
evaluator = create_supervised_evaluator(model)
to_save = {"model": model, "optimizer": optimizer, "trainer": trainer}
saver = Checkpoint(to_save, DiskSaver(str(DIRECTORY / "saved"), create_dir=True), n_saved=1)


@trainer.on(Events.ITERATION_STARTED)
def start(engine):
    begin_step()


@trainer.on(Events.ITERATION_COMPLETED)
def step(engine):
    end_step(engine.state.output, len(engine.state.batch[0]))


@trainer.on(Events.EPOCH_COMPLETED)
def epoch(engine):
    log("epoch")
    evaluator.run(loader_of(28))
    log("validation", batches=7)
    saver(engine)
    log("save")


trainer.run(loader_of(60), max_epochs=2)
end_job()
