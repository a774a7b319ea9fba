"""Scenario of six nodes and two runs for the dashboards, with real exporters, processes and Prometheus, and replayed GPUs.

- `node-1` and `node-2` have eight H100 each. A run has two ranks on each of the two nodes; the run pauses, saves checkpoints,
  validates, records NaN gradients, has a straggler, crashes and restarts. On `node-2`, a GPU overheats, a second GPU has memory
  errors, and a third GPU is lost for an interval.
- `node-3` has no GPUs. The exporter of `node-3` is down for an interval.
- `node-4` has A100 in MIG mode.
- `node-5` and `node-6` have eight H100 each. The second run, the baseline without faults, has two ranks on each of the two nodes.

`cluster.Cluster` stops all processes on exit. If the parent is killed, the ranks exit because standard input closes; the
exporters and Prometheus continue to run.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SECONDS = 240.0
SITE_ENERGY = {
    "cpu_tdp_watts": 350,
    "cpu_idle_watts": 90,
    "pue": 1.12,
    "carbon_intensity": 344,
    "carbon_zone": "DE",
    "carbon_factor": "lifecycle",
    "carbon_kind": "average",
    "currency": "EUR",
    "electricity_price": 0.21,
    "gpu_hour_price": 2.4,
}
"""Energy settings of a fictional site, with the keys of the exporter's section `energy`: intensity in g/kWh, price in EUR per kWh."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Duration of the scenario, and times of events as fractions of the duration. A pair of fractions is an interval."""

    duration_seconds: float = DEFAULT_SECONDS
    pause_range: tuple[float, float] = (0.22, 0.29)  # the data loader delivers no batch
    straggler_start: float = 0.45  # until the crash, the GPU of the straggler overheats, and its rank is slow
    nan_start: float = 0.38  # the first NaN gradient
    memory_errors_start: float = 0.38  # `machine.MEMORY_ERROR_GPU`, which no rank uses, has memory errors
    lost_range: tuple[float, float] = (0.5, 0.66)  # `machine.LOST_GPU`, which no rank uses, is lost
    exporter_down_range: tuple[float, float] = (0.34, 0.46)  # the exporter of node-3 is down
    crash_time: float = 0.7  # a rank is killed
    downtime: float = 0.05  # time between the crash and the restart of the run
    save_times: tuple[float, ...] = (0.1, 0.2, 0.32, 0.44, 0.56, 0.66, 0.86, 0.95)  # checkpoints
    failing_save_time: float = 0.56  # the checkpoint that fails, a value of `save_times`
    validation_start: float = 0.36

    def to_seconds(self, fraction: float) -> float:
        """Convert a fraction of the duration to seconds since the start of the scenario."""
        return fraction * self.duration_seconds

    def is_paused(self, seconds: float) -> bool:
        """Return True if the data loader delivers no batch at this time."""
        return self.to_seconds(self.pause_range[0]) <= seconds < self.to_seconds(self.pause_range[1])

    def has_straggler(self, seconds: float) -> bool:
        """Return True if heat throttles the straggler's GPU at this time."""
        return self.to_seconds(self.straggler_start) <= seconds < self.to_seconds(self.crash_time)
