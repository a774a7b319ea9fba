"""Problems of a run: PromQL for each problem, and the table *What is wrong* of *Run* and *Ranks*.

A row has the labels `problem`, `rank`, `instance` and `gpu`, as far as these are known. The value is the start of the problem
in Unix seconds, or 0 if the problem started before the time range. Problems that many ranks can have at once (ended, silent and
slow ranks) have at most `MAX_ROWS` rows, and waiting for data has one row. Lost GPUs, Xids and throttled GPUs have a row for each GPU.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH
from dashboards.availability import last_time
from dashboards.gpu_problems import (
    LAST_XID_BY_GPU,
    MAX_THROTTLED_RATIO,
    THROTTLED_RATIO_FAMILY,
    THROTTLED_START_FAMILY,
    XID_SECONDS,
)
from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import NO_VALUE, Json, Panel, dashboard_link, value_mappings
from dashboards.queries import (
    HANG_LABELS,
    ODD_GROUP_SIZE,
    SPEED_RATIO_BY_NODE,
    STANDSTILL_BY_RULE,
    STANDSTILL_BY_STEP_AGE,
    WALL_SECONDS,
    feed_age_seconds,
)
from dashboards.tables import NO_SAMPLE_OF_RUN, Column, table
from exporter.status.conditions.gpus import CRITICAL_XIDS
from exporter.status.xids import XID_MEANINGS

SLOW_RATIO = 0.9
"""Speed relative to the fastest rank below which a rank is slow."""
MAX_DATA_WAIT_RATIO = 0.1
"""Share of the time in `data_loading` above which waiting for data is a problem."""
SILENT_SECONDS = 30
"""Age of the feed from which a live rank is silent."""
MAX_EXIT_SPREAD_SECONDS = 900
"""Longest time between the first and the last exit of an attempt. NCCL aborts the waiting ranks after ten minutes by default."""
MAX_ROWS = 8
"""Maximum number of rows of a problem that many ranks can have."""

FEED_AGE_SECONDS = feed_age_seconds("@run", "instance, rank")
"""PromQL for the age of the feed of each rank of the run."""
_LAST_UPDATE = "max by (instance, rank) (training_feed_last_update_timestamp_seconds{@run})"
_UP_BY_RANK_AND_NODE = "max by (instance, rank) (training_process_up{@run})"
UP_BY_RANK = "max by (rank) (training_process_up{@run})"
"""PromQL for each rank: 1 if its process lives on any node, otherwise 0."""
_ENDED_NORMALLY_IN_RANGE = (
    'max(last_over_time(training_run_state{@run, state=~"finished|stopped"}[$__range])) == 1'
)
_ENDED_IN_RANGE = (
    'max(last_over_time(training_run_state{@run, state=~"finished|stopped|failed|lost"}[$__range])) == 1'
)


RANKS_WITH_SAMPLE = "group by (rank) (training_process_up{@run})"
"""PromQL for the ranks whose exporter responds."""
LIVE_RANK_COUNT = (
    "(count(max by (rank) (training_process_up{@run}) == 1) or on () 0 * max(training_world_size{@run}))"
)
UNKNOWN_RANK_COUNT = (
    f"clamp_min(max(training_world_size{{@run}}) - (count({RANKS_WITH_SAMPLE}) or vector(0)), 0)"
)
"""PromQL for the number of ranks without a sample: their exporter is down, or they have not started."""
MISSING_RANK_COUNT = (
    f"clamp_min(max(training_world_size{{@run}}) - {LIVE_RANK_COUNT} - {UNKNOWN_RANK_COUNT}, 0)"
)
"""PromQL for the number of ranks whose process has ended."""


class RunImpact(enum.Enum):
    """Impact of a problem on the run, the column *Effect*: the tables of *Run* and *Ranks* show the largest number first.

    Members that `dashboards.gpu_problems.Impact` has too have the same number there.
    """

    CAUSES_STOP = 6  # the rank or GPU for which the other ranks wait
    STOPS_RUN = 5  # no step finishes, or ranks have ended
    ENDANGERS_WORK = 4  # work or the model may be lost, although steps finish
    UNKNOWN = 3  # samples of ranks are missing
    SLOWS_RUN = 2  # steps take longer than necessary
    PAST = 1  # over, and no alert about the problem fires


RUN_IMPACT_TEXTS = value_mappings(
    {
        RunImpact.CAUSES_STOP.value: ("stops the run", BAD),
        RunImpact.STOPS_RUN.value: ("stops the run", BAD),
        RunImpact.ENDANGERS_WORK.value: ("endangers work", BAD),
        RunImpact.UNKNOWN.value: ("unknown", WARNING),
        RunImpact.SLOWS_RUN.value: ("slows the run", WARNING),
        RunImpact.PAST.value: ("past", NEUTRAL),
    }
)
RUN_PROBLEM_TEXTS: list[Json] = [
    *value_mappings({"no problem found": ("no problem found", GOOD)}),
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


@dataclass(frozen=True, slots=True)
class RunProblem:
    """Problem of a run."""

    rows: str  # PromQL for the start, with the text of the problem as a label
    impact: RunImpact
    remedy: str = ""

    @property
    def labelled_rows(self) -> str:
        """PromQL for the start, with the text of the problem, the impact and the remedy as labels."""
        with_impact = f'label_replace({self.rows}, "impact", "{self.impact.value}", "", "")'
        return (
            f'label_replace({with_impact}, "remedy", "{self.remedy}", "", "")' if self.remedy else with_impact
        )


def _with_text(expression: str, text: str, label: str = "", pattern: str = "(.+)") -> str:
    """Return PromQL that adds the label `problem`; `$1` in the text is the value of a label."""
    return f'label_replace({expression}, "problem", "{text}", "{label}", "{pattern if label else ""}")'


def _with_number(number: str, since: str, text: str, by: str = "") -> str:
    """Return PromQL for the start of a problem with a number in its text; 0 if the start is unknown, so that the row stays."""
    counted = f'count_values by ({by}) ("number", {number})'
    rows = f"{_with_text(counted, text, 'number')} * 0"
    return f"({rows} + on ({by}) group_left () ({since}) or on ({by}) {rows})"


def _with_suffix(rows: str, number: str, suffix: str) -> str:
    """Return PromQL that appends a text with a number to the label `problem`, if the number is known."""
    suffixes = f'label_replace(count_values("suffix", {number}), "suffix", "{suffix}", "suffix", "(.+)")'
    joined = (
        f'label_join({rows} + on () group_left (suffix) 0 * {suffixes}, "problem", "", "problem", "suffix")'
    )
    return f"({joined} or on () {rows})"


# GPUs of the ranks -------------------------------------------------------------------------------------------

LAST_GPUS_BY_RANK = "max by (instance, rank, gpu, uuid) (rank:training_gpu:info{@run})"
"""PromQL for the GPUs of each rank, with index and UUID. The driver lists no processes of a lost GPU, so that the last known GPU counts."""
_GPU_LOST = "max by (uuid) (gpu_up) == 0"
_LOST_GPU_STARTS = (
    f"{LAST_GPUS_BY_RANK} * on (uuid) group_left () max by (uuid) (gpu:gpu_lost_start:timestamp_seconds)"
)
_LOST_GPUS_WITH_NOTE = (
    f"label_replace({_LOST_GPU_STARTS} * on (uuid) group_left (xid) ({LAST_XID_BY_GPU}) or on (instance, rank, gpu) {_LOST_GPU_STARTS},"
    ' "note", " (Xid $1)", "xid", "(.+)")'
)
LOST_GPU_ROWS = _with_text(
    f'label_join({_LOST_GPUS_WITH_NOTE}, "problem", " lost", "gpu", "note")', "GPU $1", "problem"
)
"""PromQL for the lost GPUs of the ranks, with the Xid in the label `problem`, and as the label `note`."""


def _xids(matcher: str = "") -> str:
    """Return PromQL for the time of the recent Xids of the ranks' GPUs that respond."""
    return (
        f"(max by (uuid, xid) (gpu_xid_last_timestamp_seconds{{{matcher}}}) > time() - {XID_SECONDS}"
        f" unless on (uuid) {_GPU_LOST}) * on (uuid) group_left (instance, rank, gpu) topk by (uuid) (1, {LAST_GPUS_BY_RANK})"
    )


