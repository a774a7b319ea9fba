"""Section of a run on the status page: state, position, numbers, phases, plots."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.status.elements import (
    Figure,
    Part,
    Plot,
    StyledText,
    Words,
    ago,
    figure,
    known,
    parts,
    plot,
    with_current,
    words,
)
from exporter.status.history import Line
from exporter.status.numbers import age, duration, energy, grams, number, ranges, share
from exporter.status.view import Run, View

_CAUSES = 3
_STATES = {"stalled": "warn", "stopped": "dim", **dict.fromkeys(("failed", "hung", "lost"), "bad")}


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a run between first and last step."""

    text: str
    done: float | None  # share of the steps; None if the target is not known


@dataclass(frozen=True, slots=True)
class RunSection:
    """A run."""

    name: str
    badges: Words
    facts: tuple[tuple[str, str], ...]
    position: Position | None
    remark: str
    figures: list[Figure]
    phases_title: str
    phases: list[Part]
    plots: list[Plot]


def run_section(seen: View, run: Run) -> RunSection:
    """Return the section of a run; rates and losses only if steps end now."""
    readings, now, name = seen.readings, seen.about.now, run.name
    info = next((labels for labels, _ in readings.rows("training_run_info", run=name)), {})
    attempt = readings.value("training_attempt", run=name)
    badges = [StyledText(run.state, _STATES.get(run.state, "good"))] if run.state else []
    if run.state and run.since is not None:
        ago_text = age(run.since, now)
        badges.append(StyledText(ago_text if run.ended else f"for {ago_text.removesuffix(' ago')}", "dim"))
    if attempt is not None and attempt > 1:
        badges.append(StyledText(f"attempt {attempt:.0f}", "warn"))
    if 0 < run.reporting < len(run.ranks):
        badges.append(StyledText(f"{run.reporting} of {len(run.ranks)} ranks report", "bad"))
    elif run.is_partial and not run.state and run.reporting:
        badges.append(StyledText(f"{run.reporting} rank{'s' if run.reporting > 1 else ''} alive", "good"))
    return RunSection(
        name=name,
        badges=tuple(badges),
        facts=tuple((key, fact) for key, fact in info.items() if key != "run" and fact),
        position=_position(seen, run),
        remark=_remark(run),
        figures=_run_figures(seen, run),
        phases_title=f"last minute{_reporting(run) or ' of all ranks'}",
        phases=[] if run.ended else parts(run.phases),
        plots=_run_plots(seen, run),
    )


def _remark(run: Run) -> str:
    """Return which part of a run on several nodes this page shows."""
    if not run.is_partial:
        return ""
    whole = f" of {run.world_size}" if run.world_size else ""
    part = f"This node has rank{'s' if len(run.ranks) > 1 else ''} {ranges(run.ranks)}{whole}"
    if run.has_rank_zero:
        return f"{part}. Figures of this node are labelled; the others are of the whole run."
    return (
        f"{part}. Rank 0 runs on a different node: the status page there has state, step, loss, goodput and saves of the run."
        " This page has the processes, phases and GPUs of its own ranks."
    )


def _here(run: Run) -> str:
    return " (this node)" if run.is_partial else ""


def _reporting(run: Run) -> str:
    """Return which ranks a rate covers, if not all: a rate of half of the ranks is no fall."""
    if 0 < run.reporting < len(run.ranks):
        return f" ({run.reporting} of {len(run.ranks)} ranks{' of this node' if run.is_partial else ''})"
    return _here(run)


def _step_seconds(seen: View, run: Run) -> float | None:
    return seen.past.recent("step seconds", run.name, per="steps") if run.steps_now else None


def _tokens_per_second(seen: View, run: Run) -> float | None:
    return seen.past.recent("tokens", run.name) if run.steps_now else None


def _loss(seen: View, run: Run) -> float | None:
    return seen.readings.value("training_loss", run=run.name, mode="train") if run.steps_now else None


