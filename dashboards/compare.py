"""Comparison of runs with the same `perf_tag` on the dashboard *Fleet*."""

from __future__ import annotations

from collections.abc import Callable

from dashboards.board import Variable
from dashboards.palette import BLUE, ORANGE, PLAIN, VERMILION, fixed
from dashboards.panels import Json, Panel, lines, steps, to
from dashboards.queries import Query, rows
from dashboards.tables import Column, matrix, table

SAME_WORK = (
    '(last_over_time(training_run_info{{@cluster, perf_tag=~"$perf_tag", perf_tag!=""{more}}}[$__range])'
    ' or last_over_time(training_run_info{{@cluster, perf_tag="", model=~"$perf_tag"{more}}}[$__range]))'
)
"""PromQL for the runs with the chosen perf_tag, or without perf_tag and of that model."""
TAG = Variable(
    "perf_tag",
    "Same work (perf_tag, else model)",
    'query_result(group by (perf_tag) (last_over_time(training_run_info{@cluster, perf_tag!=""}[$__range])'
    ' or label_replace(last_over_time(training_run_info{@cluster, perf_tag=""}[$__range]), "perf_tag", "$1", "model", "(.+)")))',
    several=False,
    regex='/perf_tag="([^"]+)"/',
    what="Runs with one perf_tag do the same work and may be compared; without perf_tag, runs of one model.",
)
RUNS = Variable(
    "run",
    "Runs",
    f"query_result(group by (run) ({SAME_WORK.format(more='')}))",
    every=None,
    regex='/run="([^"]+)"/',
    what="Runs to compare with the baseline.",
)


BASELINE = Variable(
    "baseline",
    "Baseline",
    "query_result(sort_desc(max by (run)"
    f" ({SAME_WORK.format(more=', is_baseline=' + chr(34) + 'true' + chr(34))} * 2 or {SAME_WORK.format(more='')})))",
    several=False,
    regex='/run="([^"]+)"/',
    sort=0,
    what="Reference of the comparison; the first choice is a run with is_baseline.",
)


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


LOSS = 'max by (run) (training_loss{{{}, mode="train"}})'
STEP = "max by (run) (training_step{@run})"
LAST_STEPS = "max by (run) (last_over_time(training_step{@run}[$__range] @ end()))"
UNIT = f"scalar(10 ^ (floor(log10(max({LAST_STEPS}))) - 1))"
STRIDE = f"scalar(ceil(max({LAST_STEPS}) / 10 / {UNIT}) * {UNIT})"
"""A tenth of the largest step, rounded up to two digits."""
THESE, THAT = "@run", 'cluster=~"$cluster", run="$baseline"'


def _compared(
    of: Callable[[str], str], title: str, unit: str, decimals: int, better: Json
) -> tuple[Column, Column]:
    """Return the columns of a number of each run, and of the relative difference to the baseline."""
    delta = f"\N{GREEK CAPITAL LETTER DELTA} {title}"
    return (
        Column(of(THESE), title, unit, 100, decimals=decimals),
        Column(f"({of(THESE)}) / scalar({of(THAT)}) - 1", delta, "percentunit", 100, better, decimals=1),
    )


def _at_common_step(value: str) -> str:
    """Return PromQL for a number of each run at the last step that all runs have reached."""
    return f"last_over_time(({value} and on (run) {STEP} <= scalar(min({LAST_STEPS})))[$__range:$__interval])"


def comparison() -> tuple[Panel, ...]:
    """Return the panels that compare runs with a baseline."""
    better_down = steps((None, BLUE), (-0.02, PLAIN), (0.02, VERMILION))
    return (
        table(
            "Runs against the baseline",
            Column("run", "Run", links=(to("training-run", "Run", run="${__value.raw}"),)),
            *_compared(
                _tokens, "Tokens/s", "locale", 0, steps((None, VERMILION), (-0.02, PLAIN), (0.02, BLUE))
            ),
            *_compared(_step, "Step", "s", 3, better_down),
            *_compared(_joules, "J/token", "joule", 3, better_down),
            Column(
                "max by (run) (last_over_time(training_productive_seconds_total{@run}[$__range]))"
                " / max by (run) (last_over_time(training_wall_seconds_total{@run}[$__range]))",
                "Goodput, committed",
                unit="percentunit",
                width=100,
                decimals=1,
            ),
            Column(LAST_STEPS, "At step", unit="locale", width=100),
            Column(_at_common_step(LOSS.format(THESE)), "Same-step loss", width=100, decimals=3),
            Column(
                _at_common_step("sum by (run, currency) (training_cost_total{@run})"),
                "Same-step cost",
                width=100,
                decimals=2,
            ),
            Column(
                "sum by (run, currency) (last_over_time(training_cost_total{@run}[$__range]))",
                "Cost so far",
                width=100,
                decimals=2,
            ),
            Column("currency", "Currency", width=90),
            sort="Tokens/s",
            points=100,
            h=6,
        ),
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
            w=12,
            h=11,
        ),
        matrix(
            "Loss by step",
            rows(
                f"avg_over_time(({LOSS.format(THESE)} * on (run) group_left (step)"
                f' count_values by (run) ("step", floor({STEP} / {STRIDE}) * {STRIDE}))[$__range:$__interval])'
            ),
            across="run",
            down="step",
            unit="none",
            decimals=3,
            numbers=True,
            w=12,
            h=11,
        ),
        lines(
            "Loss by time",
            Query(LOSS.format(THESE), "{{run}}", BLUE),
            Query(LOSS.format(THAT), "{{run}} (baseline)"),
            unit="none",
            least=None,
            overrides=[
                {
                    "matcher": {"id": "byFrameRefID", "options": "B"},
                    "properties": [
                        {"id": "color", "value": fixed(ORANGE)},
                        {"id": "custom.lineWidth", "value": 2},
                    ],
                }
            ],
        ),
    )