def _xid_text(xids: str) -> str:
    """Return PromQL that adds the GPU and the Xid as the label `problem`."""
    return _with_text(f'label_join({xids}, "place", ": Xid ", "gpu", "xid")', "GPU $1", "place")


_XIDS = _xids()
CRITICAL_XIDS_OF_GPUS = _xids(f'xid=~"{"|".join(str(xid) for xid in sorted(CRITICAL_XIDS))}"')
"""PromQL for the time of the recent Xids that point to the hardware."""
_THROTTLED_SINCE = f"min by (uuid) ({THROTTLED_START_FAMILY}) and on (uuid) max by (uuid) ({THROTTLED_RATIO_FAMILY}) > {MAX_THROTTLED_RATIO}"
_CELSIUS = (
    'label_replace(count_values by (uuid) ("celsius", max by (uuid) (gpu_temperature_celsius{sensor="gpu"})),'
    ' "celsius", "$1 °C", "celsius", "(.+)")'
)
_THROTTLED_ROWS_WITHOUT_TEMPERATURE = _with_text(
    f"{LAST_GPUS_BY_RANK} * on (uuid) group_left () ({_THROTTLED_SINCE})",
    "GPU $1 throttled",
    "gpu",
)
THROTTLED_GPU_ROWS = (
    f'(label_join({_THROTTLED_ROWS_WITHOUT_TEMPERATURE} * on (uuid) group_left (celsius) ({_CELSIUS}), "problem", ", ", "problem", "celsius")'
    f" or on (instance, rank, gpu) {_THROTTLED_ROWS_WITHOUT_TEMPERATURE})"
)
"""PromQL for the throttled GPUs of the ranks, with the temperature in the label `problem`."""

