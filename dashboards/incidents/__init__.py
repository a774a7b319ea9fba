"""Prometheus data set of training runs with incidents, over 24 minutes.

The data set uses a scrape interval of 15 seconds and the rules in `deploy/prometheus/rules`. The exporters, the ranks and
Prometheus are real processes; the GPUs are replayed. Fourteen nodes execute eleven runs: a healthy run of 64 ranks, nine small
runs with one incident each, and a small run that ends normally. `python -m dashboards.incidents --out DIR` executes the runs and
stores the data.
`python -m dashboards.incidents --out DIR --serve` starts a Prometheus server with the stored data, for screenshots of the
dashboards.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Incident(enum.Enum):
    """Incidents of the runs. The value is the name of the run with the incident; two runs have no incident."""

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
    FINISHED = "finished"  # no incident; the run ends normally before the end of the data set


@dataclass(frozen=True, slots=True)
class EventTimes:
    """Times of events in seconds since the start of the data set."""

    incident_start: float = 480.0  # start of all incidents
    nan_end: float = 510.0  # first finite loss after the NaN losses
    exporter_restart: float = 540.0  # restart of the killed exporter
    killed_run_restart: float = 555.0  # restart of the killed run; its first step starts 15 s later
    finished_run_end: float = 660.0  # end of the run that ends normally
    end: float = 1440.0  # end of the data set


TIMES = EventTimes()


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """Ranks of a run on one node."""

    incident: Incident
    node: str
    ranks: range
    first_gpu: int = 0  # index of the first rank's GPU; the next ranks have the next GPUs

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.incident.value


NODE_RANKS = (
    *(
        NodeRanks(Incident.HEALTHY, f"gpu-{index + 1:02d}", range(8 * index, 8 * index + 8))
        for index in range(8)
    ),
    NodeRanks(Incident.STRAGGLER, "gpu-09", range(4)),
    NodeRanks(Incident.XID_ECC, "gpu-09", range(2), first_gpu=4),
    NodeRanks(Incident.LOST_CARD, "gpu-10", range(2)),
    NodeRanks(Incident.LOADER_STALL, "gpu-10", range(2), first_gpu=4),
    NodeRanks(Incident.NAN_LOSS, "gpu-11", range(2)),
    NodeRanks(Incident.FAILING_SAVES, "gpu-11", range(2), first_gpu=4),
    NodeRanks(Incident.HANG, "gpu-12", range(2)),
    NodeRanks(Incident.KILLED, "gpu-12", range(2), first_gpu=4),
    NodeRanks(Incident.EXPORTER_DOWN, "gpu-13", range(2)),
    NodeRanks(Incident.FINISHED, "gpu-13", range(2), first_gpu=4),
    NodeRanks(Incident.EXPORTER_DOWN, "gpu-14", range(2, 4)),
)


def world_size(incident: Incident) -> int:
    """Return the number of ranks of the run with an incident."""
    return sum(len(node_ranks.ranks) for node_ranks in NODE_RANKS if node_ranks.incident is incident)
