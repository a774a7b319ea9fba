"""Section of a run on the status page: state, progress, figures, phases and plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exporter.status.attention import hourly_cost_texts, total_costs
from exporter.status.condition import Finding
from exporter.status.conditions.checkpoints import failures_since_last_save
from exporter.status.conditions.runs import remote_ranks_text, unsaved_steps_text
from exporter.status.elements import (
    MAX_ROWS,
    BarSegment,
    Figure,
    Plot,
    RichText,
    StyledText,
    age_or_dash,
    append_current,
    bar_segments,
    figure,
    plot,
    styled,
    value_or_dash,
)
from exporter.status.formatting import age, duration, energy, exit_text, grams, number, rank_names, share
from exporter.status.history import PLOT_SECONDS, Line
from exporter.status.view import STOP_REASONS, NonfiniteValues, Run, View

_MAX_BADPUT_CAUSES = 3
SAME_FAILURE_SECONDS = 60.0
"""Maximum time between two exits that belong to the same failure of a run."""
_END_TEXTS = {
    "exit": "exit status or exception",
    "signal": "killed by a signal",
    "oom_kill": "killed for lack of memory (OOM)",
    "user": "stopped by the user",
    "host": "reboot of the node",
}
"""Text of a reason in `END_REASONS`; other reasons are shown as reported."""
MIN_UNSAVED_SECONDS = 0.1
"""Unsaved work that is shown as 0 s below this time."""
_STATE_STYLES = {
    "stalled": "warn",
    "ending": "warn",
    "stopped": "dim",
    **dict.fromkeys(("failed", "hung", "lost"), "bad"),
}


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress of a run towards its step target."""

    text: str
    ratio: float | None  # share of the steps that are complete; None if the target is unknown


@dataclass(frozen=True, slots=True)
class RunSection:
    """Content of a run's section."""

    name: str
    is_folded: bool  # True for an ended run beside other runs: the page shows one line
    badges: RichText
    facts: tuple[tuple[str, str], ...]  # pairs of name and text
    progress: RunProgress | None
    remark: str
    figures: list[Figure]
    phases_title: str
    phases: list[BarSegment]
    plots: list[Plot]


def run_sections(view: View, findings: Sequence[Finding]) -> list[RunSection]:
    """Return the sections of the runs: live runs in the order of their findings, then by name; then ended runs, the latest end first."""
    subjects = [finding.match.subject[0] for finding in findings if finding.match.subject]
    runs = sorted(
        view.runs.values(),
        key=lambda run: (
            run.is_ended,
            -(run.state_since or run.failed_at or 0.0) if run.is_ended else 0.0,
            subjects.index(run.name) if run.name in subjects else len(subjects),
        ),
    )
    return [run_section(view, run) for run in runs[:MAX_ROWS]]


def run_section(view: View, run: Run) -> RunSection:
    """Return the section of a run, without rates and loss if they are not current."""
    info = next((labels for labels, _ in view.samples.select("training_run_info", run=run.name)), {})
    return RunSection(
        name=run.name,
        is_folded=run.is_ended and len(view.runs) > 1,
        badges=tuple(_badges(view, run)),
        facts=tuple((key, fact) for key, fact in info.items() if key != "run" and fact),
        progress=_progress(view, run),
        remark=_remark(run),
        figures=_run_figures(view, run),
        phases_title=f"last minute{_coverage_note(run) or ' of all ranks'}",
        phases=[] if run.is_ended else bar_segments(run.phase_rates),
        plots=_run_plots(view, run),
    )