# Processes of the ranks --------------------------------------------------------------------------------------

_LAST_EXIT = "max by (instance, rank, reason) (training_rank_last_exit_timestamp_seconds{@run})"
EXIT_REASON_PATTERN = "(?:inferred: )?(?:the process )?(?:was )?(.+)"
"""Regular expression of the label `reason` of an exit. The group has the reason without its introduction."""
_LAST_EXIT_OR_UPDATE = (
    f'({_LAST_EXIT} or on (instance, rank) label_replace({_LAST_UPDATE}, "reason", "reason unknown", "", ""))'
)
_OF_ENDED_RANKS = f"and on (instance, rank) {_UP_BY_RANK_AND_NODE} == 0 unless on (rank) {UP_BY_RANK} == 1 unless on () {_ENDED_NORMALLY_IN_RANGE}"
_KNOWN_EXITS = f"({_LAST_EXIT} {_OF_ENDED_RANKS})"
_LATEST_EXITS = f"({_KNOWN_EXITS} > scalar(max({_KNOWN_EXITS})) - {MAX_EXIT_SPREAD_SECONDS})"
ENDED_FIRST = f"({_LATEST_EXITS} == scalar(min({_LATEST_EXITS})))"
_ENDED_LATER = f"({_LAST_EXIT_OR_UPDATE} {_OF_ENDED_RANKS} unless on (instance, rank) {ENDED_FIRST})"
_FIRST_RANKS = _with_text(
    f"bottomk({MAX_ROWS}, {ENDED_FIRST})", "ended first: $1", "reason", EXIT_REASON_PATTERN
)
_ENDED_RANKS = _with_text(f"bottomk({MAX_ROWS}, {_ENDED_LATER})", "ended: $1", "reason", EXIT_REASON_PATTERN)
_EXITS_BEFORE_RESTART = f"{_LAST_EXIT} > time() - $__range_s and on (rank) {UP_BY_RANK} == 1"
_FIRST_EXIT = f"bottomk(1, ({_EXITS_BEFORE_RESTART}) >= scalar(max({_EXITS_BEFORE_RESTART})) - 60)"
"""PromQL for the first exit before the last restart of the ranks. The exits of the other ranks follow within a minute."""
_UNKNOWN_RANK_COUNT_BY_NODE = (
    "count by (instance) (group by (instance, rank) (last_over_time(training_process_up{@run}[$__range]) == 1)"
    f" unless on (rank) {RANKS_WITH_SAMPLE}) unless on (instance) exporter_build_info{{@cluster}}"
    f" unless on () {_ENDED_IN_RANGE}"
)
LAST_SAMPLE_TIME_BY_NODE = (
    "max by (instance) (max_over_time(timestamp(training_process_up{@run})[$__range:15s]))"
)
"""PromQL for the time of the last sample of each node of the run."""
_SILENT_RANKS = (
    f"bottomk({MAX_ROWS}, {_LAST_UPDATE} and on (instance, rank) ({FEED_AGE_SECONDS} > {SILENT_SECONDS})"
    f" and on (instance, rank) {_UP_BY_RANK_AND_NODE} == 1)"
)

