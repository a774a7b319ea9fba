"""The dashboard *Compare runs*: runs of the same work side by side, against one of them."""

from __future__ import annotations

from collections.abc import Callable

from dashboards.board import Board, Row, Variable
from dashboards.palette import BLUE, ORANGE, PLAIN, VERMILION, fixed
from dashboards.panels import About, Json, Panel, lines, steps, to
from dashboards.queries import Query, rows
from dashboards.tables import Column, matrix, table

UID = "training-compare"

TAG = Variable(
    "perf_tag",
    "Comparable (perf_tag)",
    "label_values(training_run_info, perf_tag)",
    several=False,
    what="Runs of one perf_tag do the same work and may be compared.",
)
RUNS = Variable(
    "run",
    "Runs",
    'label_values(training_run_info{perf_tag=~"$perf_tag"}, run)',
    every=None,
    what="Runs beside the baseline.",
)


BASELINE = Variable(
    "baseline",
    "Baseline",
    "query_result(sort_desc(max by (run)"
    ' (last_over_time(training_run_info{perf_tag=~"$perf_tag", is_baseline="true"}[$__range]) * 2'
    ' or last_over_time(training_run_info{perf_tag=~"$perf_tag"}[$__range]))))',
    several=False,
    regex='/run="([^"]+)"/',
    sort=0,
    what="What the others are compared with; first comes the run that says of itself that it is one.",
)

EMPTY = "No run of this perf_tag has told it in this time: widen the time range."


def _tokens(run: str) -> str:
    return (
        f'sum by (run) (increase(training_tokens_total{{{run}, mode="train"}}[$__range]))'
        f" / max by (run) (increase(training_wall_seconds_total{{{run}}}[$__range]))"
    )


def _step(run: str) -> str:
    return f"max by (run) (avg_over_time(training_step_ideal_seconds{{{run}}}[$__range]))"


def _joules(run: str) -> str:
    return (
        f"sum by (run) (increase(training_energy_joules_total{{{run}}}[$__range]))"
        f' / sum by (run) (increase(training_tokens_total{{{run}, mode="train"}}[$__range]))'
    )


THESE, THAT = "@run", 'run="$baseline"'


def _compared(
    of: Callable[[str], str], title: str, unit: str, decimals: int, better: Json
) -> tuple[Column, Column]:
    """Give a number of each run, and how far it is from the baseline's."""
    delta = f"\N{GREEK CAPITAL LETTER DELTA} {title.lower()}"
    return (
        Column(of(THESE), title, unit, 100, decimals=decimals),
        Column(f"({of(THESE)}) / scalar({of(THAT)}) - 1", delta, "percentunit", 100, better, decimals=1),
    )


def board() -> Board:
    """The dashboard."""
    return Board(
        uid=UID,
        title="Training / Compare runs",
        what="Runs with the same perf_tag side by side against a baseline: speed, loss, energy, goodput.",
        variables=(TAG, BASELINE, RUNS),
        rows=(
            Row("Which run is better, and by how much?", _table()),
            Row("Where does the difference come from?", _difference()),
            Row("Over time", _time()),
        ),
        span="now-7d",
        refresh="1m",
    )


def _table() -> tuple[Panel, ...]:
    better_down = steps((None, BLUE), (-0.02, PLAIN), (0.02, VERMILION))
    return (
        table(
            "Runs against the baseline",
            Column("run", "Run", links=(to("training-run", "Training run", run="${__value.raw}"),)),
            *_compared(
                _tokens, "Tokens/s", "locale", 0, steps((None, VERMILION), (-0.02, PLAIN), (0.02, BLUE))
            ),
            *_compared(_step, "Step", "s", 3, better_down),
            *_compared(_joules, "Joules/token", "joule", 3, better_down),
            Column(
                "max by (run) (last_over_time(training_productive_seconds_total{@run}[$__range]))"
                " / max by (run) (last_over_time(training_wall_seconds_total{@run}[$__range]))",
                "Goodput",
                unit="percentunit",
                width=100,
                decimals=1,
            ),
            Column(
                'min by (run) (last_over_time(training_loss{@run, mode="train"}[$__range]))',
                "Last loss",
                width=100,
                decimals=3,
            ),
            Column(
                "max by (run) (last_over_time(training_step{@run}[$__range]))",
                "At step",
                unit="locale",
                width=100,
            ),
            Column(
                "sum by (run) (last_over_time(training_restarts_total{@run}[$__range]))", "Restarts", width=90
            ),
            sort="Tokens/s",
            about=About(
                "Each run over the whole time range, and how far it is from the baseline. Blue is better by more than "
                "2 %, orange-red worse. Tokens per second count all of the time, restarts and checkpoints too; the "
                "step is the mean of those without outliers.",
                "orange-red; or a better step with fewer tokens a second: what was won is lost in waiting.",
                "the phases below say where the difference comes from.",
                "the run did not live in this time, or does not tell that number.",
            ),
            empty=EMPTY,
            h=9,
        ),
    )


