"""Exporter to Weights & Biases: compatibility module for `nv_one_logger.wandb.exporter`."""
