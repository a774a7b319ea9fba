"""Bridge to PyTorch Lightning, with the real Trainer on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from bridges_support import (
    AUTO,
    FAILED_SAVES,
    LIGHTNING,
    SAMPLES,
    SAVES,
    STEPS,
    VALIDATION_STEPS,
    Job,
    job_fixture,
    needs,
    run_job,
)

import exporter_auto

pytestmark = [needs("lightning"), pytest.mark.timeout(240)]

LOOPS_PROGRAM = """
from programs import lightning_loops, loops
loops.run_loops(lightning_loops)
"""
ended_job = job_fixture(LIGHTNING + LOOPS_PROGRAM, "lightning")

EXPECTED: dict[str, dict[str, float | None]] = {
    # A step is an optimizer step. The sanity check adds validation time but no validation steps.
    "accumulation": {
        STEPS: 6,
        "microbatches_total": 10,
        SAMPLES: 40,
        "epochs_total": 2,
        "step_duration_seconds_count mode=train": 6,
        "phase validation": 3,
        VALIDATION_STEPS: 4,
        "phase forward": 10,
        "phase backward": 10,
        "phase optimizer": 6,
        "phase data_loading": 10,
        "phase zero_grad": 6,
        "run_info framework=lightning model=ValidatedModule": 1,
    },
    # In manual optimization a step is a batch, also after a restart.
    "two_optimizers": {STEPS: 3, "phase optimizer": 6, "phase backward": 6},
    "two_optimizers_resumed": {STEPS: 3, "gauge step": 6},
    # A failed save does not affect the next save. A save of weights only adds time to the phase.
    "failed_save": {FAILED_SAVES: 2, SAVES: 2, "phase checkpoint_save_sync": 6, STEPS: 2},
    # An asynchronous save succeeds when the file is written.
    "async_checkpoints": {
        "checkpoints_total kind=async result=ok": 2,
        "checkpoints_total kind=async result=failed": 1,
        "phase checkpoint_save_async": 3,
    },
    # A queued save of weights does not report the next queued save.
    "async_checkpoints_and_weights": {
        "checkpoints_total kind=async result=ok": 1,
        "checkpoints_total kind=async result=failed": 1,
        "phase checkpoint_save_async": 3,
    },
    "async_checkpoints_over_two_fits": {"checkpoints_total kind=async result=ok": 2},
    "tested_with_the_step_of_the_validation": {"steps_total mode=test": 2},
    # The call of `fit` after an exception is counted correctly.
    "failing_module": {STEPS: 2 + 1},
    # A completed step counts although a callback fails afterwards.
    "failing_callback": {STEPS: 3},
    "several_loops": {STEPS: 4, "steps_total mode=test": 3, VALIDATION_STEPS: 1, "gauge step": 4},
    # A loop starts at the step of its checkpoint.
    "resumed": {
        "gauge step": 6,
        "gauge step_target": 6,
        "gauge learning_rate": 0.125,
        "phase checkpoint_load": 1,
    },
    # A loader without a length, and a training step that fetches its own batch.
    "loaders_without_length": {STEPS: 5 + 2},
    "nonfinite_losses": {"nonfinite_total kind=loss value=nan": 2},
    # A completed step counts although its epoch is aborted or its validation fails.
    "aborted_epoch_and_failed_validation": {STEPS: 1 + 3, VALIDATION_STEPS: 0},
    "pickled": {STEPS: 2, "phase data_loading": 2},
}


@pytest.mark.parametrize("run", EXPECTED)
def test_training_validation_and_saves_of_a_trainer_are_recorded(ended_job: Job, run: str) -> None:
    assert ended_job.differences(EXPECTED[run], run) == {}


def test_background_saves_losses_of_a_resumed_loop_and_nonfinite_gradients_are_recorded(
    ended_job: Job,
) -> None:
    assert ended_job.value(
        "training_background_seconds_total", "async_checkpoints", task="checkpoint_finalize"
    )
    assert ended_job.gauges("resumed")["loss,mode=train"] > 0
    assert (ended_job.value("training_nonfinite_total", "nonfinite_losses", kind="grad") or 0) >= 1


def test_a_loss_that_a_test_logs_as_val_loss_is_not_the_loss_of_a_validation(ended_job: Job) -> None:
    gauges = ended_job.gauges("tested_with_the_step_of_the_validation")

    assert "loss,mode=validation" not in gauges


def test_exceptions_propagate_and_a_trainer_can_be_pickled_and_copied_while_training(ended_job: Job) -> None:
    assert "raised amid an iteration" in ended_job.process.stdout
    assert ended_job.process.stdout.count("pickled ['TrainerPickler', 'ExporterCallback']") == 2


# Unchanged jobs -----------------------------------------------------------------------------------------------

UNCHANGED_JOB = """
callbacks = []
if {explicit}:
    from exporter.bridges import lightning
    callbacks.append(lightning.callback())
