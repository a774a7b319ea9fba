"""Parts of training jobs of Hugging Face Transformers: examples and a Trainer of a small model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def examples(count: int) -> list[dict[str, Any]]:
    """Return examples of eight random tokens."""
    return [
        {"input_ids": torch.randint(0, 64, (8,)), "labels": torch.randint(0, 64, (8,))} for _ in range(count)
    ]


def small_trainer(
    dataset: Any = None, cls: Any = Trainer, callbacks: Sequence[Any] = (), **options: Any
) -> Any:
    """Return a Trainer on the CPU, by default of twelve examples in batches of two."""
    defaults = {"per_device_train_batch_size": 2, "save_strategy": "no", "logging_steps": 1}
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir="."),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{**defaults, **options},
    )
    configuration = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return cls(
        LlamaForCausalLM(configuration),
        arguments,
        train_dataset=examples(12) if dataset is None else dataset,
        eval_dataset=examples(6),
        callbacks=[*callbacks],
    )


def recorded_trainer(dataset: Any = None, cls: Any = Trainer, **options: Any) -> Any:
    """Return a Trainer with the callback of the bridge."""
    from exporter.bridges import transformers as bridge

    return small_trainer(dataset, cls, [bridge.callback()], **options)
