# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN204  # written as users write jobs
"""Job with a Lightning Trainer, whose callback writes the diary."""

import logging
import time
import warnings

warnings.simplefilter("ignore")
import diary  # noqa: E402  # Lightning warns while it is imported
import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
torch.manual_seed(diary.attempt)
examples = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        inputs, targets = batch
        time.sleep(diary.BATCH_SECONDS)
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.own_loss = float(loss.detach())
        if index % diary.BATCHES_PER_STEP:
            diary.crash_if_due(self.global_step)
        return loss

    def validation_step(self, batch, index):
        start_time = time.monotonic()
        time.sleep(diary.BATCH_SECONDS)
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("val_loss", loss)
        diary.write("validation", seconds=time.monotonic() - start_time)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        rates = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: diary.LEARNING_RATES[min(step, diary.STEPS - 1)]
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


class Diary(pl.Callback):
    start_time = 0.0
    completed_steps = 0

    def on_train_batch_start(self, trainer, module, batch, index):
        if index % diary.BATCHES_PER_STEP == 0:
            self.start_time = time.monotonic()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        diary.write("batch", samples=len(batch[0]))
        step = trainer.global_step
        if step == self.completed_steps:
            return
        self.completed_steps = step
        loss = module.own_loss  # Lightning divides the loss of `outputs` by the accumulated batches
        # The scheduler has already set the rate of the next step, which the bridge records.
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        diary.write("step", step=step, loss=loss, rate=rate, seconds=time.monotonic() - self.start_time)
        if step % diary.STEPS_BETWEEN_SAVES == 0:
            trainer.save_checkpoint(diary.CHECKPOINT)
            diary.write("save", step=step)

    def on_train_start(self, trainer, module):
        self.completed_steps = trainer.global_step
        diary.write("attempt", start_step=trainer.global_step)

    def on_validation_end(self, trainer, module):
        diary.write("validated", loss=float(trainer.callback_metrics["val_loss"]))


pl.Trainer(
    max_steps=diary.STEPS,
    accumulate_grad_batches=diary.BATCHES_PER_STEP,
    val_check_interval=diary.STEPS_BETWEEN_VALIDATIONS * diary.BATCHES_PER_STEP,
    check_val_every_n_epoch=None,
    callbacks=[Diary()],
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
).fit(
    Module(),
    DataLoader(examples, batch_size=4),
    DataLoader(examples, batch_size=16),
    ckpt_path=str(diary.CHECKPOINT) if diary.CHECKPOINT.exists() else None,
)
diary.wait_for_the_end()
