import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from exporter.bridges import transformers as transformers_bridge

tiny_sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **tiny_sizes))
tokens = torch.randint(0, 64, (64, 8))
dataset = [{"input_ids": sequence, "labels": sequence} for sequence in tokens]
arguments = TrainingArguments("output", max_steps=10, save_steps=5, report_to=[])
# The callback is not needed under `training-exporter run`.
Trainer(model, arguments, train_dataset=dataset, callbacks=[transformers_bridge.callback()]).train()
