"""Problems of a run: PromQL for each problem, and the table *What is wrong* of *Run* and *Ranks*.

A row is a series with the labels `problem`, `rank`, `instance` and `gpu`, as far as these are known. The value is the start of the problem
in Unix seconds, or 0 if the start is unknown or before the time range. `dashboards.queries` explains the recurring forms of PromQL.

- Ranks that ended first, ranks that ended later, silent ranks and slow ranks have at most `MAX_ROWS` rows each.
- Waiting for data has one row: the rank that waits longest, or all ranks.
- Lost and throttled GPUs have a row for each GPU, and Xids a row for each GPU and Xid.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dashboards import verdicts
from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH
from dashboards.availability import last_time
from dashboards.losses_now import USUAL_COST_PER_HOUR_BY_RUN
from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import NO_VALUE, Json, Panel, dashboard_link, value_mappings
from dashboards.queries import (
    ODD_GROUP_SIZE,
    SPEED_RATIO_BY_RANK_AND_NODE,
    STANDSTILL_BY_STEP_AGE,
    WALL_SECONDS,
    data_wait_remedies,
)
from dashboards.rank_problems import (
    ALL_RANKS_ENDED_ROW,
    CRITICAL_XIDS_OF_GPUS,
    EARLY_END_ROW,
    EXIT_REASON_PATTERN,
    FIRST_ENDED_ROWS,
    FIRST_EXIT,
    HANGING_PLACE_ROWS,
    LAST_GPUS_BY_RANK,
    LAST_SAMPLE_TIME_BY_NODE,
    LATER_ENDED_ROWS,
    LOST_GPU_ROWS,
    LOST_GPU_STARTS,
    MAX_DATA_WAIT_RATIO,
    MAX_ROWS,
    ODD_PHASE_ROW,
    SILENT_RANKS,
    SLOW_RATIO,
    STANDSTILL_START,
    THROTTLED_GPU_ROWS,
    UNKNOWN_RANK_COUNT_BY_NODE,
    UP_BY_RANK_AND_NODE,
    XIDS_OF_GPUS,
    with_number,
    with_suffix,
    with_suffix_label,
    with_text,
    xid_rows,
)
from dashboards.tables import NO_SAMPLE_OF_RUN, Column, table
from dashboards.verdicts import Verdict
from exporter.status.xids import XID_MEANINGS


class RunImpact(enum.Enum):
    """Impact of a problem on the run, the column *Effect*: the tables of *Run* and *Ranks* show the largest number first.

    Members that `dashboards.gpu_problems.Impact` has too have the same order there.
    """

    CAUSES_STOP = 6  # the rank or GPU for which the other ranks wait
    NO_PROGRESS = 5  # no step finishes, or ranks have ended
    ENDING = 4.5  # all ranks have ended, and the outcome is not decided
    ENDANGERS_WORK = 4  # work or the model may be lost, although steps finish
    UNKNOWN = 3  # samples of ranks are missing
    LOSES_MUCH_TIME = 2.5  # as `LOSES_TIME`, and the run loses at least `MIN_LARGE_LOSS_SHARE` of its time
    LOSES_TIME = 2  # steps take longer than necessary
    HAD_NAN_LOSS = 1.5  # the loss was NaN or infinite, and is finite again: the critical alert still fires
    PAST = 1  # over, and no alert about the problem fires


RUN_IMPACT_TEXTS = value_mappings(
    {
        str(RunImpact.CAUSES_STOP.value): (verdicts.NO_PROGRESS, BAD),
        str(RunImpact.NO_PROGRESS.value): (verdicts.NO_PROGRESS, BAD),
        str(RunImpact.ENDING.value): (verdicts.ENDING, WARNING),
        str(RunImpact.ENDANGERS_WORK.value): (verdicts.ENDANGERS_WORK, BAD),
        str(RunImpact.UNKNOWN.value): (verdicts.UNKNOWN, WARNING),
        str(RunImpact.HAD_NAN_LOSS.value): (verdicts.HAD_NAN_LOSS, WARNING),
        str(RunImpact.LOSES_MUCH_TIME.value): (verdicts.LOSES_TIME, BAD),
        str(RunImpact.LOSES_TIME.value): (verdicts.LOSES_TIME, WARNING),
        str(RunImpact.PAST.value): ("past", NEUTRAL),
    }
)
RUN_PROBLEM_TEXTS: list[Json] = [
    *value_mappings({verdicts.NO_PROBLEM: (verdicts.NO_PROBLEM, GOOD)}),
    *(
        {
            "type": "regex",
            "options": {"pattern": f"/Xid {xid}\\b/", "result": {"text": f"Xid {xid}: {meaning}"}},
        }
        for xid, meaning in XID_MEANINGS.items()
    ),
]
"""Value mappings of the problems. The regular expression of an Xid replaces only the Xid within a text."""
GPUS_OF_ROW_LINK = dashboard_link("training-gpus", "GPUs of this node", node="${__data.fields.Node}")
NODE_OF_ROW_LINK = dashboard_link("training-node", "Node", node="${__data.fields.Node}")
"""Data links of a table with the column *Node*, to the node of the row."""


@dataclass(frozen=True, slots=True)
class RunProblem:
    """Problem of a run."""

    rows: str  # PromQL for the start in Unix seconds, with the text of the problem as the label `problem`
    impact: RunImpact
    remedy: str = ""  # empty if the rows or another row have the remedy, or if the problem is over

    @property
    def labelled_rows(self) -> str:
        """PromQL for the start, with the text of the problem, the impact and the remedy as labels."""
        with_impact = f'label_replace({self.rows}, "impact", "{self.impact.value}", "", "")'
        return (
            f'label_replace({with_impact}, "remedy", "{self.remedy}", "", "")' if self.remedy else with_impact
        )


_SLOWEST_RANKS = f"bottomk({MAX_ROWS}, {SPEED_RATIO_BY_RANK_AND_NODE} < {SLOW_RATIO})"
"""PromQL for the relative speed of the `MAX_ROWS` slowest slow ranks, by node and rank."""
_LISTED_SLOW_RANKS = f"({_SLOWEST_RANKS} unless on () {STANDSTILL_BY_STEP_AGE})"
"""PromQL for the relative speed of the slow ranks that have a row in the table, by node and rank."""
_SLOW_STARTS = (
    "(0 * max by (instance, rank) (run:training_slow_rank:ratio{@run})"
    " + on () group_left () max(run:training_slow_start:timestamp_seconds{@run})"
    " or on (instance, rank) max by (instance, rank) (rank:training_slow_start:timestamp_seconds{@run}))"
)
"""PromQL for the start of the slowness of each slow rank, in Unix seconds.

