"""Table *What is wrong* of the dashboard *Node*: current problems of the node, and of the GPUs, ranks and runs on the node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH, titles
from dashboards.availability import NO_EXPORTER_UP, last_time
from dashboards.cost_and_loss import standstill_by_run
from dashboards.gpu_problems import (
    ERROR_TEXTS,
    IMPACT_TEXTS,
    NO_PROBLEM,
    NO_PROBLEM_VALUE,
    NO_RESPONSE_PREFIX,
    NODE_PROBLEMS,
    PRIORITIES_PER_IMPACT,
    PROBLEMS_TITLE,
    Impact,
    Problem,
    query_start_of_worst,
    recorded_gpu_problems,
    with_remedies_of_gpus,
)
from dashboards.node_cost import NODE_LOST_PER_HOUR, RUNS_LIVE_ON_NODE
from dashboards.palette import GOOD, NEUTRAL
from dashboards.panels import NO_VALUE, RUN_LINK, Panel, value_mappings
from dashboards.queries import (
    ENDING_RUNS,
    LAST_PROGRESS_TIME_BY_RUN,
    data_wait_remedies,
    feed_age_seconds,
)
from dashboards.rank_problems import (
    EXIT_REASON_PATTERN,
    MAX_DATA_WAIT_RATIO,
    MAX_EXIT_SPREAD_SECONDS,
    SILENT_SECONDS,
    SLOW_RATIO,
)
from dashboards.tables import Column, table
from exporter.status.xids import XID_MEANINGS

SPEED_RATIO_BY_RANK_ON_NODE = "max by (run, rank) (rank:training_straggler_score:ratio{@node_run})"
"""PromQL for the speed of each rank on the node relative to the fastest rank of its pipeline stage, on any node, by run and rank."""
RECORDED_STANDSTILL = standstill_by_run("@run")
"""PromQL with the value 1 for each run that stands still."""
_RUNS_WITHOUT_PROGRESS = f'({RECORDED_STANDSTILL} or on (run) max by (run) (training_run_state{{@run, state=~"failed|lost"}}) == 1)'
"""PromQL with a value for each run that stands still or has died."""
RESTART_SECONDS = 3600
"""Time after the exit of a rank for which the restart of the run has a row."""
MAX_SLOW_RANKS = 3
"""Maximum number of slow ranks of a run in the table; on a slow node, all ranks are slow."""
UP_BY_RANK_ON_NODE = "max by (run, rank) (training_process_up{@node_run})"
"""PromQL for each rank on the node: 1 if the process is alive, otherwise 0."""
_LAST_UPDATE = "max by (run, rank) (training_feed_last_update_timestamp_seconds{@node_run})"
"""PromQL for the time of the last update of the feed of each rank on the node, in Unix seconds."""
TRAINER_FEED_AGE_SECONDS = feed_age_seconds('@node_run, role=~"trainer|"', "run, rank", "min")
"""PromQL for the age of the feed of each rank on the node in seconds, without the feeds of the rank's other processes."""
LAST_PROGRESS_TIME_BY_RANK = "max by (run, rank) (training_last_progress_timestamp_seconds{@node_run})"
"""PromQL for the time of the last step or validation batch of each rank on the node, in Unix seconds."""
_LAST_PROGRESS_TIME_OF_RUN = (
    f"0 * {LAST_PROGRESS_TIME_BY_RANK} + on (run) group_left () {LAST_PROGRESS_TIME_BY_RUN}"
)
"""PromQL for the time of the last step or validation batch of any rank of the run, by the ranks on the node, as on *Run*."""
_LAST_EXIT = (
    "label_replace(max by (run, rank, reason) (training_rank_last_exit_timestamp_seconds{@node_run}),"
    f' "reason", "$1", "reason", "{EXIT_REASON_PATTERN}")'
)
"""PromQL for the time of the last failed exit of each rank on the node, with the reason without the introducing words."""
_RUNS_ENDING_OR_ENDED_NORMALLY = (
    'max by (run) (training_run_state{@run, state=~"ending|finished|stopped"}) == 1'
)
"""PromQL with a value for each run that is ending, has finished or was stopped."""
_LAST_EXIT_OR_UPDATE = (
    f'({_LAST_EXIT} or on (run, rank) label_replace({_LAST_UPDATE}, "reason", "reason unknown", "", ""))'
)
"""PromQL for the time of the last exit of each rank; without a recorded exit, the last update of the feed."""
_EXITS_OF_RUN = (
    "(max by (run, rank) (training_rank_last_exit_timestamp_seconds{@run})"
    " and on (run, rank) max by (run, rank) (training_process_up{@run}) == 0)"
)
"""PromQL for the time of the last exit of each rank that has no process, on any node."""
_FIRST_EXIT = f"min by (run) ({_EXITS_OF_RUN} >= on (run) group_left () (max by (run) ({_EXITS_OF_RUN}) - {MAX_EXIT_SPREAD_SECONDS}))"
"""PromQL for the first exit of the last attempt of each run, on any node."""
_OF_ENDED_RANKS = (
    f"and on (run, rank) {UP_BY_RANK_ON_NODE} == 0 unless on (run) {_RUNS_ENDING_OR_ENDED_NORMALLY}"
)
"""Condition that the process of a rank on the node has ended, unless the run is ending or has ended normally."""
_STANDSTILL_RANK_TEMPLATE = (
    "max by (run, rank, cause) (run:training_standstill_rank:info{{@node_run_any_job, cause{matcher}}})"
)
"""Template of PromQL for the rank on the node that causes the standstill of its run, with the cause as the label `cause`.

The cause is the line of the code, or one of the two below. `{matcher}` is an operator with a regular expression of the cause.
"""
_PHASE_CAUSE = "phase .+"
"""Regular expression of the cause before the stacks of the ranks are known: the phase of the only rank that does not wait."""
_LOST_GPU_CAUSE = "GPU lost"
"""Cause of a rank whose GPU is lost. The row of the GPU has this problem."""
_SLOW_RANKS = f"bottomk by (run) ({MAX_SLOW_RANKS}, {SPEED_RATIO_BY_RANK_ON_NODE} < {SLOW_RATIO}) unless on (run) {RECORDED_STANDSTILL}"
"""PromQL for the speed of the slowest slow ranks of each run on the node, at most `MAX_SLOW_RANKS`; without a value during a standstill."""
DATA_WAIT_RATIO_BY_RANK_ON_NODE = (
    'max by (run, rank) (rate(training_phase_seconds_total{@node_run, phase="data_loading"}[2m]))'
    " / on (run) group_left () max by (run) (run:training_observed:ratio2m{@run})"
)
"""PromQL for the share of the last two minutes in which each rank on the node waits for data; of a younger run, the share of its time."""
WAITS_FOR_DATA = f"max({DATA_WAIT_RATIO_BY_RANK_ON_NODE}) > {MAX_DATA_WAIT_RATIO}"
"""PromQL for the largest share of time in which a rank on the node waits for data, if that is a problem."""
_ALL_RANKS_WAIT_RATIO = f"max by (run) (run:training_waiting_for_data:min2m{{@run}}) > {MAX_DATA_WAIT_RATIO} unless on (run) {RECORDED_STANDSTILL}"
"""PromQL for the smallest share of the time in which a rank waits for data, for each run whose ranks all wait: no rank is then the cause."""
_RANKS_WAITING_FOR_DATA = (
    f"topk by (run) (1, {DATA_WAIT_RATIO_BY_RANK_ON_NODE} > {MAX_DATA_WAIT_RATIO})"
    f" unless on (run) {RECORDED_STANDSTILL} unless on (run) ({_ALL_RANKS_WAIT_RATIO})"
)
"""PromQL for the rank of each run on the node that waits longest for data, unless the run stands still or all ranks wait."""
_DATA_WAIT_START = "max by (run) (run:training_data_wait_start:timestamp_seconds{@run})"
"""PromQL for the start of the wait for data of each run, in Unix seconds."""
_DATA_WAIT_REMEDIES = data_wait_remedies("@node_run", "@node")
"""PromQL for the remedy of a wait for data of each run on this node, as the label `remedy`."""


