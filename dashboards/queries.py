"""PromQL queries of panels, and named selectors.

Expressions contain named selectors such as `training_step{@run}`, which expand to matchers on the variables of the
dashboard: `training_step{cluster=~"$cluster", run=~"$run"}`. Some selectors add a condition too, and series of the host and of
containers are deduplicated; see `expand`.

The dashboards use these forms of PromQL again and again:

    x or on (run) y                            x, and y for the runs without x: *x, else y* in the docstrings
    x and on () c, x unless on () c            x if the condition c has a value, or has none; `on ()` compares no labels
    0 * x + 2, x ^ 0                           the value 2, or 1, with the labels of x
    x + on (run) group_left (gpu) 0 * y        x with the label `gpu` of y, for the runs that have y
    x * on () group_left () y                  each series of x times the only series of y
    label_replace(x, "note", "text", "", "")   x with the constant label note="text"
    count_values by (run) ("percent", x)       the value of x as the label `percent`, from which `label_replace` builds a text
    topk by (run) (1, x)                       one series for each run; also to protect a join from a duplicate series
    max_over_time(x[$__range:$__interval])     a subquery: x at each point of the time range
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exporter.training import phases

SELECTORS = {
    "cluster": 'cluster=~"$cluster"',
    # Without `job`, because alerts from aggregations have no such label.
    "node_any_job": 'cluster=~"$cluster", instance=~"$node"',
    "node": 'cluster=~"$cluster", job=~"$job", instance=~"$node"',
    "gpu": 'cluster=~"$cluster", job=~"$job", instance=~"$node", gpu=~"$gpu"',
    "gpu_any_run": 'cluster=~"$cluster", job=~"$job", instance=~"$node", gpu=~"$gpu"',
    "target": 'cluster=~"$cluster", job=~"$job", instance=~"$node"',
    "gpu_node": 'cluster=~"$cluster", job=~"$job", instance=~"$node"',
    "gpu_target": 'cluster=~"$cluster", job=~"$job", instance=~"$node"',
    "energy_node": 'cluster=~"$cluster", instance=~"$node"',
    "run": 'cluster=~"$cluster", run=~"$run"',
    "compared_run": 'cluster=~"$cluster", run=~"$run"',
    "rank": 'cluster=~"$cluster", run=~"$run", rank=~"$rank"',
    "other_rank": 'cluster=~"$cluster", run=~"$run", rank!~"$rank"',
    "node_run_any_job": 'cluster=~"$cluster", instance=~"$node", run=~"$run"',
    "node_run": 'cluster=~"$cluster", job=~"$job", instance=~"$node", run=~"$run"',
}
"""Matchers by selector name. Selectors with equal matchers differ in their conditions, see `_CONDITIONS`."""

_SELECTOR = re.compile(r"@(?P<name>\w+)")
"""A named selector."""
_MACHINE_SERIES = re.compile(
    r"\b\w+\((?:host|cgroup)_\w+\{[^}]*\}\[[^]]*\]\)|\b(?:host|cgroup)_\w+\{[^}]*\}(?!\[)"
)
"""A series of the host or of a container, with the function around it if the series has a range."""
_RANGE_FUNCTION_OR_SERIES = (
    r"\b\w+\([\w:]+\{{[^}}]*@{0}\b[^}}]*\}}\[[^]]*\](?: offset [$\w]+| @ end\(\))?\)"
    r"|\b[\w:]+\{{[^}}]*@{0}\b[^}}]*\}}(?!\[)(?: offset [$\w]+| @ end\(\))?"
)
"""Template of the regular expression of a series with the selector `{0}`, with the function around it if the series has a range."""


def gpus_of_runs(selector: str) -> str:
    """Return PromQL for each GPU that a run held in the time range."""
    return f"last_over_time(run_gpu:training_gpu_held:group{{{selector}}}[$__range] @ end())"


GPUS_OF_RUN = gpus_of_runs('@run, instance!~"$all_runs"')
"""PromQL for each GPU that a selected run held in the time range; without a value if all runs are selected.

