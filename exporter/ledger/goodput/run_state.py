"""State of a run: starting, running, stalled, hung, ending, or a final state. See docs/goodput.md."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from exporter.errors import CollectError
from exporter.families import Collected, FamilySpec
from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.goodput.endings import Endings, follows
from exporter.ledger.goodput.hang import WAITING_PHASES
from exporter.ledger.goodput.outcome import EvidenceSource, Outcome
from exporter.ledger.state.codec import from_line
from exporter.ledger.state.store import StateRecord, StateStore
from exporter.ledger.totals import GapRules, Moment, ProcessTotals, VisibleSlot

ACTIVE_STATES = ("starting", "running", "stalled", "hung", "ending")
"""States of a run whose outcome is not decided."""
FINAL_STATES = ("stopped", "finished", "failed", "lost")
"""States of a run whose outcome is decided."""
STATES = ACTIVE_STATES + FINAL_STATES

_STOPPED_STATUSES = frozenset({-signal.SIGINT, -signal.SIGTERM})
"""Exit statuses of a process that a user or a scheduler has stopped. The status of a signal is its negative number."""
_SIGNAL_NAMES = {member.value: member.name for member in signal.Signals}

CLOCK_TOLERANCE_SECONDS = 1.0
"""Decrease of the wall clock between two passes, relative to the monotonic clock, from which the wall clock counts as set back."""

_ABSENT = "*other node* or *expired*"

STATE = FamilySpec(
    name="training_run_state",
    type="gauge",
    labels=("run", "state"),
    help="1 for the current state of the run, 0 for all other states.",
    absent=_ABSENT,
    source="processes of the run, exit status from `run` and from torchrun",
    details=(
        "`starting`: no step or validation batch has finished.",
        (
            "`running`: a step or validation batch has finished, or the job has reported the end of the application,"
            " and no step is overdue."
        ),
        (
            "`stalled`: a step is overdue in a phase that initializes, waits for data, compiles, loads, saves or"
            " validates, or the feed is stale."
        ),
        "`hung`: a step is overdue in a different phase.",
        "`ending`: the processes exited, and the outcome is not decided.",
        (
            "`stopped`: SIGINT or SIGTERM ended the processes, or a process reported a stop by the user or a"
            " preemption."
        ),
        "`finished`: the training was completed, or the exit status is 0.",
        (
            "`failed`: an exception, an exit status other than 0, a reported failure or a different signal ended a"
            " process, torchrun restarted the process, or it exited during a step while another rank was killed or"
            " crashed."
        ),
        "`lost`: a process was killed or crashed, and its exit status is unknown.",
    ),
)
STATE_SINCE = FamilySpec(
    name="training_run_state_since_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=("run",),
    help="Unix time at which the current state of the run started.",
    absent=_ABSENT,
    source="see training_run_state",
)
OUTCOME = FamilySpec(
    name="training_run_outcome_info",
    type="info",
    labels=("run", "outcome", "reason", "exit_status", "signal", "exception"),
    help="Outcome of the run: exit status, signal or exception, if known.",
    absent="before the end of the run, *other node*, or *expired*",
    source="see training_run_state",
    details=("A reason that starts with `inferred` is not based on an exit status.",),
)
RANK_EXIT = FamilySpec(
    name="training_rank_last_exit_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=(*IDENTITY_LABELS, "reason"),
    help="Unix time of the last exit of a process of the rank that did not complete the training.",
    absent="before such an exit or *expired*",
    source="see training_run_state",
    details=(
        (
            "The reason is the signal, the exit status or the exception. A reason that starts with `inferred`"
            " is not based on an exit status."
        ),
        "A restart of the rank keeps the series.",
    ),
)
SPECS = (STATE, STATE_SINCE, OUTCOME, RANK_EXIT)


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run, with the start and the reason. The texts are empty if the state is not final or the fact is unknown."""

    state: str  # a value of `STATES`
    since_timestamp: float = field(default=0.0, compare=False)  # Unix time
    reason: str = ""  # evidence of a final state, such as "exit status 1"
    exit_status: str = ""  # of the process or of the launch, as a decimal number
    signal: str = ""  # name such as "SIGTERM", or the number of a signal without a name
    exception: str = ""  # type of the uncaught exception


def add_rank_exits(collected: Collected, slots: Iterable[VisibleSlot]) -> None:
    """Add the last exit of each rank that did not complete the training."""
    for slot in slots:
        if slot.key.rank is None:
            continue
        exits = [
            _final_state(process.outcome, process)
            for process in slot.worker_slot.processes
            if process.outcome is not None and not process.outcome.is_completed
        ]
        if exits:
            last = max(exits, key=lambda state: state.since_timestamp)
            collected.add(RANK_EXIT, last.since_timestamp, *slot.labels, last.reason)