def _with_percent(ratio: str) -> str:
    """Return PromQL for the series of a ratio by run and rank, with the ratio in percent as the label `percent`."""
    return f'count_values by (run, rank) ("percent", round(100 * ({ratio})))'


_EXITS_AT_FIRST_TIME = f"{_EXITS_OF_RUN} == on (run) group_left () {_FIRST_EXIT}"
"""PromQL for the exits of each run at the time of its first exit."""
_ENDED_FIRST = (
    f"({_LAST_EXIT} and on (run, rank) ({_EXITS_AT_FIRST_TIME}"
    " and on (run, rank) last_over_time(run:training_first_exit:timestamp_seconds{@run}[5m])"
    f" or on (run) {_EXITS_AT_FIRST_TIME}))"
)
"""PromQL for the exit of the rank on the node that ended first of its run.

Of several exits at the same time, the rule selects one, as on *Fleet*. Before its evaluation, all of them are first.
"""
_EXIT_BEFORE_RESTART = (
    "(label_replace(max by (run, rank, reason) (run:training_exit_before_restart:timestamp_seconds{@node_run_any_job}),"
    f' "reason", "$1", "reason", "{EXIT_REASON_PATTERN}") > time() - {RESTART_SECONDS})'
)
"""PromQL for the exit of the rank on the node that ended first before the last restart of its run, for `RESTART_SECONDS`."""
_RANK_PROBLEMS = (
    Problem(
        "process ended first",
        condition=f"{_ENDED_FIRST} {_OF_ENDED_RANKS}",
        # 0.1 s earlier than other exits at the same time, so that the table, which is sorted by start, shows it above them.
        start=f"{_LAST_EXIT_OR_UPDATE} - 0.1",
        remedy="read the log of this rank first",
        impact=Impact.NO_PROGRESS,
        label="reason",
        text="process ended first: $1",
    ),
    Problem(
        "process ended",
        condition=f"{_LAST_EXIT_OR_UPDATE} {_OF_ENDED_RANKS} unless on (run, rank) ({_ENDED_FIRST})",
        start=_LAST_EXIT_OR_UPDATE,
        remedy="read its log; Run has all exits",
        impact=Impact.NO_PROGRESS,
        label="reason",
        text="process ended: $1",
    ),
    Problem(
        "process ended, outcome not known yet",
        condition=f"{UP_BY_RANK_ON_NODE} == 0 and on (run) {ENDING_RUNS}",
        start=_LAST_UPDATE,
        remedy="wait a minute; then Run has the outcome",
        impact=Impact.UNKNOWN,
        label="run",
    ),
    Problem(
        "rank that causes a hang",
        condition=_STANDSTILL_RANK_TEMPLATE.format(matcher=f'!~"{_PHASE_CAUSE}|{_LOST_GPU_CAUSE}"'),
        start=_LAST_PROGRESS_TIME_OF_RUN,
        remedy="read this line of the job; restart the run",
        impact=Impact.NO_PROGRESS,
        label="cause",
        text="this node holds up the run: $1",
    ),
    Problem(
        "rank for which the others wait",
        condition=_STANDSTILL_RANK_TEMPLATE.format(matcher=f'=~"{_PHASE_CAUSE}"'),
        start=_LAST_PROGRESS_TIME_OF_RUN,
        remedy="run training-exporter stacks on the node",
        impact=Impact.NO_PROGRESS,
        label="cause",
        text="this node holds up the run: $1",
    ),
    Problem(
        "process lives, but does not report",
        condition=f"{TRAINER_FEED_AGE_SECONDS} > {SILENT_SECONDS} and on (run, rank) {UP_BY_RANK_ON_NODE} == 1",
        start=_LAST_UPDATE,
        remedy="run training-exporter stacks on the node",
        impact=Impact.UNKNOWN,
        label="run",
    ),
    Problem(
        "slow rank",
        condition=_with_percent(_SLOW_RANKS),
        start="max by (run, rank) (rank:training_slow_start:timestamp_seconds{@run})",
        remedy="check clocks and heat; else replace the node",
        impact=Impact.LOSES_TIME,
        label="percent",
        text="computes at $1 % of the fastest rank",
    ),
    Problem(
        "rank that waits for data",
        condition=_with_percent(_RANKS_WAITING_FOR_DATA),
        start=f"0 * {DATA_WAIT_RATIO_BY_RANK_ON_NODE} + on (run) group_left () {_DATA_WAIT_START}",
        remedy="",
        impact=Impact.LOSES_TIME,
        label="percent",
        text="waits longest for data: $1 %, 2 min",
        remedies=_DATA_WAIT_REMEDIES,
    ),
    Problem(
        "restarted",
        condition=_EXIT_BEFORE_RESTART,
        start=_EXIT_BEFORE_RESTART,
        remedy="read the log of this rank",
        impact=Impact.PAST,
        label="reason",
        text="the run restarted after: $1",
    ),
)
"""Problems of ranks on the node. The ranks of a run wait for each other, so that a slow rank slows the run on all nodes."""


