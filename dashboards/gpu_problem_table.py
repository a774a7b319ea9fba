"""Table *What is wrong* of the dashboard *GPUs*: the worst current problem of each node and GPU."""

from __future__ import annotations

from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH
from dashboards.cost_and_loss import CLUSTER_LOST_COST_PER_HOUR, standstill_by_run
from dashboards.gpu_problems import (
    ERROR_TEXTS,
    IMPACT_NAMES,
    IMPACT_TEXTS,
    NO_PROBLEM,
    NO_PROBLEM_VALUE,
    NO_RESPONSE_PREFIX,
    NODE_PROBLEMS,
    PRIORITIES_PER_IMPACT,
    PROBLEMS_TITLE,
    RUNS_ON_NODES,
    SELECTED_NODES,
    Impact,
    query_start_of_worst,
    recorded_gpu_problems,
    with_remedies_of_gpus,
)
from dashboards.palette import GOOD, NEUTRAL
from dashboards.panels import NO_VALUE, NODE_LINK, RUN_LINK, Panel, value_mappings
from dashboards.queries import data_wait_remedies, last_in_range
from dashboards.rank_problems import EXIT_REASON_PATTERN, MAX_DATA_WAIT_RATIO
from dashboards.tables import Column, table
from exporter.status.xids import XID_MEANINGS

PROBLEM_TEXTS = value_mappings(
    {NO_PROBLEM: (NO_PROBLEM, GOOD)}
    | {f"{NO_RESPONSE_PREFIX}{error}": (text, NEUTRAL) for error, text in ERROR_TEXTS.items()}
    | {f"Xid {xid}": (f"Xid {xid}: {meaning}", NEUTRAL) for xid, meaning in XID_MEANINGS.items()}
)
"""Texts of the column *Problem*: no problem in green, NVML errors and Xids by name without a color. The column *Impact* has the color of a problem."""
_RUNS_WITHOUT_PROGRESS = (
    f"({standstill_by_run('@cluster')}"
    ' or on (run) max by (run) (training_run_state{@cluster, state=~"stalled|hung|failed|lost"}) == 1)'
)
"""PromQL for the runs that stand still, are stalled, hung or lost, or have failed: a driver that does not respond stops only these runs."""
_RECORDED_NO_PROGRESS = "max by (run) (run:training_no_progress:info{@run})"
"""PromQL for the selected runs that have a row for the run.

Unlike `_RUNS_WITHOUT_PROGRESS`, the rule counts runs that remain `ending`, and live runs after five minutes without a step.
"""
_SELECTED_GPUS = '@gpu_any_run, run=~"$run"'
"""Selector of recorded problems of GPUs. `.*`, the value of All, also selects GPUs without a run."""
_WITH_RUN, _WITHOUT_RUN = ', run!=""', ', run=""'
"""Further matchers of recorded problems: of GPUs that a rank reported in the last hour, and of the others."""
_WORST_GPU_PROBLEMS = f"topk by (instance, gpu) (1, {recorded_gpu_problems(_SELECTED_GPUS)})"
"""PromQL for the worst problem of each selected GPU, with the last run and rank."""
PROBLEMS_WITHOUT_RUN = f"({recorded_gpu_problems(_SELECTED_GPUS + _WITHOUT_RUN)})"
"""PromQL for the problems of selected GPUs that no rank reported in the last hour."""


def _standstill_ranks(cause_matcher: str) -> str:
    """Return PromQL for the rank that causes the standstill of each run. The label `cause` is the line, the phase, or `GPU lost`."""
    selector = f"@run, cause{cause_matcher}"
    return f"max by (instance, gpu, run, rank, cause) (run:training_standstill_rank:info{{{selector}}})"


