"""TRL's DPOTrainer on a tiny model."""

from datasets import Dataset
from own_log import DIRECTORY, end_job
from tiny_language_model import ARGUMENTS, Log, model, tokenizer
from trl import DPOConfig, DPOTrainer

pairs = [
    {"prompt": f"the {noun}", "chosen": " sat on the mat", "rejected": " ran"} for noun in ("cat", "dog")
]
DPOTrainer(
    model=model(),
    ref_model=model(),
    processing_class=tokenizer(),
    callbacks=[Log()],
    train_dataset=Dataset.from_list(pairs * 40),
    args=DPOConfig(output_dir=str(DIRECTORY / "out"), **ARGUMENTS),
).train()
end_job()
