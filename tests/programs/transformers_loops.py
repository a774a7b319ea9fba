"""Training jobs of Hugging Face Transformers. Each function is a job.

`programs.loops.run_loops` calls the functions in sequence in the same process; each call is a separate run.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from programs.loops import start_run
from programs.transformers_parts import examples, recorded_trainer


def accumulation() -> None:
    recorded_trainer(
        examples(8),
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="epoch",
        gradient_checkpointing=True,
    ).train()


def failed_save() -> None:
    class TrainerWithFullDiskAtFirstStep(Trainer):  # type: ignore[misc]  # Transformers has no types here
        def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
            if self.state.global_step == 1:
                raise OSError(28, "No space left on device")
            super()._save_optimizer_and_scheduler(output_dir)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with contextlib.suppress(OSError):
                super()._save_checkpoint(*args, **kwargs)

    recorded_trainer(
        cls=TrainerWithFullDiskAtFirstStep, max_steps=3, save_strategy="steps", save_steps=1
    ).train()


def failing_trainer() -> None:
    class TrainerFailingAtThirdStep(Trainer):  # type: ignore[misc]  # Transformers has no types here
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 2:
                raise ZeroDivisionError("amid an iteration")
            return super().compute_loss(*args, **kwargs)

    try:
        recorded_trainer(cls=TrainerFailingAtThirdStep, max_steps=5).train()
    except ZeroDivisionError as error:
        print("raised", error)
    recorded_trainer(max_steps=1).train()


def resumed_trainer() -> None:
    start_run("before")
    first_trainer = recorded_trainer(max_steps=2, save_strategy="steps", save_steps=2)
    first_trainer.train()
    start_run("resumed_trainer")
    recorded_trainer(max_steps=5).train(
        resume_from_checkpoint=f"{first_trainer.args.output_dir}/checkpoint-2"
    )


def nonfinite_loss() -> None:
    class TrainerWithNanAtSecondStep(Trainer):  # type: ignore[misc]  # Transformers has no types here
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.state.global_step == 1 else loss

    trainer = recorded_trainer(cls=TrainerWithNanAtSecondStep, max_steps=2)
    trainer.train()
    callbacks = copy.deepcopy(pickle.loads(pickle.dumps(trainer.callback_handler.callbacks)))
    print("copied", [type(callback).__name__ for callback in callbacks])


def loader_without_length() -> None:
    class StreamDataset(IterableDataset):  # type: ignore[misc]  # torch has no types here
        def __iter__(self) -> Iterator[Any]:
            return iter(examples(5))

    recorded_trainer(StreamDataset(), max_steps=4, per_device_train_batch_size=2).train()


def evaluation_and_prediction() -> None:
    trainer = recorded_trainer(max_steps=1)
    trainer.evaluate()
    trainer.predict(examples(4))


def pairs_of_completions() -> None:
    class DataCollatorForPreference:
        """TRL's collator for DPO: the chosen completions, then the rejected completions."""

        def __call__(self, batch: Any) -> Any:
            rows = torch.stack([example["input_ids"] for example in batch] * 2)
            return {"input_ids": rows, "labels": rows}

    trainer = recorded_trainer(examples(9), num_train_epochs=1)
    trainer.data_collator = DataCollatorForPreference()
    trainer.train()


def batches_of_several_steps() -> None:
    class GenerationTrainer(Trainer):  # type: ignore[misc]  # Transformers has no types here
        """TRL's GRPOTrainer: a batch of generations for two calls of `training_step`."""

        calls = 0

        def get_train_dataloader(self) -> Any:
            batches = [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
            return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=list)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.calls += 1
            return loss

        def _prepare_inputs(self, batch: Any) -> Any:
            if self.calls % 2 == 0:
                rows = torch.stack([example["input_ids"] for example in batch])
                self.slices = rows.split(2)
            rows = self.slices[self.calls % 2]
            return {"input_ids": rows, "labels": rows}

    recorded_trainer(examples(8), cls=GenerationTrainer, gradient_accumulation_steps=2, max_steps=2).train()


def overridden_training_step() -> None:
    class OwnStepTrainer(Trainer):  # type: ignore[misc]  # Transformers has no types here
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    recorded_trainer(cls=OwnStepTrainer, max_steps=2).train()
