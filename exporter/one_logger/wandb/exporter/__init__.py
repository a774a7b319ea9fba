"""Exporter to Weights & Biases. The layout is that of `nv_one_logger.wandb.exporter`."""
