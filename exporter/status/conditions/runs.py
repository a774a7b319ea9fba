"""Conditions of runs: failed, hanging and slow runs, data stalls, nonfinite values, and restarts."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.status.condition import AlertSeverity, Condition, Match
from exporter.status.formatting import duration, exit_text, rank_names, share
from exporter.status.history import STEP_RATE_SECONDS, Increase
from exporter.status.thresholds import DATA_STALL_RATIO, SLOWER_RATIO, STARTUP_SECONDS
from exporter.status.view import Gpu, NonfiniteValues, Run, View

PHASE_RATE_SECONDS = 300.0
"""Time range in which the share of the waits for data is computed."""
NONFINITE_SECONDS = 900.0
"""Time for which a nonfinite loss counts as current."""
GRADIENT_SECONDS = 600.0
"""Time range of nonfinite gradients."""
GRADIENT_RATIO = 0.1
"""Share of the steps above which nonfinite gradients need attention. A loss scaler causes a few."""
RESTART_SECONDS = 3600.0
"""Time range in which restarts are counted."""
MAX_RESTARTS = 3
"""Number of restarts within `RESTART_SECONDS` above which the run is in a restart loop."""
ODD_GROUP_REMEDY = "fix the wait of the rank that is listed first"
LOST_GPU_REMEDY = "drain the node, then reset the GPU (nvidia-smi --gpu-reset -i {index}) or reboot the node"
REMOTE_RANKS_REMEDY = "look for ended, silent or waiting ranks on the status pages of the other nodes before you change a rank of this node"
NO_ODD_GROUP_REMEDY = "check storage, network and GPUs of all ranks"
FULL_CPU_RATIO = 0.9
"""Utilization above which more workers do not make the data loading faster."""
FULL_CPU_REMEDY = (
    "the CPU is full, so that more workers do not help: prepare the data in advance, simplify their transformation, or"
    " use a node with more cores"
)
FOREIGN_CPU_REMEDY = "processes outside the run use most of the machine's CPU: move them, or reserve CPUs for the job; then add workers"
MIN_OWN_CPU_RATIO = 0.5
"""Share of the CPU below which the processes of the run are not the reason of a full CPU."""
FREE_CPU_REMEDY = "add workers to the data loader; if this does not help, check the storage"
PAUSING_PHASES = frozenset({"checkpoint_load", "checkpoint_save_sync", "validation", "test"})
"""Phases in which a run makes no steps, although it is not slow."""


def _dead_runs(view: View) -> Iterator[Match]:
    for name, run in view.runs.items():
        if run.state in {"failed", "lost"}:
            outcome = "failed" if run.state == "failed" else "ended without a report"
            facts = {
                "run": name,
                "outcome": outcome,
                "reason": _reason_text(view, run),
                "lost": _lost_work_text(view, name) + _nonfinite_text(run),
            }
            yield Match((name,), facts, start=run.state_since)


def _reason_text(view: View, run: Run) -> str:
    """Return the reasons of the failed ranks of this node, in order of time, or else the reason of the run; "" if unknown."""
    failures: dict[str, list[int]] = {}
    ranks = [rank for rank in view.ranks if rank.run == run.name and rank.rank.isdecimal()]
    for rank in sorted(ranks, key=lambda rank: rank.failed_at or 0.0):
        if rank.failed_at is not None:
            failures.setdefault(exit_text(rank.exit_reason), []).append(int(rank.rank))
    texts = [f"{rank_names(numbers)} {reason}" for reason, numbers in failures.items()]
    if not texts:
        return f": {exit_text(run.reason)}" if run.reason else ""
    return f": {', then '.join(texts)}"


def unsaved_steps_text(view: View, run: str) -> str:
    """Return the number of steps since the last save, such as "3 steps since the save of step 20"; "" if unknown."""
    step = view.samples.value("training_step", run=run)
    saved_step = view.samples.value("training_checkpoint_last_step", run=run)
    if step is None:
        return ""
    if saved_step is None:
        return "no save was reported"
    count = max(0, round(step - saved_step))
    return f"{count:,} step{'' if count == 1 else 's'} since the save of step {saved_step:,.0f}"


def _lost_work_text(view: View, run: str) -> str:
    """Return a sentence about the work of an ended run that no save covers; "" without such work."""
    seconds = view.samples.value("training_uncommitted_seconds", run=run)
    if not seconds or round(seconds, 1) == 0:
        return ""
    steps = unsaved_steps_text(view, run)
    return f". {duration(seconds)} of work are lost{f' ({steps})' if steps else ''}"


def _nonfinite_text(run: Run) -> str:
    """Return a sentence about the losses that were not finite up to the end of a run: no save after the first of them is a remedy."""
    values = run.nonfinite.get("loss")
    if values is None:
        return ""
    remedy = "" if values.saved_step is None else f": return to the save of step {values.saved_step:,}"
    return f". Each loss was NaN or infinite since {values.start_text}{remedy}"


def _hung_runs(view: View) -> Iterator[Match]:
    yield from _overdue_runs(view, "hung")


def _stalled_runs(view: View) -> Iterator[Match]:
    yield from _overdue_runs(view, "stalled")


def _overdue_runs(view: View, state: str) -> Iterator[Match]:
    """Yield a match for each run in *state*, which is `hung` or `stalled`.

    The match explains where the run waits, by the stacks if they are known and otherwise by the phases. It names a lost GPU of the run.
    """
    for name, run in view.runs.items():
        if run.state == state:
            hang = view.exporter.hangs.get(name)
            where = hang.sentence if hang else _phases(view, run)
            stacks = hang.groups if hang else ()
            step = f" at step {hang.step:,}" if hang and hang.step is not None else ""
            remedy = ODD_GROUP_REMEDY if hang and hang.has_odd_group else NO_ODD_GROUP_REMEDY
            if run.remote_count:
                where = f"{where.removesuffix('.')}. {remote_ranks_text(run)}"
                remedy = REMOTE_RANKS_REMEDY
            lost_gpu = _lost_gpu(view, name)
            cause, gpu_uuid = "", ""
            if lost_gpu:
                cause, gpu_uuid = f": {lost_gpu.title} does not answer", lost_gpu.uuid
                remedy = LOST_GPU_REMEDY.format(index=lost_gpu.index)
            facts = {"run": name, "step": step, "cause": cause, "where": where, "remedy": remedy}
            yield Match((name,), facts, start=run.state_since, stacks=stacks, gpu_uuid=gpu_uuid)


def remote_ranks_text(run: Run) -> str:
    """Return a sentence about the ranks of a run that are not on this node; "" without such ranks."""
    count = run.remote_count
    if not count:
        return ""
    return f"{count} of {run.world_size} ranks {'is' if count == 1 else 'are'} not on this node; see the pages of the other nodes."


def _lost_gpu(view: View, run: str) -> Gpu | None:
    """Return a GPU that does not answer and that a rank of the run used last; None if all GPUs answer."""
    return next(
        (gpu for gpu in view.gpus if not gpu.is_up and run in {holder for holder, _ in gpu.last_holders}),
        None,
    )


def _early_ends(view: View) -> Iterator[Match]:
    for name, run in view.runs.items():
        if run.has_finished_early:
            step = view.samples.value("training_step", run=name) or 0.0
            target = view.samples.value("training_step_target", run=name) or 0.0
            facts = {"run": name, "step": f"{step:,.0f}", "target": f"{target:,.0f}"}
            yield Match((name,), facts, start=run.state_since, is_event=True)


def _late_steps(view: View) -> Iterator[Match]:
    for name, run in view.runs.items():
        if run.last_step_before_delay is not None:
            facts = {
                "run": name,
                "seconds": duration(view.exporter.now - run.last_step_before_delay),
                "where": _phases(view, run),
            }
            yield Match((name,), facts, start=run.last_step_before_delay)


def _phases(view: View, run: Run) -> str:
    """Return a text with the phases of the run's ranks on this node."""
    phases: dict[str, list[int]] = {}
    for rank in view.ranks:
        if rank.run == run.name and rank.alive and rank.phase and rank.rank.isdecimal():
            phases.setdefault(rank.phase, []).append(int(rank.rank))
    texts = [f"{rank_names(ranks).capitalize()} in {phase}" for phase, ranks in phases.items()]
    return ". ".join(texts) or "No phase of its ranks is known"


