"""Conditions of ranks: ended and silent processes, stuck phases, stragglers, and GPU memory pressure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from exporter.status.condition import AlertSeverity, Condition, Match
from exporter.status.formatting import duration, exit_text, rank_names
from exporter.status.view import PAUSING_CAUSES, SILENT_AFTER_SECONDS, Rank, View
from exporter.training.phases import PHASES

STUCK_SECONDS = 3600.0
"""Time in one of `STEPLESS_PHASES`, or in a validation without a batch, above which the phase counts as stuck."""
LOST_SECONDS = 120.0
"""Age of the snapshot of a living process above which its feed counts as lost."""
RETRY_SECONDS = 600.0
"""Time range of the retries of PyTorch's allocator."""
STEPLESS_PHASES = frozenset(
    {
        *("init", "rendezvous", "model_init", "optimizer_init", "dataloader_init", "compile"),
        *("checkpoint_load", "checkpoint_save_sync", "checkpoint_save_async", "restart"),
    }
)
"""Phases in which a rank finishes neither steps nor batches, so that only the time in the phase shows a stuck rank."""


@dataclass(frozen=True, slots=True)
class AffectedRanks:
    """Ranks of a run that a condition affects."""

    run: str
    title: str  # text that names the ranks
    ranks: list[Rank]


def _affected_ranks(view: View, is_affected: Callable[[Rank], bool]) -> Iterator[AffectedRanks]:
    """Yield the affected ranks of each run, except runs without an affected rank."""
    ranks_by_run: dict[str, list[Rank]] = {}
    for rank in view.ranks:
        if rank.run and is_affected(rank):
            ranks_by_run.setdefault(rank.run, []).append(rank)
    for run, ranks in ranks_by_run.items():
        yield AffectedRanks(run, _ranks_text(ranks), ranks)


def _ranks_text(ranks: list[Rank]) -> str:
    """Return the names of ranks of a run, such as "ranks 0-2 of night". If no process has a rank, return the title of the first process."""
    numbers = {int(rank.rank) for rank in ranks if rank.rank.isdecimal()}
    if not numbers:
        return ranks[0].title
    return f"{rank_names(numbers)} of {ranks[0].run}"


def _early_ends(view: View) -> Iterator[Match]:
    """Yield a match for each run with ranks that have ended while other ranks of the run live."""
    runs_with_live_ranks = {rank.run for rank in view.ranks if rank.alive and rank.rank}

    def has_ended_early(rank: Rank) -> bool:
        return rank.alive == 0 and bool(rank.rank) and rank.run in runs_with_live_ranks

    for affected in _affected_ranks(view, has_ended_early):
        if not view.runs[affected.run].is_ended:
            yield _end_match(affected)


def _remote_ends(view: View) -> Iterator[Match]:
    """Yield a match for each run whose ranks of this node have all ended, some of them by a failure, and whose rank 0 is elsewhere.

    The state of such a run is known only on the node of rank 0.
    """
    for affected in _affected_ranks(view, lambda rank: bool(rank.rank) and rank.failed_at is not None):
        run = view.runs[affected.run]
        if run.is_ended and not run.has_rank_zero:
            yield _end_match(affected)


def _end_match(affected: AffectedRanks) -> Match:
    """Return the match of ended ranks, with the reasons if they are known. The start is the first exit, or else the oldest snapshot."""
    exits = [rank for rank in affected.ranks if rank.failed_at is not None]
    start = min(
        (rank.failed_at for rank in exits if rank.failed_at is not None),
        default=min(
            (rank.updated_at for rank in affected.ranks if rank.updated_at is not None), default=None
        ),
    )
    reasons = "; ".join(dict.fromkeys(exit_text(rank.exit_reason) for rank in exits))
    facts = {"ranks": affected.title, "reasons": f": {reasons}" if reasons else ""}
    return Match((affected.run,), facts, start=start)


def _silent_seconds(rank: Rank, view: View) -> float:
    """Return the age of the last snapshot of a living process. Return 0 for other processes and for an unknown age."""
    return view.exporter.now - rank.updated_at if rank.alive and rank.updated_at is not None else 0.0


