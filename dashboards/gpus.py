"""Dashboard *GPUs*: problems, presence, health, use, memory, power, heat, clocks and links."""

from __future__ import annotations

import dataclasses

from dashboards.board import ALERTS_OF_NODE, JOB, NODE, NUMERICAL_SORT, RUN, Board, Row, Variable
from dashboards.cost_and_loss import CLUSTER_COST_PER_HOUR, CLUSTER_LOST_COST_PER_HOUR
from dashboards.gpu_health import health_panels
from dashboards.gpu_load import (
    GPU_LEGEND,
    GPUS_OF_LIVE_RANKS,
    inventory_panels,
    link_panels,
    memory_panels,
    mig_panels,
    power_panels,
    utilization_panels,
)
from dashboards.gpu_problem_table import (
    PROBLEMS_WITHOUT_RUN,
    current_problems_table,
    query_problem_counts_by_impact,
    query_runs_with_problem,
)
from dashboards.gpu_problems import (
    EXPORTER_IS_UP,
    IMPACT_COLORS,
    IMPACT_NAMES,
    NODES_WITH_EXPORTER_DOWN,
    RUNS_ON_NODES,
    SELECTED_NODES,
    THROTTLED_RATIO_FAMILY,
    count_lost_gpus,
    count_unknown_gpus,
)
from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import (
    Panel,
    stat,
    state_timeline,
    threshold_steps,
    value_mappings,
    warn_below,
    warn_from,
)
from dashboards.queries import NODES_OF_RUN, Query, instant_query

UID = "training-gpus"
RUN_VARIABLE = Variable(
    RUN.name,
    RUN.label,
    RUN.query,
    all_value=".*",
    description="Selects the GPUs of the ranks of the run; All selects every GPU of the nodes.",
)
ALL_RUNS_VARIABLE = Variable(
    "all_runs",
    "All runs",
    'query_result(label_replace(label_replace(label_replace(vector(1), "all_runs", "-", "", ""),'
    ' "selected", "$run", "", ""), "all_runs", ".*", "selected", "[.][*]"))',
    multi=False,
    regex='/all_runs="([^"]+)"/',
    hidden=True,
    description="`.*` if all runs are selected, otherwise `-`: the queries then limit the GPUs to those of the runs.",
)
NODE_VARIABLE = Variable(
    NODE.name,
    NODE.label,
    f"query_result(group by (instance) ({NODES_OF_RUN}))",
    regex='/instance="([^"]+)"/',
    description=NODE.description,
)
GPU_VARIABLE = Variable(
    "gpu",
    "GPU",
    "label_values(gpu_up{@node}, gpu)",
    sort=NUMERICAL_SORT,
    description="Position of the GPU in CUDA_VISIBLE_DEVICES of the job; without that variable, the index in NVML.",
)
_ALERTS_ON_NODES_OF_RUN = dataclasses.replace(
    ALERTS_OF_NODE, expression='ALERTS{alertstate="firing", @node_any_job} and ' + SELECTED_NODES
)
"""Annotation of the alerts on the nodes of the selected runs."""
GPUS_IN_USE_LEGEND = "GPUs in use"
"""Legend of the mean SM activity of the GPUs that live ranks hold."""
SELECTED_GPUS_LEGEND = "selected GPUs"
"""Legend of the panel *Throttled, 2 min* if no GPU is throttled for more than `NEGLIGIBLE_THROTTLING`."""
NEGLIGIBLE_THROTTLING = 0.01
"""Share of the time up to which the panel *Throttled, 2 min* names no GPU."""
MAX_ROWS_PER_KIND = 6
"""Maximum number of rows of each kind in the timeline of failures: exporter, driver and GPU."""
_NO_LOSS_VALUE = -1
"""Loss in the panel *Loss of the runs listed below* if no live run has a problem and every exporter is up."""
_UNKNOWN_RUNS_LEGEND = "runs unknown"
"""Legend of the number of unknown runs in the panel *Loss of the runs listed below*."""