def _slow_starts(view: View) -> Iterator[Match]:
    for name in view.runs:
        attempt_start = view.samples.value("training_attempt_start_timestamp_seconds", run=name)
        if attempt_start is None or view.samples.value("training_attempt_steps", run=name) != 0:
            continue
        ranks = [rank for rank in view.ranks if rank.run == name]
        last_progress_at = max(
            (rank.progress_at for rank in ranks if rank.progress_at is not None), default=None
        )
        is_late = view.exporter.now - attempt_start > STARTUP_SECONDS
        # A rank may have validated batches before its first step.
        has_progress = last_progress_at is not None and view.exporter.now - last_progress_at < STARTUP_SECONDS
        if is_late and not has_progress and any(rank.alive != 0 for rank in ranks):
            yield Match((name,), {"run": name, "where": _phases(view, view.runs[name])}, start=attempt_start)


def _slower_runs(view: View) -> Iterator[Match]:
    """Yield a match for each run that is slower than usual.

    Runs that make no steps for a known reason are omitted: a rank loads, saves, validates or tests, or the run has ended, hangs or stalls.
    """
    for name, run in view.runs.items():
        rate = view.history.compute_mean_rate("executed steps", name, seconds=STEP_RATE_SECONDS)
        pauses = any(rank.run == name and rank.phase in PAUSING_PHASES for rank in view.ranks)
        if rate is None or pauses or run.is_ended or run.state in {"hung", "stalled"}:
            continue
        usual_rate = view.history.compute_usual_rate("executed steps", name)
        if usual_rate and rate / usual_rate < SLOWER_RATIO:
            facts = {"run": name, "share": share(rate / usual_rate)}
            yield Match((name,), facts)


