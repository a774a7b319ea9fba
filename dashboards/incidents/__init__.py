"""Session of 24 minutes: training runs with incidents, for screenshots of the dashboards.

Eleven training runs use fourteen nodes: a healthy run of 64 ranks, nine small runs with one incident each, and a small run that
ends before its step target. The exporters, the ranks and Prometheus are real processes. The exporters replay the GPUs from machine
descriptions. Prometheus has a scrape interval of 15 seconds and the rules in `deploy/prometheus/rules`.

`python -m dashboards.incidents --out DIR` runs the session and stores the data of Prometheus. With `--serve`, the command starts a
Prometheus server with the stored data instead.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SessionRun(enum.Enum):
    """Runs of the session. The value is the name of the run, which describes its incident, if it has one."""

    HEALTHY = "healthy"  # no incident
    STRAGGLER = "straggler"  # heat throttles the GPU of one rank
    XID_ECC = "xid-ecc"  # a GPU has Xids 48 and 63, and uncorrected ECC errors
    LOST_GPU = "lost-gpu"  # with Xid 79, the driver reports the GPU as lost
    LOADER_STALL = "loader-stall"  # the ranks wait for data for 60 % of the time
    NAN_LOSS = "nan-loss"  # the loss and the gradient norm are NaN for half a minute
    FAILING_SAVES = "failing-saves"  # every save of a checkpoint after the start of the incidents fails
    HANG = "hang"  # rank 1 hangs in the forward pass
    KILLED = "killed"  # rank 1 is killed, rank 0 is terminated, and both restart
    EXPORTER_DOWN = "exporter-down"  # the exporter of one of two nodes is down for a minute
    FINISHED = "finished"  # the run ends before its step target: the column *What is wrong* of *Fleet* shows `finished early`


@dataclass(frozen=True, slots=True)
class EventTimes:
    """Times of events, in seconds since the start of the session."""

    incident_start_seconds: float = 480.0  # start of all incidents
    nan_end_seconds: float = 510.0  # first finite loss after the NaN losses
    exporter_restart_seconds: float = 540.0  # restart of the killed exporter
    killed_run_restart_seconds: float = 555.0  # restart of the ranks of the run `killed`
    finished_run_end_seconds: float = 660.0  # end of the run `finished`
    end_seconds: float = 1440.0


TIMES = EventTimes()
FIRST_STEP_SECONDS = 15.0
"""Seconds from the start of the session, or from the restart of the killed run, to the first step."""


@dataclass(frozen=True, slots=True)
class RunPlacement:
    """Consecutive ranks of a run on one node."""

    run: SessionRun
    node: str
    ranks: range
    first_gpu: int = 0  # index of the first rank's GPU; the next ranks have the next GPUs

    @property
    def gpus(self) -> range:
        """Indexes of the GPUs, in the order of the ranks."""
        return range(self.first_gpu, self.first_gpu + len(self.ranks))


PLACEMENTS = (
    *(
        RunPlacement(SessionRun.HEALTHY, f"gpu-{index + 1:02d}", range(8 * index, 8 * index + 8))
        for index in range(8)
    ),
    RunPlacement(SessionRun.STRAGGLER, "gpu-09", range(4)),
    RunPlacement(SessionRun.XID_ECC, "gpu-09", range(2), first_gpu=4),
    RunPlacement(SessionRun.LOST_GPU, "gpu-10", range(2)),
    RunPlacement(SessionRun.LOADER_STALL, "gpu-10", range(2), first_gpu=4),
    RunPlacement(SessionRun.NAN_LOSS, "gpu-11", range(2)),
    RunPlacement(SessionRun.FAILING_SAVES, "gpu-11", range(2), first_gpu=4),
    RunPlacement(SessionRun.HANG, "gpu-12", range(2)),
    RunPlacement(SessionRun.KILLED, "gpu-12", range(2), first_gpu=4),
    RunPlacement(SessionRun.EXPORTER_DOWN, "gpu-13", range(2)),
    RunPlacement(SessionRun.FINISHED, "gpu-13", range(2), first_gpu=4),
    RunPlacement(SessionRun.EXPORTER_DOWN, "gpu-14", range(2, 4)),
)


def world_size(run: SessionRun) -> int:
    """Return the number of ranks of a run."""
    return sum(len(placement.ranks) for placement in PLACEMENTS if placement.run is run)
