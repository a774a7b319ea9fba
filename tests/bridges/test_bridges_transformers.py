"""The bridge to Hugging Face Transformers, with the real Trainer on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, FAILED, SAMPLES, SAVED, STEPS, VALIDATED, Job, job, loops, wanted

pytestmark = [wanted("transformers", "accelerate"), pytest.mark.timeout(240)]

PRELUDE = """
import copy, pickle, tempfile, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

def data(samples):
    return [{"input_ids": torch.randint(0, 64, (8,)), "labels": torch.randint(0, 64, (8,))}
            for _ in range(samples)]

def trainer(samples=12, cls=Trainer, **options):
    options = {"per_device_train_batch_size": 2, "save_strategy": "no", "logging_steps": 1, **options}
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(dir="."), report_to=[], use_cpu=True, disable_tqdm=True,
                                  dataloader_pin_memory=False, **options)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32))
    return cls(model, arguments, train_dataset=data(samples) if isinstance(samples, int) else samples,
               eval_dataset=data(6), callbacks=CALLBACKS())
"""

LOOPS = """
from exporter.bridges import transformers as bridge
CALLBACKS = lambda: [bridge.callback()]

def accumulation():
    trainer(samples=8, num_train_epochs=2, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2,
            eval_strategy="epoch", gradient_checkpointing=True).train()

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
    begin("before")
    made = trainer(max_steps=2, save_strategy="steps", save_steps=2)
    made.train()
    begin("resumed")
    trainer(max_steps=5).train(resume_from_checkpoint=made.args.output_dir + "/checkpoint-2")

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

def pairs_of_completions():
    class DataCollatorForPreference:  # TRL's collator for DPO: the chosen completions, then the rejected completions
        def __call__(self, examples):
            rows = torch.stack([each["input_ids"] for each in examples] * 2)
            return {"input_ids": rows, "labels": rows}
    made = trainer(samples=9, num_train_epochs=1)
    made.data_collator = DataCollatorForPreference()
    made.train()

def batches_of_several_steps():
    class Generating(Trainer):  # TRL's GRPOTrainer: a batch of generations for two calls of `training_step`
        calls = 0
        def get_train_dataloader(self):
            batches = [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
            return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=list)
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.calls += 1
            return loss
        def _prepare_inputs(self, examples):
            if self.calls % 2 == 0:
                rows = torch.stack([each["input_ids"] for each in examples])
                self.slices = rows.split(2)
            rows = self.slices[self.calls % 2]
            return {"input_ids": rows, "labels": rows}
    trainer(samples=8, cls=Generating, gradient_accumulation_steps=2, max_steps=2).train()

def own_steps():
    class Own(Trainer):
        def training_step(self, model, inputs, *rest):
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()
    trainer(cls=Own, max_steps=2).train()
"""
recorded = loops(PRELUDE, LOOPS)

EXPECTED: dict[str, dict[str, float | None]] = {
    "pairs_of_completions": {STEPS: 5, SAMPLES: 9, "tokens_total mode=train": 2 * 9 * 8},
    "batches_of_several_steps": {
        STEPS: 2,
        "microbatches_total": 4,
        SAMPLES: 8,
        "tokens_total mode=train": 64,
    },
    "accumulation": {
        STEPS: 4,
        "microbatches_total": 8,
        SAMPLES: 16,
        "tokens_total mode=train": 128,
        "epochs_total": 2,
        "step_duration_seconds_count mode=train": 4,
        VALIDATED: 2,
        SAVED: 2,
        "phase forward": 8,
        "phase backward": 8,
        "phase optimizer": 4,
        "phase validation": 2,
        "phase checkpoint_save_sync": 2,
        "gauge step": 4,
        "gauge step_target": 4,
    },
    # A save that fails does not hinder the next.
    "failed_save": {FAILED: 1, SAVED: 2, STEPS: 3},
    # The next run after an exception counts right.
    "failing": {STEPS: 2 + 1},
    # A loop starts at the step of its checkpoint.
    "resumed": {STEPS: 3, "gauge step": 5},
    # A hidden loss is counted; a norm that is observed and logged is counted once.
    "not_finite": {
        "nonfinite_total kind=loss value=nan": 1,
        "nonfinite_total kind=grad value=nan": 1,
    },
    # A loader that ends before its epoch loses no step.
    "without_length": {STEPS: 4},
    "evaluations": {VALIDATED: 1, "steps_total mode=test": 1, "run_info framework=transformers": 1},
    # A Trainer with its own training step is counted through the hooks.
    "own_steps": {STEPS: 2},
}


@pytest.mark.parametrize("run", EXPECTED)
def test_training_validation_and_saves_of_a_trainer_are_recorded(recorded: Job, run: str) -> None:
    assert recorded.unlike(EXPECTED[run], run) == {}


def test_flops_match_transformers_and_recomputed_flops_are_separate(
    recorded: Job,
) -> None:
    model = recorded.value("training_model_flops_total", "accumulation") or 0
    hardware = recorded.value("training_hardware_flops_total", "accumulation") or 0

    assert model > 0
    assert hardware / model == pytest.approx(8 / 6)


def test_loops_without_a_fixed_number_of_steps_are_recorded(recorded: Job) -> None:
    gauges = recorded.gauges("accumulation")

    assert 3 < gauges["loss,mode=train"] < 5
    assert 3 < gauges["loss,mode=validation"] < 5
    assert gauges["grad_norm"] > 0
    assert "learning_rate" in gauges
    assert recorded.gauges("own_steps")["loss,mode=train"] > 0
    for phase, run, least in (("data_loading", "accumulation", 4), ("checkpoint_load", "resumed", 1)):
        assert (recorded.number(f"phase {phase}", run) or 0) >= least


def test_exceptions_propagate_and_callbacks_can_be_pickled_and_copied(recorded: Job) -> None:
    assert "raised amid an iteration" in recorded.done.stdout
    assert "'ExporterCallback'" in recorded.done.stdout.partition("copied ")[2].partition("\n")[0]


UNCHANGED = """
made = trainer(max_steps=3, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3)
made.train()
print("callbacks", [type(each).__name__ for each in made.callback_handler.callbacks])
"""
EXPLICIT = "from exporter.bridges import transformers as bridge\nCALLBACKS = lambda: [bridge.callback()]"


@pytest.mark.parametrize("callbacks", ["CALLBACKS = list", EXPLICIT], ids=["unchanged", "explicit"])
def test_an_unchanged_job_is_recorded_once(tmp_path: Path, callbacks: str) -> None:
    recorded = job(tmp_path, PRELUDE + callbacks + UNCHANGED, AUTO)

    assert "ExporterAutoCallback" in recorded.done.stdout
    assert recorded.unlike({STEPS: 3, VALIDATED: 1, "phase forward": 3, "phase backward": 3, SAVED: 1}) == {}
    assert "already one" not in recorded.done.stderr
