"""The bridge to Hugging Face Transformers, with the real Trainer on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, Job, job, wanted

pytestmark = [wanted("transformers", "accelerate"), pytest.mark.timeout(240)]

PRELUDE = """
import copy, os, pickle, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
ROOT = tempfile.mkdtemp(dir=os.environ["EXPORTER_FEED_DIR"] + "/..")

def model():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32))

def data(samples):
    return [{"input_ids": torch.randint(0, 64, (8,)), "labels": torch.randint(0, 64, (8,))}
            for _ in range(samples)]

def trainer(samples=12, cls=Trainer, callbacks=(), made=None, **options):
    options = {"per_device_train_batch_size": 2, "save_strategy": "no", "logging_steps": 1, **options}
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(dir=ROOT), report_to=[], use_cpu=True, disable_tqdm=True,
                                  dataloader_pin_memory=False, **options)
    return cls(made or model(), arguments, train_dataset=data(samples) if isinstance(samples, int) else samples,
               eval_dataset=data(6), callbacks=[*CALLBACKS(), *callbacks])
"""

SCENARIOS = """
from exporter.bridges import transformers as bridge
CALLBACKS = lambda: [bridge.callback()]

def accumulation():
    made = trainer(samples=8, num_train_epochs=2, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2,
                   eval_strategy="epoch", gradient_checkpointing=True)
    made.train()
    print("accumulation", gauges())