def _alert_of_run(names: str, remedy: str, impact: Impact, recorded_start: str = "") -> Problem:
    """Return the problem of a firing alert about a run with a live process on the node; the alert itself has no node.

    The text of the problem is the name of the alert, which the table replaces by the title.

    Args:
        names: Regular expression of the names of the alerts.
        remedy: Remedy of the problem.
        impact: Impact of the problem.
        recorded_start: PromQL for the start of the problem in Unix seconds, by run. If it is empty or has no value, the start is the time at
            which the alert became pending.
    """
    selector = f'alertname=~"{names}"'
    firing = f'max by (run, alertname) (ALERTS{{@run, alertstate="firing", {selector}}})'
    pending_since = f"max by (run, alertname) (ALERTS_FOR_STATE{{@run, {selector}}})"
    start = (
        f"{pending_since} * 0 + on (run) group_left () max by (run) ({recorded_start}) or {pending_since}"
        if recorded_start
        else pending_since
    )
    condition = f"{firing} and on (run) {RUNS_LIVE_ON_NODE}"
    return Problem(
        "alert of the run",
        condition=condition,
        start=start,
        remedy=remedy,
        impact=impact,
        label="alertname",
        text="$1",
    )


_CAUSE_ON_NODE = (
    "(run:training_standstill_rank:info{@node_run_any_job}"
    f' or on (run) max by (run) (gpu:gpu_problem:urgency{{@node, problem=~"{NO_RESPONSE_PREFIX}.+"}}))'
)
"""PromQL with a value for each run whose standstill has a cause on this node: a rank or a lost GPU. The cause has its own row."""
_CAUSE_ELSEWHERE = (
    'max by (run, place) (label_replace(label_join(run:training_standstill_rank:info{@run}, "place", " on ", "rank", "instance"),'
    ' "place", "rank $1", "place", "(.+)"))'
)
"""PromQL for the rank that causes the standstill of each run, on any node, as the label `place`: `rank 3 on node-2`."""
_RUN_PROBLEMS = (
    Problem(
        "standstill with a known cause",
        condition=f"{_CAUSE_ELSEWHERE} and on (run) {RECORDED_STANDSTILL} and on (run) {RUNS_LIVE_ON_NODE} unless on (run) {_CAUSE_ON_NODE}",
        start=LAST_PROGRESS_TIME_BY_RUN,
        remedy="What is wrong on Run has the cause",
        impact=Impact.NO_PROGRESS,
        label="place",
        text="no rank finishes a step; the cause is $1",
    ),
    Problem(
        "no rank finishes a step; the cause is not known yet",
        condition=f"{RECORDED_STANDSTILL} and on (run) {RUNS_LIVE_ON_NODE} unless on (run) {_CAUSE_ON_NODE} unless on (run) {_CAUSE_ELSEWHERE}",
        start=LAST_PROGRESS_TIME_BY_RUN,
        remedy="run training-exporter stacks on the node",
        impact=Impact.NO_PROGRESS,
        label="run",
    ),
    Problem(
        "all ranks wait for data",
        condition=f'count_values by (run) ("percent", round(100 * ({_ALL_RANKS_WAIT_RATIO}))) and on (run) {RUNS_LIVE_ON_NODE}',
        start=_DATA_WAIT_START,
        remedy="",
        impact=Impact.LOSES_TIME,
        label="percent",
        text="all ranks wait for data: at least $1 %, 2 min",
        remedies=_DATA_WAIT_REMEDIES,
    ),
    _alert_of_run(
        "TrainingLossNonFinite",
        remedy="Run has the step and the rank",
        impact=Impact.ENDANGERS_WORK,
        recorded_start="run:training_nonfinite_start:timestamp_seconds{@run}",
    ),
    _alert_of_run(
        "TrainingGradNonFinite", remedy="Run has the step and the rank", impact=Impact.ENDANGERS_WORK
    ),
    _alert_of_run(
        "CheckpointHangs|TrainingCheckpoint(Failing|Overdue)",
        remedy="Run has the error and the work at risk",
        impact=Impact.ENDANGERS_WORK,
    ),
    _alert_of_run(
        "TrainingCheckpoint(DiskFillingUp|DiskFillingUpFast|WontFit)",
        remedy="Run has the saves and the free space",
        impact=Impact.POSSIBLE,
    ),
)
"""Problems of runs with a live process on the node that no rank or GPU of the node causes."""
_COLLECTOR_PROBLEMS = (
    Problem(
        "collector fails",
        condition="min by (instance, collector) (max_over_time(exporter_collector_success{@node}[35s])) == 0",
        start=last_time("min by (instance, collector) (exporter_collector_success{@node}) == bool 1"),
        remedy="read the log of the exporter",
        impact=Impact.UNKNOWN,
        label="collector",
        text="collector $1 fails",
    ),
)
_NO_DRIVER, *_OTHER_NODE_PROBLEMS = NODE_PROBLEMS
_OF_NODE_WITHOUT_PROGRESS = f"on () ({_RUNS_WITHOUT_PROGRESS} and on (run) {RUNS_LIVE_ON_NODE})"
"""Right operand of `and` and `unless`: a run with a live process on the node makes no progress."""
_ADAPTED_NODE_PROBLEMS = (
    dataclasses.replace(_NO_DRIVER, condition=f"{_NO_DRIVER.condition} and {_OF_NODE_WITHOUT_PROGRESS}"),
    dataclasses.replace(
        _NO_DRIVER,
        condition=f"{_NO_DRIVER.condition} unless {_OF_NODE_WITHOUT_PROGRESS}",
        impact=Impact.ENDANGERS_WORK,
    ),
    *_OTHER_NODE_PROBLEMS,
    *_COLLECTOR_PROBLEMS,
)
"""Problems of the node. A driver that does not respond stops a run only if the run makes no step."""
_PRIORITY_OF_GPUS = 20
"""Priority added to problems of GPUs, more than the number of problems of ranks: the hot GPU of a slow rank is the cause."""
_PROBLEM_TEXTS = value_mappings(
    {NO_PROBLEM: (NO_PROBLEM, GOOD)}
    | {f"{NO_RESPONSE_PREFIX}{error}": (text, NEUTRAL) for error, text in ERROR_TEXTS.items()}
    | {f"Xid {xid}": (f"Xid {xid}: {meaning}", NEUTRAL) for xid, meaning in XID_MEANINGS.items()}
    | {alert: (title, NEUTRAL) for alert, title in titles().items()}
)
"""Value mappings of the column *Problem*. The column *Impact* has the color."""
_DASHES = value_mappings({0: (NO_VALUE, NEUTRAL), NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL)})
"""Value mappings of the column *Others*: a dash for no other problem and for the row *no problem*."""