def _data_stalls(view: View) -> Iterator[Match]:
    phases: dict[str, dict[str, float]] = {}
    for run, phase in view.history.list_owners("phase"):
        seconds = view.history.compute_mean_rate("phase", run, phase, seconds=PHASE_RATE_SECONDS)
        phases.setdefault(run, {})[phase] = seconds or 0.0
    for run, rates in phases.items():
        if run not in view.runs or not view.runs[run].is_stepping:
            # At a standstill, the time in the phase is no measure of the data loader.
            continue
        total = sum(rates.values())
        if total and rates.get("data_loading", 0.0) / total > DATA_STALL_RATIO:
            facts = {
                "run": run,
                "share": share(rates["data_loading"] / total),
                "remedy": _data_stall_remedy(view, run),
            }
            yield Match((run,), facts)


def _data_stall_remedy(view: View, run: str) -> str:
    """Return the remedy of waits for data, by the CPU of the machine and the part that the processes of the run use of it."""
    if (view.samples.value("host_cpu_utilization_ratio") or 0.0) <= FULL_CPU_RATIO:
        return FREE_CPU_REMEDY
    own_cpus = view.history.compute_last_rate("job CPU", run)
    cpus = view.samples.value("host_cpus", kind="online")
    if own_cpus is not None and cpus and own_cpus / cpus < MIN_OWN_CPU_RATIO:
        return FOREIGN_CPU_REMEDY
    return FULL_CPU_REMEDY


def _nonfinite_losses(view: View) -> Iterator[Match]:
    for name, run in view.runs.items():
        if run.is_ended or run.state == "ending":
            continue
        values = run.nonfinite.get("loss")
        if values is not None:
            facts = {"statement": f"each loss of run {name} is NaN or infinite since {values.start_text}"}
            facts["checkpoint"] = saved_step_text(values) or "a checkpoint from before"
            yield Match((name,), facts, start=values.start)
            continue
        increase = view.history.compute_increase("nonfinite", name, "loss", required_track="executed steps")
        if increase is not None:
            recent = view.history.compute_increase(
                "nonfinite", name, "loss", seconds=NONFINITE_SECONDS, required_track="executed steps"
            )
            yield Match(
                (name,),
                {
                    "statement": f"run {name} has had {count_text(increase, 'loss', 'losses')} of NaN or infinity",
                    "checkpoint": "a checkpoint from before",
                },
                start=increase.first_at,
                last_event_at=increase.last_at,
                is_event=True,
                is_past=recent is None,
            )


def saved_step_text(values: NonfiniteValues) -> str:
    """Return a text that names the last save before nonfinite values, or "" if no such save is known."""
    return "" if values.saved_step is None else f"the last save before it, of step {values.saved_step:,}"


def count_text(increase: Increase, singular: str, plural: str) -> str:
    """Return the number of events with their name, such as "1 save" or "3 saves"."""
    return f"{increase.amount:.0f} {singular if round(increase.amount) == 1 else plural}"


def _nonfinite_gradients(view: View) -> Iterator[Match]:
    for name, run in view.runs.items():
        if run.is_ended or run.state == "ending":
            continue
        nonfinite = view.history.compute_mean_rate("nonfinite", name, "grad", seconds=GRADIENT_SECONDS)
        steps = view.history.compute_mean_rate("executed steps", name, seconds=GRADIENT_SECONDS)
        if nonfinite is not None and steps is not None and nonfinite > GRADIENT_RATIO * steps:
            values = run.nonfinite.get("grad")
            ratio = min(1.0, nonfinite / steps) if steps else 1.0
            text = f"{share(ratio)} of the steps of run {name} in the last 10 min"
            if values is not None:
                text = f"all steps of run {name} since {values.start_text}"
            yield Match((name,), {"steps": text}, start=None if values is None else values.start)


