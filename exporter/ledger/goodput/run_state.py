"""State of each run: starting, running, stalled, hung, ending, or a final state; see docs/goodput.md."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from exporter.families import Collected, FamilySpec
from exporter.ledger.goodput.endings import Endings, follows
from exporter.ledger.goodput.hang import WAITING_PHASES
from exporter.ledger.goodput.outcome import EvidenceSource, Outcome
from exporter.ledger.totals import GapRules, Moment, ProcessTotals

LIVING_STATES = ("starting", "running", "stalled", "hung", "ending")
ENDED_STATES = ("stopped", "finished", "failed", "lost")
STATES = LIVING_STATES + ENDED_STATES

_STOP_SIGNALS = frozenset({-signal.SIGINT, -signal.SIGTERM})
_SIGNAL_NAMES = {member.value: member.name for member in signal.Signals}

_ABSENT = " Absent after the retention time of an ended run, and on nodes without rank 0."

STATE = FamilySpec(
    name="training_run_state",
    type="gauge",
    labels=("run", "state"),
    help="1 for the current state of the run, 0 for the others: starting (no step has ended), running, stalled (a step is"
    " overdue while the run waits for data, compiles, loads, saves or validates, or the feed is stale), hung (a step is"
    " overdue), ending (the processes ended, their outcome is not decided), stopped (by SIGINT, SIGTERM or its user),"
    " finished, failed, lost (killed or crashed, without an exit status)." + _ABSENT,
    source="processes of the run, exit status seen by `run` and by torchrun",
)
SINCE = FamilySpec(
    name="training_run_state_since_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=("run",),
    help="Unix time since which the run is in its state." + _ABSENT,
    source="see training_run_state",
)
OUTCOME = FamilySpec(
    name="training_run_outcome_info",
    type="info",
    labels=("run", "outcome", "reason", "exit_status", "signal", "exception"),
    help="How the run ended: exit status, signal or exception, as far as known; a reason that begins with `inferred` has no"
    " evidence. Absent before the end of the run, after the retention time of an ended run, and on nodes without rank 0.",
    source="see training_run_state",
)
SPECS = (STATE, SINCE, OUTCOME)


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run, with the start and the reason."""

    state: str  # a value of `STATES`
    since: float = field(default=0.0, compare=False)  # Unix time
    reason: str = ""  # text about the end of the run
    exit_status: str = ""
    signal: str = ""
    exception: str = ""


class RunStates:
    """States of all runs in the last pass, with the time of the last change."""

    def __init__(self) -> None:
        self._runs: dict[str, RunState] = {}

    def overdue(self) -> Mapping[str, RunState]:
        """Return the hung and stalled runs of the last pass."""
        return {run: state for run, state in self._runs.items() if state.state in {"hung", "stalled"}}

    def add_families(
        self,
        collected: Collected,
        processes: Iterable[ProcessTotals],
        shown: Collection[str],
        endings: Endings,
        rules: GapRules,
        now: Moment,
    ) -> None:
        """Add the families of the runs in *shown*, except on nodes that have only ranks other than 0."""
        runs: dict[str, list[ProcessTotals]] = {}
        for process in processes:
            if process.identity.run in shown:
                runs.setdefault(process.identity.run, []).append(process)
        previous, self._runs = self._runs, {}
        for run, run_processes in runs.items():
            if all(process.identity.rank for process in run_processes):
                continue
            state = _state(run_processes, endings, rules, now)
            # The time of a state is the time of the first pass in that state.
            state = self._runs[run] = previous[run] if previous.get(run) == state else state
            if all(process.identity.rank for process in _trainers(run_processes)):
                continue  # on a node without rank 0, the state serves only the explanation of hangs
            for name in STATES:
                collected.add(STATE, float(name == state.state), run, name)
            collected.add(SINCE, state.since, run)
            if state.state in ENDED_STATES:
                labels = (state.state, state.reason, state.exit_status, state.signal, state.exception)
                collected.add(OUTCOME, 1.0, run, *labels)