# Hangs -------------------------------------------------------------------------------------------------------

ODD_RANK = f"max by (instance, rank, {HANG_LABELS}) (training_hang_info{{@run}} and on (cluster, run, {HANG_LABELS}) {ODD_GROUP_SIZE} == 1)"
"""PromQL for the rank that holds up a hang, by the rule of the alert TrainingHang."""
LOOKBACK = "1h"
"""Time after the last sample for which the last known state is shown."""
STATE_SINCE = f"max(last_over_time(training_run_state_since_timestamp_seconds{{@run}}[{LOOKBACK}]))"
"""PromQL for the start of the last known state."""
_HANG = (
    f'label_join({ODD_RANK} unless on (instance, rank) ({_LOST_GPU_STARTS}), "place", " ", "function", "location")'
    f' or label_join(max by ({HANG_LABELS}) ({ODD_GROUP_SIZE} > 1), "place", " ", "function", "location")'
)
ODD_PHASE = (
    "(max by (instance, rank, phase) (run:training_odd_phase:info{@run} and on (cluster, run) run:training_standstill:info)"
    " unless on () max(training_hang_info{@run}))"
)
"""PromQL for the only rank that is in another phase while all others wait for it, before the lines of the ranks are known."""
_LAST_STEP_TIME = "max(training_last_progress_timestamp_seconds{@run})"
_HANGING_PLACE = _with_text(
    f"({_HANG}) * 0 + on () group_left () {_LAST_STEP_TIME}", "holds up the others: $1", "place"
)
_WAITED_FOR = _with_text(
    f"{ODD_PHASE} unless on (instance, rank) ({_LOST_GPU_STARTS})",
    "all other ranks wait for this rank: phase $1",
    "phase",
)
_ODD_PHASE_ROW = f"({_WAITED_FOR}) * 0 + on () group_left () {_LAST_STEP_TIME}"
STANDSTILL_SINCE = f"({_LAST_STEP_TIME} and on () {STANDSTILL_BY_RULE})"
"""PromQL for the time of the last step of a run whose step is overdue, or that hangs or is stalled."""

_CURRENT_STEP = f"max(last_over_time(training_step{{@run}}[{LOOKBACK}]))"
_STEP_TARGET = f"max(last_over_time(training_step_target{{@run}}[{LOOKBACK}]))"
_STEP_AND_TARGET = (
    f'count_values("step", {_CURRENT_STEP}) * on () group_left (target)'
    f' count_values("target", {_STEP_TARGET} > {_CURRENT_STEP})'
)
STEPS_OF_EARLY_END = f'label_join({_STEP_AND_TARGET}, "steps", " of ", "step", "target")'
"""PromQL for a series with the last step and the step target as the label `steps`, such as `850 of 6000`, before the target."""
_EARLY_END = _with_text(
    f'({STEPS_OF_EARLY_END} and on () max(last_over_time(training_run_state{{@run, state="finished"}}[{LOOKBACK}])) == 1)'
    f" * 0 + on () group_left () {STATE_SINCE}",
    "finished early, at step $1",
    "steps",
)

# Speed, numbers and saves ------------------------------------------------------------------------------------

