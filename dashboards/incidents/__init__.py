"""Prometheus data set of training runs with incidents, over 24 minutes.

The data set uses a scrape interval of 15 seconds and the rules in `deploy/prometheus/rules`. The exporters, the ranks and
Prometheus are real processes; the GPUs are replayed. Fourteen nodes execute a healthy run of 64 ranks, nine small runs with
an incident each, and a small run that ends normally. `python -m dashboards.incidents --out DIR` executes the runs and stores
the data. `--serve` starts a Prometheus server with the stored data, for pictures of the dashboards.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RunScenario(enum.Enum):
    """Runs of the data set; most are named after their incident. The value is the name of the run."""

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
    FINISHED = "finished"  # the run ends normally before the end of the data set


@dataclass(frozen=True, slots=True)
class EventTimes:
    """Times of events in seconds since the start of the data set."""

    incident: float = 480.0  # start of all incidents
    nan_end: float = 510.0  # first finite loss after the NaN losses
    exporter_restart: float = 540.0  # restart of the killed exporter
    killed_run_restart: float = 555.0  # restart of the killed run
    finished_run_end: float = 660.0  # end of the run that ends normally
    end: float = 1440.0  # end of the data set


TIMES = EventTimes()


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """Ranks of a run on one node."""

    scenario: RunScenario
    node: str
    ranks: range
    first_gpu: int = 0  # index of the first rank's GPU; the next ranks have the next GPUs

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.scenario.value


NODE_RANKS = (
    *(
        NodeRanks(RunScenario.HEALTHY, f"gpu-{index + 1:02d}", range(8 * index, 8 * index + 8))
        for index in range(8)
    ),
    NodeRanks(RunScenario.STRAGGLER, "gpu-09", range(4)),
    NodeRanks(RunScenario.XID_ECC, "gpu-09", range(2), first_gpu=4),
    NodeRanks(RunScenario.LOST_CARD, "gpu-10", range(2)),
    NodeRanks(RunScenario.LOADER_STALL, "gpu-10", range(2), first_gpu=4),
    NodeRanks(RunScenario.NAN_LOSS, "gpu-11", range(2)),
    NodeRanks(RunScenario.FAILING_SAVES, "gpu-11", range(2), first_gpu=4),
    NodeRanks(RunScenario.HANG, "gpu-12", range(2)),
    NodeRanks(RunScenario.KILLED, "gpu-12", range(2), first_gpu=4),
    NodeRanks(RunScenario.EXPORTER_DOWN, "gpu-13", range(2)),
    NodeRanks(RunScenario.FINISHED, "gpu-13", range(2), first_gpu=4),
    NodeRanks(RunScenario.EXPORTER_DOWN, "gpu-14", range(2, 4)),
)


def world_size(scenario: RunScenario) -> int:
    """Return the number of ranks of a run."""
    return sum(len(node_ranks.ranks) for node_ranks in NODE_RANKS if node_ranks.scenario is scenario)