def _runs_without_steps(view: View) -> set[str]:
    """Return the runs without a step for `SILENT_AFTER_SECONDS`.

    Runs that start, compile, save, load or validate are omitted, unless a trainer is stopped by a signal or a debugger.
    """
    runs_without_steps: set[str] = set()
    for name in view.runs:
        ranks = [rank for rank in view.ranks if rank.run == name]
        last_progress_at = max(
            (rank.progress_at for rank in ranks if rank.progress_at is not None), default=None
        )
        is_stopped = any(
            view.samples.total("training_process_state", run=name, role="trainer", state=state)
            for state in ("stopped", "tracing_stop")
        )
        pauses = not is_stopped and any(
            PHASES[rank.phase].badput in PAUSING_CAUSES for rank in ranks if rank.phase in PHASES
        )
        is_overdue = (
            last_progress_at is not None and view.exporter.now - last_progress_at > SILENT_AFTER_SECONDS
        )
        if is_overdue and not pauses:
            runs_without_steps.add(name)
    return runs_without_steps


def _blocking_ranks(view: View) -> Iterator[Match]:
    """Yield a match for each run that has silent ranks and makes no steps: the other ranks probably wait for the silent ranks."""
    runs_without_steps = _runs_without_steps(view)
    for affected in _affected_ranks(view, lambda rank: _silent_seconds(rank, view) > SILENT_AFTER_SECONDS):
        if affected.run in runs_without_steps:
            yield _silent_match(affected)


def _silent_ranks(view: View) -> Iterator[Match]:
    """Yield a match for each run that has silent ranks and still makes steps.

    A rank that has been silent for more than `LOST_SECONDS` is a match of `_lost_feeds`.
    """

    def is_silent(rank: Rank) -> bool:
        return SILENT_AFTER_SECONDS < _silent_seconds(rank, view) <= LOST_SECONDS

    runs_without_steps = _runs_without_steps(view)
    for affected in _affected_ranks(view, is_silent):
        if affected.run not in runs_without_steps:
            yield _silent_match(affected)


def _lost_feeds(view: View) -> Iterator[Match]:
    for affected in _affected_ranks(view, lambda rank: _silent_seconds(rank, view) > LOST_SECONDS):
        yield _silent_match(affected)


def _silent_match(affected: AffectedRanks) -> Match:
    # The time is known, because a rank is silent only if its last snapshot is old.
    start = min(rank.updated_at or 0.0 for rank in affected.ranks)
    is_single = len(affected.ranks) == 1
    processes = f"the process{'' if is_single else 'es'} of {affected.title} {'is' if is_single else 'are'}"
    return Match((affected.run,), {"processes": processes, "run": affected.run}, start=start)


def _stuck_phases(view: View) -> Iterator[Match]:
    def last_progress_at(rank: Rank) -> float | None:
        """Return the start of a phase without steps, or the time of the last batch of a validation; None in other phases."""
        if rank.alive == 0 or rank.phase not in STEPLESS_PHASES | {"validation"}:
            return None
        return rank.phase_since if rank.phase in STEPLESS_PHASES else rank.progress_at

    def is_stuck(rank: Rank) -> bool:
        progress_at = last_progress_at(rank)
        return progress_at is not None and view.exporter.now - progress_at > STUCK_SECONDS

    for affected in _affected_ranks(view, is_stuck):
        phases = ", ".join(sorted({rank.phase for rank in affected.ranks}))
        start = min(time for rank in affected.ranks if (time := last_progress_at(rank)) is not None)
        yield Match((affected.run,), {"ranks": affected.title, "phases": phases}, start=start)


def _stragglers(view: View) -> Iterator[Match]:
    for affected in _affected_ranks(view, lambda rank: rank.is_slow):
        slowest = max(affected.ranks, key=lambda rank: rank.compute_seconds or 0.0)
        fastest_seconds = view.runs[affected.run].fastest_seconds.get(slowest.stage)
        gpus = sorted({rank.gpu for rank in affected.ranks if rank.gpu})
        facts = {
            "ranks": affected.title,
            "gpus": f" (GPU {', '.join(gpus)})" if gpus else "",
            "slowest": duration(slowest.compute_seconds),
            "fastest": duration(fastest_seconds),
        }
        uuids = {rank.uuid for rank in affected.ranks}
        yield Match((affected.run,), facts, gpu_uuid=uuids.pop() if len(uuids) == 1 else "")


def _conflicting_ranks(view: View) -> Iterator[Match]:
    for rank in view.ranks:
        if rank.conflict_count:
            processes = "a second process trains"
            if rank.conflict_count > 1:
                processes = f"{rank.conflict_count:.0f} more processes train"
            yield Match((rank.run, rank.rank), {"processes": processes, "rank": rank.title})