_SLOW_ROWS = _with_number(
    f"round(100 * bottomk({MAX_ROWS}, {SPEED_RATIO_BY_NODE} < {SLOW_RATIO}))",
    "max by (instance, rank) (rank:training_slow_start:timestamp_seconds{@run})",
    "computes at $1 % of the fastest rank",
    "instance, rank",
)
_SM_CLOCK = f'max by (instance, rank) ({LAST_GPUS_BY_RANK} * on (uuid) group_left () max by (uuid) (gpu_clock_hertz{{clock="sm"}}))'
_SM_CLOCK_TEXTS = (
    'label_replace(count_values by (instance, rank) ("clock",'
    f" round(100 * {_SM_CLOCK} / on () group_left () (max({_SM_CLOCK}) > 0) < {100 * SLOW_RATIO})),"
    ' "clock", ", SM clock at $1 %", "clock", "(.+)")'
)
_SLOW_WITH_CLOCK = (
    f'(label_join({_SLOW_ROWS} + on (instance, rank) group_left (clock) 0 * {_SM_CLOCK_TEXTS}, "problem", "", "problem", "clock")'
    f" or on (instance, rank) {_SLOW_ROWS})"
)
_SLOW_RANKS = (
    f"({_SLOW_WITH_CLOCK} + on (instance, rank) group_left (gpu) 0 * topk by (instance, rank) (1, {LAST_GPUS_BY_RANK})"
    f" or on (instance, rank) {_SLOW_WITH_CLOCK}) unless on () {STANDSTILL_BY_STEP_AGE}"
)
DATA_WAIT_RATIO_BY_RANK = "max by (instance, rank) (rank:training_data_wait:ratio5m{@run})"
"""PromQL for the share of the last five minutes in which each rank waited for data, also of a younger run."""
_DATA_WAIT_SINCE = "max(run:training_data_wait_start:timestamp_seconds{@run})"
ALL_WAIT_FOR_DATA = (
    f"(min({DATA_WAIT_RATIO_BY_RANK}) > {MAX_DATA_WAIT_RATIO} and on () count({DATA_WAIT_RATIO_BY_RANK}) > 1)"
)
"""PromQL for the share in which each rank waits for data at least, if all ranks wait: no rank is then the cause."""
_ALL_RANKS_WAIT = _with_number(
    f"round(100 * {ALL_WAIT_FOR_DATA})",
    _DATA_WAIT_SINCE,
    "all ranks wait for data: at least $1 % of the last 5 min",
)
_WAITING_RANK = _with_number(
    f"round(100 * topk(1, {DATA_WAIT_RATIO_BY_RANK} > {MAX_DATA_WAIT_RATIO})) unless on () {ALL_WAIT_FOR_DATA}",
    f"0 * {_UP_BY_RANK_AND_NODE} + on () group_left () {_DATA_WAIT_SINCE}",
    "waits longest for data: $1 % of the last 5 min",
    "instance, rank",
)


def events_in_range(counter: str, by: str) -> str:
    """Return PromQL for the number of events in the time range, for a counter that may start with its first event."""
    before = f"last_over_time({counter}[6h] offset $__range)"
    return f"sum(max by ({by}) ({counter})) - (sum(max by ({by}) ({before})) or vector(0))"


_NONFINITE = 'training_nonfinite_total{@run, kind="loss"}'
_NEW_NONFINITE = f"sum(increase({_NONFINITE}[$__rate_interval]))"
NONFINITE_NOW = f"{_NEW_NONFINITE} > 0"
"""PromQL with a value while losses are NaN or infinite."""
_NONFINITE_BEFORE = (
    f"(sum(max by (value) (last_over_time({_NONFINITE}[6h] @ end() offset $__range))) or vector(0))"
)
_LAST_FINITE_TIME = last_time(
    f"(sum({_NONFINITE}) or 0 * {WALL_SECONDS}) <= bool scalar({_NONFINITE_BEFORE})"
)
_NONFINITE_COUNT = f"round({events_in_range(_NONFINITE, 'value')}) > 0"
# Before the first such loss, the counter has no sample or is 0. The last step at such a time is finite.
_LAST_FINITE_STEP = (
    f"max_over_time((max(training_step{{@run}}) unless on () max({_NONFINITE}) > 0)[$__range:$__interval])"
)
_NONFINITE_ROW = _with_number(_NONFINITE_COUNT, _LAST_FINITE_TIME, "loss was NaN or infinite in $1 steps")
_NONFINITE_ROW_WITH_STEP = _with_suffix(_NONFINITE_ROW, _LAST_FINITE_STEP, ", the first after step $1")
_NONFINITE_PAUSED = f'(label_replace({_NONFINITE_ROW_WITH_STEP}, "problem", "$1, none recently", "problem", "(.+)") unless on () {NONFINITE_NOW})'
NONFINITE_ALERT = 'max(ALERTS{@run, alertname="TrainingLossNonFinite", alertstate="firing"})'
"""PromQL with a value while the alert fires: the weights may be invalid, although the loss is finite again."""
_FAILED_COUNTER = 'training_checkpoints_total{@run, result="failed"}'
_LAST_FAILURE = last_time(
    f"(sum({_FAILED_COUNTER}) or 0 * {WALL_SECONDS}) < bool scalar(sum({_FAILED_COUNTER} @ end()))"
)
_LAST_SAVE = f"(max(training_checkpoint_last_success_timestamp_seconds{{@run}}) or 0 * {WALL_SECONDS})"
LAST_SAVE_FAILED = f"{_LAST_FAILURE} > {_LAST_SAVE}"
"""PromQL with a value while no save has succeeded after the last failed save."""
_FAILED_COUNT = f"round({events_in_range(_FAILED_COUNTER, 'kind')}) > 0"
_SAVES_ALERT = 'max(ALERTS{@run, alertname="TrainingCheckpointFailing", alertstate="firing"})'
_LAST_SAVE_AT_END = (
    "scalar(max(training_checkpoint_last_success_timestamp_seconds{@run} @ end()) or on () vector(0))"
)
_FIRST_FAILURE_AFTER_SAVE = (
    f"clamp_min(min_over_time((time() + 0 * (sum({_FAILED_COUNTER} offset -$__interval) > (sum({_FAILED_COUNTER}) or 0 * {WALL_SECONDS}))"
    f" > {_LAST_SAVE_AT_END} - $__interval_ms / 1000)[$__range:$__interval]), {_LAST_SAVE_AT_END})"
)
"""PromQL for the start of the first interval with a failed save after the last successful save, or the time of that save in the same interval."""
_SAVES_FAIL = _with_number(_FAILED_COUNT, _FIRST_FAILURE_AFTER_SAVE, "no checkpoint: $1 saves failed")
_SAVES_FAILED = _with_number(_FAILED_COUNT, _LAST_FAILURE, "$1 saves failed; a later save succeeded")

