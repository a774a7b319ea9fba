"""Default thresholds of the alert rules that conditions of the status page use; a test compares them with rules/thresholds.yml."""

STARTUP_SECONDS = 1800.0
STRAGGLER_RATIO = 0.75
SLOWER_RATIO = 0.8
DATA_STALL_RATIO = 0.2
CHECKPOINT_OVERDUE_INTERVALS = 3.0
CHECKPOINT_HANG_RATIO = 10.0
GPU_IDLE_RATIO = 0.05
GPU_STRAGGLER_RATIO = 0.8
CGROUP_MEMORY_RATIO = 0.9

THRESHOLDS = {
    "threshold:training_startup:seconds": STARTUP_SECONDS,
    "threshold:training_straggler:ratio": STRAGGLER_RATIO,
    "threshold:training_slower:ratio": SLOWER_RATIO,
    "threshold:training_data_stall:ratio": DATA_STALL_RATIO,
    "threshold:training_checkpoint_overdue:intervals": CHECKPOINT_OVERDUE_INTERVALS,
    "threshold:training_checkpoint_hang:ratio": CHECKPOINT_HANG_RATIO,
    "threshold:gpu_idle:ratio": GPU_IDLE_RATIO,
    "threshold:gpu_straggler:ratio": GPU_STRAGGLER_RATIO,
    "threshold:cgroup_memory:ratio": CGROUP_MEMORY_RATIO,
}
"""Threshold by series name. The sidecar does not read the thresholds that a site has changed in Prometheus."""
