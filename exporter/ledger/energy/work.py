"""What the processes of each run do, and what has become of it: for whoever divides energy by it.

Runs in the sidecar, values only: made on the ledger's collecting thread once a pass, read from any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Flows:
    """What has become of the work of a run, in seconds so far."""

    session: str  # whose; numbers of another one cannot be compared with these
    productive: float  # safe, validation left out
    lost: float
    hung: float
    uncommitted: float
    validates: bool  # validation is productive


@dataclass(frozen=True, slots=True)
class ProcessWork:
    """What one process does."""

    run: str
    rank: int
    process: str
    phases: Mapping[str, float]  # seconds in each so far
    device: str = ""  # UUID of the GPU that it alone holds


@dataclass(frozen=True, slots=True)
class WorkUse:
    """What all processes do that tell of it, of one run those of lower ranks first, and what has become of the work."""

    processes: tuple[ProcessWork, ...] = ()
    flows: Mapping[str, Flows] = field(default_factory=dict)

    def flow(self, run: str, session: str) -> Flows | None:
        """Tell what has become of the work of a run, which its session may have gone on with under another name."""
        own = self.flows.get(run)
        if own is None and session:
            return next((each for each in self.flows.values() if each.session == session), None)
        return own
