"""What state each run is in, and why.

Runs in the sidecar, on the ledger's collecting thread. The processes of all ranks and what `run` has seen of their ends
come in; a state set and its reason go out, for as long as anything of the run is shown. How a run has ended is kept in
the ledger's state, so that it is still told after a restart of the sidecar.

| state      | when                                                                                                  |
|------------|-------------------------------------------------------------------------------------------------------|
| `starting` | lives, and no step has ended yet; the first one may compile                                           |
| `running`  | lives, and steps end, or it has ended its training loop                                               |
| `stalled`  | no step for long, while it waits for data, saves, loads or validates; or its feed is not refreshed    |
| `hung`     | no step for long, within the step: longer than `goodput.hang_after` and ten usual steps               |
| `stopped`  | ended by SIGINT or SIGTERM, or by its user                                                            |
| `finished` | ended with status 0; without `run`: the process exited normally                                       |
| `failed`   | ended with another status, by another signal, or by an exception                                      |
| `lost`     | killed or crashed, and nobody saw how                                                                 |
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from prometheus_client.core import Metric

from exporter.errors import StateError
from exporter.families import FamilySpec, family
from exporter.ledger import codec
from exporter.ledger.goodput.ends import Ends
from exporter.ledger.ranks import Ranks
from exporter.ledger.store import StateKey, StateStore
from exporter.ledger.totals import Moment, Process
from exporter.ledger.visible import LONG_PHASES, GapRules

STATES = ("starting", "running", "stalled", "hung", "stopped", "finished", "failed", "lost")
ENDED = frozenset({"stopped", "finished", "failed", "lost"})
STATUS_SECONDS = 60.0
"""How long after the end of a process its exit status is still looked for."""
_WAITING = LONG_PHASES | {"data_loading"}
_STOPS = frozenset({-signal.SIGINT, -signal.SIGTERM})

STATE = family(
    "training_run_state",
    "1 for the state that the run is in, 0 for the others: starting, running, stalled (no step for long while it waits"
    " for data, saves or validates, or its feed is not refreshed), hung (no step for long), stopped (by SIGINT, SIGTERM"
    " or its user), finished, failed, lost (killed or crashed, and nobody saw how). Absent when nothing of the run"
    " lingers, and on nodes without rank 0.",
    "processes of the run, exit status seen by `run`",
    *("run", "state"),
)
INFO = FamilySpec(
    "training_run_state_info",
    "gauge",  # as an info family it would have the name of the other one
    "Why the run is in its state, and since when (Unix time): exit status, signal or exception where they are known;"
    " a reason that begins with `deduced` was seen by nobody. Absent as training_run_state.",
    ("run", "state", "reason", "exit_status", "signal", "exception", "since"),
    source="see training_run_state",
)
SPECS = (STATE, INFO)


@dataclass(slots=True)
class RunState:
    """The state of one run."""

    run: str
    state: str  # one of `STATES`
    reason: str = ""  # for people
    exit_status: str = ""  # of the job, where somebody saw it and it ended by no signal
    signal: str = ""  # that ended it
    exception: str = ""  # that ended it
    since: float = field(default=0.0, compare=False)  # Unix time
    process: str = ""  # by whose end it was found; "" while it lives
    settled: bool = field(default=True, compare=False, metadata=codec.NOT_KEPT)  # it can no longer change


class RunStates:
    """Follows the state of every run; an end is told for `linger_seconds`, also after a restart of the sidecar."""

    def __init__(self, state: StateStore, ends: Ends, *, linger_seconds: float) -> None:
        self._state = state
        self._ends = ends
        self._linger_seconds = linger_seconds
        self._runs: dict[str, RunState] = {}
        self._resumed = False

    def update(self, ranks: Ranks, rules: GapRules, now: Moment) -> list[str]:
        """Look at all runs; give why an end could not be kept, a sentence for each run."""
        if ranks.owner and not self._resumed:
            self._resumed = True
            self._resume()
        problems: list[str] = []
        runs: dict[str, list[Process]] = {}
        for process in ranks.processes():
            runs.setdefault(process.identity.run, []).append(process)
        for run, processes in runs.items():
            if all((each.identity.rank or 0) > 0 for each in processes):
                continue
            before = self._runs.get(run)
            found = self._look(processes, before, rules, now)
            if found == before:
                assert before is not None  # noqa: S101  # something was found
                before.settled = found.settled
                continue
            self._runs[run] = found
            if ranks.owner and found.state in ENDED:
                problems += self._keep(found)
        self._runs = {run: each for run, each in self._runs.items() if run in runs}
        return problems

    def families(self, shown: Collection[str]) -> list[Metric]:
        """Fill the families, of the runs of which anything is shown."""
        runs = [each for run, each in self._runs.items() if run in shown]
        states: dict[tuple[str, ...], float] = {
            (found.run, each): float(each == found.state) for found in runs for each in STATES
        }
        infos: dict[tuple[str, ...], float] = {}
        for each in runs:
            told = (each.run, each.state, each.reason, each.exit_status, each.signal, each.exception)
            infos.update({(*told, str(round(each.since))): 1.0})
        return [STATE.family(states), INFO.family(infos)] if runs else []

    def _resume(self) -> None:
        """Learn how runs ended that ended a short while ago."""
        try:
            for key in self._state.recent("state", self._linger_seconds):
                found = self._state.load(key, lambda content: codec.loads(RunState, content))
                if found is not None:
                    self._runs[found.run] = found
        except StateError:
            self._resumed = False

    def _keep(self, found: RunState) -> list[str]:
        key: StateKey = ("state", found.run, self._state.keeper)
        try:
            if self._state.claim(key):
                self._state.save(key, codec.dumps(found))
        except StateError as error:
            return [str(error)]
        finally:
            self._state.release(key)
        return []

    def _look(
        self, processes: list[Process], before: RunState | None, rules: GapRules, now: Moment
    ) -> RunState:
        """Tell the state of a run."""
        run = processes[0].identity.run
        trainers = [each for each in processes if each.identity.rank is not None] or processes
        living = [each for each in trainers if each.living]
        if living:
            return _living(
                run,
                min(
                    living, key=lambda each: (not each.trains, each.identity.rank or 0, each.identity.started)
                ),
                rules,
                now,
            )
        lowest = min(each.identity.rank or 0 for each in trainers)
        last = max(
            (each for each in trainers if (each.identity.rank or 0) == lowest),
            key=lambda each: (each.identity.started, each.departed or 0.0),
        )
        if before is not None and before.process == last.identity.id and before.settled:
            return before
        found = self._ended(run, last)
        late = now.monotonic - last.departed_monotonic > STATUS_SECONDS
        return replace(found, settled=late or not found.reason.startswith("deduced"))

    def _ended(self, run: str, process: Process) -> RunState:
        """Tell how a run has ended, from all that is known of its last process."""
        at, identity, snapshot = process.departed or 0.0, process.identity, process.snapshot
        own = self._ends.own(identity.pid, identity.started, at)
        job = own or self._ends.job(run, identity.started, at)
        exception = "" if snapshot is None or snapshot.ending is None else snapshot.ending.exception
        failure = "" if process.training is None else process.training.failure
        found = RunState(run, "lost", exception=exception, since=at, process=identity.id)
        if job is not None:
            found.since = min(at, job.at)
        if job is not None and job.status < 0:
            try:
                found.signal = signal.Signals(-job.status).name
            except ValueError:
                found.signal = str(-job.status)
            found.state, found.reason = (
                "stopped" if job.status in _STOPS else "failed",
                f"signal {found.signal}",
            )
        elif job is not None and job.status > 0:
            found.state, found.exit_status = "failed", str(job.status)
            found.reason = f"exit status {job.status}" + (f", {exception}" if exception else "")
        elif job is not None and (own is not None or process.final or snapshot is None):
            found.state, found.reason, found.exit_status, found.exception = (
                "finished",
                "exit status 0",
                "0",
                "",
            )
        elif exception or failure:
            found.state = "stopped" if failure in {"user", "preemption"} else "failed"
            found.reason = f"exception {exception}" if exception else f"told: {failure}"
        elif process.final:
            found.state, found.reason = "finished", "deduced: the process exited normally"
        else:
            found.reason = "deduced: the process was killed or crashed"
        return found


def _living(run: str, process: Process, rules: GapRules, now: Moment) -> RunState:
    reading, started = process.training, process.identity.started
    if process.snapshot is not None and not rules.fresh(process):
        since = now.wall - process.age_seconds
        return RunState(run, "stalled", "its feed is not refreshed: stopped, or starved", since=since)
    late = rules.without_step(process, now)
    if reading is not None and late is not None:
        state = "stalled" if reading.phase in _WAITING else "hung"
        return RunState(run, state, f"no step has ended, phase {reading.phase}", since=now.wall - late)
    if process.identity.rank is None:
        return RunState(run, "starting", "no process trains yet", since=started)
    if reading is None:
        return RunState(run, "running", "its training is not told", since=started)
    if reading.steps == 0 and reading.last_progress is None and not reading.finished:
        return RunState(run, "starting", "no step has ended yet", since=started)
    return RunState(run, "running", since=now.wall)
