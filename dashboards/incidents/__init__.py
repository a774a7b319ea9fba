"""Prometheus data set of training runs with incidents, over 24 minutes.

The data set uses a scrape interval of 15 seconds and the rules in `deploy/prometheus/rules`. The exporters, the ranks and
Prometheus are real processes; the GPUs are replayed. Fourteen nodes execute eleven runs: a healthy run of 64 ranks, nine small
runs with one incident each, and a small run that ends normally before its step target. `python -m dashboards.incidents --out DIR` executes the runs and
stores the data.
`python -m dashboards.incidents --out DIR --serve` starts a Prometheus server with the stored data, for screenshots of the
dashboards.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DemoRun(enum.Enum):
    """Runs of the data set. The value is the name of the run, which describes its incident."""

    HEALTHY = "healthy"  # no incident
    STRAGGLER = "straggler"  # heat throttles the GPU of one rank
    XID_ECC = "xid-ecc"  # Xid 48 with uncorrected ECC errors
    LOST_CARD = "lost-card"  # Xid 79 and a lost GPU
    LOADER_STALL = "loader-stall"  # the ranks wait for data for 60 % of the time
    NAN_LOSS = "nan-loss"  # the loss is NaN for half a minute
    FAILING_SAVES = "failing-saves"  # every checkpoint after the start of the incidents fails
    HANG = "hang"  # a rank hangs in the forward pass
    KILLED = "killed"  # a rank is killed, and all ranks restart
    EXPORTER_DOWN = "exporter-down"  # the exporter of a node is down for a minute
    FINISHED = "finished"  # the run ends normally, before its step target and before the end of the data set


@dataclass(frozen=True, slots=True)
class EventTimes:
    """Times of events in seconds since the start of the data set."""

    incident_start_seconds: float = 480.0  # start of all incidents
    nan_end_seconds: float = 510.0  # first finite loss after the NaN losses
    exporter_restart_seconds: float = 540.0  # restart of the killed exporter
    killed_run_restart_seconds: float = 555.0  # restart of the killed run; its first step starts 15 s later
    finished_run_end_seconds: float = 660.0  # end of the run that ends normally
    end_seconds: float = 1440.0  # end of the data set


TIMES = EventTimes()


@dataclass(frozen=True, slots=True)
class RunPlacement:
    """Consecutive ranks of a run on one node."""

    run: DemoRun
    node: str
    ranks: range
    first_gpu: int = 0  # index of the first rank's GPU; the next ranks have the next GPUs


PLACEMENTS = (
    *(
        RunPlacement(DemoRun.HEALTHY, f"gpu-{index + 1:02d}", range(8 * index, 8 * index + 8))
        for index in range(8)
    ),
    RunPlacement(DemoRun.STRAGGLER, "gpu-09", range(4)),
    RunPlacement(DemoRun.XID_ECC, "gpu-09", range(2), first_gpu=4),
    RunPlacement(DemoRun.LOST_CARD, "gpu-10", range(2)),
    RunPlacement(DemoRun.LOADER_STALL, "gpu-10", range(2), first_gpu=4),
    RunPlacement(DemoRun.NAN_LOSS, "gpu-11", range(2)),
    RunPlacement(DemoRun.FAILING_SAVES, "gpu-11", range(2), first_gpu=4),
    RunPlacement(DemoRun.HANG, "gpu-12", range(2)),
    RunPlacement(DemoRun.KILLED, "gpu-12", range(2), first_gpu=4),
    RunPlacement(DemoRun.EXPORTER_DOWN, "gpu-13", range(2)),
    RunPlacement(DemoRun.FINISHED, "gpu-13", range(2), first_gpu=4),
    RunPlacement(DemoRun.EXPORTER_DOWN, "gpu-14", range(2, 4)),
)


def world_size(run: DemoRun) -> int:
    """Return the number of ranks of a run."""
    return sum(len(placement.ranks) for placement in PLACEMENTS if placement.run is run)