The start of the slowest rank is the recorded start of its run, which is that of the throttling if a throttled GPU is the cause.
"""
_SLOW_ROWS = with_number(
    f"round(100 * {_SLOWEST_RANKS})",
    _SLOW_STARTS,
    "computes at $1 % of the fastest rank",
    "instance, rank",
)
"""PromQL for the start of the slowness of the `MAX_ROWS` slowest ranks, by node and rank, with the speed in the label `problem`."""
_SM_CLOCK = f'max by (instance, rank) ({LAST_GPUS_BY_RANK} * on (uuid) group_left () max by (uuid) (gpu_clock_hertz{{clock="sm"}}))'
"""PromQL for the SM clock of each rank in hertz, by node and rank: the highest clock of its GPUs."""
_SM_CLOCK_TEXTS = (
    'label_replace(count_values by (instance, rank) ("clock",'
    f" round(100 * {_SM_CLOCK} / on () group_left () (max({_SM_CLOCK}) > 0) < {100 * SLOW_RATIO})),"
    ' "clock", ", SM clock at $1 %", "clock", "(.+)")'
)
"""PromQL for the ranks whose SM clock is below `SLOW_RATIO` of the highest clock in the run, with the ratio as the label `clock`."""
_SLOW_ROWS_WITH_CLOCK = (
    f'(label_join({_SLOW_ROWS} + on (instance, rank) group_left (clock) 0 * {_SM_CLOCK_TEXTS}, "problem", "", "problem", "clock")'
    f" or on (instance, rank) {_SLOW_ROWS})"
)
"""PromQL for `_SLOW_ROWS` with the text of the SM clock at the end of the label `problem`, if the clock is low."""
_SLOW_ROWS_WITH_GPU = (
    f"({_SLOW_ROWS_WITH_CLOCK} + on (instance, rank) group_left (gpu) 0 * topk by (instance, rank) (1, {LAST_GPUS_BY_RANK})"
    f" or on (instance, rank) {_SLOW_ROWS_WITH_CLOCK}) unless on () {STANDSTILL_BY_STEP_AGE}"
)
"""PromQL for the rows of slow ranks, with a GPU of the rank if one is known; without a value during a standstill."""
_THROTTLING_BY_RANK = f'label_replace(topk by (instance, rank) (1, {THROTTLED_GPU_ROWS}), "throttling", "; $1", "problem", "GPU [^ ]+ (.+)")'
"""PromQL for one throttled GPU of each rank, with the end of its text as the label `throttling`: `; throttled by heat, 88 °C`."""
_SLOW_ROWS_WITH_THROTTLING = (
    f"label_join(({_SLOW_ROWS_WITH_GPU}) + on (instance, rank) group_left (throttling, remedy) 0 * {_THROTTLING_BY_RANK},"
    ' "problem", "", "problem", "throttling")'
)
"""PromQL for the rows of slow ranks with a throttled GPU, which is the cause of the slowness.