_RESUME_FINITE = "end the run; resume from a checkpoint before the first such step"
_CHECK_DISK = "check the free space and the quota of the checkpoints"
_DRAIN_NODE = "drain the node; restart the run without it; then reset the GPU"
PROBLEMS = (
    RunProblem(
        f'label_replace({LOST_GPU_ROWS} and on () {STANDSTILL_SINCE}, "problem", "$1: no rank finishes a step", "problem", "(.+)")',
        RunImpact.CAUSES_STOP,
        _DRAIN_NODE,
    ),
    RunProblem(f"{LOST_GPU_ROWS} unless on () {STANDSTILL_SINCE}", RunImpact.ENDANGERS_WORK, _DRAIN_NODE),
    RunProblem(_HANGING_PLACE, RunImpact.CAUSES_STOP, "read this line of the job; restart the run"),
    RunProblem(_ODD_PHASE_ROW, RunImpact.CAUSES_STOP, "run training-exporter stacks on this node"),
    RunProblem(_FIRST_RANKS, RunImpact.CAUSES_STOP, "read the log of this rank first"),
    RunProblem(_ENDED_RANKS, RunImpact.STOPS_RUN),
    RunProblem(
        f"{_with_text(STANDSTILL_SINCE, 'no rank finishes a step')} unless on () ({_LOST_GPU_STARTS})",
        RunImpact.STOPS_RUN,
        "run training-exporter stacks on each node",
    ),
    RunProblem(f"{_SAVES_FAIL} and on () {LAST_SAVE_FAILED}", RunImpact.ENDANGERS_WORK, _CHECK_DISK),
    RunProblem(
        f"{_SAVES_FAILED} unless on () {LAST_SAVE_FAILED} and on () {_SAVES_ALERT}",
        RunImpact.ENDANGERS_WORK,
        _CHECK_DISK,
    ),
    RunProblem(
        f"{_NONFINITE_ROW_WITH_STEP} and on () {NONFINITE_NOW}", RunImpact.ENDANGERS_WORK, _RESUME_FINITE
    ),
    RunProblem(f"{_NONFINITE_PAUSED} and on () {NONFINITE_ALERT}", RunImpact.ENDANGERS_WORK, _RESUME_FINITE),
    RunProblem(_xid_text(CRITICAL_XIDS_OF_GPUS), RunImpact.ENDANGERS_WORK, _DRAIN_NODE),
    RunProblem(
        f"{_xid_text(_XIDS)} unless on (instance, rank, gpu, xid) {CRITICAL_XIDS_OF_GPUS}",
        RunImpact.ENDANGERS_WORK,
        "read the log of the rank; if the Xid repeats, reset the GPU",
    ),
    RunProblem(
        _with_number(
            _UNKNOWN_RANK_COUNT_BY_NODE,
            LAST_SAMPLE_TIME_BY_NODE,
            "exporter down, ranks unknown: $1",
            "instance",
        ),
        RunImpact.UNKNOWN,
        "check the node and the log of the exporter",
    ),
    RunProblem(
        _with_text(_SILENT_RANKS, "alive, but does not report"),
        RunImpact.UNKNOWN,
        "check the process of the rank",
    ),
    RunProblem(_SLOW_RANKS, RunImpact.SLOWS_RUN, "open GPUs, and compare clock and heat of its GPU"),
    RunProblem(THROTTLED_GPU_ROWS, RunImpact.SLOWS_RUN, "check the cooling and the power supply of the node"),
    RunProblem(_WAITING_RANK, RunImpact.SLOWS_RUN, "use more or faster data workers"),
    RunProblem(_ALL_RANKS_WAIT, RunImpact.SLOWS_RUN, "check the storage; use more or faster data workers"),
    RunProblem(_EARLY_END, RunImpact.PAST, "read the log of the job, unless the early end is intended"),
    RunProblem(_with_text(_FIRST_EXIT, "restarted after: $1", "reason", EXIT_REASON_PATTERN), RunImpact.PAST),
    RunProblem(
        f"{_SAVES_FAILED} unless on () {LAST_SAVE_FAILED} unless on () {_SAVES_ALERT}", RunImpact.PAST
    ),
    RunProblem(f"{_NONFINITE_PAUSED} unless on () {NONFINITE_ALERT}", RunImpact.PAST),
)
_ROW_LABELS = "impact, problem, instance, rank, gpu, remedy"
_STATE_KNOWN = "max(training_run_state{@run})"
_NO_PROBLEM_ROW = (
    f"{_with_text(f'0 * {_STATE_KNOWN} - 1', 'no problem found')}"
    f" or on () {_with_text('vector(-1)', NO_SAMPLE_OF_RUN)}"
)


