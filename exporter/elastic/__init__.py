"""Compatibility modules of torchelastic's metrics and events: replace `torch.distributed.elastic` by `exporter.elastic`.

Used in the training process and in torchrun's agent. Does not need torch.
"""
