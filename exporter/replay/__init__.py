"""Described machines: GPUs that are played in place of NVIDIA's library, below the real binding."""