def failed_save():
    class Failing(Trainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            if self.state.global_step == 1:
                raise OSError(28, "No space left on device")
            super()._save_optimizer_and_scheduler(output_dir)
    made = trainer(cls=Failing, max_steps=3, save_strategy="steps", save_steps=1)
    original = made._save_checkpoint
    def forgiving(*args, **kwargs):
        try:
            original(*args, **kwargs)
        except OSError:
            pass
    made._save_checkpoint = forgiving
    made.train()

def failing():
    class Failing(Trainer):
        def compute_loss(self, *args, **kwargs):
            if self.state.global_step == 2:
                raise ZeroDivisionError("amid an iteration")
            return super().compute_loss(*args, **kwargs)
    try:
        trainer(cls=Failing, max_steps=5).train()
    except ZeroDivisionError as error:
        print("raised", error)
    trainer(max_steps=1).train()

def resumed():
    made = trainer(max_steps=2, save_strategy="steps", save_steps=2)
    made.train()
    folder = made.args.output_dir + "/checkpoint-2"
    begin("resumed_again")
    made = trainer(max_steps=5)
    made.train(resume_from_checkpoint=folder)
    print("resumed_again", gauges())

def not_finite():
    class Odd(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.state.global_step == 1 else loss
    made = trainer(cls=Odd, max_steps=2)
    made.train()
    copied = copy.deepcopy(pickle.loads(pickle.dumps(made.callback_handler.callbacks)))
    print("copied", [type(each).__name__ for each in copied])

def without_length():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(data(5))
    trainer(samples=Endless(), max_steps=4, per_device_train_batch_size=2).train()

def evaluations():
    made = trainer(max_steps=1)
    made.evaluate()
    made.predict(data(4))

def own_steps():
    class Own(Trainer):
        def training_step(self, model, inputs, *rest):
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()
    trainer(cls=Own, max_steps=2).train()
    print("own_steps", gauges())

for scenario in (accumulation, failed_save, failing, resumed, not_finite, without_length, evaluations, own_steps):
    begin(scenario.__name__)
    scenario()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job(tmp_path_factory.mktemp("transformers"), PRELUDE + SCENARIOS)


def test_a_step_is_one_of_the_optimizer_however_many_batches_it_takes(told: Job) -> None:
    assert told.value("training_steps_total", "accumulation", mode="train") == 4
    assert told.value("training_microbatches_total", "accumulation") == 8
    assert told.value("training_samples_total", "accumulation", mode="train") == 16
    assert told.value("training_tokens_total", "accumulation", mode="train") == 128
    assert told.value("training_epochs_total", "accumulation") == 2
    assert told.value("training_step_duration_seconds_count", "accumulation", mode="train") == 4


def test_a_batch_is_divided_into_fetch_forward_backward_and_optimizer(told: Job) -> None:
    phases = told.phases("accumulation")

    assert (phases["forward"], phases["backward"], phases["optimizer"]) == (8, 8, 4)
    assert phases["data_loading"] >= 4


def test_evaluations_and_saves_are_told_from_their_begin(told: Job) -> None:
    phases = told.phases("accumulation")

    assert (phases["validation"], phases["checkpoint_save_sync"]) == (2, 2)
    assert told.value("training_steps_total", "accumulation", mode="validation") == 2
    assert told.value("training_checkpoints_total", "accumulation", result="ok") == 2


def test_flops_are_counted_as_transformers_counts_them_and_those_of_recomputation_beside_them(
    told: Job,
) -> None:
    model = told.value("training_model_flops_total", "accumulation")
    hardware = told.value("training_hardware_flops_total", "accumulation")

    assert model is not None
    assert hardware is not None
    assert model > 0
    assert hardware / model == pytest.approx(8 / 6)


def test_the_last_values_are_those_of_the_step_itself(told: Job) -> None:
    gauges = told.told()["accumulation"]

    assert (gauges["training.step"], gauges["training.step_target"]) == (4, 4)
    assert 3 < gauges["training.loss,mode=train"] < 5
    assert 3 < gauges["training.loss,mode=validation"] < 5
    assert gauges["training.grad_norm"] > 0
    assert "training.learning_rate" in gauges


def test_a_save_that_fails_is_counted_and_does_not_hinder_the_next(told: Job) -> None:
    assert told.value("training_checkpoints_total", "failed_save", result="failed") == 1
    assert told.value("training_checkpoints_total", "failed_save", result="ok") == 2
    assert told.value("training_steps_total", "failed_save", mode="train") == 3


def test_an_exception_amid_an_iteration_comes_out_and_the_next_run_counts_right(told: Job) -> None:
    assert "raised amid an iteration" in told.done.stdout
    assert told.value("training_steps_total", "failing", mode="train") == 2 + 1


def test_a_loop_begins_where_its_checkpoint_ended(told: Job) -> None:
    assert told.value("training_steps_total", "resumed_again", mode="train") == 3
    assert told.told()["resumed_again"]["training.step"] == 5
    assert told.phases("resumed_again")["checkpoint_load"] >= 1


def test_a_loss_that_the_trainer_hides_is_counted(told: Job) -> None:
    assert told.value("training_nonfinite_total", "not_finite", kind="loss", value="nan") == 1


def test_a_norm_that_is_seen_and_logged_is_counted_once(told: Job) -> None:
    assert told.value("training_nonfinite_total", "not_finite", kind="grad", value="nan") == 1


def test_its_callbacks_can_be_pickled_and_copied(told: Job) -> None:
    assert "'ExporterCallback'" in told.done.stdout.partition("copied ")[2].partition("\n")[0]


def test_a_loader_that_ends_before_its_epoch_costs_no_step(told: Job) -> None:
    assert told.value("training_steps_total", "without_length", mode="train") == 4


def test_an_evaluation_and_a_prediction_of_their_own_are_told(told: Job) -> None:
    assert told.value("training_steps_total", "evaluations", mode="validation") == 1
    assert told.value("training_steps_total", "evaluations", mode="test") == 1
    assert told.value("training_run_info", "evaluations", framework="transformers") == 1


def test_a_trainer_with_a_step_of_its_own_is_counted_by_what_the_hooks_tell(told: Job) -> None:
    assert told.value("training_steps_total", "own_steps", mode="train") == 2
    assert told.told()["own_steps"]["training.loss,mode=train"] > 0


def test_nothing_was_told_out_of_order_and_no_notice_was_given(told: Job) -> None:
    assert "training_misuse_total" not in told.page
    assert "exporter" not in told.done.stderr


UNCHANGED = """
CALLBACKS = lambda: []
if sys.argv[1:] == ["explicit"]:
    from exporter.bridges import transformers as bridge
    CALLBACKS = lambda: [bridge.callback()]
made = trainer(max_steps=3, save_strategy="steps", save_steps=3)
made.train()
print("callbacks", [type(each).__name__ for each in made.callback_handler.callbacks])
"""


@pytest.mark.parametrize("explicit", [False, True])
def test_a_job_that_is_not_changed_is_told_once(tmp_path: Path, explicit: bool) -> None:
    program = f"import sys; sys.argv[1:] = {['explicit'] if explicit else []}\n{PRELUDE}{UNCHANGED}"
    told = job(tmp_path, program, AUTO)

    assert "ExporterAutoCallback" in told.done.stdout
    assert told.value("training_steps_total", mode="train") == 3
    assert told.phases()["forward"] == told.phases()["backward"] == 3
    assert told.value("training_checkpoints_total", result="ok") == 1
    assert 'framework="transformers"' in told.page
    assert "already one" not in told.done.stderr
