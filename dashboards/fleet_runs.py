"""Tables of the runs on the dashboard *Fleet*: problems and costs, speed and progress."""

from __future__ import annotations

from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH, title_mappings
from dashboards.cost_and_loss import (
    CLUSTER_COST_PER_HOUR,
    CLUSTER_LOST_COST_PER_HOUR,
    CLUSTER_LOST_SHARE,
    LOST_THRESHOLDS,
    SHORT_CAUSE_TEXTS,
    gpus_by_run,
    standstill_by_run,
)
from dashboards.fleet_problems import (
    RUNS,
    main_problem_or_text,
    since_query,
    unseen_run_problems,
)
from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import (
    NO_VALUE,
    NODE_LINK,
    RUN_LINK,
    Panel,
    dashboard_link,
    state_timeline,
    value_mappings,
    warn_below,
    warn_from,
)
from dashboards.queries import Query
from dashboards.rank_problems import SLOW_RATIO, VERY_SLOW_RATIO
from dashboards.tables import Column, percent_column, table
from dashboards.verdicts import TIMELINE_MAPPINGS, VERDICT_MAPPINGS, Verdict, verdict_by_run

NO_STEP = "no step"
"""State of a run that stands still before its exporter decides that the run hangs. The exporter reports such a run as `running`."""
RUN_STATES = {
    "starting": ("starting", NEUTRAL),
    "running": ("running", GOOD),
    NO_STEP: (NO_STEP, WARNING),
    "stalled": ("stalled", WARNING),
    "hung": ("hung", BAD),
    "ending": ("ending", WARNING),
    "stopped": ("stopped", WARNING),
    "finished": ("finished", GOOD),
    "failed": ("failed", BAD),
    "lost": ("lost", BAD),
    "unknown": ("unknown", WARNING),
}
"""Texts and colors of the states of a run: the states that the exporter reports, `NO_STEP`, and `unknown` for a run without a sample."""
STATE_MAPPINGS = value_mappings(RUN_STATES)
_RECORDED_STATE = (
    "topk by (run) (1, max by (run, state) (timestamp(run:training_run_state:info{@cluster}))) * 0 + 1"
)
"""PromQL for a series of value 1 for each run, with the state of the newest sample as the label `state`."""
_DISPLAYED_STATE = (
    f'(label_replace({_RECORDED_STATE} and on (run) {standstill_by_run("@cluster")}, "state", "{NO_STEP}", "state", "running")'
    f" or on (run) {_RECORDED_STATE})"
)
"""PromQL for a series of value 1 for each run, with the state `NO_STEP` instead of `running` if the run stands still."""


def _query_unseen_runs() -> str:
    """Return PromQL for a series for each run that has not ended and has no current sample. The value has no meaning.

    The labels of a series are:

        run, user
        state      the text `unknown`
        instance   the node of the run whose samples ended last
        alertname  the text with the minutes since the last sample, for the column *What is wrong*
    """
    return (
        "label_replace(max by (run, user) (last_over_time(run:training_run:info{@cluster}[1h]))"
        f' * on (run) group_left (alertname, instance) {unseen_run_problems()}, "state", "unknown", "", "")'
    )


def _query_rows() -> str:
    """Return PromQL for the rows of the table: a series for each known run. The value has no meaning.

    The labels of a series are:

        run, user, state
        alertname            the problem as in `dashboards.fleet_problems`, or a dash for a run without a problem
        instance, rank, gpu  the node, rank and GPU of the problem, if known
    """
    # The dash of a run without a problem keeps the column *What is wrong*, which fills the width of the table, if no run has a problem.
    # A product drops the runs without a match in its right operand. Each right operand therefore has a series for every run.
    seen_rows = (
        "max by (run, user) (run:training_run:info{@cluster})"
        f" * on (run) group_left (state) ({_DISPLAYED_STATE} or on (run) {RUNS})"
        f" * on (run) group_left (alertname, instance, rank, gpu) {main_problem_or_text(RUNS, NO_VALUE)}"
    )
    return f"({_query_unseen_runs()}) or on (run) {seen_rows}"


def run_panels() -> tuple[Panel, ...]:
    """Return the table of all runs, the most urgent first, the verdicts over time, and the table of their speed."""
    return (_build_problem_table(), _build_verdict_timeline(), _build_speed_table())


MAX_TIMELINE_ROWS = 20
"""Number of runs in the timeline of the verdicts."""


def _build_verdict_timeline() -> Panel:
    """Return the timeline of the verdicts of the runs that had a problem in the time range, at most `MAX_TIMELINE_ROWS` runs."""
    # Every run starts and ends, which is no problem. Each comparison drops the runs with this verdict.
    urgency = f"run:training_verdict:urgency{{@cluster}} != {Verdict.STARTING} != {Verdict.ENDING}"
    worst_urgency = f"max by (run) (max_over_time(({urgency})[$__range:$__interval] @ end()))"
    return state_timeline(
        "Verdict of each run with a problem",
        Query(
            f"{verdict_by_run('@cluster')} and on (run) topk({MAX_TIMELINE_ROWS}, {worst_urgency} > {Verdict.NO_PROBLEM})",
            "{{run}}",
        ),
        mappings=TIMELINE_MAPPINGS,
        h=9,
    )


