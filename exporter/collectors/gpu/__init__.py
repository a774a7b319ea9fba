"""The GPUs: a collector in the sidecar, and the process beside it that calls NVIDIA's library (`nvml`)."""