def board() -> Board:
    """Return the dashboard of GPU problems and GPU load, for runs or nodes."""
    return Board(
        uid=UID,
        title="Training / GPUs",
        description="Problems, use, memory, power, heat, clocks and links of each GPU of a run, or of some nodes.",
        variables=(JOB, RUN_VARIABLE, ALL_RUNS_VARIABLE, NODE_VARIABLE, GPU_VARIABLE),
        rows=(
            Row("At a glance", _overview_panels()),
            Row("Health", health_panels()),
            Row("Use", utilization_panels()),
            Row("Memory", memory_panels()),
            Row("Power, heat and clocks", power_panels()),
            Row("NVLink and PCIe", link_panels(), collapsed=True),
            Row("MIG instances", mig_panels(), collapsed=True),
            Row("Inventory", inventory_panels(), collapsed=True),
        ),
        annotations=(_ALERTS_ON_NODES_OF_RUN,),
    )


def _overview_panels() -> tuple[Panel, ...]:
    """Return the panels of the first row: counts, losses, use and throttling, current problems, and failures over time."""
    exporters = "min by (instance) (up{@gpu_target})"
    return (
        stat(
            "Exporters",
            instant_query(f"count({exporters} == 1) or 0 * count({exporters})", "up"),
            instant_query(f"count({exporters} == 0) or 0 * count({exporters})", "down", BAD),
            unit="none",
            text_mode="value_and_name",
            w=3,
        ),
        _selected_gpus_panel(),
        stat(
            "Problems listed below",
            instant_query(query_problem_counts_by_impact(), "{{impact}}"),
            unit="none",
            text_mode="value_and_name",
            value_size=30,
            overrides=[
                {
                    "matcher": {"id": "byName", "options": IMPACT_NAMES[impact]},
                    "properties": [{"id": "thresholds", "value": threshold_steps((None, color))}],
                }
                for impact, color in IMPACT_COLORS.items()
            ],
            w=5,
        ),
        _loss_of_listed_runs_panel(),
        stat(
            "SM active",
            instant_query(_query_mean_sm_activity(), "{{gpus}}"),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            overrides=[
                {
                    "matcher": {"id": "byName", "options": GPUS_IN_USE_LEGEND},
                    "properties": [{"id": "thresholds", "value": warn_below(0.5, 0.2)}],
                }
            ],
            w=3,
        ),
        _throttling_panel(),
        current_problems_table(),
        state_timeline(
            "Exporters, drivers and GPUs with a failure",
            Query(_query_failures(), "{{subject}}"),
            mappings=value_mappings({1: ("up", GOOD), 0: ("down", BAD)}),
            w=24,
            h=6,
        ),
    )


def _selected_gpus_panel() -> Panel:
    """Return the panel with the numbers of selected GPUs that are up, lost and unknown."""
    seen_gpus = "count(group by (instance, gpu) (last_over_time(gpu_up{@gpu}[1h])))"
    up_gpus = f"(count(group by (instance, gpu) (gpu_up{{@gpu}} == 1)) or 0 * ({seen_gpus}))"
    unknown_gpus = f"({count_unknown_gpus('@gpu', '@gpu_target')} or 0 * ({seen_gpus}))"
    # A driver may not list a lost GPU, so that the number of expected GPUs counts, if all GPUs of the nodes are selected.
    some_gpus_selected = "count(group by (instance, gpu) (gpu_up{@gpu})) < on () count(group by (instance, gpu) (gpu_up{@gpu_node}))"
    lost_gpus = (
        f"({count_lost_gpus('@gpu_node', '@gpu_target')} unless on () {some_gpus_selected})"
        f" or on () count(group by (instance, gpu) (gpu_up{{@gpu}} == 0)) or 0 * ({seen_gpus})"
    )
    return stat(
        "Selected GPUs",
        instant_query(up_gpus, "up"),
        instant_query(lost_gpus, "lost", BAD),
        instant_query(unknown_gpus, "unknown", WARNING),
        unit="none",
        text_mode="value_and_name",
        w=5,
    )


