"""Conditions of ranks: ended or silent processes, stuck phases, stragglers, tight memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from exporter.status.condition import AlertSeverity, Condition, Found
from exporter.status.numbers import duration, ranges
from exporter.status.view import STOPPED_SECONDS, Rank, View

STUCK_SECONDS = 3600.0
LOST_SECONDS = 120.0
RETRY_SECONDS = 600.0
LONG_PHASES = frozenset(
    {
        *("init", "rendezvous", "model_init", "optimizer_init", "dataloader_init", "compile"),
        *("checkpoint_load", "checkpoint_save_sync", "checkpoint_save_async", "restart"),
    }
)


def _by_run(seen: View, holds: Callable[[Rank], bool]) -> Iterator[tuple[str, str, list[Rank]]]:
    """Yield the run, the name of the ranks for which something holds, and these ranks."""
    found: dict[str, list[Rank]] = {}
    for rank in seen.ranks:
        if rank.run and holds(rank):
            found.setdefault(rank.run, []).append(rank)
    for run, ranks in found.items():
        yield run, _named(ranks), ranks


def _named(ranks: list[Rank]) -> str:
    numbers = {int(rank.rank) for rank in ranks if rank.rank.isdecimal()}
    if not numbers:
        return ranks[0].title
    return f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)} of {ranks[0].run}"


def _ended(seen: View) -> Iterator[Found]:
    running = {rank.run for rank in seen.ranks if rank.alive and rank.rank}
    for run, name, ranks in _by_run(
        seen, lambda rank: rank.alive == 0 and bool(rank.rank) and rank.run in running
    ):
        if not seen.runs[run].ended:
            since = min((rank.updated for rank in ranks if rank.updated is not None), default=None)
            yield Found((run,), {"ranks": name}, since=since)


def _silence(rank: Rank, seen: View) -> float:
    return seen.about.now - rank.updated if rank.alive and rank.updated is not None else 0.0


def _silent(seen: View) -> Iterator[Found]:
    for run, name, ranks in _by_run(
        seen, lambda rank: STOPPED_SECONDS < _silence(rank, seen) <= LOST_SECONDS
    ):
        yield Found((run,), {"ranks": name}, since=min(rank.updated or 0.0 for rank in ranks))


def _lost(seen: View) -> Iterator[Found]:
    for run, name, ranks in _by_run(seen, lambda rank: _silence(rank, seen) > LOST_SECONDS):
        yield Found((run,), {"ranks": name}, since=min(rank.updated or 0.0 for rank in ranks))


def _stuck(seen: View) -> Iterator[Found]:
    def start(rank: Rank) -> float | None:
        if rank.alive == 0:
            return None
        return rank.phase_since if rank.phase in LONG_PHASES else rank.progress

    for run, name, ranks in _by_run(
        seen,
        lambda rank: (
            rank.phase in LONG_PHASES | {"validation"}
            and (began := start(rank)) is not None
            and seen.about.now - began > STUCK_SECONDS
        ),
    ):
        phases = ", ".join(sorted({rank.phase for rank in ranks}))
        since = min(began for rank in ranks if (began := start(rank)) is not None)
        yield Found((run,), {"ranks": name, "phases": phases}, since=since)


def _stragglers(seen: View) -> Iterator[Found]:
    for run, name, ranks in _by_run(seen, lambda rank: rank.is_slow):
        slowest = max(rank.compute_seconds or 0.0 for rank in ranks)
        fastest = min(seen.runs[run].fastest_seconds.values(), default=None)
        cards = sorted({rank.gpu for rank in ranks if rank.gpu})
        facts = {
            "ranks": name,
            "cards": f" (GPU {', '.join(cards)})" if cards else "",
            "own": duration(slowest),
            "fastest": duration(fastest),
        }
        yield Found((run,), facts)


def _rivals(seen: View) -> Iterator[Found]:
    for rank in seen.ranks:
        if rank.rivals:
            more = f"{rank.rivals:.0f} more processes train" if rank.rivals > 1 else "a second process trains"
            yield Found((rank.run, rank.rank), {"more": more, "rank": rank.title})


def _retries(seen: View) -> Iterator[Found]:
    found: dict[str, list[tuple[str, str]]] = {}
    for run, rank, gpu in seen.past.owners("allocation retries"):
        if seen.past.increase("allocation retries", run, rank, gpu, seconds=RETRY_SECONDS):
            found.setdefault(run, []).append((rank, gpu))
    for run, places in found.items():
        ranks = ranges(int(rank) for rank, _ in places if rank.isdecimal())
        cards = ", ".join(sorted({gpu for _, gpu in places if gpu}))
        yield Found((run,), {"run": run, "ranks": ranks, "cards": cards or "unknown"})


CONDITIONS = (
    Condition(
        condition="the process of a rank ended while other ranks of the run live",
        severity=AlertSeverity.CRITICAL,
        sentence="{ranks} ended before the other ranks",
        remedy="read the log of the rank; the others wait for it in the next collective",
        find=_ended,
    ),
    Condition(
        alert="TrainingFeedLost",
        condition="a living process silent for more than 120 s",
        sentence="{ranks}: the process lives and reports nothing",
        remedy="check whether the process is stopped or holds the GIL, and the space of the feed directory",
        find=_lost,
    ),
    Condition(
        condition="a living process silent for more than 15 s",
        sentence="{ranks}: the process lives and has not reported lately",
        remedy="check whether the process is stopped or holds the GIL, and the space of the feed directory",
        find=_silent,
    ),
    Condition(
        alert="TrainingPhaseStuck",
        condition=(
            "a rank more than 3600 s in one phase of starting, compiling, loading or saving, or in a validation without a batch"
        ),
        sentence="{ranks}: no progress in {phases}",
        remedy="check what the phase waits for: storage, other nodes, a compilation",
        find=_stuck,
    ),
    Condition(
        alert="TrainingStraggler",
        condition="the fastest rank's compute time below threshold:training_straggler:ratio of a rank's own",
        sentence="{ranks}{cards} slow: {own} of own work per step, the fastest rank {fastest}",
        remedy="check heat, clocks and power limit of the card, then the CPU of the node",
        find=_stragglers,
    ),
    Condition(
        condition="training_rank_conflicts is above 0",
        severity=AlertSeverity.CRITICAL,
        sentence="{more} as {rank}",
        remedy="choose a different run name for either job",
        find=_rivals,
    ),
    Condition(
        alert="TrainingGpuMemoryPressure",
        condition="any retry of PyTorch's allocator in 10m",
        sentence="rank {ranks} of {run} frees cached memory of GPU {cards} to continue",
        remedy="lower the batch size or the sequence length before an allocation fails",
        find=_retries,
    ),
)