def _state(processes: list[ProcessTotals], endings: Endings, rules: GapRules, now: Moment) -> RunState:
    """Return the state of a run, computed from the run's processes."""
    trainers = _deciding(_trainers(processes), endings)
    living = [trainer for trainer in trainers if trainer.living]
    if living:
        living.sort(
            key=lambda trainer: (not trainer.trains, trainer.identity.rank or 0, trainer.identity.started)
        )
        return _living(living[0], rules, now)
    last = max(trainers, key=_order)
    outcome = endings.outcome(last)
    return RunState("ending", last.departed or now.wall) if outcome is None else _ended(outcome, last)


def _trainers(processes: list[ProcessTotals]) -> list[ProcessTotals]:
    """Return the processes with a rank, or all processes without ranks."""
    return [process for process in processes if process.identity.rank is not None] or processes


def _deciding(trainers: list[ProcessTotals], endings: Endings) -> list[ProcessTotals]:
    """Return the processes that decide the state.

    After a training that completed, or whose outcome is still open, later processes of the same launch that do not train,
    such as an evaluation, are ignored.
    """
    trained = [trainer for trainer in trainers if trainer.has_trained]
    if not trained or any(trainer.living for trainer in trained):
        return trainers
    last = max(trained, key=_order)
    outcome = endings.outcome(last)
    awaited = outcome is None and not endings.expects_restart(last.identity.run)
    if not awaited and (outcome is None or not outcome.completed):
        return trainers
    return [
        trainer for trainer in trainers if not follows(trainer, last.identity.launch, last.identity.started)
    ]


def _order(process: ProcessTotals) -> tuple[float, float, float]:
    """Return the sort key by which the last process of the lowest rank is the maximum."""
    return -(process.identity.rank or 0), process.identity.started, process.departed or 0.0


def _living(process: ProcessTotals, rules: GapRules, now: Moment) -> RunState:
    reading = process.training
    if process.snapshot is not None and not rules.fresh(process):
        return RunState("stalled", now.wall - process.age_seconds)
    overdue = rules.overdue_seconds(process, now)
    if reading is not None and overdue is not None:
        return RunState("stalled" if reading.phase in WAITING_PHASES else "hung", now.wall - overdue)
    if reading is None or (reading.steps == 0 and reading.last_progress is None and not reading.finished):
        return RunState("starting", process.identity.started)
    return RunState("running", now.wall)


def _ended(outcome: Outcome, process: ProcessTotals) -> RunState:
    """Return the final state of a run, computed from the outcome of the last process."""
    status, exception, at = outcome.status, outcome.exception, outcome.at
    if outcome.source is EvidenceSource.EXCEPTION:
        state = "stopped" if outcome.failure in {"user", "preemption"} else "failed"
        reason = f"exception {exception}" if exception else f"reported: {outcome.failure}"
        exit_status = str(status) if status is not None and status > 0 else ""
        return RunState(state, at, reason, exit_status, exception=exception)
    if status is not None and status < 0:
        name = _SIGNAL_NAMES.get(-status, str(-status))
        state = "stopped" if status in _STOP_SIGNALS else "failed"
        return RunState(state, at, f"signal {name}", signal=name, exception=exception)
    if status is not None:
        of_launch = " of the launch" if outcome.source is EvidenceSource.LAUNCH else ""
        reason = f"exit status {status}{of_launch}" + (f", {exception}" if exception else "")
        return RunState("failed" if status else "finished", at, reason, str(status), exception=exception)
    if outcome.completed:
        return RunState("finished", at, "inferred: the process exited normally")
    if outcome.source is EvidenceSource.RESTART:
        return RunState("failed", at, "torchrun restarted the process")
    if process.final:
        return RunState("failed", at, "inferred: the process exited while another rank was killed or crashed")
    return RunState("lost", at, "inferred: the process was killed or crashed")