_LAST_RANK_BY_GPU = (
    "topk by (instance, gpu) (1, 0 * max by (instance, gpu, run, rank) (rank:training_gpu:info{@node_run_any_job}"
    " or on (instance, gpu) last_over_time(rank:training_gpu:info{@node_run_any_job}[$__range])))"
)
"""PromQL with the value 0 for each GPU that a rank on the node used in the time range, with the last run and rank."""
_GPU_BY_RANK = (
    f"(topk by (run, rank) (1, {_LAST_RANK_BY_GPU})"
    " or on (run, rank) 0 * max by (run, rank) (last_over_time(training_process_up{@node_run}[$__range])))"
)
"""PromQL with the value 0 for each rank on the node in the time range, with one GPU of the rank if a GPU is known."""
_GPU_PROBLEMS = recorded_gpu_problems("@node")
"""PromQL for the recorded problems of the GPUs of the node."""
_GPU_ROWS = f"({with_remedies_of_gpus(_GPU_PROBLEMS, '@node')} + {_PRIORITY_OF_GPUS})"
"""PromQL for impact and priority of the problems of GPUs as one number, above those of ranks with the same impact."""
_GPU_STARTS = (
    f'(0 * count_values by (instance, gpu, run, rank, problem) ("priority", {_GPU_PROBLEMS} % {PRIORITIES_PER_IMPACT} + {_PRIORITY_OF_GPUS})'
    " + on (instance, gpu, problem) group_left () max by (instance, gpu, problem) (gpu:gpu_problem_start:timestamp_seconds{@node}))"
)
"""PromQL for the start of each problem of a GPU in Unix seconds, with the priority of its row as the label `priority`."""