def _throttling_panel() -> Panel:
    """Return the panel with the most throttled GPU, or with *none*."""
    # The recorded share remains for minutes after the last sample of a GPU.
    throttled = (
        f"(max by (instance, gpu) ({THROTTLED_RATIO_FAMILY}{{@gpu}}) and on (instance) {EXPORTER_IS_UP})"
    )
    return stat(
        "Throttled, 2 min",
        instant_query(f"topk(1, {throttled} > {NEGLIGIBLE_THROTTLING})", GPU_LEGEND),
        instant_query(
            f"0 * max({throttled}) unless on () {throttled} > {NEGLIGIBLE_THROTTLING}",
            SELECTED_GPUS_LEGEND,
        ),
        unit="percentunit",
        decimals=0,
        text_mode="value_and_name",
        thresholds=warn_from(NEGLIGIBLE_THROTTLING, 0.1),
        overrides=[
            {
                "matcher": {"id": "byName", "options": SELECTED_GPUS_LEGEND},
                "properties": [{"id": "mappings", "value": value_mappings({0: ("none", NEUTRAL)})}],
            }
        ],
        w=3,
    )


def _query_mean_sm_activity() -> str:
    """Return PromQL for the mean SM activity of the selected GPUs that live ranks hold, with the label `gpus="GPUs in use"`.

    If no live rank holds a selected GPU, the result is the mean of all selected GPUs with the label `gpus="no GPU in use"`. The panel has a
    color only for GPUs in use. Without a GPU with performance counters, the result is absent.
    """
    activity = "gpu_sm_activity_ratio{@gpu}"
    in_use = f"avg({activity} and on (uuid) ({GPUS_OF_LIVE_RANKS}))"
    return (
        f'label_replace({in_use}, "gpus", "{GPUS_IN_USE_LEGEND}", "", "")'
        f' or on () label_replace(avg({activity}), "gpus", "no GPU in use", "", "")'
    )


def _loss_of_listed_runs_panel() -> Panel:
    """Return the panel with the loss and the cost of the runs in the table of problems, and the number of unknown runs.

    The loss is:

    - the sum over the runs with a row
    - `_NO_LOSS_VALUE` if no live run has a row and the exporters of all selected nodes are up
    - absent while the run of a GPU with a problem is unknown

    The cost is the sum over the same runs, or absent.

    A run that has not ended is unknown in these cases:

    - It had a process on a node whose exporter is down.
    - Its ranks report neither GPU nor local rank, and a GPU of their node has a problem and no known rank.
    """
    runs_with_problem = query_runs_with_problem()
    live_runs = 'max by (run) (training_run_state{@cluster, state=~"starting|running|stalled|hung"}) == 1'
    ranks_without_gpu = 'training_rank_info{@cluster, uuid="", local_rank=""}'
    problems_without_known_run = f"({PROBLEMS_WITHOUT_RUN} and on (instance) {ranks_without_gpu})"
    no_loss = (
        f"0 * sum by (currency) ({CLUSTER_COST_PER_HOUR}) + {_NO_LOSS_VALUE} and on () max(up{{@gpu_target}})"
        f" unless on () (({live_runs} and on (run) {runs_with_problem}) or on () {NODES_WITH_EXPORTER_DOWN})"
    )
    loss = f"sum by (currency) ({CLUSTER_LOST_COST_PER_HOUR} and on (run) {runs_with_problem}) or ({no_loss})"
    cost = f"sum by (currency) ({CLUSTER_COST_PER_HOUR} and on (run) {runs_with_problem})"
    unknown_runs = (
        f"group by (run) ({RUNS_ON_NODES} and on (instance) {NODES_WITH_EXPORTER_DOWN}"
        f" or {ranks_without_gpu} and on (instance) {problems_without_known_run})"
        ' unless on (run) last_over_time(training_run_state{@cluster, state=~"stopped|finished|failed|lost"}[1h]) == 1'
    )
    return stat(
        "Loss of the runs listed below",
        instant_query(f"({loss}) unless on () {problems_without_known_run}", "{{currency}}/h lost"),
        instant_query(f"({cost}) unless on () {problems_without_known_run}", "{{currency}}/h cost"),
        instant_query(f"count({unknown_runs}) or 0 * max(up{{@gpu_target}})", _UNKNOWN_RUNS_LEGEND),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=[
            {
                "matcher": {"id": "byRegexp", "options": "/ lost$/"},
                "properties": [
                    {"id": "thresholds", "value": warn_from(0.01, 0.01)},
                    {"id": "mappings", "value": value_mappings({_NO_LOSS_VALUE: ("no problem", NEUTRAL)})},
                ],
            },
            {
                "matcher": {"id": "byName", "options": _UNKNOWN_RUNS_LEGEND},
                "properties": [{"id": "decimals", "value": 0}, {"id": "thresholds", "value": warn_from(1)}],
            },
        ],
        w=5,
    )