def _badges(view: View, run: Run) -> list[StyledText]:
    """Return the badges for the state, a late step, the attempt and the reporting ranks of a run."""
    now, attempt = view.exporter.now, view.samples.value("training_attempt", run=run.name)
    has_warning = run.last_step_before_delay is not None or run.has_finished_early
    state_style = "warn" if has_warning else _STATE_STYLES.get(run.state, "good")
    badges = [StyledText(run.state, state_style)] if run.state else []
    if not run.state and run.is_ended and run.failed_at is not None:
        badges = [StyledText("ended early", "bad"), StyledText(age(run.failed_at, now), "dim")]
    if run.state and run.state_since is not None:
        seconds = max(0.0, now - run.state_since)
        is_over = run.is_ended and run.state != "ending"
        badges.append(StyledText(age(run.state_since, now) if is_over else f"for {duration(seconds)}", "dim"))
    if run.has_finished_early:
        badges.append(StyledText("before its target", "warn"))
    if run.last_step_before_delay is not None:
        badges.append(StyledText(f"no step for {duration(now - run.last_step_before_delay)}", "warn"))
    if attempt is not None and attempt > 1:
        badges.append(StyledText(f"attempt {attempt:.0f}", "warn"))
    reporting_count = run.reporting_count
    if 0 < reporting_count < len(run.ranks):
        badges.append(StyledText(f"{reporting_count} of {len(run.ranks)} ranks report", "bad"))
    elif run.is_partial and not run.state and reporting_count:
        badges.append(StyledText(f"{reporting_count} rank{'s' if reporting_count > 1 else ''} alive", "good"))
    return badges


def _remark(run: Run) -> str:
    """Return sentences about the part of a multi-node run that this page shows, or an empty text for a run on one node."""
    if not run.is_partial:
        return ""
    total = f" of {run.world_size}" if run.world_size else ""
    part = f"{remote_ranks_text(run)} This node has {rank_names(run.ranks)}{total}".lstrip()
    if run.has_rank_zero:
        return f"{part}. Figures of this node are labeled; other figures are of the whole run."
    return (
        f"{part}. Rank 0 runs on a different node: its status page shows the state, step, loss, goodput and saves of the run."
        " This page shows the processes, phases and GPUs of the ranks of this node."
    )


def _node_note(run: Run) -> str:
    return " (this node)" if run.is_partial else ""


def _coverage_note(run: Run) -> str:
    """Return a note about the ranks that a rate covers. If some ranks do not report, the lower rate is no slowdown."""
    if 0 < run.reporting_count < len(run.ranks):
        return (
            f" ({run.reporting_count} of {len(run.ranks)} ranks{' of this node' if run.is_partial else ''})"
        )
    return _node_note(run)


def _step_seconds(view: View, run: Run) -> float | None:
    return (
        view.history.compute_last_rate("step seconds", run.name, divisor="timed steps")
        if run.is_stepping
        else None
    )


def _tokens_per_second(view: View, run: Run) -> float | None:
    return view.history.compute_last_rate("tokens", run.name) if run.is_stepping else None


def _loss(view: View, run: Run) -> float | None:
    return view.samples.value("training_loss", run=run.name, mode="train") if run.is_stepping else None


def _loss_figure(view: View, run: Run) -> list[Figure]:
    """Return the latest loss. For a loss that is not finite, return the first such step, the last save before, and the last finite loss."""
    values = run.nonfinite.get("loss")
    losses = [loss for _, loss in view.history.read_levels("loss", run.name) if loss is not None]
    notes = []
    if values is not None and values.saved_step is not None:
        notes.append(f"last save before it: step {values.saved_step:,}")
    if values is not None and losses:
        notes.append(f"last finite loss: {number(losses[-1])}")
    return _value_figure("loss", _loss(view, run), values, *notes)


def _value_figure(
    name: str, value: float | None, values: NonfiniteValues | None, *notes: str
) -> list[Figure]:
    """Return the latest value, or the first step of the values that are not finite up to the latest value."""
    if values is None:
        return figure(name, value_or_dash(value, number))
    return figure(name, styled("NaN or infinite", "bad"), f"since {values.start_text}", *notes)


