"""One-logger's Trainer and callback for PyTorch Lightning, with the real Trainer on a CPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bridges_support import needs
from training_support import run_python

pytestmark = [needs("lightning"), pytest.mark.timeout(240)]

JOB = """
import contextlib, logging, pickle, warnings
from pathlib import Path
import torch
import lightning.pytorch as pl
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset
from exporter.one_logger import *
from exporter.one_logger.training_telemetry.integration.pytorch_lightning import (
    OneLoggerPTLTrainer, hook_trainer_cls)

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).mean()
    def validation_step(self, batch, index):
        pass
    test_step = validation_step
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class DiskFullForBadPaths(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if "bad" in str(path):
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)

def loader(samples):
    return DataLoader(TensorDataset(torch.zeros(samples, 4)), batch_size=4)

provider = TrainingTelemetryProvider.instance()
provider.with_base_config(OneLoggerConfig(application_name="app", world_size_or_fn=1, session_tag_or_fn="s",
    telemetry_config=TrainingTelemetryConfig(perf_tag_or_fn="p", global_batch_size_or_fn=8,
                                             log_every_n_train_iterations=1)))
provider.with_exporter(FileExporter(Path("t.jsonl"))).configure_provider()
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
               enable_model_summary=False, max_epochs=1, accumulate_grad_batches=2, num_sanity_val_steps=1,
               plugins=[DiskFullForBadPaths()])
"""
TRAINER = """
options["callbacks"] = None
trainer = OneLoggerPTLTrainer(options, provider)
print("options unchanged", options["callbacks"] is None)
callback = trainer.nv_one_logger_callback
"""
HOOKED_TRAINER = """
class OwnTrainer(pl.Trainer):
    pass
hooked_class, callback = hook_trainer_cls(OwnTrainer, provider)
trainer = hooked_class(callbacks=pl.Callback(), **options)
print("trainer unchanged", hooked_class is OwnTrainer and trainer.nv_one_logger_callback is callback)
"""
RUN = """
callback.on_model_init_start()
module = Module()
callback.on_model_init_end()
trainer.fit(module, loader(16), loader(8))
with contextlib.suppress(OSError):
    trainer.save_checkpoint("bad.ckpt")
trainer.save_checkpoint("good.ckpt")
trainer.test(module, loader(8), verbose=False)
print("pickled", type(pickle.loads(pickle.dumps(callback))) is type(callback))
callback.on_app_end()
"""


def read_records(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "t.jsonl").read_text(encoding="ascii").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "trainer_code", [TRAINER, HOOKED_TRAINER], ids=["OneLoggerPTLTrainer", "hook_trainer_cls"]
)
def test_a_trainer_is_recorded_with_its_sanity_check_and_saves(trainer_code: str, tmp_path: Path) -> None:
    completed = run_python(JOB + trainer_code + RUN, tmp_path, timeout=200)
    assert completed.returncode == 0, completed.stderr
    assert "unchanged True\n" in completed.stdout
    assert "pickled True\n" in completed.stdout
    assert (tmp_path / "good.ckpt").exists()

    records = read_records(tmp_path)
    ended_spans = Counter(record["name"] for record in records if record["type"] in {"stop", "complete"})
    events = Counter(record["event"]["name"] for record in records if record["type"] == "event")
    assert (
        ended_spans["application"] == ended_spans["model_initialization"] == ended_spans["training_loop"] == 1
    )
    # The sanity check is a validation of one batch.
    assert ended_spans["validation_loop"] == events["validation_metrics_update"] == 2
    assert ended_spans["testing_loop"] == events["testing_metrics_update"] == 1
    assert events["training_metrics_update"] == 2  # optimizer steps of four batches
    assert ended_spans["checkpoint_save_sync"] == events["sync_checkpoint_metrics_update"] == 2
    assert events["save_checkpoint_success"] == 1
