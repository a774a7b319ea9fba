"""Table *What is wrong* of the dashboard *GPUs*: the worst current problem of each node and GPU."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH
from dashboards.cost_and_loss import CLUSTER_LOST_COST_PER_HOUR, standstill_by_run
from dashboards.gpu_problems import (
    ALL_GPUS,
    ERROR_TEXTS,
    EXPORTER_IS_UP,
    GPU_PROBLEMS,
    GPUS_AND_LAST_RANKS,
    IMPACT_NAMES,
    IMPACT_TEXTS,
    LAST_RANK_BY_GPU,
    NO_PROBLEM,
    NO_PROBLEM_VALUE,
    NO_RESPONSE_PREFIX,
    NODE_PROBLEMS,
    PRIORITIES_PER_IMPACT,
    PROBLEMS_TITLE,
    RUNS_ON_NODES,
    SELECTED_GPUS,
    SELECTED_NODES,
    Impact,
    Problem,
    add_last_rank,
    query_start_of_worst,
)
from dashboards.palette import GOOD, NEUTRAL
from dashboards.panels import NO_VALUE, NODE_LINK, RUN_LINK, Panel, value_mappings
from dashboards.queries import data_wait_remedies
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
"""PromQL for the runs that stand still, are stalled, hung or lost, or have failed.