_FIRST_EXITS = (
    "(0 * max by (instance, run, rank, reason) (run:training_first_exit:timestamp_seconds{@run})"
    f" unless on (run) {standstill_by_run('@run')})"
)
"""PromQL for the rank of each run that ended first, if no rank runs. The value is 0 instead of the time, to add a number to it."""
_GPUS_OF_RANKS = (
    "topk by (instance, run, rank) (1, 0 * max by (instance, gpu, run, rank) (rank:training_gpu:info{@run}))"
)
"""PromQL with the value 0 for each rank, with one of its GPUs."""
_FIRST_EXITS_WITH_GPU = f"({_FIRST_EXITS} + on (instance, run, rank) group_left (gpu) {_GPUS_OF_RANKS} or on (run) {_FIRST_EXITS})"
"""PromQL as `_FIRST_EXITS`, with a GPU of the rank if one is known."""


def _no_progress_row(
    runs_or_ranks: str, *, text: str, remedy: str, label: str = "run", pattern: str = "(.+)"
) -> str:
    """Return PromQL for a row of each run or rank of an expression, with the impact *no progress*.

    Args:
        runs_or_ranks: PromQL for the runs or ranks.
        text: Text of the problem; `$1` is the first group of *pattern* in the value of *label*.
        remedy: Remedy of the problem.
        label: Label whose value is part of the text.
        pattern: Regular expression of the value of the label.
    """
    value = f"0 * {runs_or_ranks} + {PRIORITIES_PER_IMPACT * Impact.NO_PROGRESS}"
    return f'label_replace(label_replace({value}, "problem", "{text}", "{label}", "{pattern}"), "remedy", "{remedy}", "", "")'


_NO_PROGRESS_ROWS = (
    _no_progress_row(
        _standstill_ranks('!~"phase .+|GPU lost"'),
        text="no rank finishes a step: $1",
        remedy="read this line of the job; restart the run",
        label="cause",
    ),
    _no_progress_row(
        _standstill_ranks('=~"phase .+"'),
        text="no rank finishes a step: $1",
        remedy="run training-exporter stacks on the node",
        label="cause",
    ),
    _no_progress_row(
        _FIRST_EXITS_WITH_GPU,
        text="no rank runs; ended first: $1",
        remedy="read the log of this rank first",
        label="reason",
        pattern=EXIT_REASON_PATTERN,
    ),
    _no_progress_row(
        _RECORDED_NO_PROGRESS, text="no rank finishes a step", remedy="What is wrong on Run has the cause"
    ),
)
"""PromQL for the rows of runs without progress. Of several rows of a run, the table has the first, which is the most specific."""
_RUNS_STOPPED_BY_LOST_GPU = (
    f'max by (run) (gpu:gpu_problem:urgency{{@cluster, run!="", problem=~"{NO_RESPONSE_PREFIX}.+"}})'
)
"""PromQL for the runs of which a rank used a GPU that does not respond."""
_ROWS_OF_STOPPED_RUNS = (
    f"(({' or on (run) '.join(_NO_PROGRESS_ROWS)}) unless on (run) {_RUNS_STOPPED_BY_LOST_GPU})"
)
"""PromQL for the rows of the runs without progress, except those that a lost GPU stops."""
_START_OF_RUN_PROBLEM = " or on (run) ".join(
    (
        f"max by (run) (run:training_first_exit:timestamp_seconds{{@run}} unless on (run) {standstill_by_run('@run')})",
        f"max by (run) (run:training_last_progress:timestamp_seconds{{@run}} and on (run) {_RECORDED_NO_PROGRESS})",
        "max by (run) (run:training_data_wait_start:timestamp_seconds{@run})",
    )
)
"""PromQL for the start of each row of a run: the first exit, the last step, or the start of the wait for data."""
_START_OF_WORST_GPU_PROBLEM = (
    "max by (instance, gpu) (max by (instance, gpu, problem) (gpu:gpu_problem_start:timestamp_seconds{@gpu_any_run})"
    f" and on (instance, gpu, problem) {_WORST_GPU_PROBLEMS})"
)
"""PromQL for the start of the worst problem of each selected GPU, in Unix seconds."""
_TARGET_EXISTS = "max(up{@gpu_target})"
"""PromQL with a value if Prometheus has a target of a selected node. Without such a target, the panels are empty."""