def _allocation_retries(view: View) -> Iterator[Match]:
    ranks_and_gpus: dict[str, list[tuple[str, str]]] = {}
    for run, rank, gpu in view.history.list_owners("allocation retries"):
        if view.history.compute_increase(
            "allocation retries", run, rank, gpu, seconds=RETRY_SECONDS, starts_at_zero=False
        ):
            ranks_and_gpus.setdefault(run, []).append((rank, gpu))
    for run, pairs in ranks_and_gpus.items():
        numbers = {int(rank) for rank, _ in pairs if rank.isdecimal()}
        gpus = ", ".join(sorted({gpu for _, gpu in pairs if gpu}))
        facts = {
            "run": run,
            "ranks": rank_names(numbers) if numbers else "a process",
            "gpus": gpus or "unknown",
        }
        yield Match((run,), facts)


CONDITIONS = (
    Condition(
        criterion="the process of a rank ended while other ranks of the run live",
        severity=AlertSeverity.CRITICAL,
        sentence="{ranks} ended before the other ranks{reasons}",
        remedy="read the log of the rank; the next collective of the other ranks does not complete",
        runbook_alert="TrainingRankEnded",
        stops_run=True,
        is_cause=True,
        find_matches=_early_ends,
    ),
    Condition(
        criterion="the process of a rank was killed, crashed or failed, and rank 0 of the run is on a different node",
        severity=AlertSeverity.CRITICAL,
        sentence=(
            "{ranks} ended without completing the training{reasons}. The page of the node of rank 0 shows the state of the run"
        ),
        remedy="read the log of the rank; the next collective of the other ranks does not complete",
        runbook_alert="TrainingRankEnded",
        is_cause=True,
        find_matches=_remote_ends,
    ),
    Condition(
        criterion="a living process without a new snapshot for more than 15 s, and no step of the run for more than 15 s",
        severity=AlertSeverity.CRITICAL,
        sentence="{processes} alive and silent (no new snapshot), and run {run} makes no steps",
        remedy="check whether the process is stopped by a signal or a debugger (kill -CONT resumes it), or holds the GIL: `training-exporter stacks` prints its stack",
        runbook_alert="TrainingFeedLost",
        stops_run=True,
        is_cause=True,
        find_matches=_blocking_ranks,
    ),
    Condition(
        alert_name="TrainingFeedLost",
        criterion="a running process without a snapshot for more than 120 s",
        sentence="{processes} alive and silent (no new snapshot)",
        remedy="check whether the process is stopped or holds the GIL, and the space of the feed directory",
        is_cause=True,
        find_matches=_lost_feeds,
    ),
    Condition(
        criterion="a living process without a new snapshot for more than 15 s",
        sentence="{processes} alive and silent (no new snapshot)",
        remedy="check whether the process is stopped or holds the GIL, and the space of the feed directory",
        runbook_alert="TrainingFeedLost",
        is_cause=True,
        find_matches=_silent_ranks,
    ),
    Condition(
        alert_name="TrainingPhaseStuck",
        criterion=(
            "a rank more than 3600 s in one phase of starting, compiling, loading or saving, or in a validation without a batch"
        ),
        sentence="{ranks} made no progress in {phases}",
        remedy="check what the phase waits for: storage, other nodes, a compilation",
        find_matches=_stuck_phases,
    ),
    Condition(
        alert_name="TrainingStraggler",
        criterion="compute time of the fastest rank below threshold:training_straggler:ratio of the rank's compute time",
        sentence="a step takes {slowest} of compute time on {ranks}{gpus}, and {fastest} on the fastest rank",
        remedy="check heat, clocks and power limit of the GPU, then the CPU of the node",
        find_matches=_stragglers,
    ),
    Condition(
        criterion="training_rank_conflicts is above 0",
        severity=AlertSeverity.CRITICAL,
        sentence="{processes} as {rank}",
        remedy="choose a different run name for either job",
        find_matches=_conflicting_ranks,
    ),
    Condition(
        alert_name="TrainingGpuMemoryPressure",
        criterion="any retry of PyTorch's allocator in 10m",
        sentence="{ranks} of {run} freed cached memory of GPU {gpus} to continue",
        remedy="lower the batch size or the sequence length before an allocation fails",
        find_matches=_allocation_retries,
    ),
)
