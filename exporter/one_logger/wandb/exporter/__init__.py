"""Exporter to Weights & Biases. Same layout as `nv_one_logger.wandb.exporter`."""