def _nonfinite_counts(view: View, run: Run) -> list[Figure]:
    """Return the number of values that were not finite, by kind; no figure without such a value."""
    texts = []
    for kind, singular, plural in (("loss", "loss", "losses"), ("grad", "gradient norm", "gradient norms")):
        count = view.samples.total("training_nonfinite_total", run=run.name, kind=kind)
        if count:
            texts.append(f"{count:,.0f} {singular if count == 1 else plural}")
    if not texts:
        return []
    text = ", ".join(texts)
    return figure("NaN or infinite so far", styled(text, "bad"))


def _bad_save_notes(view: View, run: Run) -> list[str]:
    """Return a note if the last save is later than the first of the losses that are not finite."""
    values = run.nonfinite.get("loss")
    saved_step = view.samples.value("training_checkpoint_last_step", run=run.name)
    if values is None or values.step is None or saved_step is None or saved_step < values.step:
        return []
    return [f"after the first NaN or infinite loss, of step {values.step:,}"]


def _rate_figure(
    name: str, value: float | None, format_value: Callable[[float], str], *notes: str
) -> list[Figure]:
    """Return the figure of a mean over the last minute, which its note names; no figure without a value."""
    return [] if value is None else figure(name, styled(format_value(value)), "last minute", *notes)


def _run_figures(view: View, run: Run) -> list[Figure]:
    """Return the figures of a run. Rates, loss, gradient norm and learning rate are dashes if they are not current."""
    samples, history, now, name = view.samples, view.history, view.exporter.now, run.name
    node_note = _node_note(run)

    def current(family: str) -> float | None:
        return samples.value(family, run=name) if run.is_stepping else None

    saved_at = samples.value("training_checkpoint_last_success_timestamp_seconds", run=name)
    steps_per_second = history.compute_last_rate("timed steps", name) if run.is_stepping else None
    figures = [
        *_rate_figure("step time", _step_seconds(view, run), duration),
        *_rate_figure("steps per second", steps_per_second, number),
        *_loss_figure(view, run),
        *_nonfinite_counts(view, run),
        *_rate_figure(f"tokens per second{_coverage_note(run)}", _tokens_per_second(view, run), number),
        *_value_figure("gradient norm", current("training_grad_norm"), run.nonfinite.get("grad")),
        *figure("learning rate", value_or_dash(current("training_learning_rate"), number)),
        *_goodput(view, run),
        *_unsaved_work(view, run),
        *figure("last checkpoint", age_or_dash(saved_at, now), *_bad_save_notes(view, run)),
        *_restarts(view, run),
        *figure(
            f"energy{node_note}",
            value_or_dash(samples.total("training_energy_joules_total", run=name), energy),
        ),
        *figure(
            f"CO2{node_note}", value_or_dash(samples.total("training_carbon_grams_total", run=name), grams)
        ),
    ]
    for currency, amount in total_costs(view, {name}).items():
        figures += figure(
            f"cost{node_note}", styled(f"{amount:,.2f} {currency}"), *hourly_cost_texts(view, {name})
        )
    return figures + _lost_time(view, run)


def _unsaved_seconds(view: View, run: Run) -> float | None:
    """Return the work that no save covers, without the time of an overdue step; None if unknown."""
    seconds = view.samples.value("training_uncommitted_seconds", run=run.name)
    return None if seconds is None else max(0.0, seconds - run.undecided_seconds)


def _unsaved_work(view: View, run: Run) -> list[Figure]:
    """Return the work that no save covers: at risk while the run lives, and lost after a crash unless a save was not reported."""
    if run.state == "finished":
        return _later_steps(view, run)
    seconds = _unsaved_seconds(view, run)
    if seconds is None:
        return []
    text = duration(seconds) if seconds >= MIN_UNSAVED_SECONDS else "0 s"
    if not run.is_ended or run.state == "ending":
        is_failing = failures_since_last_save(view, run.name) is not None
        return figure("at risk, unsaved", styled(text, "bad" if is_failing else ""))
    if run.state not in {"failed", "lost", "stopped"}:
        return []
    name = "unsaved at the stop" if run.state == "stopped" else "lost with the crash"
    style = "bad" if run.state != "stopped" and seconds >= MIN_UNSAVED_SECONDS else ""
    wall = view.samples.value("training_wall_seconds_total", run=run.name)
    ratio = seconds / wall if wall else 0.0
    notes = [f"{share(ratio)} of the time"] if wall else []
    notes += [
        f"{ratio * amount:,.2f} {currency}" for currency, amount in total_costs(view, {run.name}).items()
    ]
    return figure(name, styled(text, style), *filter(None, [unsaved_steps_text(view, run.name)]), *notes)


