"""Incidents of training runs over 24 minutes, with a scrape interval of 15 seconds and the shipped rules.

Real exporters and processes, a real Prometheus and replayed GPUs. Fourteen machines run a healthy job of 64 ranks and ten
small jobs with an incident each. `python -m dashboards.incidents --out DIR` plays the incidents and stores the data;
`--serve` starts a Prometheus with stored data, for drawing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Incident(enum.Enum):
    """Incident of a run."""

    NONE = "healthy"
    STRAGGLER = "straggler"  # the GPU of a rank throttles for heat
    XID = "xid-ecc"  # Xid 48 with uncorrected ECC errors
    LOST_CARD = "lost-card"  # Xid 79 and a lost GPU
    LOADER = "loader-stall"  # 60 % of the time waits for data
    NAN = "nan-loss"  # losses that are NaN for half a minute
    SAVES = "failing-saves"  # every checkpoint fails
    HANG = "hang"  # a rank stops within its forward pass
    KILL = "killed"  # a rank is killed, and all ranks restart
    EXPORTER = "exporter-down"  # the exporter of a node is down for a minute
    FINISHED = "finished"  # the job ends in order


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since the start of the scenario."""

    incident: float = 480.0  # each incident begins
    nan_end: float = 510.0  # the losses are finite again
    exporter_back: float = 540.0  # restart of the killed exporter
    restart: float = 555.0  # restart of the killed run
    finished: float = 660.0  # the finished run ends
    end: float = 1440.0  # the scenario ends


TIMES = Times()


@dataclass(frozen=True, slots=True)
class Part:
    """Ranks of a run on one machine."""

    incident: Incident
    node: str
    ranks: range
    first_gpu: int = 0

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.incident.value


PARTS = (
    *(Part(Incident.NONE, f"gpu-{place + 1:02d}", range(8 * place, 8 * place + 8)) for place in range(8)),
    Part(Incident.STRAGGLER, "gpu-09", range(4)),
    Part(Incident.XID, "gpu-09", range(2), 4),
    Part(Incident.LOST_CARD, "gpu-10", range(2)),
    Part(Incident.LOADER, "gpu-10", range(2), 4),
    Part(Incident.NAN, "gpu-11", range(2)),
    Part(Incident.SAVES, "gpu-11", range(2), 4),
    Part(Incident.HANG, "gpu-12", range(2)),
    Part(Incident.KILL, "gpu-12", range(2), 4),
    Part(Incident.EXPORTER, "gpu-13", range(2)),
    Part(Incident.FINISHED, "gpu-13", range(2), 4),
    Part(Incident.EXPORTER, "gpu-14", range(2, 4)),
)


def world_size(incident: Incident) -> int:
    """Return the number of ranks of a run."""
    return sum(len(part.ranks) for part in PARTS if part.incident is incident)