quiet_trainer(max_epochs=2, callbacks=callbacks).fit(Module(), loader(12))
"""


@pytest.mark.parametrize(("package", "explicit"), [("lightning.pytorch", True), ("pytorch_lightning", False)])
def test_an_unchanged_job_is_recorded_once(tmp_path: Path, package: str, explicit: bool) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"not installed: {package}")
    program = LIGHTNING + UNCHANGED_JOB.format(explicit=explicit)
    environment = {**AUTO, "LIGHTNING_PACKAGE": package}
    ended_job = run_job(tmp_path, program, environment, library="lightning" if explicit else "torch")

    assert (
        ended_job.differences({STEPS: 6, SAMPLES: 24, "phase backward": 6, "phase optimizer": 6, SAVES: 2})
        == {}
    )


PLAIN_LOOP_PROGRAM = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
for batch in torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=4):
    model(batch).sum().backward()
    optimizer.step()
"""


def test_a_plain_loop_after_a_trainer_is_recorded(tmp_path: Path) -> None:
    program = LIGHTNING + "quiet_trainer(max_epochs=1).fit(Module(), loader(12))" + PLAIN_LOOP_PROGRAM
    ended_job = run_job(tmp_path, program, AUTO, library="lightning")

    assert ended_job.differences({STEPS: 3 + 5, SAMPLES: 12 + 20}) == {}


@pytest.mark.parametrize("name", ["EXPORTER_AUTO", "EXPORTER_DISABLED"])
def test_the_callback_factory_returns_nothing_unless_it_is_enabled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPORTER_AUTO", "1")
    monkeypatch.setenv(name, {"EXPORTER_AUTO": "0", "EXPORTER_DISABLED": "1"}[name])

    assert exporter_auto.lightning_callbacks() == exporter_auto.pytorch_lightning_callbacks() == []
    assert exporter_auto.fabric_callbacks() == exporter_auto.lightning_fabric_callbacks() == []
    assert exporter_auto.OneLoggerExporterConfig.get_default_config()["enabled"] is False


TWO_RANKS_PROGRAM = """
class Ranked(Module):
    def train_dataloader(self):
        size = 4 if self.global_rank == 0 else 2
        return loader(3 * size, size)

if __name__ == "__main__":
    quiet_trainer(max_epochs=1, enable_checkpointing=False, devices=2, strategy="{strategy}",
                 use_distributed_sampler=False).fit(Ranked())
"""


# Lightning starts the second rank as a script (ddp) or both ranks by multiprocessing (ddp_spawn).
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_ranks_started_by_lightning_are_distinct_and_count_their_own_samples(
    tmp_path: Path, strategy: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING + TWO_RANKS_PROGRAM.format(strategy=strategy))
    ended_job = run_job(tmp_path, script, AUTO, library="lightning")

    for rank, samples in (("0", 12), ("1", 6)):
        assert ended_job.differences({f"{STEPS} rank={rank}": 3, f"{SAMPLES} rank={rank}": samples}) == {}
    assert ended_job.quantity_value("step_duration_seconds_count mode=train") == 3