def _query_failures() -> str:
    """Return PromQL for a series for each exporter, driver and GPU that failed in the time range. The value is 1 while up and 0 while down.

    The label `subject` is the name of the row:

    - the exporters and drivers with the most failed scrapes, at most `MAX_ROWS_PER_KIND` of each; a driver on a node with expected GPUs
    - the GPUs that were lost for the longest time, at most `MAX_ROWS_PER_KIND`
    - `no failure`, if nothing failed

    A single failed scrape is no failure: a new target often fails its first scrape.
    """
    has_gpus = "max by (instance) (gpu_devices_expected{@gpu_node}) > 0"
    exporters = _rows_of_failed("up{@gpu_target}")
    drivers = f"{_rows_of_failed('gpu_nvml_up{@gpu_node}')} and on (instance) {has_gpus}"
    failures = " or ".join(
        (
            f'label_replace({exporters}, "subject", "$1 exporter", "instance", "(.+)")',
            f'label_replace({drivers}, "subject", "$1 driver", "instance", "(.+)")',
            f'label_join({_rows_of_lost_gpus()}, "subject", " GPU ", "instance", "gpu")',
        )
    )
    any_failure = (
        f"({_failed_scrapes('up{@gpu_target}')} or {_LOST_SAMPLES} > 1"
        f" or {_failed_scrapes('gpu_nvml_up{@gpu_node}')} and on (instance) {has_gpus})"
    )
    no_failure = f'label_replace(0 * min(up{{@gpu_target}}) + 1, "subject", "no failure", "", "") unless on () {any_failure}'
    return f"{failures} or {no_failure}"


def _failed_scrapes(series: str) -> str:
    """Return PromQL for the number of scrapes at which each series was 0, if there are at least two scrapes. *series* is 1 while up."""
    return f"count_over_time({series}[$__range] @ end()) - sum_over_time({series}[$__range] @ end()) > 1"


def _rows_of_failed(series: str) -> str:
    """Return PromQL for the `MAX_ROWS_PER_KIND` series with the most failed scrapes, by node. *series* is 1 while up and 0 while down."""
    most_failed = f"topk({MAX_ROWS_PER_KIND}, max by (instance) ({_failed_scrapes(series)}))"
    value = f"min by (instance) ({series})"
    # The first scrapes of a new target may fail, which is no failure: they have no earlier sample.
    first_failures = f"({value} == 0 unless on (instance) {series} offset 1m)"
    return f"({value} unless {first_failures}) and on (instance) {most_failed}"


_LOST_SAMPLES = "count_over_time(gpu:gpu_lost:timestamp_seconds{@gpu}[$__range] @ end())"
"""PromQL for the number of samples with which each GPU was recorded as lost. The series exists only while the GPU is lost."""


def _rows_of_lost_gpus() -> str:
    """Return PromQL for the `MAX_ROWS_PER_KIND` GPUs that were lost for the longest time: 0 while lost, 1 while their driver is read."""
    lost_longest = f"topk({MAX_ROWS_PER_KIND}, max by (instance, gpu) ({_LOST_SAMPLES} > 1))"
    lost = "0 * max by (instance, gpu) (gpu:gpu_lost:timestamp_seconds{@gpu})"
    return f"({lost} or on (instance, gpu) 0 * {lost_longest} + 1 and on (instance) gpu_nvml_up{{@gpu_node}} == 1) and on (instance, gpu) {lost_longest}"
