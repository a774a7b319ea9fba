"""torchelastic's metrics and events, name for name: swap `torch.distributed.elastic` for `exporter.elastic`.

Used in the training process and in torchrun's agent. Standard library only: torch is neither imported nor needed.
"""