_WAIT_RATIO = f"max by (run) (run:training_waiting_for_data:min2m{{@run}}) > {MAX_DATA_WAIT_RATIO}"
"""PromQL for the smallest share of the time that a rank of each run waits for data, if that is a problem."""
_WAITING_RUNS = (
    f'(label_replace(0 * count_values by (run) ("share", round(100 * ({_WAIT_RATIO}))) + {PRIORITIES_PER_IMPACT * Impact.LOSES_TIME},'
    ' "problem", "all ranks wait for data: at least $1 %, 2 min", "share", "(.+)")'
    f" unless on (run) {_RECORDED_NO_PROGRESS})"
)
"""PromQL for the selected runs whose ranks all wait for data and that make progress, with the text as the label `problem`.

`count_values` turns the share into a label, which becomes a part of the text.
"""
_RUNS_OF_SELECTED_GPUS = (
    "max by (run) (gpu:training_last_rank:info{@run} and on (uuid) last_over_time(gpu_up{@gpu_any_run}[5m]))"
)
"""PromQL for the runs that used a selected GPU in the last hour."""


def current_problems_table() -> Panel:
    """Return the table of the nodes and GPUs with a problem, with the worst problem of each, the largest impact first."""
    panel = table(PROBLEMS_TITLE, *_problem_columns(), sort="Impact", w=24, h=7, max_data_points=120)
    panel.body["options"]["sortBy"].append({"displayName": "Since", "desc": False})
    return panel


_NODE_PROBLEM_BY_PRIORITY = {
    len(NODE_PROBLEMS) - index: problem for index, problem in enumerate(NODE_PROBLEMS)
}
"""The problems of nodes by priority. The first has the highest."""
_NODE_PROBLEM_ROWS = f"(({' or '.join(problem.row(priority) for priority, problem in _NODE_PROBLEM_BY_PRIORITY.items())}) and {SELECTED_NODES})"
"""PromQL for each current problem of a selected node: impact and priority as one number, with the labels `problem` and `remedy`."""


_RUN_BY_NODE = f"topk by (instance) (1, {RUNS_ON_NODES})"
"""PromQL for one of the runs that had a process on each node in the last hour."""


def _query_node_problems() -> str:
    """Return PromQL for the worst problem of each selected node, with the labels `instance`, `run`, `problem` and `remedy`.

    The label `run` is one of the runs on the node, if there is one. The impact *no progress* becomes *endangers work* unless this run makes
    no progress.
    """
    # A join drops nodes without a match, so a node without a run needs a series too.
    run_by_node = (
        f"(0 * {_RUN_BY_NODE} or on (instance) 0 * max by (instance) ({last_in_range('up{@node}')}))"
    )
    problems = f"max by (instance, run, problem, remedy) ({_NODE_PROBLEM_ROWS} + on (instance) group_left (run) {run_by_node})"
    lowered = (
        f"({problems} >= {PRIORITIES_PER_IMPACT * Impact.NO_PROGRESS})"
        f" - {PRIORITIES_PER_IMPACT * (Impact.NO_PROGRESS - Impact.ENDANGERS_WORK)} unless on (run) {_RUNS_WITHOUT_PROGRESS}"
    )
    return f"topk by (instance) (1, {lowered} or {problems})"


def _query_run_problems() -> str:
    """Return PromQL for the problems of the runs that used a selected GPU in the last hour. The value is 100 times the impact.

    The labels are:

    - `run` and `problem` for a run whose ranks all wait for data
    - also `instance`, `rank` and `gpu` for a run without progress whose cause, or first exit, is known

    A run that a lost GPU stops has no series, because its GPU has one.
    """
    rows = f"max by (instance, gpu, run, rank, problem) ({_ROWS_OF_STOPPED_RUNS} or {_WAITING_RUNS})"
    return f"({rows} and on (run) {_RUNS_OF_SELECTED_GPUS})"


def _query_run_rows() -> str:
    """Return PromQL for the series of `_query_run_problems` with the label `remedy`, which reads the processes of all ranks."""
    remedies = f"topk by (run) (1, {data_wait_remedies('@run', '@cluster')})"
    waiting_rows = f"{_WAITING_RUNS} + on (run) group_left (remedy) 0 * {remedies}"
    rows = f"max by (instance, gpu, run, rank, problem, remedy) ({_ROWS_OF_STOPPED_RUNS} or {waiting_rows})"
    return f"({rows} and on (run) {_RUNS_OF_SELECTED_GPUS})"


