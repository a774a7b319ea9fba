"""Comparison of runs that do the same work, on the dashboard *Fleet*.

Runs do the same work if they have the same `perf_tag`, or no `perf_tag` and the same model. A run whose `perf_tag` is the name of a model
is also compared with the runs of this model that have no `perf_tag`.

The selector `@compared_run` in a query stands for the selected runs that do the same work, see `dashboards.queries`.
"""

from __future__ import annotations

from collections.abc import Callable

from dashboards.board import ORDER_OF_QUERY, Variable
from dashboards.palette import BLUE, HASHED_COLOR, NEUTRAL, ORANGE, VERMILION, fixed_color
from dashboards.panels import RUN_LINK, Json, Panel, threshold_steps, time_series
from dashboards.queries import SAME_WORK_RUNS_TEMPLATE, Query, table_query
from dashboards.tables import Column, matrix, table

PERF_TAG = Variable(
    "perf_tag",
    "Same work (perf_tag, else model)",
    'query_result(group by (perf_tag) (last_over_time(training_run_info{@cluster, perf_tag!=""}[$__range])'
    ' or label_replace(last_over_time(training_run_info{@cluster, perf_tag=""}[$__range]), "perf_tag", "$1", "model", "(.+)")))',
    multi=False,
    regex='/perf_tag="([^"]+)"/',
    description="Runs with the same perf_tag do the same work; runs without a perf_tag are grouped by their model.",
)
RUNS = Variable(
    "run",
    "Runs",
    f"query_result(group by (run) ({SAME_WORK_RUNS_TEMPLATE.format(extra_matchers='')}))",
    regex='/run="([^"]+)"/',
    description="Runs to compare with the baseline.",
)

IS_BASELINE_MATCHER = 'is_baseline="true"'
"""Matcher of the runs that the job declares as baseline."""
BASELINE = Variable(
    "baseline",
    "Baseline",
    # The value, 2 for a run with is_baseline and 1 for the others, sorts the choices.
    "query_result(sort_desc(max by (run)"
    f" ({SAME_WORK_RUNS_TEMPLATE.format(extra_matchers=f', {IS_BASELINE_MATCHER}')} * 2 or {SAME_WORK_RUNS_TEMPLATE.format(extra_matchers='')})))",
    multi=False,
    regex='/run="([^"]+)"/',
    sort=ORDER_OF_QUERY,
    description="Reference of the comparison; a run with is_baseline is the first choice, if there is one.",
)


def _query_tokens_per_second(run_matchers: str) -> str:
    """Return PromQL for the tokens per second of wall time, including downtime."""
    return (
        f'sum by (run) (increase(training_tokens_total{{{run_matchers}, mode="train"}}[$__range]))'
        f" / max by (run) (increase(training_wall_seconds_total{{{run_matchers}}}[$__range]))"
    )


def _query_ideal_step_seconds(run_matchers: str) -> str:
    """Return PromQL for the mean duration of a step, without the slow steps."""
    return f"max by (run) (avg_over_time(training_step_ideal_seconds{{{run_matchers}}}[$__range]))"


def _query_joules_per_token(run_matchers: str) -> str:
    """Return PromQL for the energy of a run per training token. The energy includes other work, such as validations and saves."""
    return (
        f"sum by (run) (increase(training_energy_joules_total{{{run_matchers}}}[$__range]))"
        f' / sum by (run) (increase(training_tokens_total{{{run_matchers}, mode="train"}}[$__range]))'
    )


def _query_training_loss(run_matchers: str) -> str:
    """Return PromQL for the last finite loss of a training step."""
    return f'max by (run) (training_loss{{{run_matchers}, mode="train"}})'


STEP_NUMBER = "max by (run) (training_step{@compared_run})"
"""PromQL for the step of each compared run."""
LAST_STEP_NUMBER = "max by (run) (last_over_time(training_step{@compared_run}[$__range] @ end()))"
"""PromQL for the last step of each compared run in the time range."""
ROUNDING_STEPS = f"scalar(10 ^ (floor(log10(max({LAST_STEP_NUMBER}))) - 1))"
"""PromQL for the largest power of ten that is at most a tenth of the largest step number, such as 1,000 for 27,500 steps."""
ROW_DISTANCE_STEPS = f"scalar(ceil(max({LAST_STEP_NUMBER}) / 10 / {ROUNDING_STEPS}) * {ROUNDING_STEPS})"
"""PromQL for the distance in steps between two rows of *Loss by step*.

The distance is a tenth of the largest step number, rounded up to one significant digit, such as 3,000 for 27,500 steps.
"""
BASELINE_MATCHERS = 'cluster=~"$cluster", run="$baseline"'
"""Matchers of the baseline."""
OTHER_RUNS_MATCHERS = '@compared_run, run!="$baseline"'
"""Matchers of the compared runs without the baseline."""