def _build_problem_table() -> Panel:
    """Return the table of the verdict, problem, cost and loss of each run, the most urgent verdict first."""
    panel = table(
        "All runs, rates over 5 min",
        Column(
            "run",
            "Run",
            links=(
                RUN_LINK,
                dashboard_link("training-ranks", "Ranks", run="${__value.raw}"),
                dashboard_link("training-energy", "Energy and cost", run="${__value.raw}"),
            ),
            width=115,
        ),
        Column(verdict_by_run("@cluster"), "Verdict", decimals=0, width=118, mappings=VERDICT_MAPPINGS),
        Column("state", "State", width=72, mappings=STATE_MAPPINGS),
        Column("alertname", "What is wrong", mappings=[*title_mappings(), *SHORT_CAUSE_TEXTS]),
        Column("rank", "Rank", width=58, filterable=False),
        Column("instance", "Node", width=66, links=(NODE_LINK,), filterable=False),
        Column("gpu", "GPU", width=52, filterable=False),
        Column(
            f"1000 * ({since_query()})",
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=value_mappings({0: (NO_VALUE, NEUTRAL)}),
        ),
        Column("user", "Owner", width=68),
        Column(
            f"max by (run) ({CLUSTER_COST_PER_HOUR})",
            "Cost/h",
            "locale",
            64,
            decimals=2,
        ),
        Column(
            f"max by (run) ({CLUSTER_LOST_COST_PER_HOUR})",
            "Lost/h",
            "locale",
            60,
            decimals=2,
        ),
        percent_column(CLUSTER_LOST_SHARE, "Lost", 62, LOST_THRESHOLDS),
        row_query=_query_rows(),
        sort="Verdict",
        h=13,
    )
    panel.body["options"]["sortBy"].append({"displayName": "Lost", "desc": True})
    return panel


def _build_speed_table() -> Panel:
    """Return the table of progress, speed and totals of each run, the run with the oldest step first."""

    def while_stepping(expression: str) -> str:
        """Return PromQL for the values of the runs that make steps.

        The last values of a run that stands still, or that is in another state than `starting` and `running`, are not its speed.
        """
        return (
            f"max by (run) ({expression}) unless on (run) run:training_standstill:info{{@cluster}}"
            ' unless on (run) run:training_run_state:info{@cluster, state!~"starting|running"}'
        )

    return table(
        "Speed and progress of the runs",
        Column("run", "Run", links=(RUN_LINK,), width=115),
        Column("model", "Model"),
        Column(gpus_by_run("@cluster"), "GPUs", "locale", 58, decimals=0),
        Column(
            'max by (run) (run:training_last_progress:age_seconds{@cluster}) unless on (run) run:training_run_state:info{@cluster, state=~"finished|stopped"}',
            "Last step",
            unit="s",
            decimals=0,
            width=85,
            thresholds=warn_from(120, 300),
        ),
        percent_column("max by (run) (run:training_progress:ratio{@cluster})", "Progress", 95, bar=(0, 1)),
        Column(while_stepping("run:training_eta:seconds{@cluster}"), "Time left", unit="s", width=85),
        Column(
            while_stepping("run:training_step_seconds:mean5m{@cluster}"),
            "Step time",
            unit="s",
            decimals=2,
            width=82,
        ),
        Column(
            while_stepping("run:training_tokens:rate5m{@cluster}"),
            "Tokens/s",
            unit="short",
            decimals=1,
            width=78,
        ),
        percent_column(while_stepping("run:training_mfu:ratio5m{@cluster}"), "MFU", 55),
        percent_column(
            while_stepping("run:training_straggler_score:min{@cluster}"),
            "Slowest",
            74,
            warn_below(SLOW_RATIO, VERY_SLOW_RATIO),
        ),
        percent_column(
            while_stepping("run:training_waiting_for_data:max2m{@cluster}"),
            "Data wait",
            84,
            warn_from(0.1, 0.2),
        ),
        Column(
            "max by (run) (run:training_restarts:increase1d{@cluster})",
            "Restarts/d",
            decimals=0,
            width=100,
            thresholds=warn_from(1),
        ),
        percent_column("max by (run) (run:training_goodput_if_saved:ratio6h{@cluster})", "Goodput, 6 h", 106),
        Column("max by (run) (run:training_cost:sum{@cluster})", "Cost so far", "locale", 92, decimals=2),
        row_query="max by (run, model) (run:training_run:info{@cluster})",
        sort="Last step",
        h=13,
    )