The hidden variable `all_runs` of *GPUs* is `.*` if all runs are selected, and otherwise `-`, which is no name of a node. The matcher
`instance!~"$all_runs"` therefore selects nothing if all runs are selected. That saves the join of all GPUs with all runs.
"""


def last_in_range(series: str) -> str:
    """Return PromQL for the last sample of series in the time range, from the end of the range or from the last multiple of five minutes.

    For the labels of targets, this is enough, and reads a twentieth of the samples of a range.
    """
    return f"({series} @ end() or last_over_time({series}[$__range:5m] @ end()))"


_EXPORTERS = 'exporter_build_info{@cluster, job=~"$job"}'
_EXPORTERS_OF_RUN = 'exporter_build_info{@cluster, job=~"$job", run=~"$run"}'
NODES_OF_RUN = (
    f"{last_in_range(_EXPORTERS_OF_RUN)}"
    ' or last_over_time(gpu_up{@cluster, job=~"$job", instance!~"$all_runs"}[$__range] @ end())'
    f" and on (uuid) ({GPUS_OF_RUN})"
)
"""PromQL for series with the labels `job` and `instance` of the nodes of the selected runs.

A node counts if the exporter has the label `run` of a selected run, or if a selected run held a GPU of the node in the time range.
`.*`, the value of All, also matches series without the label `run`, and so selects all nodes.
"""
NODES_OF_ENERGY = (
    "last_over_time(training_energy_joules_total{@run}[$__range] @ end())"
    " or on () last_over_time(exporter_energy_counting{@cluster}[$__range] @ end())"
)
"""PromQL for the nodes on which the selected runs used energy in the time range.

If there is no such node, the result is all nodes whose exporter had `exporter_energy_counting` in the time range.
"""
SAME_WORK_RUNS_TEMPLATE = (
    '(last_over_time(training_run_info{{@cluster, perf_tag=~"$perf_tag", perf_tag!=""{extra_matchers}}}[$__range])'
    ' or last_over_time(training_run_info{{@cluster, perf_tag="", model=~"$perf_tag"{extra_matchers}}}[$__range]))'
)
"""PromQL for the runs with the selected `perf_tag`, and for the runs without `perf_tag` whose model is the selected value."""
_CONDITIONS = {
    "compared_run": f"on (run) {SAME_WORK_RUNS_TEMPLATE.format(extra_matchers='')}",
    "gpu": 'on (uuid) (last_over_time(gpu_up{@gpu_any_run, run=~"$run", instance!~"$all_runs"}[$__range] @ end())'
    f" or {GPUS_OF_RUN})",
    "gpu_node": f"on (instance) ({NODES_OF_RUN})",
    "gpu_target": f"on (job, instance) ({NODES_OF_RUN})",
    # `up` has series of every target of Prometheus.
    "target": f"on (job) {last_in_range(_EXPORTERS)}",
    "energy_node": f"on (instance) ({NODES_OF_ENERGY})",
}
"""PromQL operands of `and` that limit series with a selector, by selector name.

