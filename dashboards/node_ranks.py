"""Panels of the dashboard *Node* about the training on the node: the runs and the ranks."""

from __future__ import annotations

from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH
from dashboards.availability import NO_EXPORTER_UP
from dashboards.cost_and_loss import LOST_THRESHOLDS, SHORT_CAUSE_TEXTS, largest_loss_share_by_run
from dashboards.fleet_runs import NO_STEP, RUN_STATES
from dashboards.losses_now import STOPPED_RUN_CAUSES, VERDICT_BY_RUN
from dashboards.node_cost import NODE_COST_PER_HOUR, NODE_LOST_PER_HOUR, RUN_LOST_SHARE, RUNS_LIVE_ON_NODE
from dashboards.node_problems import (
    DATA_WAIT_RATIO_BY_RANK_ON_NODE,
    RECORDED_STANDSTILL,
    SPEED_RATIO_BY_RANK_ON_NODE,
    TRAINER_FEED_AGE_SECONDS,
    UP_BY_RANK_ON_NODE,
)
from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import RUN_LINK, Panel, value_mappings, warn_below, warn_from
from dashboards.queries import LAST_PROGRESS_TIME_BY_RUN, STATE_BY_RUN, progress_age_seconds
from dashboards.rank_problems import SILENT_SECONDS, SLOW_RATIO, VERY_SLOW_RATIO
from dashboards.tables import Column, percent_column, table
from dashboards.verdicts import VERDICT_MAPPINGS

_ALIVE, _ENDED = 1, 0
"""Values of the column *Process*: those of `training_process_up`."""
_SILENT, _UNKNOWN = 2, -1
"""Further values of the column *Process*. `_UNKNOWN` also replaces the numbers of a run while the exporter of the node is down."""
_UNKNOWN_TEXTS = value_mappings({_UNKNOWN: ("unknown", WARNING)})
_HERE_UNKNOWN = ", here unknown"
"""Suffix of the state of a run that another node reports while the exporter of this node is down."""
_STATE_AND_UNKNOWN_MAPPINGS = [
    *value_mappings(
        RUN_STATES | {f"{state}{_HERE_UNKNOWN}": (f"{state}{_HERE_UNKNOWN}", WARNING) for state in RUN_STATES}
    ),
    {
        "type": "regex",
        "options": {"pattern": "/^(ended early.*)$/", "result": {"text": "$1", "color": WARNING}},
    },
]
"""Value mappings of the states of a run, with and without `_HERE_UNKNOWN`, and of an early end with its step."""
_EARLY_END_STATES = 'label_replace(max by (run, steps) (run:training_early_end:info{@run}), "state", "ended early, step $1", "steps", "(.+)")'
"""PromQL with the value 1 for each run that finished before its step target, with the steps in the label `state`."""
_RANKS_IN_RANGE = "group by (run, rank) (last_over_time(training_process_up{@node_run}[$__range]))"
"""PromQL for a series of value 1 for each rank with a sample on the node in the time range."""
_GPU_SOURCES = (
    'training_rank_info{@node_run, gpu!=""}',
    "training_process_gpu_memory_bytes{@node_run}",
    'label_replace(training_rank_info{@node_run, local_rank!=""}, "gpu", "$1", "local_rank", "(.+)")',
    'last_over_time(training_rank_info{@node_run, gpu!=""}[$__range])',
    'label_replace(last_over_time(training_rank_info{@node_run, local_rank!=""}[$__range]), "gpu", "$1", "local_rank", "(.+)")',
)
"""PromQL for series of the ranks on the node with the label `gpu`: current samples, the most reliable first, then the last samples."""
_GPU_OF_RANK = "topk by (run, rank) (1, {})".format(
    " or on (run, rank) ".join(f"group by (run, rank, gpu) ({source})" for source in _GPU_SOURCES)
)
"""PromQL for one GPU index of each rank: from the feed, else from the processes that NVML lists, else from the local rank.

The GPU of a rank without a current sample is the last in the time range.
"""
RUNS_ENDED_NORMALLY = 'max by (run) (training_run_state{@run, state=~"finished|stopped"}) == 1'
"""PromQL with a value for each run that has finished or was stopped."""
_PHASE_OF_RANK = "topk by (run, rank) (1, max by (run, rank, phase) (training_phase_active{@node_run} == 1))"
"""PromQL for the current phase of each rank as the label `phase`."""


