"""TRL's GRPOTrainer on a tiny model: four completions for each prompt."""

from datasets import Dataset
from own_log import DIRECTORY, end_job
from tiny_language_model import ARGUMENTS, Log, model, tokenizer
from trl import GRPOConfig, GRPOTrainer


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


prompts = Dataset.from_list([{"prompt": f"the {noun}"} for noun in ("cat", "dog") for _ in range(20)])
GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=length,
    train_dataset=prompts,
    callbacks=[Log()],
    args=GRPOConfig(
        output_dir=str(DIRECTORY / "out"), num_generations=4, max_completion_length=8, **ARGUMENTS
    ),
).train()
end_job()