A condition instead of a list of values keeps a query short: a thousand nodes have eight thousand GPUs.
"""
_CONDITIONAL_SERIES = {name: re.compile(_RANGE_FUNCTION_OR_SERIES.format(name)) for name in _CONDITIONS}
TARGET_LABELS = "job, namespace, pod, container, endpoint"
"""Labels that differ between the exporter of a node and the sidecar of a pod on the same node."""


_CURRENT_SERIES_OF_RUN = re.compile(
    r"(?<!timestamp\()(?<![\w:])"
    r'(?:training_\w+\{[^{}]*\brun=~?"\$run"[^{}]*\}|(?:gpu|exporter)_\w+\{cluster=~"\$cluster"(?![^{}]*\binstance="\$node")[^{}]*\})'
    r"(?!\[| offset | @ )"
)
"""A series of which `bridge_missed_scrape` also uses the last sample."""


def bridge_missed_scrape(expression: str) -> str:
    """Return an expanded expression in which the last samples of runs, GPUs and exporters count for up to 35 s.

    At the scrape interval of 15 s, a single missed scrape then changes no value, as in the recording rules. These series remain unchanged:

    - recorded series
    - series with a range, an offset or `@`
    - operands of `timestamp`
    - series of GPUs and exporters that the variable `node` limits to a single node: *Node* shows a driver that was not read
    """
    return _CURRENT_SERIES_OF_RUN.sub(r"(\g<0> or last_over_time(\g<0>[35s]))", expression)


def _limited(condition: str, series: re.Match[str]) -> str:
    """Return a series that a condition limits."""
    return f"({series[0]} and {condition})"


def _of_all_runs_or_limited(condition: str, series: re.Match[str]) -> str:
    """Return a series of GPUs: without a condition if all runs are selected, otherwise with the condition.

    By the variable `all_runs` (see `GPUS_OF_RUN`), one of the two operands of `or` selects nothing.
    """
    of_all_runs, of_selected_runs = (
        re.sub(r"@gpu\b", f'@gpu_any_run, instance{operator}"$all_runs"', series[0])
        for operator in ("=~", "!~")
    )
    return f"({of_all_runs} or {of_selected_runs} and {condition})"


def expand(expression: str) -> str:
    """Return an expression with expanded selectors and their conditions.

    A series of the host or of a container counts once, even if two exporters of the node publish it: the largest value counts.

    Raises:
        KeyError: The expression contains an unknown selector.
    """
    deduplicated_expression = _MACHINE_SERIES.sub(
        rf"max without ({TARGET_LABELS}) (\g<0>)", " ".join(expression.split())
    )
    for name, condition in _CONDITIONS.items():
        if f"@{name}" not in deduplicated_expression:
            continue  # saves a slow search: the pattern would be tried at each word
        limit = _of_all_runs_or_limited if name == "gpu" else _limited
        deduplicated_expression = _CONDITIONAL_SERIES[name].sub(
            functools.partial(limit, condition), deduplicated_expression
        )
    return _SELECTOR.sub(lambda match: SELECTORS[match["name"]], deduplicated_expression)


@dataclass(frozen=True, slots=True)
class Query:
    """Query of a panel: PromQL with named selectors, legend and line style."""

    expression: str
    legend: str = "__auto"  # `{{label}}` is the value of a label; Grafana chooses the text for `__auto`
    color: str | None = None  # color of the series; shades of it if the legend of lines contains a label
    reference: bool = False  # a reference line: dashed, not stacked, gray by default
    dashed: bool = False  # dashed lines
    right_axis: bool = False  # dashed lines on the right axis
    instant: bool = False  # instant query at the end of the time range
    table: bool = False  # result in table format

    def target(self, index: int) -> dict[str, Any]:
        """Return the JSON model of the query at position `index` in the panel."""
        return {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": expand(self.expression),
            "format": "table" if self.table else "time_series",
            "instant": self.instant,
            "legendFormat": self.legend,
            "range": not self.instant,
            "refId": chr(ord("A") + index),
        }


DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""Reference to the data source that the variable `datasource` of the dashboard selects."""


LOCAL_RANK_AS_GPU = (
    'label_replace(training_rank_info{@run, local_rank!=""}, "gpu", "$1", "local_rank", "(.+)")'
)
"""PromQL for the ranks of the run with a local rank, which is also the label `gpu`.

The GPU is inferred: usually the rank uses the GPU with the index of its local rank, but a job can number its GPUs differently.
"""


def _gpu_label_by_rank(label: str, inferred_source: str) -> str:
    """Return PromQL for series of value 1 with a label of each rank's GPUs, by node, rank and this label.

    The GPUs of a rank come from the first of these sources that has any: the feed, the processes that NVML lists, *inferred_source*. A
    rank that uses several GPUs has several series. A rank without a GPU in any source is absent.

    Args:
        label: `gpu` or `uuid`.
        inferred_source: PromQL of the last resort.
    """
    sources = (
        'training_rank_info{@run, uuid!=""}',
        "training_process_gpu_memory_bytes{@run}",
        inferred_source,
    )
    alternatives = (f"group by (instance, rank, {label}) ({source})" for source in sources)
    return f"({' or on (instance, rank) '.join(alternatives)})"