def _comparison_columns(
    build_query: Callable[[str], str], title: str, unit: str, decimals: int, difference_thresholds: Json
) -> tuple[Column, Column]:
    """Return a column with a value of each run, and a column with its relative difference from the baseline.

    Args:
        build_query: Function that returns the PromQL of the value. Its argument is the text between the braces of each selector:
            `@compared_run` or `BASELINE_MATCHERS`.
        title: Heading of the value column.
        unit: Grafana's identifier of the unit.
        decimals: Number of decimals of the value.
        difference_thresholds: Thresholds that color the difference.
    """
    return (
        Column(build_query("@compared_run"), title, unit, 100, decimals=decimals),
        Column(
            f"({build_query('@compared_run')}) / scalar({build_query(BASELINE_MATCHERS)}) - 1",
            f"\N{GREEK CAPITAL LETTER DELTA} {title}",
            "percentunit",
            100,
            difference_thresholds,
            decimals=1,
        ),
    )


def _at_last_common_step(expression: str) -> str:
    """Return PromQL for a value of each compared run: the latest sample at or before the last step that all compared runs have reached."""
    return f"last_over_time(({expression} and on (run) {STEP_NUMBER} <= scalar(min({LAST_STEP_NUMBER})))[$__range:$__interval])"


def comparison_panels() -> tuple[Panel, ...]:
    """Return the panels that compare the runs: a table with differences from the baseline, phases, and losses by step and by time."""
    lower_is_better_thresholds = threshold_steps((None, BLUE), (-0.02, NEUTRAL), (0.02, VERMILION))
    higher_is_better_thresholds = threshold_steps((None, VERMILION), (-0.02, NEUTRAL), (0.02, BLUE))
    return (
        table(
            "Runs against the baseline",
            Column("run", "Run", links=(RUN_LINK,)),
            *_comparison_columns(
                _query_tokens_per_second,
                "Tokens/s",
                "locale",
                0,
                higher_is_better_thresholds,
            ),
            *_comparison_columns(_query_ideal_step_seconds, "Ideal step", "s", 3, lower_is_better_thresholds),
            *_comparison_columns(_query_joules_per_token, "J/token", "joule", 3, lower_is_better_thresholds),
            Column(
                # The productive time is the time of work that a checkpoint contains.
                "max by (run) (last_over_time(training_productive_seconds_total{@compared_run}[$__range]))"
                " / max by (run) (last_over_time(training_wall_seconds_total{@compared_run}[$__range]))",
                "Goodput, committed",
                unit="percentunit",
                width=100,
                decimals=1,
            ),
            Column(LAST_STEP_NUMBER, "Last step", unit="locale", width=100),
            Column(
                _at_last_common_step(_query_training_loss("@compared_run")),
                "Same-step loss",
                width=100,
                decimals=3,
            ),
            Column(
                _at_last_common_step("sum by (run, currency) (training_cost_total{@compared_run})"),
                "Same-step cost",
                width=100,
                decimals=2,
            ),
            Column(
                "sum by (run, currency) (last_over_time(training_cost_total{@compared_run}[$__range]))",
                "Cost so far",
                width=100,
                decimals=2,
            ),
            Column("currency", "Currency", width=90),
            sort="Tokens/s",
            max_data_points=100,  # sets `$__interval`, the resolution of the subqueries of *Same-step loss* and *Same-step cost*
            h=6,
        ),
        matrix(
            "Seconds per training step, by phase",
            table_query(
                "sum by (run, phase) (increase(training_phase_seconds_total{@compared_run}[$__range]))"
                ' / on (run) group_left () sum by (run) (increase(training_steps_total{@compared_run, mode="train"}[$__range]))'
            ),
            column_label="run",
            row_label="phase",
            unit="s",
            decimals=1,
            w=12,
            h=11,
        ),
        matrix(
            "Loss by step",
            # The label `step` is the step number, rounded down to a row: `count_values` turns a value into a label.
            table_query(
                f"avg_over_time(({_query_training_loss('@compared_run')} * on (run) group_left (step)"
                f' count_values by (run) ("step", floor({STEP_NUMBER} / {ROW_DISTANCE_STEPS}) * {ROW_DISTANCE_STEPS}))[$__range:$__interval])'
            ),
            column_label="run",
            row_label="step",
            unit="none",
            decimals=3,
            numeric_rows=True,
            w=12,
            h=11,
        ),
        time_series(
            "Loss by time",
            Query(_query_training_loss(OTHER_RUNS_MATCHERS), "{{run}}"),
            Query(_query_training_loss(BASELINE_MATCHERS), "{{run}} (baseline)"),
            unit="none",
            minimum=None,
            color=HASHED_COLOR,
            overrides=[
                {
                    "matcher": {"id": "byFrameRefID", "options": "B"},  # the second query, the baseline
                    "properties": [
                        {"id": "color", "value": fixed_color(ORANGE)},
                        {"id": "custom.lineWidth", "value": 2},
                    ],
                }
            ],
        ),
    )
