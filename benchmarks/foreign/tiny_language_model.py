"""A language model of a few thousand parameters and a tokenizer of words, which need no download."""

import time

import transformers
from own_log import SECONDS, begin_step, end_step, log
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "mat",
    "road",
    "fast",
    "slow",
    "and",
    "is",
    "was",
    "good",
    "bad",
]


def tokenizer():
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate([*special, *VOCABULARY])}
    tokenizer_of_words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer_of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of_words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model():
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


class Log(transformers.TrainerCallback):
    """The log of a Trainer that logs each step."""

    def on_step_begin(self, args, state, control, **kwargs):
        begin_step()
        time.sleep(SECONDS)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
            end_step(logs["loss"], samples)

    def on_epoch_end(self, args, state, control, **kwargs):
        log("epoch")

    def on_save(self, args, state, control, **kwargs):
        log("save")


ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "use_cpu": True,
    "report_to": [],
    "save_steps": 10,
    "max_steps": 20,
    "learning_rate": 1e-3,
    "disable_tqdm": True,
    "bf16": False,
}