GPU_INDEX_BY_RANK = _gpu_label_by_rank("gpu", LOCAL_RANK_AS_GPU)
"""PromQL for a series of value 1 for each GPU of each rank, with the labels `instance`, `rank` and `gpu`.

The index is from the first of these sources that has one: the feed, the processes that NVML lists, the local rank.
"""
GPU_UUID_BY_RANK = _gpu_label_by_rank(
    "uuid", f"{LOCAL_RANK_AS_GPU} * on (instance, gpu) group_left (uuid) topk by (instance, gpu) (1, gpu_up)"
)
"""PromQL for the GPU UUIDs of each rank. The UUID joins series of different exporters, whose GPU indexes may differ."""


def gpu_values_by_rank(family: str) -> str:
    """Return PromQL for the largest value of a GPU family among the GPUs of each rank, by node and rank."""
    return f"max by (instance, rank) ({GPU_UUID_BY_RANK} * on (uuid) group_left () max by (uuid) ({family}))"


def feed_age_seconds(selector: str, by: str, aggregation: str = "max") -> str:
    """Return PromQL for the age of feeds at the time of the scrape in seconds, by labels. `time()` would add the time since the scrape.

    Args:
        selector: Matchers of the feeds.
        by: Labels to keep.
        aggregation: `max` for the oldest feed of each group, `min` for the newest.
    """
    last_update = f"training_feed_last_update_timestamp_seconds{{{selector}}}"
    return f"{aggregation} by ({by}) (timestamp({last_update}) - {last_update})"


SATURATED_CPU_RATIO = 0.9
"""Share of the CPU time of five minutes above which the CPUs of a node are saturated: more data workers would compete for them."""
IDLE_CPUS_PER_PROCESS = 0.5
"""Number of CPUs that a rank or a data worker uses on average, below which the process is idle: its computation does not delay the data."""
CPUS_FULL_REMEDY = "CPUs are full: cheaper transforms, more CPUs"
NO_DATA_WORKERS_REMEDY = "no data worker processes: set num_workers"
OTHER_PROGRAMS_REMEDY = "other programs use the CPUs of the node"
IDLE_DATA_WORKERS_REMEDY = "data workers use little CPU: check storage"
DATA_WAIT_REMEDY = "check the storage; use more data workers"


