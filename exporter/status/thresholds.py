"""Thresholds of the conditions on the status page.

They are the defaults of the alert rules' thresholds in deploy/prometheus/rules/thresholds.yml. The sidecar does not read the thresholds
that a site has changed in Prometheus.
"""

STARTUP_SECONDS = 1800.0
"""Time from the start of a run to its first step."""
STRAGGLER_RATIO = 0.75
"""Compute time of the fastest rank of a pipeline stage, as a share of the compute time of a straggler in the stage."""
SLOWER_RATIO = 0.8
"""Throughput of a slower run, as a share of the run's throughput in the hour before."""
DATA_STALL_RATIO = 0.2
"""Share of the wall time in which a run waits for data."""
CHECKPOINT_OVERDUE_INTERVALS = 3.0
"""Time since the last checkpoint, in usual intervals between checkpoints."""
CHECKPOINT_HANG_RATIO = 10.0
"""Duration of a hanging save, as a multiple of the usual duration."""
GPU_IDLE_RATIO = 0.05
"""Share of the time in which an idle GPU is busy."""
GPU_STRAGGLER_RATIO = 0.8
"""SM clock, power or SM activity of a slow GPU, as a share of the median of the run's GPUs."""
CGROUP_MEMORY_RATIO = 0.9
"""Memory of a cgroup that is almost full, as a share of the limit."""

THRESHOLD_BY_SERIES = {
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
"""Threshold by the name of its series in thresholds.yml, with which a test compares the thresholds."""
