"""What the processes of each run do, and what has become of it: for whoever divides energy by it.

Runs in the sidecar, values only: made on the ledger's collecting thread once a pass, read from any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Flows:
    """What has become of the work of a run, in seconds so far.

    Attributes:
        session: Whose; numbers of another one cannot be compared with these.
        productive: Work that is safe, validation left out.
        lost: Work that was lost.
        hung: Work that hung.
        uncommitted: Work of which neither is known yet.
        validates: Whether validation is productive.
    """

    session: str
    productive: float
    lost: float
    hung: float
    uncommitted: float
    validates: bool


@dataclass(frozen=True, slots=True)
class ProcessWork:
    """What one process does.

    Attributes:
        run: Its run.
        rank: Its rank.
        process: Its id.
        phases: Seconds in each phase so far.
        device: UUID of the GPU that it alone holds; "" where there is none such.
    """

    run: str
    rank: int
    process: str
    phases: Mapping[str, float]
    device: str = ""


@dataclass(frozen=True, slots=True)
class WorkUse:
    """What all processes do that tell of it.

    Attributes:
        processes: Of one run those of lower ranks first.
        flows: What has become of the work, by run.
    """

    processes: tuple[ProcessWork, ...] = ()
    flows: Mapping[str, Flows] = field(default_factory=dict)

    def flow(self, run: str, session: str) -> Flows | None:
        """Tell what has become of the work of a run, which its session may have gone on with under another name."""
        own = self.flows.get(run)
        if own is None and session:
            return next((each for each in self.flows.values() if each.session == session), None)
        return own