The label `problem` ends with the text of the throttling, and the label `remedy` has its remedy.
"""
DATA_WAIT_RATIO_BY_RANK = "max by (instance, rank) (rank:training_data_wait:ratio2m{@run})"
"""PromQL for the share of the last two minutes in which each rank waited for data; of a younger run, the share of its time."""
_DATA_WAIT_START = "max(run:training_data_wait_start:timestamp_seconds{@run})"
"""PromQL for the start of the wait for data in the run, in Unix seconds, without labels."""
ALL_WAIT_FOR_DATA = (
    f"(min({DATA_WAIT_RATIO_BY_RANK}) > {MAX_DATA_WAIT_RATIO} and on () count({DATA_WAIT_RATIO_BY_RANK}) > 1)"
)
"""PromQL for the smallest share of the time in which a rank waits for data, if all of several ranks wait: no rank is then the cause."""
_LONGEST_DATA_WAIT = f'label_join(topk(1, {DATA_WAIT_RATIO_BY_RANK}), "whose", " on ", "rank", "instance")'
DATA_WAIT_WITH_RANK = (
    f'(label_replace({ALL_WAIT_FOR_DATA}, "whose", "each rank, at least", "", "")'
    f' or on () label_replace({_LONGEST_DATA_WAIT}, "whose", "rank $1", "whose", "(.+)"))'
)
"""PromQL for the longest wait for data of a rank, as a share of the last two minutes. The label `whose` is `rank 3 on node-1`.