def query_runs_with_problem() -> str:
    """Return PromQL for a series of each row of the table whose run is known, with the label `run`."""
    runs_of_nodes = f"{_RUN_BY_NODE} and on (instance) {_NODE_PROBLEM_ROWS}"
    return (
        f"(group by (run) ({recorded_gpu_problems(_SELECTED_GPUS + _WITH_RUN)}) or group by (run) ({runs_of_nodes})"
        f" or group by (run) ({_query_run_problems()}))"
    )


def query_problem_counts_by_impact() -> str:
    """Return PromQL for the number of rows of the table of problems, by impact.

    The label `impact` is the impact in words. If there is no problem, the only series has the impact *no problem* and the value 0.
    Without a target of the selected nodes, the result is absent.
    """
    worst = f"({_WORST_GPU_PROBLEMS} or {_query_node_problems()} or {_query_run_problems()})"
    impacts = f"floor({worst} / {PRIORITIES_PER_IMPACT})"
    counts = f'count_values("impact", {impacts})'
    for impact, text in IMPACT_NAMES.items():
        counts = f'label_replace({counts}, "impact", "{text}", "impact", "{impact.value}")'
    return f'{counts} or on () label_replace(0 * {_TARGET_EXISTS}, "impact", "{NO_PROBLEM}", "", "")'


def _problem_columns() -> tuple[Column, ...]:
    """Return the columns of the table.

    If there is no problem, each column of values has one row with `NO_PROBLEM_VALUE`, so that Grafana joins the columns to a single row.
    """
    gpu_rows = with_remedies_of_gpus(_WORST_GPU_PROBLEMS, "@gpu_any_run")
    node_rows, run_rows = _query_node_problems(), _query_run_rows()
    # Grafana joins the columns on equal labels, so that each start has all labels of its row.
    gpu_start = f"0 * {gpu_rows} + on (instance, gpu) group_left () {_START_OF_WORST_GPU_PROBLEM}"
    node_start = query_start_of_worst(
        " or ".join(
            problem.row_start(priority, "instance") for priority, problem in _NODE_PROBLEM_BY_PRIORITY.items()
        ),
        node_rows,
        "instance",
        "run, problem, remedy",
    )
    run_start = f"0 * {run_rows} + on (run) group_left () ({_START_OF_RUN_PROBLEM})"
    no_problem = (
        f'label_replace(0 * {_TARGET_EXISTS} + {NO_PROBLEM_VALUE}, "problem", "{NO_PROBLEM}", "", "")'
        f" unless on () ({_WORST_GPU_PROBLEMS} or {_NODE_PROBLEM_ROWS} or {_query_run_problems()})"
    )
    return (
        Column(
            f"floor(({gpu_rows} or {node_rows} or {run_rows}) / {PRIORITIES_PER_IMPACT}) or {no_problem}",
            "Impact",
            decimals=0,
            width=130,
            mappings=IMPACT_TEXTS,
        ),
        Column("instance", "Node", width=85, links=(NODE_LINK,)),
        Column("gpu", "GPU", width=60),
        Column("run", "Run", width=110, links=(RUN_LINK,)),
        Column("rank", "Rank", width=70),
        Column("problem", "Problem", mappings=PROBLEM_TEXTS),
        Column(
            f"1000 * ({gpu_start} or {node_start} or {run_start}) or {no_problem}",
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=value_mappings(
                {0: ("before this range", NEUTRAL), NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL)}
            ),
        ),
        Column(
            f"sum by (run) ({CLUSTER_LOST_COST_PER_HOUR}) and on (run) {query_runs_with_problem()} or {no_problem}",
            "Run lost/h",
            decimals=2,
            width=100,
            mappings=value_mappings({NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL)}),
        ),
        Column("remedy", "Remedy"),
    )