def data_wait_remedies(run_selector: str, node_selector: str) -> str:
    """Return PromQL for the remedy of a wait for data on each node of each run, as the label `remedy`, by node and run.

    The value orders the remedies: the largest value of the nodes of a run is the remedy of the run. The first of these cases applies:

    1. The container's CPU limit throttles more than half of the periods, or the CPUs of the host are saturated and the run is not idle:
       `CPUS_FULL_REMEDY`. A run without samples of its processes counts as not idle.
    2. The run has no data workers on the node: `NO_DATA_WORKERS_REMEDY`.
    3. The CPUs of the host are saturated, although the run is idle: `OTHER_PROGRAMS_REMEDY`.
    4. The data workers are idle: `IDLE_DATA_WORKERS_REMEDY`.
    5. Otherwise: `DATA_WAIT_REMEDY`.
    """
    cpu_seconds = "training_process_cpu_seconds_total"
    nodes = f"group by (instance, run) (last_over_time(training_process_up{{{run_selector}}}[5m]))"
    saturated_host = f"max by (instance) (avg_over_time(host_cpu_utilization_ratio{{{node_selector}}}[5m])) > {SATURATED_CPU_RATIO}"
    throttled_periods = f"rate(cgroup_cpu_throttled_periods_total{{{node_selector}}}[5m])"
    reached_limit = f"max by (instance) ({throttled_periods} / rate(cgroup_cpu_periods_total{{{node_selector}}}[5m])) > 0.5"
    idle_run = (
        "avg by (instance, run) (sum by (instance, run, rank)"
        f" (rate({cpu_seconds}{{{run_selector}}}[5m]))) < {IDLE_CPUS_PER_PROCESS}"
    )
    processes = f"group by (instance, run) (training_process_instances{{{run_selector}}})"
    workers = f'sum by (instance, run) (training_process_instances{{{run_selector}, role="dataloader"}}) > 0'
    idle_workers = (
        f'sum by (instance, run) (rate({cpu_seconds}{{{run_selector}, role="dataloader"}}[5m]))'
        f" / ({workers}) < {IDLE_CPUS_PER_PROCESS}"
    )
    busy_nodes_of_busy_runs = (
        f"{nodes} and on (instance) ({saturated_host}) unless on (instance, run) ({idle_run})"
    )
    cases = (
        (
            f"{nodes} and on (instance) ({reached_limit}) or {busy_nodes_of_busy_runs}",
            CPUS_FULL_REMEDY,
        ),
        (f"{processes} unless on (instance, run) ({workers})", NO_DATA_WORKERS_REMEDY),
        (f"{nodes} and on (instance) ({saturated_host})", OTHER_PROGRAMS_REMEDY),
        (idle_workers, IDLE_DATA_WORKERS_REMEDY),
        (nodes, DATA_WAIT_REMEDY),
    )
    remedies = " or on (instance, run) ".join(
        f'label_replace(0 * ({condition}) + {len(cases) - index}, "remedy", "{remedy}", "", "")'
        for index, (condition, remedy) in enumerate(cases)
    )
    return f"({remedies})"


def event_counts(counter: str, by: str = "", *, starts_at_first_event: bool = False) -> str:
    """Return PromQL for the number of events in each interval of a graph.

    `$__rate_interval` is longer than the interval between two points, so that `increase` would show an event several times.
    The difference between the last values of two intervals counts each event once, even if a scrape fails. It is too small, and at least 0,
    in an interval in which the counter restarts.

    Args:
        counter: Counter with selectors.
        by: Labels to keep.
        starts_at_first_event: Count the value of the first sample, for a counter without series before the first event.
    """
    current = f"sum by ({by}) (last_over_time({counter}[$__interval]))"
    previous = f"sum by ({by}) (last_over_time({counter}[6h] offset $__interval))"
    if starts_at_first_event:
        previous = f"({previous} or 0 * {current})"
    return f"clamp_min({current} - {previous}, 0)"


RECORDED_LAST_PROGRESS_TIME = "max by (cluster, run) (run:training_last_progress:timestamp_seconds{@cluster})"
"""PromQL for the time of the last step or validation batch of each run, in Unix seconds."""
WALL_SECONDS = "max(training_wall_seconds_total{@run})"
"""PromQL for the wall time of the run since its first attempt in seconds, without labels."""


def progress_age_seconds(selector: str, by: str = "") -> str:
    """Return PromQL for the seconds from the last step or validation batch of any rank to the last scrape, by labels.

    `time()` would add the time since the scrape. The result is absent if the last scrape is more than 35 s old.

    Args:
        selector: Matchers of the ranks.
        by: Labels to keep.
    """
    last_progress = f"training_last_progress_timestamp_seconds{{{selector}}}"
    return f"min by ({by}) (last_over_time((timestamp({last_progress}) - {last_progress})[35s:5s]))"