If all of several ranks wait, the result is the shortest wait, and the label `whose` is `each rank, at least`: no rank is the cause.
"""
_ALL_RANKS_WAIT_ROW = with_number(
    f"round(100 * {ALL_WAIT_FOR_DATA})",
    _DATA_WAIT_START,
    "all ranks wait for data: at least $1 %, 2 min",
)
"""PromQL for the row of a run whose ranks all wait for data."""
_WAITING_RANK_ROW = with_number(
    f"round(100 * topk(1, {DATA_WAIT_RATIO_BY_RANK} > {MAX_DATA_WAIT_RATIO})) unless on () {ALL_WAIT_FOR_DATA}",
    f"0 * {UP_BY_RANK_AND_NODE} + on () group_left () {_DATA_WAIT_START}",
    "waits longest for data: $1 %, 2 min",
    "instance, rank",
)
"""PromQL for the row of the rank that waits longest for data, unless all ranks wait. The start is that of the run."""


def events_in_range(counter: str, by: str) -> str:
    """Return PromQL for the number of events in the time range, without labels, for a counter that may start with its first event.

    Args:
        counter: Counter with selectors. The result is absent if the counter has no current sample.
        by: Label by which the run has several counters, such as `reason`. Series that differ only in the exporter count once.
    """
    before = f"last_over_time({counter}[6h] offset $__range)"
    return f"sum(max by ({by}) ({counter})) - (sum(max by ({by}) ({before})) or vector(0))"


_NONFINITE_COUNTER = 'training_nonfinite_total{@run, kind="loss"}'
"""Counter of the losses that were NaN or infinite."""
NONFINITE_NOW = f"sum(increase({_NONFINITE_COUNTER}[2m])) > 0"
"""PromQL with a value if a loss was NaN or infinite within the last two minutes, as for the verdict of the run."""
_NONFINITE_COUNT_BEFORE_RANGE = (
    f"(sum(max by (value) (last_over_time({_NONFINITE_COUNTER}[6h] @ end() offset $__range))) or vector(0))"
)
"""PromQL for the value of the counter at the start of the time range, at each point of a subquery; 0 without a counter."""
_LAST_FINITE_TIME = last_time(
    f"(sum({_NONFINITE_COUNTER}) or 0 * {WALL_SECONDS}) <= bool scalar({_NONFINITE_COUNT_BEFORE_RANGE})"
)
"""PromQL for the last point of the time range at which no loss of the range had been NaN or infinite; 0 without such a point."""
_NONFINITE_COUNT = f"round({events_in_range(_NONFINITE_COUNTER, 'value')}) > 0"
"""PromQL for the number of NaN and infinite losses in the time range; absent if there is none."""
# The next two subqueries use that the counter has no sample or is 0 before the first such loss: `unless` keeps only these times.
_LAST_FINITE_STEP = f"max_over_time((max(training_step{{@run}}) unless on () max({_NONFINITE_COUNTER}) > 0)[$__range:$__interval])"
"""PromQL for the last step before the first NaN or infinite loss of the run."""
_LAST_FINITE_CHECKPOINT = f"max_over_time((max(training_checkpoint_last_step{{@run}}) unless on () max({_NONFINITE_COUNTER}) > 0)[$__range:$__interval])"
"""PromQL for the step of the last checkpoint before the first NaN or infinite loss of the run."""
_NONFINITE_START = (
    "(max(last_over_time(run:training_nonfinite_start:timestamp_seconds{@run}[$__range]))"
    f" or on () {_LAST_FINITE_TIME})"
)
"""PromQL for the recorded start of the NaN and infinite losses, as on the other dashboards; before its evaluation, `_LAST_FINITE_TIME`."""
_NONFINITE_ROW = with_number(_NONFINITE_COUNT, _NONFINITE_START, "loss was NaN or infinite in $1 steps")
"""PromQL for the row of NaN and infinite losses in the time range, with their number."""


def _with_last_finite_step(rows: str) -> str:
    """Return PromQL that appends the last step and the last checkpoint before the first NaN or infinite loss to the text of rows."""
    with_step = with_suffix(rows, _LAST_FINITE_STEP, ", the first after step $1")
    return with_suffix(with_step, _LAST_FINITE_CHECKPOINT, ", safe checkpoint: step $1")


_NONFINITE_ROW_WITH_STEP = _with_last_finite_step(_NONFINITE_ROW)
"""PromQL for `_NONFINITE_ROW` with the last step and checkpoint before the first of the losses."""
_MINUTES_SINCE_NONFINITE = "floor((time() - max(run:training_nonfinite_last:timestamp_seconds{@run})) / 60)"
_PAST_NONFINITE_ROW = (
    f"({_with_last_finite_step(with_suffix(_NONFINITE_ROW, _MINUTES_SINCE_NONFINITE, ', none for $1 min'))}"
    f" unless on () {NONFINITE_NOW})"
)
"""PromQL for `_NONFINITE_ROW_WITH_STEP` if the last two minutes have no such loss, with the minutes since the last loss."""
NONFINITE_ALERT = 'max(ALERTS{@run, alertname="TrainingLossNonFinite", alertstate="firing"})'
"""PromQL with a value while the alert fires: the weights may be invalid, although the loss is finite again."""
_FAILED_COUNTER = 'training_checkpoints_total{@run, result="failed"}'
"""Counter of the failed saves."""
_LAST_FAILED_SAVE_TIME = last_time(
    f"(sum({_FAILED_COUNTER}) or 0 * {WALL_SECONDS}) < bool scalar(sum({_FAILED_COUNTER} @ end()))"
)
"""PromQL for the time of the last failed save in Unix seconds: the last point of the range at which the counter was below its last value."""
_LAST_SAVE_TIME = f"(max(training_checkpoint_last_success_timestamp_seconds{{@run}}) or 0 * {WALL_SECONDS})"
"""PromQL for the time of the last successful save, in Unix seconds; 0 without such a save."""
LAST_SAVE_FAILED = f"{_LAST_FAILED_SAVE_TIME} > {_LAST_SAVE_TIME}"
"""PromQL with a value while no save has succeeded after the last failed save."""
_FAILED_SAVE_COUNT = f"round({events_in_range(_FAILED_COUNTER, 'kind')}) > 0"
"""PromQL for the number of failed saves in the time range; absent if there is none."""
_SAVES_ALERT = 'max(ALERTS{@run, alertname="TrainingCheckpointFailing", alertstate="firing"})'
"""PromQL with a value while the alert about failing saves fires."""
_LAST_SAVE_TIME_AT_END = (
    "scalar(max(training_checkpoint_last_success_timestamp_seconds{@run} @ end()) or on () vector(0))"
)
"""PromQL for the time of the last successful save at the end of the time range, at each point of a subquery; 0 without such a save."""
_FIRST_FAILED_SAVE_TIME = (
    f"clamp_min(min_over_time((time() + 0 * (sum({_FAILED_COUNTER} offset -$__interval) > (sum({_FAILED_COUNTER}) or 0 * {WALL_SECONDS}))"
    f" > {_LAST_SAVE_TIME_AT_END} - $__interval_ms / 1000)[$__range:$__interval]), {_LAST_SAVE_TIME_AT_END})"
)
"""PromQL for the start of the first interval of the subquery with a failed save after the last successful save.