def _difference() -> tuple[Panel, ...]:
    return (
        matrix(
            "Seconds of a step, by phase",
            rows(
                "sum by (run, phase) (increase(training_phase_seconds_total{@run}[$__range]))"
                ' / on (run) group_left () sum by (run) (increase(training_steps_total{@run, mode="train"}[$__range]))'
            ),
            across="run",
            down="phase",
            unit="s",
            decimals=1,
            about=About(
                "Mean time of each phase for one step of one rank.",
                "the phase whose row differs most from the baseline's column is where the time went.",
                "`data_loading`: data and workers. `backward`, `grad_sync`: the network and stragglers.",
            ),
            empty=EMPTY,
            w=14,
            h=11,
        ),
        matrix(
            "What was lost, as a share of the time?",
            rows(
                "max by (run, cause) (last_over_time(training_badput_seconds_total{@run}[$__range]))"
                " / on (run) group_left () max by (run) (last_over_time(training_wall_seconds_total{@run}[$__range]))"
            ),
            across="run",
            down="cause",
            unit="percentunit",
            decimals=1,
            w=10,
            h=11,
            about=About(
                "Badput of each run by cause, over its life.",
                "a cause that the baseline does not have.",
                "*Training run* of that run has it over time.",
                "nothing was lost, or no time is counted.",
            ),
            empty=EMPTY,
        ),
    )


def _time() -> tuple[Panel, ...]:
    def over(title: str, expression: str, unit: str, about: About, least: float | None = 0) -> Panel:
        return lines(
            title,
            Query(expression.replace("@these", '@run, run!="$baseline"'), "{{run}}", BLUE),
            Query(expression.replace("@these", THAT), "{{run}} (baseline)"),
            unit=unit,
            least=least,
            overrides=[
                {
                    "matcher": {"id": "byFrameRefID", "options": "B"},
                    "properties": [
                        {"id": "color", "value": fixed(ORANGE)},
                        {"id": "custom.lineWidth", "value": 2},
                    ],
                }
            ],
            about=about,
            empty=EMPTY,
        )

    return (
        over(
            "Loss",
            'max by (run) (training_loss{@these, mode="train"})',
            "none",
            About(
                "Training loss of each run at its own time; the baseline is thick and orange.",
                "a run that is faster and learns less is not faster.",
                "compare the table's loss at equal steps.",
                "the run did not live then.",
            ),
            least=None,
        ),
        over(
            "Step time, undisturbed",
            "max by (run) (training_step_ideal_seconds{@these})",
            "s",
            About(
                "Of each run at its own time.",
                "a run that starts as the baseline and becomes slower.",
                "heat, memory, or a filling disk: *GPUs* and *Node and container* at that time.",
                "the run did not live then, or stood still.",
            ),
        ),
        over(
            "Tokens a second",
            'sum by (run) (rate(training_tokens_total{@these, mode="train"}[$__rate_interval]))',
            "cps",
            About(
                "Of each run at its own time.",
                "holes that the baseline does not have.",
                "checkpoints, validation or restarts: *Training run*.",
                "the run did not live then.",
            ),
        ),
        over(
            "Joules per token",
            "sum by (run) (rate(training_energy_joules_total{@these}[$__rate_interval]))"
            ' / (sum by (run) (rate(training_tokens_total{@these, mode="train"}[$__rate_interval])) > 0)',
            "joule",
            About(
                "Of each run at its own time.",
                "above the baseline at the same work.",
                "*Energy, carbon, cost*.",
                "the run stood still then.",
            ),
        ),
    )
