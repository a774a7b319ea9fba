"""Incidents of training runs over 24 minutes, with a scrape interval of 15 seconds and the rules of `deploy/prometheus/rules`.

The exporters, the ranks and Prometheus are real processes; the GPUs are replayed. Fourteen nodes execute a healthy run of 64
ranks and ten small runs with one incident each. `python -m dashboards.incidents --out DIR` executes the runs and stores the
data; `--serve` starts a Prometheus server with the stored data, for pictures of the dashboards.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Incident(enum.Enum):
    """Incident of a run; the value is the name of the run."""

    NONE = "healthy"
    STRAGGLER = "straggler"  # heat throttles the GPU of one rank
    XID = "xid-ecc"  # Xid 48 with uncorrected ECC errors
    LOST_CARD = "lost-card"  # Xid 79 and a lost GPU
    LOADER = "loader-stall"  # the ranks wait for data for 60 % of the time
    NAN = "nan-loss"  # the loss is NaN for half a minute
    SAVES = "failing-saves"  # every checkpoint fails
    HANG = "hang"  # one rank hangs in the forward pass
    KILL = "killed"  # a rank is killed, and all ranks restart
    EXPORTER = "exporter-down"  # the exporter of a node is down for a minute
    FINISHED = "finished"  # the run ends normally


@dataclass(frozen=True, slots=True)
class Times:
    """Times of events in seconds since the start of the scenario."""

    incident: float = 480.0  # start of all incidents
    nan_end: float = 510.0  # first finite loss after the NaN losses
    exporter_restart: float = 540.0  # restart of the killed exporter
    run_restart: float = 555.0  # restart of the killed run
    run_end: float = 660.0  # end of the run that ends normally
    end: float = 1440.0  # end of the scenario


TIMES = Times()


@dataclass(frozen=True, slots=True)
class RunPart:
    """Ranks of a run on one node."""

    incident: Incident
    node: str
    ranks: range
    first_gpu: int = 0  # index of the first rank's GPU; the next ranks have the next GPUs

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.incident.value


RUN_PARTS = (
    *(RunPart(Incident.NONE, f"gpu-{index + 1:02d}", range(8 * index, 8 * index + 8)) for index in range(8)),
    RunPart(Incident.STRAGGLER, "gpu-09", range(4)),
    RunPart(Incident.XID, "gpu-09", range(2), 4),
    RunPart(Incident.LOST_CARD, "gpu-10", range(2)),
    RunPart(Incident.LOADER, "gpu-10", range(2), 4),
    RunPart(Incident.NAN, "gpu-11", range(2)),
    RunPart(Incident.SAVES, "gpu-11", range(2), 4),
    RunPart(Incident.HANG, "gpu-12", range(2)),
    RunPart(Incident.KILL, "gpu-12", range(2), 4),
    RunPart(Incident.EXPORTER, "gpu-13", range(2)),
    RunPart(Incident.FINISHED, "gpu-13", range(2), 4),
    RunPart(Incident.EXPORTER, "gpu-14", range(2, 4)),
)


def world_size(incident: Incident) -> int:
    """Return the number of ranks of a run."""
    return sum(len(part.ranks) for part in RUN_PARTS if part.incident is incident)
