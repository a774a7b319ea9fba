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
    start_of_worst,
    with_last_rank,
)
from dashboards.palette import GOOD, NEUTRAL
from dashboards.panels import NO_VALUE, NODE_LINK, RUN_LINK, Panel, value_mappings
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
"""PromQL for the runs that make no step, or that died. In other runs, `worst_problems` lowers the impact of a problem that can stop a run."""


_TARGET_EXISTS = "max(up{@gpu_target})"
"""PromQL with a value if Prometheus has a target of a selected node. Without such a target, the panels are empty."""


def _impact_and_priority(problems: Sequence[Problem]) -> str:
    """Return PromQL for the impact and priority of all current problems as one number; the first problem has the highest priority."""
    return " or ".join(problem.row(len(problems) - index) for index, problem in enumerate(problems))


def _starts(problems: Sequence[Problem]) -> str:
    """Return PromQL for the starts of all current problems in Unix seconds, by node, GPU and priority."""
    return " or ".join(
        problem.row_start(len(problems) - index, "instance, gpu") for index, problem in enumerate(problems)
    )


def current_problems_table() -> Panel:
    """Return the table of the nodes and GPUs with a problem, with the worst problem of each, the largest impact first."""
    panel = table(PROBLEMS_TITLE, *_problem_columns(), sort="Impact", w=24, h=7, max_data_points=120)
    panel.body["options"]["sortBy"].append({"displayName": "Since", "desc": False})
    return panel


def _current_gpu_problems() -> str:
    """Return PromQL for the impact and priority of all current problems of the selected GPUs.

    While no exporter of a node is up, the row of the node replaces the rows of the GPUs, because recorded series keep a problem for minutes.
    """
    return f"(({_impact_and_priority(GPU_PROBLEMS)}) and {SELECTED_GPUS} and on (instance) {EXPORTER_IS_UP})"


def _current_node_problems() -> str:
    """Return PromQL for the impact and priority of all current problems of the selected nodes, as one number."""
    return f"(({_impact_and_priority(NODE_PROBLEMS)}) and {SELECTED_NODES})"


def worst_problems() -> str:
    """Return PromQL for the worst problem of each node and GPU: impact and priority as one number, with text and remedy as labels.

    A problem of a GPU has the last run and rank on the GPU as labels; without a rank in the time range, the impact is `NO_RUN`. A
    problem of a node has one run of the node as a label, if there is one.
    """
    gpu_problems, node_problems = _current_gpu_problems(), _current_node_problems()
    text_labels = ", ".join(
        sorted({problem.label for problem in (*GPU_PROBLEMS, *NODE_PROBLEMS)} - {"instance"})
    )
    # A join drops nodes without a match, so a node without a run needs a series too.
    run_by_node = (
        f"(0 * topk by (instance) (1, {RUNS_ON_NODES})"
        " or on (instance) 0 * max by (instance) (last_over_time(up{@target}[$__range])))"
    )
    problems = (
        f"({with_last_rank(gpu_problems, LAST_RANK_BY_GPU, ALL_GPUS)}"
        f" or ({node_problems}) + on (instance) group_left (run) {run_by_node})"
    )
    # While the run still completes steps, a problem with the impact *stops the run* counts as *endangers work*.
    downgraded_problems = (
        f"({problems} >= {PRIORITIES_PER_IMPACT * Impact.STOPS_RUN})"
        f" - {PRIORITIES_PER_IMPACT * (Impact.STOPS_RUN - Impact.ENDANGERS_WORK)} unless on (run) {_RUNS_WITHOUT_PROGRESS}"
    )
    worst = f"topk by (instance, gpu) (1, {downgraded_problems} or {problems})"
    return f"max without ({text_labels}) ({worst})"


def problem_counts_by_impact() -> str:
    """Return PromQL for the number of nodes and GPUs by the impact of their worst problem, with the impact in words as a label.

    If there is no problem, the result is a series of value 0 with the impact *nothing is wrong*.
    """
    impacts = f"floor({worst_problems()} / {PRIORITIES_PER_IMPACT})"
    counts = f'count_values("impact", {impacts})'
    for impact, text in IMPACT_NAMES.items():
        counts = f'label_replace({counts}, "impact", "{text}", "impact", "{impact.value}")'
    return f'{counts} or on () label_replace(0 * {_TARGET_EXISTS}, "impact", "{NO_PROBLEM}", "", "")'


def _problem_columns() -> tuple[Column, ...]:
    """Return the columns of the table.

    If there is no problem, each column of values has one row with `NO_PROBLEM_VALUE`, so that Grafana joins the columns to a single row.
    """
    gpu_problems, node_problems = _current_gpu_problems(), _current_node_problems()
    start = start_of_worst(
        f"{_starts(GPU_PROBLEMS)} or {_starts(NODE_PROBLEMS)}", worst_problems(), "instance, gpu"
    )
    no_problem = (
        f'label_replace(0 * {_TARGET_EXISTS} + {NO_PROBLEM_VALUE}, "problem", "{NO_PROBLEM}", "", "")'
        f" unless on () ({gpu_problems} or {node_problems})"
    )
    return (
        Column(
            f"floor(({worst_problems()}) / {PRIORITIES_PER_IMPACT}) or {no_problem}",
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
            f"count by (instance, gpu) ({gpu_problems} or {node_problems}) - 1 or {no_problem}",
            "Others",
            decimals=0,
            width=75,
            mappings=value_mappings({0: (NO_VALUE, NEUTRAL), NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL)}),
        ),
        Column(
            f"{start} * 1000 or {no_problem}",
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=value_mappings(
                {0: ("before this range", NEUTRAL), NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL)}
            ),
        ),
        Column(
            f"sum by (run) ({CLUSTER_LOST_COST_PER_HOUR}) and on (run) ({worst_problems()}) or {no_problem}",
            "Run lost/h",
            decimals=2,
            width=100,
            mappings=value_mappings({NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL)}),
        ),
        Column("remedy", "Remedy"),
    )