class RunStates:
    """States of all runs in the last pass. The time since which a run has its state survives a restart of the sidecar.

    If the wall clock is set back, the times are moved back with it, so that the duration of a state stays correct.
    """

    def __init__(self, store: StateStore) -> None:
        self._runs: dict[str, RunState] = {}
        self._store = store
        self._records: dict[str, StateRecord[RunState]] = {}
        self._saved_states: dict[str, RunState] = {}  # by run
        self._clock_offset: float | None = None  # wall clock minus monotonic clock in the last pass

    def overdue(self) -> Mapping[str, RunState]:
        """Return the hung and stalled runs of the last pass."""
        return {run: state for run, state in self._runs.items() if state.state in {"hung", "stalled"}}

    def add_families(
        self,
        collected: Collected,
        processes: Iterable[ProcessTotals],
        visible_runs: Collection[str],
        endings: Endings,
        rules: GapRules,
        now: Moment,
        *,
        is_owner: bool,
    ) -> None:
        """Update the states, and add the families of the runs in *visible_runs* that have a process of rank 0 on this node.

        A run without ranks is included. The owner of the feed directory saves the states.
        """
        runs: dict[str, list[ProcessTotals]] = {}
        for process in processes:
            if process.identity.run in visible_runs:
                runs.setdefault(process.identity.run, []).append(process)
        previous, self._runs = self._states_after_clock_change(now), {}
        for run, run_processes in runs.items():
            if not _includes_rank_0(run_processes):
                continue
            state = _state_of(run_processes, endings, rules, now)
            # An equal state (the time is not compared) continues since its first pass.
            known_state = previous.get(run)
            if known_state is None and state.state == "running":  # the start of each other state is computed
                known_state = self._load(run, run_processes, is_owner=is_owner)
            if known_state is not None and known_state == state:
                state = known_state
            if state.since_timestamp > now.wall:  # on the clock of the job or of an earlier sidecar
                state = replace(state, since_timestamp=now.wall)
            self._runs[run] = state
            if is_owner and state is not self._saved_states.get(run):
                self._save(run, state)
            if not _includes_rank_0(_trainers(run_processes)):
                continue  # on a node without rank 0, the state is used only for the explanation of hangs
            for name in STATES:
                collected.add(STATE, float(name == state.state), run, name)
            collected.add(STATE_SINCE, state.since_timestamp, run)
            if state.state in FINAL_STATES:
                labels = (state.state, state.reason, state.exit_status, state.signal, state.exception)
                collected.add(OUTCOME, 1.0, run, *labels)
        for run in self._records.keys() - self._runs.keys():
            self._records.pop(run).release()
            self._saved_states.pop(run, None)

    def _states_after_clock_change(self, now: Moment) -> Mapping[str, RunState]:
        """Return the states of the last pass, with earlier times if the wall clock was set back since then."""
        previous_offset, self._clock_offset = self._clock_offset, now.wall - now.monotonic
        if previous_offset is None or previous_offset - self._clock_offset < CLOCK_TOLERANCE_SECONDS:
            return self._runs
        seconds = previous_offset - self._clock_offset
        return {
            run: replace(state, since_timestamp=state.since_timestamp - seconds)
            for run, state in self._runs.items()
        }

    def _load(self, run: str, processes: list[ProcessTotals], *, is_owner: bool) -> RunState | None:
        """Return the state that an earlier sidecar saved, unless all running trainers have started since then."""
        # An unusable state directory is not reported here, because `Ranks` reports it.
        with contextlib.suppress(CollectError):
            record = self._record(run)
            if is_owner:
                record.claim()  # a damaged file is moved aside only if this sidecar holds the record
            saved_state = record.load()
            trainers = [process for process in _trainers(processes) if process.is_alive]
            first_start = min((trainer.identity.started for trainer in trainers), default=0.0)
            if saved_state is not None and saved_state.since_timestamp >= first_start:
                return saved_state
        return None

    def _save(self, run: str, state: RunState) -> None:
        """Save the state of a run, unless another sidecar holds the record. Errors are ignored, because `Ranks` reports them."""
        with contextlib.suppress(CollectError):
            record = self._record(run)
            if record.claim():
                record.save(state)
                self._saved_states[run] = state

    def _record(self, run: str) -> StateRecord[RunState]:
        """Return the state record of a run, created on first use."""
        if run not in self._records:
            self._records[run] = self._store.record("state", partial(from_line, RunState), run=run)
        return self._records[run]


