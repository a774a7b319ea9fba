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
from dashboards.queries import saturated_cpus
from dashboards.rank_problems import MAX_DATA_WAIT_RATIO
from dashboards.run_problems import DATA_WAIT_REMEDY, FREE_CPUS_REMEDY
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


def _query_waiting_runs() -> str:
    """Return PromQL for a series for each selected run whose GPUs all wait for data, with the labels `run`, `problem` and `remedy`.

    The value is the impact as in `_join_problem_rows`. No GPU and no node is the cause, so that these labels are absent.
    """
    share = f"(max by (run) (run:training_waiting_for_data:min2m{{@run}}) > {MAX_DATA_WAIT_RATIO} and on (run) ({GPUS_AND_LAST_RANKS}))"
    counted = f'count_values by (run) ("share", round(100 * {share}))'
    rows = (
        f'label_replace(0 * {counted} + {PRIORITIES_PER_IMPACT * Impact.LOSES_TIME}, "problem",'
        ' "GPUs wait for data: at least $1 %, 2 min", "share", "(.+)")'
    )
    saturated = f"{RUNS_ON_NODES} and on (instance) ({saturated_cpus('@cluster')})"
    with_remedy = (
        f'label_replace({rows} and on (run) ({saturated}), "remedy", "{FREE_CPUS_REMEDY}", "", "")'
        f' or on (run) label_replace({rows}, "remedy", "{DATA_WAIT_REMEDY}", "", "")'
    )
    return f"max by (run, problem, remedy) ({with_remedy})"


def query_worst_problems() -> str:
    """Return PromQL for one series for each node and GPU with a problem, which is its worst problem, and for each run that waits for data.

    The value is the impact and the priority as one number, see `PRIORITIES_PER_IMPACT`. The labels are `instance`, `problem` and
    `remedy`. A problem of a GPU also has the label `gpu`, and the labels `run` and `rank` of the last rank on the GPU. If no rank used
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
    return f"(max without ({labels_in_texts}) ({worst}) or {_query_waiting_runs()})"


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
    wait_start = (
        f"(0 * {_query_waiting_runs()} + on (run) group_left ()"
        " max by (run) (run:training_data_wait_start:timestamp_seconds{@run}))"
    )
    no_problem = (
        f'label_replace(0 * {_TARGET_EXISTS} + {NO_PROBLEM_VALUE}, "problem", "{NO_PROBLEM}", "", "")'
        f" unless on () ({gpu_problems} or {node_problems} or {_query_waiting_runs()})"
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
            f"{start} * 1000 or {wait_start} * 1000 or {no_problem}",
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
