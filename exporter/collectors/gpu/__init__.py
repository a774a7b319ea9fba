"""GPU collector in the sidecar, and the child process that calls NVIDIA's library (`nvml`)."""