def runs_table() -> Panel:
    """Return the table of the runs with ranks on the node, the run with the worst verdict first, as on *Fleet*.

    While the exporter is down, the table has the last known runs.
    """
    runs = "group by (run) (last_over_time(training_process_up{@node_run}[$__range]))"
    state = (
        f"(max by (run, state) ({_EARLY_END_STATES}) or on (run)"
        f' label_replace({STATE_BY_RUN} and on (run) {RECORDED_STANDSTILL}, "state", "{NO_STEP}", "state", "running")'
        f" or on (run) {STATE_BY_RUN})"
    )
    states = (
        f'(label_replace({state} and on () {NO_EXPORTER_UP}, "state", "$1{_HERE_UNKNOWN}", "state", "(.+)")'
        f" or on (run) {state})"
    )

    # The state *no step* starts at the last step of the run.
    no_step_starts = (
        f"{LAST_PROGRESS_TIME_BY_RUN} and on (run) {RECORDED_STANDSTILL}"
        ' and on (run) max by (run) (training_run_state{@run, state="running"}) == 1'
    )
    state_starts = (
        f"({no_step_starts} or on (run) max by (run) (training_run_state_since_timestamp_seconds{{@run}}))"
    )

    def or_unknown(expression: str) -> str:
        """Return PromQL for the values of runs; `_UNKNOWN` for runs without a value while the exporter of the node is down."""
        return f"{expression} or on (run) ({runs} * 0 + {_UNKNOWN} and on () {NO_EXPORTER_UP})"

    owners = "topk by (run) (1, max by (run, user) (last_over_time(training_run_info{@run}[$__range])))"
    slowest_elsewhere = 'min by (run) (rank:training_straggler_score:ratio{@run, instance!="$node"})'
    # A product drops the runs without a match in its right operand. Each right operand therefore has a series for every run.
    rows = (
        f"{runs} * on (run) group_left (state) ({states} or on (run) {runs})"
        f" * on (run) group_left (user) ({owners} or on (run) {runs})"
        f" * on (run) group_left (cause) (0 * {largest_loss_share_by_run('@run')} + 1 or on (run) {STOPPED_RUN_CAUSES} + 1 or on (run) {runs})"
    )
    panel = table(
        "Runs on this node",
        Column(f"({VERDICT_BY_RUN}) and on (run) {runs}", "Verdict", width=118, mappings=VERDICT_MAPPINGS),
        Column("run", "Run", links=(RUN_LINK,)),
        Column("state", "State", width=215, mappings=_STATE_AND_UNKNOWN_MAPPINGS),
        Column(
            f"1000 * {state_starts} and on (run) {runs}",
            "In state since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
        ),
        Column("user", "Owner", width=75),
        Column(
            or_unknown(
                f"count by (run) ({UP_BY_RANK_ON_NODE} == 1)"
                " or on (run) 0 * count by (run) (training_process_up{@node_run})"
            ),
            "Alive",
            decimals=0,
            width=72,
            mappings=_UNKNOWN_TEXTS,
        ),
        Column(
            f"count by (run) ({_RANKS_IN_RANGE})",
            "of",
            decimals=0,
            width=45,
        ),
        Column(
            or_unknown(f"{progress_age_seconds('@node_run', 'run')} unless on (run) {RUNS_ENDED_NORMALLY}"),
            "Last step",
            unit="s",
            decimals=0,
            width=85,
            thresholds=warn_from(60, 300),
            mappings=_UNKNOWN_TEXTS,
        ),
        Column(
            or_unknown(
                f"min by (run) ({SPEED_RATIO_BY_RANK_ON_NODE}) and on (run) {RUNS_LIVE_ON_NODE}"
                f" unless on (run) {RECORDED_STANDSTILL} unless on () {NO_EXPORTER_UP}"
            ),
            "Slowest here",
            "percentunit",
            105,
            warn_below(SLOW_RATIO, VERY_SLOW_RATIO),
            _UNKNOWN_TEXTS,
            decimals=0,
        ),
        percent_column(
            f"{slowest_elsewhere} and on (run) {runs} unless on (run) {RECORDED_STANDSTILL}",
            "elsewhere",
            96,
            warn_below(SLOW_RATIO, VERY_SLOW_RATIO),
        ),
        Column(
            or_unknown(f"sum by (run) ({NODE_COST_PER_HOUR})"),
            "Cost/h here",
            decimals=2,
            width=95,
            mappings=_UNKNOWN_TEXTS,
        ),
        Column(
            or_unknown(f"sum by (run) ({NODE_LOST_PER_HOUR})"),
            "Lost/h here",
            decimals=2,
            width=95,
            mappings=_UNKNOWN_TEXTS,
        ),
        percent_column(f"{RUN_LOST_SHARE} and on (run) {runs}", "Lost", 80, LOST_THRESHOLDS),
        Column("cause", "Lost to", mappings=SHORT_CAUSE_TEXTS),
        row_query=rows,
        sort="Verdict",
        w=24,
        h=5,
    )
    panel.body["options"]["sortBy"].append({"displayName": "Lost", "desc": True})
    return panel


