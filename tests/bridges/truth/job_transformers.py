# mypy: ignore-errors
# ruff: noqa: ANN001, ANN003, ANN201, ANN204  # written as users write jobs
"""Job with a Transformers Trainer. Its model and a callback write the diary."""

import time

import diary
import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(diary.attempt)


class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        value = index / len(self)
        return {"inputs": torch.full((8,), value), "labels": torch.tensor([value])}


class Model(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.losses_of_step = []
        self.post_init()

    def forward(self, inputs, labels):
        start_time = time.monotonic()
        time.sleep(diary.BATCH_SECONDS)
        loss = torch.nn.functional.mse_loss(self.layers(inputs), labels)
        if self.training:
            diary.write("batch", samples=len(inputs))
            self.losses_of_step.append(loss.item())
        else:
            diary.write("validation", seconds=time.monotonic() - start_time)
        return {"loss": loss, "logits": labels}


class Diary(TrainerCallback):
    start_time = 0.0

    def on_train_begin(self, args, state, control, **others):
        diary.write("attempt", start_step=state.global_step)

    def on_step_begin(self, args, state, control, **others):
        self.start_time = time.monotonic()

    def on_pre_optimizer_step(self, args, state, control, **others):
        diary.crash_if_due(state.global_step)

    def on_step_end(self, args, state, control, model=None, **others):
        loss = sum(model.losses_of_step) / len(model.losses_of_step)
        model.losses_of_step.clear()
        diary.write("step", step=state.global_step, loss=loss, seconds=time.monotonic() - self.start_time)

    def on_log(self, args, state, control, logs=None, **others):
        if "learning_rate" in logs:
            diary.write("logged", rate=logs["learning_rate"], norm=logs["grad_norm"])

    def on_evaluate(self, args, state, control, metrics=None, **others):
        diary.write("validated", loss=metrics["eval_loss"])

    def on_save(self, args, state, control, **others):
        diary.write("save", step=state.global_step)


trainer = Trainer(
    model=Model(PretrainedConfig()),
    args=TrainingArguments(
        output_dir=str(diary.CHECKPOINT),
        max_steps=diary.STEPS,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=diary.BATCHES_PER_STEP,
        eval_strategy="steps",
        eval_steps=diary.STEPS_BETWEEN_VALIDATIONS,
        save_steps=diary.STEPS_BETWEEN_SAVES,
        logging_steps=1,
        warmup_steps=5,
        learning_rate=0.05,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        log_level="error",
    ),
    train_dataset=Examples(),
    eval_dataset=Examples(),
    callbacks=[Diary()],
)
trainer.train(resume_from_checkpoint=diary.attempt > 1)
diary.wait_for_the_end()