def _restart_loops(view: View) -> Iterator[Match]:
    for (run,) in view.history.list_owners("restarts"):
        increase = view.history.compute_increase(
            "restarts", run, seconds=RESTART_SECONDS, required_track="executed steps"
        )
        if increase is not None and round(increase.amount) > MAX_RESTARTS:
            facts = {"run": run, "count": f"{increase.amount:.0f}"}
            # The first restart is earlier than the start of the condition.
            yield Match((run,), facts)


CONDITIONS = (
    Condition(
        alert_name="RunDied",
        criterion="a run that failed or was lost, for a minute",
        severity=AlertSeverity.CRITICAL,
        stops_run=True,
        sentence="run {run} {outcome}{reason}; it has not restarted{lost}",
        remedy="fix the cause, and restart the job under the same name: --run.name={run}",
        find_matches=_dead_runs,
    ),
    Condition(
        alert_name="TrainingHang",
        criterion=(
            "no finished step for goodput.hang_after (300 s) and goodput.hang_steps (5) times the longest step,"
            " outside start, compilation, checkpoints and validation"
        ),
        severity=AlertSeverity.CRITICAL,
        stops_run=True,
        sentence="run {run} hangs{step}{cause}. {where}",
        remedy="{remedy}; `training-exporter stacks` prints all stacks",
        find_matches=_hung_runs,
    ),
    Condition(
        criterion="a step is overdue while the run waits for data, compiles, loads, saves or validates",
        stops_run=True,
        sentence="run {run} is stalled{step}, a step is overdue{cause}. {where}",
        remedy="check what the phase waits for: storage, a compilation, a validation without reports",
        find_matches=_stalled_runs,
    ),
    Condition(
        criterion="no finished step for 60 s and 5 times the longest step, before TrainingHang",
        stops_run=True,
        sentence="a step of run {run} is late: none has finished for {seconds}. {where}",
        remedy="wait for the next step; if none finishes, the run is reported as hanging after goodput.hang_after (300 s)",
        find_matches=_late_steps,
    ),
    Condition(
        criterion="a run that finished before its step target, while its series are published",
        sentence="run {run} finished at step {step} of {target}",
        remedy="check in the log of the job whether it was to end there: an early stop, a limit of time, the end of the data",
        find_matches=_early_ends,
    ),
    Condition(
        alert_name="TrainingStartupSlow",
        criterion="no step threshold:training_startup:seconds after the start of the attempt",
        sentence="run {run} has started and has not made a step. {where}",
        remedy="check whether all nodes have joined, then storage and compilation",
        find_matches=_slow_starts,
    ),
    Condition(
        alert_name="RunSlower",
        criterion="steps a second below threshold:training_slower:ratio of the median of the hour before",
        sentence="run {run} makes {share} of the steps per second that it made in the hour before",
        remedy="find the phase that has grown, then check storage, GPU clocks and the slowest rank",
        find_matches=_slower_runs,
    ),
    Condition(
        alert_name="TrainingDataStall",
        criterion="more than threshold:training_data_stall:ratio of the time in data_loading",
        sentence="run {run} waits for data {share} of the time",
        remedy="{remedy}",
        find_matches=_data_stalls,
    ),
    Condition(
        alert_name="TrainingLossNonFinite",
        criterion="any loss in 15m that is not finite, until the run ends",
        severity=AlertSeverity.CRITICAL,
        sentence="{statement}",
        remedy="return to {checkpoint}, unless a loss scaler skipped the step",
        find_matches=_nonfinite_losses,
    ),
    Condition(
        alert_name="TrainingGradNonFinite",
        criterion="more than 0.1 of the steps with a gradient that is not finite, until the run ends",
        sentence="{steps} have a gradient norm that is not finite",
        remedy="lower the learning rate or the loss scale, or clip gradients",
        find_matches=_nonfinite_gradients,
    ),
    Condition(
        alert_name="TrainingRestartLoop",
        criterion="more than 3 restarts in 1h",
        severity=AlertSeverity.CRITICAL,
        sentence="run {run} restarted {count} times within an hour",
        remedy="stop the run until the cause of the restarts is fixed: training_restarts_total by reason",
        find_matches=_restart_loops,
    ),
)
