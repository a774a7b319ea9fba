"""Replay of described GPU machines below the pynvml binding, in place of NVIDIA's library."""