def _run_figures(seen: View, run: Run) -> list[Figure]:
    readings, past, now, name = seen.readings, seen.past, seen.about.now, run.name
    here = _here(run)

    def current(family: str) -> float | None:
        return readings.value(family, run=name) if run.steps_now else None

    nonfinite = readings.total("training_nonfinite_total", run=name)
    saved = readings.value("training_checkpoint_last_success_timestamp_seconds", run=name)
    unsaved = None if run.ended else readings.value("training_uncommitted_seconds", run=name)
    figures = [
        *figure("step time", known(_step_seconds(seen, run), duration)),
        *figure("steps per second", known(past.recent("steps", name) if run.steps_now else None, number)),
        *figure("loss", known(_loss(seen, run), number)),
        *figure("not finite", words(f"{nonfinite:.0f}", "bad") if nonfinite else ()),
        *figure(f"tokens per second{_reporting(run)}", known(_tokens_per_second(seen, run), number)),
        *figure("gradient norm", known(current("training_grad_norm"), number)),
        *figure("learning rate", known(current("training_learning_rate"), number)),
        *_goodput(seen, run),
        *figure("at risk, unsaved", known(unsaved, duration)),
        *figure("last checkpoint", ago(saved, now)),
        *_restarts(seen, run),
        *figure(f"energy{here}", known(readings.total("training_energy_joules_total", run=name), energy)),
        *figure(f"CO2{here}", known(readings.total("training_carbon_grams_total", run=name), grams)),
    ]
    costs: dict[str, float] = {}
    for labels, amount in readings.rows("training_cost_total", run=name):
        costs[labels["currency"]] = costs.get(labels["currency"], 0.0) + amount
    for currency, amount in costs.items():
        figures += figure(f"cost{here}", words(f"{amount:,.2f} {currency}"))
    losses = readings.rows("training_badput_seconds_total", run=name)
    lost = sorted(((seconds, labels["cause"]) for labels, seconds in losses if seconds > 0), reverse=True)
    notes = [f"{cause} {duration(seconds)}" for seconds, cause in lost[:_CAUSES]]
    return figures + (figure("lost to", (), *notes) if notes else [])


def _run_plots(seen: View, run: Run) -> list[Plot]:
    past, now, name = seen.past, seen.about.now, run.name

    def drawn(
        title: str, line: Line, latest: float | None, unit: str = "", floor: float | None = None
    ) -> list[Plot]:
        if run.ended and run.since is not None:
            line = [point for point in line if point[0] <= run.since]
        return plot(title, {title: line}, unit, now, owner=name, latest=latest, floor=floor)

    loss = _loss(seen, run)
    rates = past.rates("step seconds", name, per="steps")
    return [
        *drawn("loss", with_current(past.levels("loss", name), loss, now), loss),
        *drawn("step time", rates, _step_seconds(seen, run), "seconds"),
        *drawn(
            f"tokens per second{_reporting(run)}",
            past.rates("tokens", name),
            _tokens_per_second(seen, run),
            floor=0.0,
        ),
    ]


def _restarts(seen: View, run: Run) -> list[Figure]:
    """Return the number of restarts, with the reasons for which earlier attempts ended."""
    counts = {
        labels["reason"]: count
        for labels, count in seen.readings.rows("training_restarts_total", run=run.name)
    }
    increase = seen.past.increase("restarts", run.name)
    notes = [f"{reason} {count:.0f}" for reason, count in counts.items() if count]
    notes += [f"the last {age(increase.last, seen.about.now)}"] if increase else []
    return figure("restarts", words(f"{sum(counts.values()):.0f}"), *notes) if counts else []


def _goodput(seen: View, run: Run) -> list[Figure]:
    """Return the goodput of committed work and, while the run lives, of all work if it were saved now."""
    value, name = seen.readings.value, run.name
    wall, productive = (value(f"training_{each}_seconds_total", run=name) for each in ("wall", "productive"))
    if not wall or productive is None:
        return []
    saved = value("training_checkpoint_last_success_timestamp_seconds", run=name) is not None
    saves = seen.readings.total("training_checkpoints_total", run=name, result="ok")
    note = "work that a save covers"
    if not saved and not saves and not productive and not run.ended:
        note = "no save yet: work counts after a save or at a successful end"
    figures = figure("goodput, committed", words(share(productive / wall)), note)
    unsaved = value("training_uncommitted_seconds", run=name)
    if unsaved is not None and run.steps_now:
        figures += figure(
            "goodput, if saved", words(share((productive + unsaved) / wall)), "if all work were saved now"
        )
    return figures


def _position(seen: View, run: Run) -> Position | None:
    step, target = (
        seen.readings.value(family, run=run.name) for family in ("training_step", "training_step_target")
    )
    if step is None:
        return None
    if not target:
        return Position(f"step {step:,.0f}", None)
    done = min(max(step / target, 0.0), 1.0)
    step_seconds = _step_seconds(seen, run)
    left = ""
    if step_seconds and step < target:
        left = f" · about {duration((target - step) * step_seconds)} left at this pace"
    return Position(f"step {step:,.0f} of {target:,.0f} · {share(done)}{left}", done)
