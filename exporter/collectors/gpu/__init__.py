"""GPU collector in the sidecar, and the child process that calls NVML (`nvml`)."""
