"""TRL's SFTTrainer on a tiny model."""

from datasets import Dataset
from own_log import DIRECTORY, end_job
from tiny_language_model import ARGUMENTS, Log, model, tokenizer
from trl import SFTConfig, SFTTrainer

texts = Dataset.from_list(
    [{"text": f"the {noun} sat on the mat"} for noun in ("cat", "dog") for _ in range(40)]
)
SFTTrainer(
    model=model(),
    processing_class=tokenizer(),
    train_dataset=texts,
    callbacks=[Log()],
    args=SFTConfig(output_dir=str(DIRECTORY / "out"), **ARGUMENTS),
).train()
end_job()