def ranks_table() -> Panel:
    """Return the table of the ranks on the node, with their phase, steps, waits for data, GPU and data workers.

    While the exporter is down, the table has the last known ranks.
    """
    silent_ranks = f"{TRAINER_FEED_AGE_SECONDS} > {SILENT_SECONDS}"

    # 0 for each rank with visible processes, so that a rank without data workers does not look unknown.
    no_data_worker = "0 * sum by (run, rank) (training_process_instances{@node_run})"

    def of_gpu(expression: str) -> str:
        """Return PromQL that turns values of the node's GPUs into values of the ranks that use the GPUs, by run and rank."""
        return f"max by (run, rank) (({_GPU_OF_RANK}) * on (gpu) group_left () max by (gpu) ({expression}))"

    def of_working_ranks(expression: str) -> str:
        """Return PromQL for the values of live ranks of runs that make steps. Rates over minutes do not describe a rank that stands still."""
        return (
            f"{expression} and on (run, rank) {UP_BY_RANK_ON_NODE} == 1"
            f" unless on (run) {RECORDED_STANDSTILL} unless on () {NO_EXPORTER_UP}"
        )

    return table(
        "Ranks on this node",
        Column("run", "Run", links=(RUN_LINK,)),
        Column("rank", "Rank", width=65),
        Column("gpu", "GPU", width=65),
        Column(
            of_gpu("gpu_up{@node}"),
            "GPU state",
            width=90,
            mappings=value_mappings({1: ("up", GOOD), 0: ("lost", BAD)}),
        ),
        Column(
            f"({silent_ranks}) * 0 + {_SILENT} and on (run, rank) {UP_BY_RANK_ON_NODE} == 1"
            # `- 1` is `_UNKNOWN`.
            f" or on (run, rank) {UP_BY_RANK_ON_NODE} or on (run, rank) {_RANKS_IN_RANGE} * 0 - 1",
            "Process",
            width=85,
            mappings=value_mappings(
                {
                    _ALIVE: ("alive", GOOD),
                    _ENDED: ("ended", NEUTRAL),
                    _SILENT: ("silent", BAD),
                    _UNKNOWN: ("unknown", WARNING),
                }
            ),
        ),
        Column("phase", "Phase", width=110),
        Column(
            'max by (run, rank) (training_steps_total{@node_run, mode="train"})',
            "Steps",
            decimals=0,
            width=70,
        ),
        Column(
            f"{progress_age_seconds('@node_run', 'run, rank')} and on (run, rank) {UP_BY_RANK_ON_NODE} == 1",
            "Last step",
            unit="s",
            decimals=0,
            width=95,
            thresholds=warn_from(60, 300),
        ),
        percent_column(
            of_working_ranks(SPEED_RATIO_BY_RANK_ON_NODE),
            "Speed",
            75,
            warn_below(SLOW_RATIO, VERY_SLOW_RATIO),
        ),
        percent_column(
            of_working_ranks(DATA_WAIT_RATIO_BY_RANK_ON_NODE), "Data wait", 96, warn_from(0.1, 0.3)
        ),
        percent_column(
            f"{of_gpu('clamp_max(rate(gpu_utilization_busy_seconds_total{@node}[2m]) and on (instance, gpu) gpu_up{@node} == 1, 1)')}"
            f" and on (run, rank) {UP_BY_RANK_ON_NODE} == 1",
            "GPU busy",
            90,
        ),
        Column(
            of_gpu('gpu_temperature_celsius{@node, sensor="gpu"}'),
            "GPU heat",
            unit="celsius",
            decimals=0,
            width=85,
        ),
        Column(
            'sum by (run, rank) (rate(training_process_cpu_seconds_total{@node_run, role="dataloader"}[5m]))'
            f" or on (run, rank) {no_data_worker}",
            "Worker CPUs",
            decimals=2,
            width=110,
        ),
        Column(
            f'sum by (run, rank) (training_process_resident_bytes{{@node_run, role="dataloader"}}) or on (run, rank) {no_data_worker}',
            "Worker RAM",
            unit="bytes",
            width=100,
        ),
        # One row for each rank. The first two lines are the ranks with a phase, with or without a GPU; the third line is the ranks without
        # a phase, with or without a GPU.
        row_query=(
            f"({_RANKS_IN_RANGE} * on (run, rank) group_left (gpu) {_GPU_OF_RANK} or on (run, rank) {_RANKS_IN_RANGE})"
            f" * on (run, rank) group_left (phase) {_PHASE_OF_RANK} or on (run, rank)"
            f" {_RANKS_IN_RANGE} * on (run, rank) group_left (gpu) {_GPU_OF_RANK} or on (run, rank) {_RANKS_IN_RANGE}"
        ),
        sort="Last step",
        w=24,
        h=10,
    )