PROGRESS_AGE_SECONDS = progress_age_seconds("@run")
"""PromQL for the seconds from the last step or validation batch of any rank to the last scrape, without labels."""
WORK_PHASES = "|".join(sorted(phases.WORK_PHASES))
"""Regular expression of the phases that are work."""
STEP_OVERDUE = f"{PROGRESS_AGE_SECONDS} > clamp_min(5 * max(training_step_longest_seconds{{@run}}), 30)"
"""PromQL for the seconds since the last step, while they exceed both 30 and five times the longest of the last steps."""
STANDSTILL_BY_STEP_AGE = (
    f'({STEP_OVERDUE} or on () max(training_run_state{{@run, state=~"stalled|hung"}}) == 1)'
)
"""PromQL with a value while a step is overdue, or while the ledger has decided that the run is stalled or hung.

Unlike `STANDSTILL`, the value is present in all phases, also during a long save.
"""
STEP_OVERDUE_IN_WORK = (
    f'({STEP_OVERDUE} and on () max(training_run_state{{@run, state="running"}}) == 1'
    f' and on () max(training_phase_active{{@run, phase=~"{WORK_PHASES}"}}) == 1)'
)
"""PromQL for the seconds since the last step, while a step is overdue and the ledger still counts the time as work.

The conditions are those of the rule `run:training_step_overdue:seconds`, which is evaluated later.
"""
STANDSTILL = (
    f"(max(run:training_step_overdue:seconds{{@run}}) > 0 or on () {STEP_OVERDUE_IN_WORK}"
    ' or on () max(training_run_state{@run, state=~"hung|stalled"}) == 1)'
)
"""PromQL with a value while a step is overdue in a phase of work, or while the run is stalled or hung."""
LIVE_STATE = 'max(training_run_state{@run, state=~"starting|running|stalled|hung"}) == 1'
"""PromQL with a value while the run has neither ended nor started to end."""
ENDED_NORMALLY = 'max(training_run_state{@run, state=~"finished|stopped"}) == 1'
"""PromQL with a value after the run has finished or was stopped."""
HANG_LABELS = "function, location, phase"
"""Labels of the position at which a rank hangs."""
HANGING_RANKS = f"max by (instance, rank, {HANG_LABELS}) (training_hang_info{{@run}})"
"""PromQL for a series of value 1 for each hanging rank, with its position as labels."""
ODD_GROUP_SIZE = "run_group:training_hang_odd:count{@run}"
"""PromQL for the number of ranks in the group that causes a hang, by the position of the group.

The result is absent if several groups may be the cause. A group of one rank is the *odd rank*.
"""
STATE_BY_RUN = "max by (run, state) (training_run_state{@run} == 1)"
"""PromQL for a series of value 1 for each run, with its current state as the label `state`."""
ENDING_RUNS = 'max by (run) (training_run_state{@run, state="ending"}) == 1'
"""PromQL with a value for each run in the state `ending`: the processes have ended, and the outcome is not decided."""
LAST_PROGRESS_TIME_BY_RUN = "max by (run) (training_last_progress_timestamp_seconds{@run})"
"""PromQL for the time of the last step or validation batch of each run."""
COST_SO_FAR_BY_CURRENCY = "sum by (currency) (last_over_time(training_cost_total{@run}[15m]))"
"""PromQL for the cost of the selected runs since their start, until 15 minutes after their last sample."""
JOULES_SO_FAR = "sum(last_over_time(training_energy_joules_total{@run}[15m]))"
"""PromQL for the joules of the selected runs since their start, until 15 minutes after their last sample."""

SAVE_PHASES = "|".join(row.name for row in phases.PHASES.values() if row.badput == "checkpoint_save")
"""Regular expression of the phases of a save."""
OBSERVED_RATIO = (
    f"(clamp_max(max(rate(training_wall_seconds_total{{@run}}[5m])), 1) > 0 and on () {LIVE_STATE})"
)
"""PromQL for the share of the last five minutes with samples of a live run: below 1 for a younger run.

A rate over five minutes divided by this share is right for a young run too. The result is absent after the end of the run.
"""