def problem_since() -> str:
    """Return PromQL for the start of the problem in *State*, else of the worst current problems, in Unix seconds.

    The order is that of the texts in *State*. A start before the time range is 0.
    """
    stops = [
        problem.rows for problem in PROBLEMS if problem.impact in (RunImpact.CAUSES_STOP, RunImpact.STOPS_RUN)
    ]
    slowest = f"bottomk(1, {SPEED_RATIO_BY_NODE} < {SLOW_RATIO})"
    in_state = (
        f"max({LOST_GPU_ROWS})",
        f"max({CRITICAL_XIDS_OF_GPUS})",
        f"max({_NONFINITE_ROW} and on () ({NONFINITE_NOW} or on () {NONFINITE_ALERT}))",
        f"max({_SAVES_FAIL} and on () {LAST_SAVE_FAILED})",
        f"max({_SLOW_ROWS} and on (instance, rank) {slowest} unless on () {STANDSTILL_BY_STEP_AGE})",
        f"max({_WAITING_RANK})",
        f"max({THROTTLED_GPU_ROWS})",
        f"max({_ALL_RANKS_WAIT})",
    )
    others = [
        f"min({' or '.join(f'({problem.rows})' for problem in PROBLEMS if problem.impact is impact)})"
        for impact in (RunImpact.ENDANGERS_WORK, RunImpact.UNKNOWN)
    ]
    return " or on () ".join((f"min({' or '.join(f'({rows})' for rows in stops)})", *in_state, *others))


def what_is_wrong(w: int, h: int) -> Panel:
    """Return the table of the current problems of a run, problems that stop the run first."""
    rows = " or ".join(f"1000 * ({problem.labelled_rows})" for problem in PROBLEMS)
    since = f"max by ({_ROW_LABELS}) ({rows}) or on () ({_NO_PROBLEM_ROW})"
    panel = table(
        "What is wrong",
        Column("impact", "Effect", width=130, mappings=RUN_IMPACT_TEXTS),
        Column("problem", "Problem", mappings=RUN_PROBLEM_TEXTS),
        Column("rank", "Rank", width=70),
        Column("instance", "Node", width=100, links=(GPUS_OF_ROW_LINK, NODE_OF_ROW_LINK)),
        Column("gpu", "GPU", width=65),
        Column("remedy", "Remedy"),
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