def _later_steps(view: View, run: Run) -> list[Figure]:
    """Return the steps of a finished run that no reported checkpoint contains; no figure without such steps or without a save."""
    step = view.samples.value("training_step", run=run.name)
    saved_step = view.samples.value("training_checkpoint_last_step", run=run.name)
    if step is None or saved_step is None or step <= saved_step:
        return []
    note = f"after step {saved_step:,.0f}, in no reported checkpoint"
    return figure("steps after the last save", styled(f"{step - saved_step:,.0f}", "warn"), note)


def _lost_time(view: View, run: Run) -> list[Figure]:
    """Return the share of badput in the wall time, with its cost and its largest causes."""
    badput = {
        labels["cause"]: seconds
        for labels, seconds in view.samples.select("training_badput_seconds_total", run=run.name)
        if seconds > 0
    }
    if run.undecided_seconds:
        badput["step overdue"] = run.undecided_seconds
    wall = view.samples.value("training_wall_seconds_total", run=run.name)
    if not badput or not wall:
        return []
    ratio = min(1.0, sum(badput.values()) / wall)
    costs = [
        f"{ratio * amount:,.2f} {currency}{_node_note(run)}"
        for currency, amount in total_costs(view, {run.name}).items()
    ]
    causes = sorted(badput, key=lambda cause: -badput[cause])[:_MAX_BADPUT_CAUSES]
    notes = [f"{cause} {duration(badput[cause])}" for cause in causes]
    return figure("lost time", styled(share(ratio)), *costs, *notes)


def _run_plots(view: View, run: Run) -> list[Plot]:
    """Return the plots of a run, which end with the run. At a standstill, they end at the last step, as the figures do."""
    history, now, name = view.history, view.exporter.now, run.name

    last_at = run.state_since if run.is_ended else None
    if not run.is_ended and not run.is_stepping:
        steps_at = [
            rank.progress_at for rank in view.ranks if rank.run == name and rank.progress_at is not None
        ]
        last_at = max(steps_at, default=None)

    def run_plot(
        title: str, line: Line, latest: float | None, unit: str = "", floor: float | None = None
    ) -> list[Plot]:
        if last_at is not None:
            # A rate over a minute would sink slowly, and a loss would stay level. The gap keeps the right edge at the present.
            gap = [] if run.is_ended else [(now, None)]
            line = [*(point for point in line if point[0] <= last_at), *gap]
        return plot(title, {title: line}, unit, now, owner=name, latest=latest, floor=floor)

    loss = _loss(view, run)
    rates = history.compute_rates("step seconds", name, divisor="timed steps")
    return [
        *run_plot("loss", append_current(history.read_levels("loss", name), loss, now), loss),
        *run_plot("step time", rates, _step_seconds(view, run), "seconds"),
        *run_plot(
            f"tokens per second{_coverage_note(run)}",
            history.compute_rates("tokens", name),
            _tokens_per_second(view, run),
            floor=0.0,
        ),
    ]