def _with_gpus(ranks: str) -> str:
    """Return PromQL that adds one GPU to series of ranks; a rank without a known GPU is unchanged."""
    return f"({ranks}) + on (run, rank) group_left (gpu) {_GPU_BY_RANK}"


def _rows(problems: Sequence[Problem], _by: str) -> str:
    """Return PromQL for the impact and priority of all current problems as one number. The first has the highest priority.

    The unused parameter gives `_rows` and `_starts` the same signature, for `_union_of_problems`.
    """
    return " or ".join(problem.row(len(problems) - index) for index, problem in enumerate(problems))


def _starts(problems: Sequence[Problem], by: str) -> str:
    """Return PromQL for the starts of all current problems in Unix seconds, by labels and priority."""
    return " or ".join(problem.row_start(len(problems) - index, by) for index, problem in enumerate(problems))


def _union_of_problems(gpus: str, build_rows: Callable[[Sequence[Problem], str], str]) -> str:
    """Return PromQL for the union of the rows of all problems, with `gpu`, `run` and `rank` where known.

    While no exporter is up, the rows of GPUs and ranks are omitted, because recorded series keep a problem for minutes. The node itself then
    has the row *exporter down*.

    Args:
        gpus: PromQL for the rows of the problems of GPUs.
        build_rows: `_rows` or `_starts`.
    """
    gpus_and_ranks = f"{gpus} or {_with_gpus(build_rows(_RANK_PROBLEMS, 'run, rank'))}"
    return " or ".join(
        (
            f"(({gpus_and_ranks}) unless on () {NO_EXPORTER_UP})",
            build_rows(_RUN_PROBLEMS, "run"),
            build_rows(_ADAPTED_NODE_PROBLEMS, "instance"),
        )
    )