def _state_of(processes: list[ProcessTotals], endings: Endings, rules: GapRules, now: Moment) -> RunState:
    """Return the current state of a run."""
    trainers = _deciding_trainers(_trainers(processes), endings)
    running_trainers = [trainer for trainer in trainers if trainer.is_alive]
    if running_trainers:
        running_trainers.sort(
            key=lambda trainer: (not trainer.trains, trainer.identity.rank or 0, trainer.identity.started)
        )
        return _running_state(running_trainers[0], rules, now)
    last = max(trainers, key=_recency_key)
    outcome = endings.decide_outcome(last)
    return RunState("ending", last.exited_at or now.wall) if outcome is None else _final_state(outcome, last)


def _includes_rank_0(processes: list[ProcessTotals]) -> bool:
    """Return True if a process has rank 0 or no rank."""
    return any(not process.identity.rank for process in processes)


def _trainers(processes: list[ProcessTotals]) -> list[ProcessTotals]:
    """Return the processes with a rank, or all processes if none has a rank."""
    return [process for process in processes if process.identity.rank is not None] or processes


def _deciding_trainers(trainers: list[ProcessTotals], endings: Endings) -> list[ProcessTotals]:
    """Return the processes that decide the state.

    After a training that has completed, later processes of the same launch that do not train, such as an evaluation, are ignored. They are
    also ignored while the outcome of the training is open, unless a restart is expected.
    """
    former_trainers = [trainer for trainer in trainers if trainer.has_trained]
    if not former_trainers or any(trainer.is_alive for trainer in former_trainers):
        return trainers
    last = max(former_trainers, key=_recency_key)
    outcome = endings.decide_outcome(last)
    if outcome is None:
        ignores_followers = not endings.expects_restart(last.identity.run)
    else:
        ignores_followers = outcome.is_completed
    if not ignores_followers:
        return trainers
    return [
        trainer for trainer in trainers if not follows(trainer, last.identity.launch, last.identity.started)
    ]


def _recency_key(process: ProcessTotals) -> tuple[float, float, float]:
    """Return the sort key whose maximum is the last process of the lowest rank."""
    return -(process.identity.rank or 0), process.identity.started, process.exited_at or 0.0


def _running_state(process: ProcessTotals, rules: GapRules, now: Moment) -> RunState:
    """Return the state of a run from its lowest running rank: stalled, hung, starting or running."""
    reading = process.training
    if process.snapshot is not None and not rules.is_fresh(process):
        return RunState("stalled", now.wall - process.age_seconds)
    overdue_seconds = rules.overdue_seconds(process, now)
    if reading is not None and overdue_seconds is not None:
        return RunState("stalled" if reading.phase in WAITING_PHASES else "hung", now.wall - overdue_seconds)
    if reading is None or (reading.steps == 0 and reading.last_progress is None and not reading.finished):
        return RunState("starting", process.identity.started)
    return RunState("running", now.wall)


def _final_state(outcome: Outcome, process: ProcessTotals) -> RunState:
    """Return the final state of a run from the outcome of its last process."""
    status, exception, exited_at = outcome.status, outcome.exception, outcome.exited_at
    if outcome.source is EvidenceSource.EXCEPTION:
        state = "stopped" if outcome.failure in {"user", "preemption"} else "failed"
        reason = f"exception {exception}" if exception else f"reported: {outcome.failure}"
        exit_status = str(status) if status is not None and status > 0 else ""
        return RunState(state, exited_at, reason, exit_status, exception=exception)
    if status is not None and status < 0:
        name = _SIGNAL_NAMES.get(-status, str(-status))
        state = "stopped" if status in _STOPPED_STATUSES else "failed"
        return RunState(state, exited_at, f"signal {name}", signal=name, exception=exception)
    if status is not None:
        launch_note = " of the launch" if outcome.source is EvidenceSource.LAUNCH else ""
        reason = f"exit status {status}{launch_note}" + (f", {exception}" if exception else "")
        state = "failed" if status else "finished"
        return RunState(state, exited_at, reason, str(status), exception=exception)
    if outcome.is_completed:
        return RunState("finished", exited_at, "inferred: the process exited normally")
    if outcome.source is EvidenceSource.RESTART:
        return RunState("failed", exited_at, "torchrun restarted the process")
    if process.is_final:
        return RunState(
            "failed", exited_at, "inferred: the process exited while another rank was killed or crashed"
        )
    return RunState("lost", exited_at, "inferred: the process was killed or crashed")