def _last_exit_notes(view: View, run: Run) -> list[str]:
    """Return a note on the first exit of the latest failure: rank and reason; no note without a known exit on this node."""
    exits = [
        (rank.exited_at, int(rank.rank), rank.exit_reason)
        for rank in view.ranks
        if rank.run == run.name and rank.rank.isdecimal() and rank.exited_at is not None
    ]
    last_at = max((exited_at for exited_at, _, _ in exits), default=0.0)
    latest = [(at, rank, reason) for at, rank, reason in exits if last_at - at <= SAME_FAILURE_SECONDS]
    # The launcher stops the other ranks after a failure.
    latest = [failed for failed in latest if failed[2] not in STOP_REASONS] or latest
    if not latest:
        return []
    _, _, reason = min(latest)
    ranks = [rank for _, rank, rank_reason in latest if rank_reason == reason]
    return [f"last exit: {rank_names(ranks)} {exit_text(reason)}"]


def _restarts(view: View, run: Run) -> list[Figure]:
    """Return the number of restarts, with the reasons why earlier attempts ended."""
    counts = {
        labels["reason"]: count
        for labels, count in view.samples.select("training_restarts_total", run=run.name)
    }
    increase = view.history.compute_increase("restarts", run.name, required_track="executed steps")
    notes = [
        f"{_END_TEXTS.get(reason, reason)}: {'once' if count == 1 else f'{count:.0f} times'}"
        for reason, count in counts.items()
        if count
    ]
    if notes:
        notes += _last_exit_notes(view, run)
    notes += [f"last restart {age(increase.last_at, view.exporter.now)}"] if increase else []
    return figure("restarts", styled(f"{sum(counts.values()):.0f}"), *notes) if counts else []


def _goodput(view: View, run: Run) -> list[Figure]:
    """Return the goodput of committed work and, while steps complete, the goodput if all work were saved now."""
    value, name = view.samples.value, run.name
    wall = value("training_wall_seconds_total", run=name)
    productive = value("training_productive_seconds_total", run=name)
    if not wall or productive is None:
        return []
    has_saved = value("training_checkpoint_last_success_timestamp_seconds", run=name) is not None
    save_count = view.samples.total("training_checkpoints_total", run=name, result="ok")
    note = "work covered by a save"
    if _bad_save_notes(view, run):
        note = "includes saves after the first NaN or infinite loss"
    if not has_saved and not save_count and not productive and not run.is_ended:
        note = "no save yet: work counts after a save or at a successful end"
    figures = figure("goodput, committed", styled(share(productive / wall)), note)
    unsaved_seconds = _unsaved_seconds(view, run)
    if unsaved_seconds is not None and (run.is_stepping or run.undecided_seconds):
        figures += figure(
            "goodput, if saved",
            styled(share((productive + unsaved_seconds) / wall)),
            "if all work were saved now",
        )
    return figures


def _mean_steps_per_second(view: View, run: Run) -> float | None:
    """Return the steps per second of wall time since the first step of the attempt, over at most an hour; None if not current.

    Unlike the step time, the wall time includes data loading, saves and validation.
    """
    if not run.is_stepping:
        return None
    now = view.exporter.now
    attempt_start = view.samples.value("training_attempt_start_timestamp_seconds", run=run.name)
    seconds = PLOT_SECONDS if attempt_start is None else min(PLOT_SECONDS, now - attempt_start)
    increase = view.history.compute_increase("executed steps", run.name, seconds=seconds)
    if increase is None:
        return None
    return view.history.compute_mean_rate("executed steps", run.name, seconds=now - increase.first_at)


def _progress(view: View, run: Run) -> RunProgress | None:
    """Return the step, and the share and the remaining time of the target if it is known; None without a step."""
    step, target = (
        view.samples.value(family, run=run.name) for family in ("training_step", "training_step_target")
    )
    if step is None:
        return None
    if not target:
        return RunProgress(f"step {step:,.0f}", None)
    ratio = min(max(step / target, 0.0), 1.0)
    steps_per_second = _mean_steps_per_second(view, run)
    remaining = ""
    if steps_per_second and step < target:
        remaining = f" · about {duration((target - step) / steps_per_second)} left at this pace"
    return RunProgress(f"step {step:,.0f} of {target:,.0f} · {share(ratio)}{remaining}", ratio)