_PROBLEM_ROWS = f"max by (gpu, run, rank, problem, remedy) ({_union_of_problems(_GPU_ROWS, _rows)})"
"""PromQL for all current problems, with impact and priority as one number."""
_PROBLEM_COUNT = f"count by (gpu, run, rank) ({_PROBLEM_ROWS})"
"""PromQL for the number of problems of each row of the table: of a GPU, of a rank, of a run, or of the node."""
_NO_PROBLEM_ROW = (
    f'label_replace(0 * max(up{{@target}}) + {NO_PROBLEM_VALUE}, "problem", "{NO_PROBLEM}", "", "")'
)
"""PromQL for the row *no problem*; without a value if Prometheus has no target of this name: the table is then empty."""
_ROW_IF_NO_PROBLEM = f"{_NO_PROBLEM_ROW} unless on () ({_PROBLEM_COUNT})"
"""PromQL for the row *no problem*, if no problem has a row."""


def problems_of_node() -> Panel:
    """Return the table of the problems on a single node: the worst problem of each GPU, rank and run, and of the node itself."""
    worst = f"topk by (gpu, run, rank) (1, {_PROBLEM_ROWS})"
    start = query_start_of_worst(_union_of_problems(_GPU_STARTS, _starts), worst, "gpu, run, rank")
    columns = (
        Column(
            f"floor({worst} / {PRIORITIES_PER_IMPACT}) or on () {_NO_PROBLEM_ROW}",
            "Impact",
            decimals=0,
            width=145,
            mappings=IMPACT_TEXTS,
        ),
        Column("problem", "Problem", mappings=_PROBLEM_TEXTS),
        Column("rank", "Rank", width=70),
        Column("gpu", "GPU", width=65),
        Column("run", "Run", width=120, links=(RUN_LINK,)),
        Column(
            f"1000 * {start} or {_ROW_IF_NO_PROBLEM}",
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=value_mappings(
                {0: ("before this range", NEUTRAL), NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL)}
            ),
        ),
        Column(
            f"sum by (run) ({NODE_LOST_PER_HOUR}) and on (run) {_PROBLEM_COUNT} or {_ROW_IF_NO_PROBLEM}",
            "Lost/h here",
            decimals=2,
            width=110,
            mappings=value_mappings({NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL)}),
        ),
        Column(
            f"{_PROBLEM_COUNT} - 1 or on () {_NO_PROBLEM_ROW}",
            "Others",
            decimals=0,
            width=75,
            mappings=_DASHES,
        ),
        Column("remedy", "Remedy"),
    )
    panel = table(
        PROBLEMS_TITLE,
        *columns,
        sort="Impact",
        w=24,
        h=5,
        max_data_points=120,
    )
    panel.body["options"]["sortBy"].append({"displayName": "Since", "desc": False})
    return panel