If the successful save is in the same interval, the value is the time of that save.
"""
_FAILING_SAVES_START = (
    f"(max(run:training_saves_failing_start:timestamp_seconds{{@run}}) > on () {_LAST_SAVE_TIME}"
    f" or on () {_FIRST_FAILED_SAVE_TIME})"
)
"""PromQL for the recorded start of failing saves if it was after the last successful save, else for the first failure in the time range."""
_FAILING_SAVES_ROW = with_number(_FAILED_SAVE_COUNT, _FAILING_SAVES_START, "$1 saves failed")
"""PromQL for the row of failing saves in the time range, with their number."""
_FAILING_SAVES_ROW_WITH_STEP = with_suffix(
    _FAILING_SAVES_ROW, "max(training_checkpoint_last_step{@run})", "; last checkpoint: step $1"
)
"""PromQL for the same row, with the step of the last successful save if there is one."""
_PAST_FAILED_SAVES_ROW = with_number(
    _FAILED_SAVE_COUNT, _LAST_FAILED_SAVE_TIME, "$1 saves failed; a later save succeeded"
)
"""PromQL for the row of saves that failed before a successful save. The start is the last failure."""

_LOST_BY_RESTARTS = events_in_range(
    'training_badput_seconds_total{@run, cause=~"lost_progress|downtime"}', "cause"
)
"""PromQL for the seconds in the time range between attempts and of work that is done again."""
_COST_OF_RESTARTS = (
    f"({_LOST_BY_RESTARTS}) * on () group_right () sum by (currency) ({USUAL_COST_PER_HOUR_BY_RUN}) / 3600"
)
"""PromQL for the cost of this time, by currency."""
_COST_OF_RESTARTS_TEXT = f'label_join(topk(1, count_values by (currency) ("cost", round({_COST_OF_RESTARTS} > 0, 0.01))), "cost", " ", "cost", "currency")'
"""PromQL for a series with the cost of this time in one currency as the label `cost`: `12.5 EUR`."""
_RESTART_ROW = f'label_replace({FIRST_EXIT}, "problem", "restarted", "", "")'
_NUMBERS_OF_RESTART = (
    ("max(training_step{@run}) - max(training_attempt_steps{@run})", " at step $1"),
    (
        f"round(max(training_attempt_start_timestamp_seconds{{@run}}) - max({FIRST_EXIT}) > 0)",
        " after $1 s",
    ),
    (f"round({events_in_range('training_lost_steps_total{@run}', 'run')}) > 0", "; lost $1 steps"),
    (f"round(({_LOST_BY_RESTARTS}) / 60, 0.1) > 0", ", $1 min"),
)
"""PromQL and text of each number of a restart: the first step, the time between the attempts, the lost steps and the lost time."""


def _with_numbers_of_restart(row: str) -> str:
    """Return PromQL that appends the texts of `_NUMBERS_OF_RESTART` to the label `problem` of the row of a restart."""
    for number, suffix in _NUMBERS_OF_RESTART:
        row = with_suffix(row, number, suffix)
    return row


_RESTART_ROW_WITH_COST = with_suffix_label(
    _with_numbers_of_restart(_RESTART_ROW),
    f'label_replace({_COST_OF_RESTARTS_TEXT}, "suffix", ", $1", "cost", "(.+)")',
)
_RESTART_ROW_WITH_REASON = (
    f'label_replace(label_join({_RESTART_ROW_WITH_COST}, "problem", " after: ", "problem", "reason"),'
    f' "problem", "$1; $2", "problem", "(.+) after: {EXIT_REASON_PATTERN}")'
)
"""PromQL for the row of a restart in the time range, with the numbers and the cost of the restart and the reason of the first exit."""

_DATA_WAIT_REMEDIES = data_wait_remedies("@run", "@cluster")
_DRIVER_DOWN_ROWS = with_text(
    "max by (instance) (instance:gpu_driver_down_start:timestamp_seconds{@cluster}"
    " and on (cluster, instance) run:training_driver_down:info{@run})",
    "driver does not respond, GPUs unknown",
)
"""PromQL for the start of the time in which the driver of a node of the run does not respond."""
_UP_BY_TARGET = 'up{@cluster, job=~"training(-.+)?"}'
_OUTAGE = f"({_UP_BY_TARGET} == 0 and on (instance) last_over_time(instance:training_last_sample:timestamp_seconds{{@run}}[1h]))"
"""PromQL with a value for each node of the run whose exporter does not answer, from the first sample of the run on this node."""
_EXPORTER_OUTAGES = f"(count_over_time({_OUTAGE}[1h:15s]) * 15 and on (instance) {_UP_BY_TARGET} == 1 and on (instance) {UP_BY_RANK_AND_NODE})"
"""PromQL for the seconds of the last hour in which the exporter of a node of the run did not answer, if the exporter answers again."""
_OUTAGE_ROWS = with_number(
    f"max by (instance) ({_EXPORTER_OUTAGES})",
    f"max by (instance) (min_over_time((time() + 0 * {_OUTAGE})[1h:15s]))",
    "exporter was down for $1 s, no samples of its ranks",
    "instance",
)
"""PromQL for a row for each node of the run whose exporter was down in the last hour, with the seconds."""
# Remedies of several problems.
_RESUME_FINITE = "resume from a checkpoint before the first such step"
_CHECK_DISK = "check the free space and the quota of the checkpoints"
_DRAIN_NODE = "drain the node; restart the run; reset the GPU or reboot"
PROBLEMS = (
    RunProblem(
        f'label_replace({LOST_GPU_ROWS} and on () {STANDSTILL_START}, "problem", "$1: no rank finishes a step", "problem", "(.+)")',
        RunImpact.CAUSES_STOP,
        _DRAIN_NODE,
    ),
    RunProblem(f"{LOST_GPU_ROWS} unless on () {STANDSTILL_START}", RunImpact.ENDANGERS_WORK, _DRAIN_NODE),
    RunProblem(HANGING_PLACE_ROWS, RunImpact.CAUSES_STOP, "read this line of the job; restart the run"),
    RunProblem(ODD_PHASE_ROW, RunImpact.CAUSES_STOP, "run training-exporter stacks on this node"),
    RunProblem(FIRST_ENDED_ROWS, RunImpact.CAUSES_STOP, "read the log of this rank first"),
    RunProblem(LATER_ENDED_ROWS, RunImpact.NO_PROGRESS),
    RunProblem(ALL_RANKS_ENDED_ROW, RunImpact.ENDING, "wait a minute; then State has the outcome"),
    RunProblem(
        # A lost GPU or the odd rank explains the standstill.
        f"{with_text(STANDSTILL_START, 'no rank finishes a step')} unless on () ({LOST_GPU_STARTS}) unless on () {ODD_GROUP_SIZE}",
        RunImpact.NO_PROGRESS,
        "run training-exporter stacks on each node",
    ),
    RunProblem(
        f"{_FAILING_SAVES_ROW_WITH_STEP} and on () {LAST_SAVE_FAILED}", RunImpact.ENDANGERS_WORK, _CHECK_DISK
    ),
    RunProblem(
        f"{_PAST_FAILED_SAVES_ROW} unless on () {LAST_SAVE_FAILED} and on () {_SAVES_ALERT}",
        RunImpact.ENDANGERS_WORK,
        _CHECK_DISK,
    ),
    RunProblem(
        f"{_NONFINITE_ROW_WITH_STEP} and on () {NONFINITE_NOW}", RunImpact.ENDANGERS_WORK, _RESUME_FINITE
    ),
    RunProblem(f"{_PAST_NONFINITE_ROW} and on () {NONFINITE_ALERT}", RunImpact.HAD_NAN_LOSS, _RESUME_FINITE),
    RunProblem(xid_rows(CRITICAL_XIDS_OF_GPUS), RunImpact.ENDANGERS_WORK, _DRAIN_NODE),
    RunProblem(
        f"{xid_rows(XIDS_OF_GPUS)} unless on (instance, rank, gpu, xid) {CRITICAL_XIDS_OF_GPUS}",
        RunImpact.ENDANGERS_WORK,
        "read the log of the rank; if the Xid repeats, reset the GPU",
    ),
    RunProblem(_DRIVER_DOWN_ROWS, RunImpact.ENDANGERS_WORK, "nvidia-smi; reload the driver or reboot"),
    RunProblem(
        with_number(
            UNKNOWN_RANK_COUNT_BY_NODE,
            LAST_SAMPLE_TIME_BY_NODE,
            "exporter down, ranks unknown: $1",
            "instance",
        ),
        RunImpact.UNKNOWN,
        "check the node and the log of the exporter",
    ),
    RunProblem(
        with_text(SILENT_RANKS, "alive, but does not report"),
        RunImpact.UNKNOWN,
        "check the process of the rank",
    ),
    RunProblem(
        f"{_SLOW_ROWS_WITH_GPU} unless on (instance, rank) {THROTTLED_GPU_ROWS}",
        RunImpact.LOSES_TIME,
        "open GPUs, and compare clock and heat of its GPU",
    ),
    RunProblem(_SLOW_ROWS_WITH_THROTTLING, RunImpact.LOSES_TIME),
    RunProblem(
        f"{THROTTLED_GPU_ROWS} unless on (instance, rank) {_LISTED_SLOW_RANKS}",
        RunImpact.LOSES_TIME,
    ),
    RunProblem(
        f"{_WAITING_RANK_ROW} + on (instance) group_left (remedy) 0 * {_DATA_WAIT_REMEDIES}",
        RunImpact.LOSES_TIME,
    ),
    RunProblem(
        f"{_ALL_RANKS_WAIT_ROW} + on () group_left (remedy) 0 * topk(1, {_DATA_WAIT_REMEDIES})",
        RunImpact.LOSES_TIME,
    ),
    RunProblem(EARLY_END_ROW, RunImpact.PAST, "read the log of the job, unless the early end is intended"),
    RunProblem(_RESTART_ROW_WITH_REASON, RunImpact.PAST, "read the log of this rank"),
    RunProblem(
        f"{_PAST_FAILED_SAVES_ROW} unless on () {LAST_SAVE_FAILED} unless on () {_SAVES_ALERT}",
        RunImpact.PAST,
    ),
    RunProblem(f"{_PAST_NONFINITE_ROW} unless on () {NONFINITE_ALERT}", RunImpact.PAST),
    RunProblem(_OUTAGE_ROWS, RunImpact.PAST),
)
"""Problems of a run. The order has no effect on the table, which is sorted by effect and start."""
_ROW_LABELS = "impact, problem, instance, rank, gpu, remedy"
_STATE_KNOWN = "max(training_run_state{@run})"
_NO_PROBLEM_ROW = (
    f"{with_text(f'0 * {_STATE_KNOWN} - 1', verdicts.NO_PROBLEM)}"
    f" or on () {with_text('vector(-1)', NO_SAMPLE_OF_RUN)}"
)
"""PromQL for the row of a run without a problem or without a sample. The value -1 is shown as a dash."""


def problem_start() -> str:
    """Return PromQL for the start of the problem that the panel *State* names, else of the worst current problem, in Unix seconds.

    The result has no labels. The order of the problems is that of the texts in *State*. An unknown start and a start before the time range
    are 0. The result is absent if the run has no current problem.
    """
    stops = [
        problem.rows
        for problem in PROBLEMS
        if problem.impact in (RunImpact.CAUSES_STOP, RunImpact.NO_PROGRESS)
    ]
    slowest = f"bottomk(1, {SPEED_RATIO_BY_RANK_AND_NODE} < {SLOW_RATIO})"
    slow_start = (
        "max(run:training_slow_start:timestamp_seconds{@run})"
        f" or on () max({_SLOW_ROWS} and on (instance, rank) {slowest})"
    )
    in_state = (
        f"max({LOST_GPU_ROWS})",
        f"max({CRITICAL_XIDS_OF_GPUS})",
        f"max({_NONFINITE_ROW} and on () ({NONFINITE_NOW} or on () {NONFINITE_ALERT}))",
        f"max({_FAILING_SAVES_ROW} and on () {LAST_SAVE_FAILED})",
        f"({slow_start}) and on () {slowest} unless on () {STANDSTILL_BY_STEP_AGE}",
        f"max({_WAITING_RANK_ROW})",
        f"max({THROTTLED_GPU_ROWS})",
        f"max({_ALL_RANKS_WAIT_ROW})",
    )
    others = [
        f"min({' or '.join(f'({problem.rows})' for problem in PROBLEMS if problem.impact is impact)})"
        for impact in (RunImpact.ENDANGERS_WORK, RunImpact.UNKNOWN)
    ]
    return " or on () ".join((f"min({' or '.join(f'({rows})' for rows in stops)})", *in_state, *others))


def what_is_wrong(w: int, h: int) -> Panel:
    """Return the table of the problems of a run, the largest impact first; among equal impacts, the earliest start first."""
    rows = " or ".join(f"1000 * ({problem.labelled_rows})" for problem in PROBLEMS)
    # A row `loses time` of a run that loses much time has the red impact, as on *Fleet*: the label `verdict` of each row becomes its impact
    # and the number of the run's verdict, such as `2 8`, and this pair is replaced.
    verdict = 'count_values("verdict", max(run:training_verdict:urgency{@run})) or on () vector(0)'
    with_verdict = f'label_join(({rows}) + on () group_left (verdict) 0 * ({verdict}), "verdict", " ", "impact", "verdict")'
    loses_much = f"{RunImpact.LOSES_TIME.value} {Verdict.LOSES_MUCH_TIME.value}"
    with_impact = f'label_replace({with_verdict}, "impact", "{RunImpact.LOSES_MUCH_TIME.value}", "verdict", "{loses_much}")'
    since = f"max by ({_ROW_LABELS}) ({with_impact}) or on () ({_NO_PROBLEM_ROW})"
    panel = table(
        "What is wrong",
        Column("impact", "Effect", width=130, mappings=RUN_IMPACT_TEXTS),
        Column("problem", "Problem", mappings=RUN_PROBLEM_TEXTS),
        Column("rank", "Rank", width=70),
        Column("instance", "Node", width=100, links=(GPUS_OF_ROW_LINK, NODE_OF_ROW_LINK)),
        Column("gpu", "GPU", width=65),
        Column("remedy", "Remedy", width=400),
        Column(
            since,
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=value_mappings({0: ("before this range", NEUTRAL), -1: (NO_VALUE, NEUTRAL)}),
        ),
        sort="Effect",
        w=w,
        h=h,
        max_data_points=120,
    )
    panel.body["options"]["sortBy"].append({"displayName": "Since", "desc": False})
    return panel