COMPUTE_SECONDS_BY_RANK_AND_NODE = "max by (instance, rank) (rank:training_compute:seconds{@run})"
"""PromQL for the seconds that each rank computes in a step, by node and rank."""
MEAN_STEP_SECONDS = (
    '(sum(rate(training_step_duration_seconds_sum{@run, mode="train"}[$__rate_interval]))'
    ' / sum(rate(training_step_duration_seconds_count{@run, mode="train"}[$__rate_interval])))'
)
"""PromQL for the mean duration of the training steps of all ranks in seconds, without labels."""
STAGE_OF_RANK = (
    "on (instance, run, rank, worker) group_left (label_stage)"
    " group by (instance, run, rank, worker, label_stage) (training_rank_info{@run})"
)
"""Right operand of a multiplication that adds the label `label_stage`, the pipeline stage, to series of ranks."""
SPEED_RATIO_BY_RANK_AND_NODE = "max by (instance, rank) (rank:training_straggler_score:ratio{@run})"
"""PromQL for the speed of each rank relative to the fastest rank of its pipeline stage, by node and rank.

The recorded series of the alert TrainingStraggler and of *Fleet*, so that all dashboards show one value at a time.
"""
_ONLY_GPU_BY_RANK = (
    f"({GPU_INDEX_BY_RANK} and on (instance, rank) count by (instance, rank) ({GPU_INDEX_BY_RANK}) == 1)"
)
"""PromQL for the GPU index of each rank that uses a single GPU."""
SLOWEST_RANK = (
    f"bottomk(1, {SPEED_RATIO_BY_RANK_AND_NODE}) * on (instance, rank) group_left (gpu_suffix)"
    f' (label_replace({_ONLY_GPU_BY_RANK}, "gpu_suffix", ", GPU $1", "gpu", "(.+)")'
    f" or on (instance, rank) 0 * {COMPUTE_SECONDS_BY_RANK_AND_NODE} + 1)"
)
"""PromQL for the relative speed of the slowest rank, by node, rank and `gpu_suffix`.

The label `gpu_suffix` is `, GPU 3`, or empty if the rank uses several GPUs or none is known.
"""
EQUAL_RATIO = 0.98
"""Relative speed of the slowest rank from which the panels name no rank: the difference is noise of the measurement."""
COST_PER_HOUR_BY_CURRENCY = (
    "3600 * sum by (currency) (max by (run, currency) (run:training_cost_held:rate5m{@run}))"
)
"""PromQL for the cost per hour of all selected runs together, by currency, see `cost_and_loss.cost_per_hour_by_run`."""

REPORTING_RANKS = (
    "group by (run, rank) (last_over_time(training_process_up{@run}[35s])"
    " and count_over_time(training_process_up{@run}[$__rate_interval]) > 1)"
)
"""PromQL for the ranks with a current sample and at least two samples in a rate interval, the fewest for a rate, by run and rank."""


def blank_if_incomplete(expression: str, by: str = "") -> str:
    """Return PromQL for a sum over the ranks of a run, without a value while ranks are missing: the sum would be too small.

    A rank is missing during an outage of its exporter, and until its counters have two samples. The result is also absent if no
    rank has a current sample.

    Args:
        expression: PromQL for the sum.
        by: `run` if the sum is by run; empty for a sum over the single run of the dashboard.
    """
    rank_count = f"count by ({by}) ({REPORTING_RANKS})"
    return (
        f"({expression}) and on ({by}) training_process_up{{@run}}"
        f" unless on ({by}) ({rank_count} < max by ({by}) (training_world_size{{@run}}))"
    )


def instant_query(expression: str, legend: str = "__auto", color: str | None = None) -> Query:
    """Return a query for values at the end of the time range."""
    return Query(expression, legend, color, instant=True)


def named_values_query(values: Mapping[str, str], *, instant: bool = True) -> Query:
    """Return one query of several series, from {name of the series: PromQL for a single value without labels}.

    A series without a value is absent. With a query for each series, an absent value would be a query without data.
    """
    named_values = (f'label_replace({value}, "name", "{name}", "", "")' for name, value in values.items())
    return Query(" or ".join(named_values), "{{name}}", instant=instant)


def table_query(expression: str) -> Query:
    """Return a query for values at the end of the time range, in table format."""
    return Query(expression, instant=True, table=True)