In other runs, and on nodes without a run, `query_worst_problems` lowers the impact of a problem that can stop a run.
"""


_RUNS_WITHOUT_PROGRESS_ROW = "max by (run) (run:training_no_progress:info{@run})"


def _standstill_ranks(cause_matcher: str) -> str:
    """Return PromQL for the rank that causes the standstill of each run, with the line or the phase as the label `cause`."""
    selector = f"@run, cause{cause_matcher}"
    return f"max by (instance, gpu, run, rank, cause) (run:training_standstill_rank:info{{{selector}}})"


_FIRST_EXITS = (
    "(0 * max by (instance, run, rank, reason) (run:training_first_exit:timestamp_seconds{@run})"
    f" unless on (run) {standstill_by_run('@run')})"
)
_GPUS_OF_RANKS = (
    "topk by (instance, run, rank) (1, 0 * max by (instance, gpu, run, rank) (rank:training_gpu:info{@run}))"
)
_FIRST_EXITS_WITH_GPU = f"({_FIRST_EXITS} + on (instance, run, rank) group_left (gpu) {_GPUS_OF_RANKS} or on (run) {_FIRST_EXITS})"


def _stopped_row(runs: str, text: str, remedy: str, label: str = "run", pattern: str = "(.+)") -> str:
    """Return PromQL for rows of runs without progress; `$1` in the text is the first group of *pattern* in the value of *label*."""
    value = f"0 * {runs} + {PRIORITIES_PER_IMPACT * Impact.NO_PROGRESS}"
    return f'label_replace(label_replace({value}, "problem", "{text}", "{label}", "{pattern}"), "remedy", "{remedy}", "", "")'


_STOPPED_ROWS = (
    _stopped_row(
        _standstill_ranks('!~"phase .+|GPU lost"'),
        "no rank finishes a step: $1",
        "read this line of the job; restart the run",
        "cause",
    ),
    _stopped_row(
        _standstill_ranks('=~"phase .+"'),
        "no rank finishes a step: $1",
        "run training-exporter stacks on the node",
        "cause",
    ),
    _stopped_row(
        _FIRST_EXITS_WITH_GPU,
        "no rank runs; ended first: $1",
        "read the log of this rank first",
        "reason",
        EXIT_REASON_PATTERN,
    ),
    _stopped_row(_RUNS_WITHOUT_PROGRESS_ROW, "no rank finishes a step", "What is wrong on Run has the cause"),
)
_LOST_GPU_STOPS = f"max by (run) ({LAST_RANK_BY_GPU} and on (instance, gpu) gpu_up{{@cluster}} == 0)"
_ROWS_OF_STOPPED_RUNS = f"(({' or on (run) '.join(_STOPPED_ROWS)}) unless on (run) {_LOST_GPU_STOPS})"
"""PromQL for the rows of the runs without progress, except those that a lost GPU stops."""
_START_OF_RUN_PROBLEM = " or on (run) ".join(
    (
        f"max by (run) (run:training_first_exit:timestamp_seconds{{@run}} unless on (run) {standstill_by_run('@run')})",
        f"max by (run) (run:training_last_progress:timestamp_seconds{{@run}} and on (run) {_RUNS_WITHOUT_PROGRESS_ROW})",
        "max by (run) (run:training_data_wait_start:timestamp_seconds{@run})",
    )
)
"""PromQL for the start of each row of a run: the first exit, the last step, or the start of the wait for data."""
_TARGET_EXISTS = "max(up{@gpu_target})"
"""PromQL with a value if Prometheus has a target of a selected node. Without such a target, the panels are empty."""


def _join_problem_rows(problems: Sequence[Problem]) -> str:
    """Return PromQL for a series for each current problem. The value is the impact and the priority of the problem as one number.

    The labels are those of the problem's condition, `problem` and `remedy`. The first of the problems has the highest priority.
    """
    return " or ".join(problem.row(len(problems) - index) for index, problem in enumerate(problems))


def _join_problem_starts(problems: Sequence[Problem]) -> str:
    """Return PromQL for the start of each current problem in Unix seconds, with the labels `instance`, `gpu` and `priority`."""
    return " or ".join(
        problem.row_start(len(problems) - index, "instance, gpu") for index, problem in enumerate(problems)
    )


def current_problems_table() -> Panel:
    """Return the table of the nodes and GPUs with a problem, with the worst problem of each, the largest impact first."""
    panel = table(PROBLEMS_TITLE, *_problem_columns(), sort="Impact", w=24, h=7, max_data_points=120)
    panel.body["options"]["sortBy"].append({"displayName": "Since", "desc": False})
    return panel


def _query_gpu_problems() -> str:
    """Return PromQL for a series for each current problem of a selected GPU, with the value and the labels of `_join_problem_rows`.

    GPUs of a node without an exporter that is up have no series: their recorded series still show a problem for minutes, and the node has a
    series of `_query_node_problems`.
    """
    return f"(({_join_problem_rows(GPU_PROBLEMS)}) and {SELECTED_GPUS} and on (instance) {EXPORTER_IS_UP})"


def _query_node_problems() -> str:
    """Return PromQL for a series for each current problem of a selected node, with the value and the labels of `_join_problem_rows`."""
    return f"(({_join_problem_rows(NODE_PROBLEMS)}) and {SELECTED_NODES})"


def _query_run_problems() -> str:
    """Return PromQL for a series for each selected run that makes no progress, or whose ranks all wait for data.

    The value is the impact as in `_join_problem_rows`. The labels are `run`, `problem` and `remedy`. A run without progress also has the
    labels `instance`, `rank` and `gpu` of the rank that causes the standstill, or that ended first, if the rank is known. A run that a lost GPU
    stops has the row of the GPU.
    """
    share = f"max by (run) (run:training_waiting_for_data:min2m{{@run}}) > {MAX_DATA_WAIT_RATIO}"
    counted = f'count_values by (run) ("share", round(100 * ({share})))'
    waiting_rows = (
        f'label_replace(0 * {counted} + {PRIORITIES_PER_IMPACT * Impact.LOSES_TIME}, "problem",'
        ' "all ranks wait for data: at least $1 %, 2 min", "share", "(.+)")'
    )
    remedies = f"topk by (run) (1, {data_wait_remedies('@run', '@cluster')})"
    waiting_rows = f"{waiting_rows} + on (run) group_left (remedy) 0 * {remedies} unless on (run) {_RUNS_WITHOUT_PROGRESS_ROW}"
    rows = f"max by (instance, gpu, run, rank, problem, remedy) ({_ROWS_OF_STOPPED_RUNS} or {waiting_rows})"
    return f"({rows} and on (run) ({GPUS_AND_LAST_RANKS}))"


def query_worst_problems() -> str:
    """Return PromQL for one series for each node and GPU with a problem, and for each run of `_query_run_problems`.

    The series of a node or a GPU is its worst problem. The value is the impact and the priority as one number, see
    `PRIORITIES_PER_IMPACT`. The labels are `instance`, `problem` and `remedy`. A problem of a GPU also has the label `gpu`, and the labels `run` and `rank` of the last rank on the GPU. If no rank used
    the GPU in the time range, these labels are absent and the impact is `Impact.NO_RUN`. A problem of a node has the label `run` with one of the
    runs on the node, if there is one. The impact *no progress* is lowered to *endangers work* if no run without progress has the label
    `run`: the run makes progress, or no run is known.
    """
    gpu_problems, node_problems = _query_gpu_problems(), _query_node_problems()
    labels_in_texts = ", ".join(
        sorted({problem.label for problem in (*GPU_PROBLEMS, *NODE_PROBLEMS)} - {"instance"})
    )
    # A join drops nodes without a match, so a node without a run needs a series too.
    run_by_node = (
        f"(0 * topk by (instance) (1, {RUNS_ON_NODES})"
        " or on (instance) 0 * max by (instance) (last_over_time(up{@target}[$__range])))"
    )
    problems = (
        f"({add_last_rank(gpu_problems, LAST_RANK_BY_GPU, ALL_GPUS)}"
        f" or ({node_problems}) + on (instance) group_left (run) {run_by_node})"
    )
    downgraded_problems = (
        f"({problems} >= {PRIORITIES_PER_IMPACT * Impact.NO_PROGRESS})"
        f" - {PRIORITIES_PER_IMPACT * (Impact.NO_PROGRESS - Impact.ENDANGERS_WORK)} unless on (run) {_RUNS_WITHOUT_PROGRESS}"
    )
    worst = f"topk by (instance, gpu) (1, {downgraded_problems} or {problems})"
    return f"(max without ({labels_in_texts}) ({worst}) or {_query_run_problems()})"


def query_problem_counts_by_impact() -> str:
    """Return PromQL for the number of rows of the table of problems, by impact.

    The label `impact` is the impact in words. If there is no problem, the only series has the impact *no problem* and the value 0.
    Without a target of the selected nodes, the result is absent.
    """
    impacts = f"floor({query_worst_problems()} / {PRIORITIES_PER_IMPACT})"
    counts = f'count_values("impact", {impacts})'
    for impact, text in IMPACT_NAMES.items():
        counts = f'label_replace({counts}, "impact", "{text}", "impact", "{impact.value}")'
    return f'{counts} or on () label_replace(0 * {_TARGET_EXISTS}, "impact", "{NO_PROBLEM}", "", "")'


def _problem_columns() -> tuple[Column, ...]:
    """Return the columns of the table.

    If there is no problem, each column of values has one row with `NO_PROBLEM_VALUE`, so that Grafana joins the columns to a single row.
    """
    gpu_problems, node_problems = _query_gpu_problems(), _query_node_problems()
    # With all labels of the rows: Grafana joins the columns on equal labels, and the row of a run has no GPU.
    start = query_start_of_worst(
        f"{_join_problem_starts(GPU_PROBLEMS)} or {_join_problem_starts(NODE_PROBLEMS)}",
        query_worst_problems(),
        "instance, gpu",
        "run, rank, problem, remedy",
    )
    run_start = f"(0 * {_query_run_problems()} + on (run) group_left () ({_START_OF_RUN_PROBLEM}))"
    no_problem = (
        f'label_replace(0 * {_TARGET_EXISTS} + {NO_PROBLEM_VALUE}, "problem", "{NO_PROBLEM}", "", "")'
        f" unless on () ({gpu_problems} or {node_problems} or {_query_run_problems()})"
    )
    return (
        Column(
            f"floor(({query_worst_problems()}) / {PRIORITIES_PER_IMPACT}) or {no_problem}",
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
            f"{start} * 1000 or {run_start} * 1000 or {no_problem}",
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=value_mappings(
                {0: ("before this range", NEUTRAL), NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL)}
            ),
        ),
        Column(
            f"sum by (run) ({CLUSTER_LOST_COST_PER_HOUR}) and on (run) ({query_worst_problems()}) or {no_problem}",
            "Run lost/h",
            decimals=2,
            width=100,
            mappings=value_mappings({NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL)}),
        ),
        Column("remedy", "Remedy"),
    )
