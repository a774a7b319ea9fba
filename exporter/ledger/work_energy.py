"""Work energy: what the energy of one run went into, by phase and by what became of the work.

Runs in the sidecar, on the energy ledger's thread; arithmetic and rows, no I/O. Whatever energy a run is given is split
here, so that both sums are the run's energy at every moment:

    energy = phases + unattributed
           = productive + wasted by cause + that of uncommitted work

The energy of an interval is split by the time in each phase, and where the powers are known by time times power
(`phase_power`); never by what a counter shows at the edges of phases. Energy of work waits in a pool until goodput says
what has become of that work: the share of the uncommitted seconds that has become productive, or was lost, takes the
same share of the pool with it. What is left of it when the run begins another task was lost.

    ("pool",)                 joules of uncommitted work
    ("flow", session)         productive, lost and hung seconds that have been taken out of it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from exporter.collectors.keeping import Rows
from exporter.ledger.attempts import CAUSE_OF_PHASE, CAUSES, WORK_PHASES
from exporter.ledger.work_use import Flows, ProcessWork

UNATTRIBUTED = "unattributed"
REGRESSION, TIME_SHARE = "regression", "time_share"


class WorkEnergy:
    """The split of one run.

    Args:
        add: Adds joules to a counter, by its name; with 0 the counter begins.

    Attributes:
        changed: Whether there is something that was not yet saved.
    """

    def __init__(self, add: Callable[..., None]) -> None:
        self.changed = False
        self._add = add
        self._began = False
        self._pool = 0.0
        self._flow: tuple[str, float, float, float] | None = None
        self._validates = False
        self._before: dict[str, Mapping[str, float]] = {}
        self._spent: dict[str, tuple[ProcessWork, dict[str, float], bool]] = {}

    @property
    def session(self) -> str:
        """Whose work it was last; "" before that is known."""
        return "" if self._flow is None else self._flow[0]

    def begin(self, processes: Sequence[ProcessWork]) -> None:
        """Take what the processes of the run have done since the last division."""
        self._spent = {}
        for each in processes:
            before = self._before.get(each.process, {})
            spent = {
                phase: seconds - before.get(phase, 0.0)
                for phase, seconds in each.phases.items()
                if seconds > before.get(phase, 0.0)
            }
            self._spent[each.process] = each, spent, each.process in self._before
        self._before = {each.process: each.phases for each in processes}
        if processes and not self._began:
            self._began = True
            self._add(0.0, "productive")
            for cause in CAUSES:
                self._add(0.0, "wasted", cause)

    def split(self, component: str, device: str, joules: float, seconds: float) -> None:
        """Split what the run has used of one device since the last division.

        Args:
            component: What the device belongs to.
            device: Its name.
            joules: The run's share.
            seconds: Since the last division.
        """
        if not self._began:
            return
        process, spent, known = self._of(device)
        total = sum(spent.values())
        covered = 0.0 if total <= 0 else 1.0 if known else min(1.0, total / seconds) if seconds > 0 else 0.0
        rest = joules
        if process is not None and covered > 0:
            watts = process.watts if process.device == device else None
            method = TIME_SHARE if watts is None else REGRESSION
            weights = _weights(spent, watts)
            whole = sum(weights.values())
            for phase, weight in weights.items():
                part = joules * covered * weight / whole
                rest -= part
                self._add(part, "phase", phase, component, method)
                self._use(phase, part)
        rest = max(0.0, rest)
        self._add(rest, "phase", UNATTRIBUTED, component, TIME_SHARE)
        self._add(rest, "wasted", "other")

    def settle(self, flows: Flows | None) -> None:
        """Take out of the pool what is known by now not to be in it."""
        if flows is None:
            return
        self._validates = flows.validates
        now = (flows.session, flows.productive, flows.lost, flows.hung)
        before, self._flow = self._flow, now
        self.changed = self.changed or before != now
        if before is not None and before[0] != now[0]:
            # Another task has begun: whatever the one before had not saved, nobody goes on with it here.
            self._add(self._pool, "wasted", "lost_progress")
            self._pool = 0.0
            return
        if before is None or any(new < old for new, old in zip(now[1:], before[1:], strict=True)):
            return
        productive, lost, hung = (new - old for new, old in zip(now[1:], before[1:], strict=True))
        gone = productive + lost + hung
        if gone <= 0:
            return
        per_second = self._pool / (gone + flows.uncommitted)
        self._pool = max(0.0, self._pool - gone * per_second)
        self._add(productive * per_second, "productive")
        self._add(lost * per_second, "wasted", "lost_progress")
        self._add(hung * per_second, "wasted", "hang")

    def rows(self) -> Rows:
        """Write what is not a counter."""
        if not self._began:
            return {}
        rows: Rows = {("pool",): (self._pool,)}
        if self._flow is not None:
            rows["flow", self._flow[0]] = self._flow[1:]
        return rows

    def resume(self, name: tuple[str, ...], values: Sequence[float | None]) -> None:
        """Go on from a row of `rows`; others are passed over."""
        numbers = [value for value in values if value is not None]
        if name == ("pool",) and numbers:
            self._began = True
            self._pool += numbers[0]
        elif len(name) == 2 and name[0] == "flow" and len(numbers) == 3 and self._flow is None:
            self._flow = name[1], numbers[0], numbers[1], numbers[2]

    def _of(self, device: str) -> tuple[ProcessWork | None, dict[str, float], bool]:
        """Find the process that has done the most to a device: the one that holds it, else the lowest rank."""
        if not self._spent:
            return None, {}, False
        holders = [each for each in self._spent.values() if each[0].device == device]
        return next(iter(holders or self._spent.values()))

    def _use(self, phase: str, joules: float) -> None:
        if phase in WORK_PHASES:
            self._pool += joules
            self.changed = True
            return
        cause = CAUSE_OF_PHASE.get(phase, "other")
        if cause == "validation" and self._validates:
            self._add(joules, "productive")
        else:
            self._add(joules, "wasted", cause)


def _weights(spent: Mapping[str, float], watts: Mapping[str, float] | None) -> Mapping[str, float]:
    if watts is None:
        return spent
    known = sum(spent[phase] for phase in spent if phase in watts)
    mean = (
        sum(seconds * watts.get(phase, 0.0) for phase, seconds in spent.items()) / known if known > 0 else 0.0
    )
    weights = {phase: seconds * watts.get(phase, mean) for phase, seconds in spent.items()}
    return weights if sum(weights.values()) > 0 else spent
