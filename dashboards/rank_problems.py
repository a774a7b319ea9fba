"""PromQL for the problems of the ranks of a run: lost and throttled GPUs, Xids, ended, unknown and silent ranks, and hangs.

A name in `…_ROWS` or `…_ROW` is PromQL for rows of the table *What is wrong*, see `dashboards.run_problems`: the value is the start of a
problem in Unix seconds, and the label `problem` is its text. Most other names are the PromQL from which the rows are built.
"""

from __future__ import annotations

from dashboards.gpu_problems import (
    CHECK_COOLING,
    CHECK_POWER_SUPPLY,
    LAST_XID_BY_UUID,
    MAX_THROTTLED_RATIO,
    THROTTLED_RATIO_FAMILY,
    THROTTLED_START_FAMILY,
    XID_PROBLEM_SECONDS,
    only_power_brake,
)
from dashboards.queries import (
    EQUAL_RATIO,
    HANG_LABELS,
    LIVE_STATE,
    ODD_GROUP_SIZE,
    SLOWEST_RANK,
    SPEED_RATIO_BY_RANK_AND_NODE,
    STANDSTILL,
    STANDSTILL_BY_STEP_AGE,
    blank_if_incomplete,
    feed_age_seconds,
)
from exporter.status.conditions.gpus import CRITICAL_XIDS

SLOW_RATIO = 0.9
"""Speed relative to the fastest rank below which a rank is slow."""
VERY_SLOW_RATIO = 0.75
"""Speed relative to the fastest rank below which the color of a slow rank is bad instead of a warning."""
MAX_DATA_WAIT_RATIO = 0.1
"""Share of the time in `data_loading` above which waiting for data is a problem."""
SILENT_SECONDS = 30
"""Age of the feed from which a live rank is silent."""
MAX_EXIT_SPREAD_SECONDS = 900
"""Longest time between the first and the last exit of an attempt that ended. NCCL aborts the waiting ranks after ten minutes by default."""
FOLLOWING_EXITS_SECONDS = 60
"""Longest time between the first and the last exit before a restart: a launcher such as torchrun ends all ranks first."""
MAX_ROWS = 8
"""Maximum number of rows of a problem that many ranks can have at once."""

WHILE_STEPPING = f"and on () {LIVE_STATE} unless on () {STANDSTILL_BY_STEP_AGE}"
"""Condition that the run is live and completes steps, for the right side of a query."""
_SLOWEST_RANK_WHILE_STEPPING = f"({blank_if_incomplete(f'{SLOWEST_RANK} < {EQUAL_RATIO}')} or on () {SLOWEST_RANK} < {SLOW_RATIO}) {WHILE_STEPPING}"
"""PromQL for the relative speed of the slowest rank, with the labels of `SLOWEST_RANK`, while the run completes steps.

The result is absent if the ranks are equal. While ranks are unknown, it has a value only if a rank is slow: the slowest of all ranks may be
one of the unknown ranks.
"""
_LOWEST_SPEED_OF_EQUAL_RANKS = (
    f"{blank_if_incomplete(f'min({SPEED_RATIO_BY_RANK_AND_NODE}) >= {EQUAL_RATIO}')} {WHILE_STEPPING}"
)
"""PromQL for the lowest relative speed, without labels, while the run completes steps and all ranks are known and equal."""

SLOWEST_OR_EQUAL_RANKS = (
    f'max by (who) (label_join(label_replace(label_replace({_SLOWEST_RANK_WHILE_STEPPING}, "rank_text", "rank $1", "rank", "(.+)"),'
    ' "node_text", " on $1", "instance", "(.+)"), "who", "", "rank_text", "node_text", "gpu_suffix")'
    f' or on () label_replace({_LOWEST_SPEED_OF_EQUAL_RANKS}, "who", "all ranks alike", "", ""))'
)
"""PromQL for the relative speed of the slowest rank or, if all ranks are equal, for their lowest; the label `who` is the text for the reader."""

LOOKBACK = "1h"
"""Time after the last sample for which the last known state is shown."""
STATE_START = f"max(last_over_time(training_run_state_since_timestamp_seconds{{@run}}[{LOOKBACK}]))"
"""PromQL for the start of the last known state of the run, in Unix seconds."""
FEED_AGE_SECONDS = feed_age_seconds("@run", "instance, rank")
"""PromQL for the age of the feed of each rank of the run at the last scrape, by node and rank."""
_LAST_UPDATE = "max by (instance, rank) (training_feed_last_update_timestamp_seconds{@run})"
"""PromQL for the time of the last update of the feed of each rank, in Unix seconds."""
UP_BY_RANK_AND_NODE = "max by (instance, rank) (training_process_up{@run})"
"""PromQL for each rank on each node: 1 if the process is alive, otherwise 0."""
UP_BY_RANK = "max by (rank) (training_process_up{@run})"
"""PromQL for each rank: 1 if a process of the rank is alive on any node, otherwise 0."""
_ENDED_NORMALLY_IN_RANGE = (
    'max(last_over_time(training_run_state{@run, state=~"finished|stopped"}[$__range])) == 1'
)
"""PromQL with a value if the run has finished or was stopped, by its last state in the time range."""
_ENDED_IN_RANGE = (
    'max(last_over_time(training_run_state{@run, state=~"finished|stopped|failed|lost"}[$__range])) == 1'
)
"""PromQL with a value if the run has ended, by its last state in the time range."""


RANKS_WITH_SAMPLE = "group by (rank) (training_process_up{@run})"
"""PromQL for the ranks with a current sample, of a live or an ended process."""
_ENDING = 'max(training_run_state{@run, state="ending"}) == 1'
"""PromQL with a value while the processes of the run have ended and the outcome is not decided."""
LIVE_RANK_COUNT = f"(count(max by (rank) (training_process_up{{@run}}) == 1 unless on () {_ENDING}) or on () 0 * max(training_world_size{{@run}}))"
"""PromQL for the number of ranks with a live process; 0 if no process is alive, without a value if no rank has a sample.

The last `training_process_up` is up to a scrape older than the state `ending`, which no live rank has.
"""
UNKNOWN_RANK_COUNT = (
    f"clamp_min(max(training_world_size{{@run}}) - (count({RANKS_WITH_SAMPLE}) or vector(0)), 0)"
)
"""PromQL for the number of ranks without a sample: their exporter is down or not scraped, or they have not started."""
MISSING_RANK_COUNT = (
    f"clamp_min(max(training_world_size{{@run}}) - {LIVE_RANK_COUNT} - {UNKNOWN_RANK_COUNT}, 0)"
)
"""PromQL for the number of ranks whose process has ended: the ranks of the run that are neither alive nor unknown."""


def with_text(expression: str, text: str, label: str = "", pattern: str = "(.+)") -> str:
    """Return PromQL that adds the label `problem`; `$1` in the text is the first group of *pattern* in the value of *label*."""
    return f'label_replace({expression}, "problem", "{text}", "{label}", "{pattern if label else ""}")'


def with_number(number: str, start: str, text: str, by: str = "") -> str:
    """Return PromQL for the start of a problem with a number in its text; 0 if the start is unknown, so that the row stays.

    Args:
        number: PromQL for the number, such as a percentage. Series with equal labels *by* and equal numbers share a row.
        start: PromQL for the start in Unix seconds, by the same labels.
        text: Text of the problem; `$1` is the number.
        by: Labels to keep besides `problem` and `number`; empty for a problem of the whole run.
    """
    counted = f'count_values by ({by}) ("number", {number})'
    rows = f"{with_text(counted, text, 'number')} * 0"
    return f"({rows} + on ({by}) group_left () ({start}) or on ({by}) {rows})"


def with_suffix(rows: str, number: str, suffix: str) -> str:
    """Return PromQL that appends *suffix* to the label `problem`, with *number* for `$1`; without a number, the rows are unchanged."""
    return with_suffix_label(
        rows, f'label_replace(count_values("suffix", {number}), "suffix", "{suffix}", "suffix", "(.+)")'
    )


def with_suffix_label(rows: str, suffixes: str) -> str:
    """Return PromQL that appends the label `suffix` of the single series of *suffixes* to the label `problem`, if there is such a series."""
    # Without a suffix, the label `suffix` is empty. The rows are evaluated once.
    return (
        f"label_join({rows} + on () group_left (suffix) 0 * ({suffixes} or on () vector(0)),"
        ' "problem", "", "problem", "suffix")'
    )


# GPUs of the ranks -------------------------------------------------------------------------------------------

LAST_GPUS_BY_RANK = "max by (instance, rank, gpu, uuid) (rank:training_gpu:info{@run})"
"""PromQL for the GPUs of each rank, by node, rank, index and UUID.

The rule keeps the last GPU of a rank whose GPU is lost, because the driver lists no processes of a lost GPU.
"""
_GPU_LOST = "max by (uuid) (gpu_up) == 0"
"""PromQL with a value for each lost GPU, by UUID."""
LOST_GPU_STARTS = (
    f"{LAST_GPUS_BY_RANK} * on (uuid) group_left () max by (uuid) (gpu:gpu_lost_start:timestamp_seconds)"
)
"""PromQL for the start of the loss of each lost GPU of the ranks, by node, rank, GPU index and UUID."""
_LOST_GPUS_WITH_NOTE = (
    f"label_replace({LOST_GPU_STARTS} * on (uuid) group_left (xid) ({LAST_XID_BY_UUID}) or on (instance, rank, gpu) {LOST_GPU_STARTS},"
    ' "note", " (Xid $1)", "xid", "(.+)")'
)
"""PromQL for the lost GPUs with their last Xid, if it is recent, as the label `note`."""
LOST_GPU_ROWS = with_text(
    f'label_join({_LOST_GPUS_WITH_NOTE}, "problem", " lost", "gpu", "note")', "GPU $1", "problem"
)
"""PromQL for the lost GPUs of the ranks. A recent Xid is part of the label `problem`, and is the label `note`: ` (Xid 79)`."""


def _xids(matcher: str = "") -> str:
    """Return PromQL for the time of each Xid in the last `XID_PROBLEM_SECONDS` on the ranks' GPUs, by node, rank, GPU and Xid.

    Without the Xids of lost GPUs: the row of a lost GPU has the Xid. *matcher* limits the Xids; empty for all.
    """
    return (
        f"(max by (uuid, xid) (gpu_xid_last_timestamp_seconds{{{matcher}}}) > time() - {XID_PROBLEM_SECONDS}"
        f" unless on (uuid) {_GPU_LOST}) * on (uuid) group_left (instance, rank, gpu) topk by (uuid) (1, {LAST_GPUS_BY_RANK})"
    )


def xid_rows(xids: str) -> str:
    """Return PromQL that adds the label `problem` with the GPU and the Xid to the series of `_xids`: `GPU 3: Xid 79`."""
    return with_text(f'label_join({xids}, "place", ": Xid ", "gpu", "xid")', "GPU $1", "place")


XIDS_OF_GPUS = _xids()
"""PromQL for the time of all recent Xids of the ranks' GPUs."""
CRITICAL_XIDS_OF_GPUS = _xids(f'xid=~"{"|".join(str(xid) for xid in sorted(CRITICAL_XIDS))}"')
"""PromQL for the time of the recent Xids that point to the hardware."""
_THROTTLING_START = f"min by (uuid) ({THROTTLED_START_FAMILY}) and on (uuid) max by (uuid) ({THROTTLED_RATIO_FAMILY}) > {MAX_THROTTLED_RATIO}"
"""PromQL for the start of the throttling of each GPU that is throttled for more than `MAX_THROTTLED_RATIO` of the time, by UUID."""
_CELSIUS = (
    'label_replace(count_values by (uuid) ("celsius", max by (uuid) (gpu_temperature_celsius{sensor="gpu"})),'
    ' "celsius", "$1 °C", "celsius", "(.+)")'
)
"""PromQL for a series for each GPU, by UUID, with the temperature as the label `celsius`: `88 °C`."""
_STARTS_OF_THROTTLED_GPUS = f"({LAST_GPUS_BY_RANK} * on (uuid) group_left () ({_THROTTLING_START}))"
_ONLY_POWER_BRAKE = only_power_brake("uuid")
_HEAT_ROWS_WITHOUT_TEMPERATURE = with_text(
    f"({_STARTS_OF_THROTTLED_GPUS} unless on (uuid) {_ONLY_POWER_BRAKE})", "GPU $1 throttled by heat", "gpu"
)
_HEAT_ROWS = (
    f'(label_join({_HEAT_ROWS_WITHOUT_TEMPERATURE} * on (uuid) group_left (celsius) ({_CELSIUS}), "problem", ", ", "problem", "celsius")'
    f" or on (instance, rank, gpu) {_HEAT_ROWS_WITHOUT_TEMPERATURE})"
)
"""PromQL for the GPUs of the ranks that heat throttles, with the temperature if a sample exists: `GPU 3 throttled by heat, 88 °C`."""
_BRAKE_ROWS = with_text(
    f"({_STARTS_OF_THROTTLED_GPUS} and on (uuid) {_ONLY_POWER_BRAKE})",
    "GPU $1 throttled by the power brake",
    "gpu",
)
"""PromQL for the GPUs of the ranks that only the power brake throttles."""
THROTTLED_GPU_ROWS = (
    f'(label_replace({_HEAT_ROWS}, "remedy", "{CHECK_COOLING}", "", "")'
    f' or label_replace({_BRAKE_ROWS}, "remedy", "{CHECK_POWER_SUPPLY}", "", ""))'
)
"""PromQL for the throttled GPUs of the ranks, with the cause in the label `problem` and the remedy in the label `remedy`."""

# Processes of the ranks --------------------------------------------------------------------------------------

_LAST_EXIT = "max by (instance, rank, reason) (training_rank_last_exit_timestamp_seconds{@run})"
"""PromQL for the time of the last exit of each rank that did not complete the training, with the reason."""
EXIT_REASON_PATTERN = "(?:inferred: )?(?:the process )?(?:was )?(.+)"
"""Regular expression of the label `reason` of an exit. The group has the reason without the introducing words."""
_LAST_EXIT_OR_UPDATE = (
    f'({_LAST_EXIT} or on (instance, rank) label_replace({_LAST_UPDATE}, "reason", "reason unknown", "", ""))'
)
"""PromQL for the time of the last exit of each rank; without a recorded exit, the last update of the feed."""
_OF_ENDED_RANKS = f"and on (instance, rank) {UP_BY_RANK_AND_NODE} == 0 unless on (rank) {UP_BY_RANK} == 1 unless on () {_ENDED_NORMALLY_IN_RANGE}"
"""Condition that the process of a rank on a node has ended, no process of the rank is alive, and the run has not ended normally."""
_KNOWN_EXITS = f"({_LAST_EXIT} {_OF_ENDED_RANKS})"
"""PromQL for the recorded failed exits of the ended ranks, in Unix seconds."""
_LATEST_EXITS = f"({_KNOWN_EXITS} > scalar(max({_KNOWN_EXITS})) - {MAX_EXIT_SPREAD_SECONDS})"
"""PromQL for the exits of the last attempt: those at most `MAX_EXIT_SPREAD_SECONDS` before the last exit."""
_EXITS_AT_FIRST_TIME = f"({_LATEST_EXITS} == scalar(min({_LATEST_EXITS})))"
"""PromQL for the exits of the last attempt at the time of its first exit: usually one."""
ENDED_FIRST = (
    f"({_EXITS_AT_FIRST_TIME} and on (instance, rank) last_over_time(run:training_first_exit:timestamp_seconds{{@run}}[5m])"
    f" or on () {_EXITS_AT_FIRST_TIME})"
)
"""PromQL for the first exit of the last attempt, as on *Fleet*.

An exporter may notice several exits at once. The rule `run:training_first_exit:timestamp_seconds` then selects the rank with the oldest
step. Before the evaluation of the rule, and if it has no exit, all of these ranks are first.
"""
ENDING_WITHOUT_FAILED_EXIT = f"({_ENDING} unless on () {_KNOWN_EXITS})"
"""PromQL with a value while the processes of the run have ended, the outcome is not decided, and no exit has failed."""
ALL_RANKS_ENDED_ROW = with_text(
    f"{STATE_START} and on () {ENDING_WITHOUT_FAILED_EXIT}", "all ranks have ended, outcome not decided"
)
"""PromQL for the row of a run whose ranks have ended, until an exit or the outcome is known. A run that finishes has this row for a moment."""
_ENDED_LATER = (
    f"({_LAST_EXIT_OR_UPDATE} {_OF_ENDED_RANKS} unless on (instance, rank) {ENDED_FIRST}"
    f" unless on (instance, rank) ({_LAST_UPDATE} unless on (instance, rank) {_LAST_EXIT} and on () {_ENDING}))"
)
"""PromQL for the exits of all other ended ranks, also of earlier attempts.

A rank without a recorded exit has the last update of its feed instead, except while the run is `ending`.
"""
FIRST_ENDED_ROWS = with_text(
    f"bottomk({MAX_ROWS}, {ENDED_FIRST})", "ended first: $1", "reason", EXIT_REASON_PATTERN
)
"""PromQL for the exits of the ranks that ended first, at most `MAX_ROWS`, with the reason in the label `problem`."""
LATER_ENDED_ROWS = with_text(
    f"bottomk({MAX_ROWS}, {_ENDED_LATER})", "ended: $1", "reason", EXIT_REASON_PATTERN
)
"""PromQL for the exits of the other ended ranks, the `MAX_ROWS` earliest, with the reason in the label `problem`."""
_EXITS_BEFORE_RESTART = f"{_LAST_EXIT} > time() - $__range_s and on (rank) {UP_BY_RANK} == 1"
"""PromQL for the exits in the time range of ranks that have a live process again."""
FIRST_EXIT = (
    "(max by (instance, rank, reason) (run:training_exit_before_restart:timestamp_seconds{@run}) > time() - $__range_s"
    f" or on () bottomk(1, ({_EXITS_BEFORE_RESTART}) >= scalar(max({_EXITS_BEFORE_RESTART})) - {FOLLOWING_EXITS_SECONDS}))"
)
"""PromQL for the first exit before the last restart of the ranks, with node, rank and reason.

The exit is the recorded one, as on *Fleet*. Before the evaluation of the rule, it is computed from the exits.
"""
UNKNOWN_RANKS = (
    "(group by (instance, rank) (last_over_time(training_process_up{@run}[$__range]) == 1)"
    f" unless on (rank) {RANKS_WITH_SAMPLE} unless on (instance) exporter_build_info{{@cluster}}"
    f" unless on () {_ENDED_IN_RANGE})"
)
"""PromQL for the ranks without a sample, by rank and by the node on which they last lived, if the exporter of that node has no sample.

The result is absent if the run has ended in the time range.
"""
UNKNOWN_RANK_COUNT_BY_NODE = f"count by (instance) ({UNKNOWN_RANKS})"
"""PromQL for the number of unknown ranks, by the node on which they last lived."""
LAST_SAMPLE_TIME_BY_NODE = (
    "max by (instance) (timestamp(training_process_up{@run})"
    " or max_over_time(timestamp(training_process_up{@run})[$__range:15s]))"
)
"""PromQL for the time of the last sample of each node of the run. The points of the subquery can be before the last sample."""
_PHASE_START = "max by (instance, rank) (training_phase_active_since_timestamp_seconds{@run})"
"""PromQL for the start of the current phase of each rank, in Unix seconds."""
LONG_PHASE_START = f"({_PHASE_START} < time() - {SILENT_SECONDS})"
"""PromQL for the start of the current phase of each rank, by node and rank, if the phase has lasted for more than `SILENT_SECONDS`."""
LONG_PHASES = f"topk by (instance, rank) (1, max by (instance, rank, phase) (training_phase_active{{@run}} == 1) and on (instance, rank) {LONG_PHASE_START})"
"""PromQL for a series of value 1 for each rank of `LONG_PHASE_START`, with the phase as the label `phase`."""
SILENT_RANKS = (
    f"bottomk({MAX_ROWS}, {_LAST_UPDATE} and on (instance, rank) ({FEED_AGE_SECONDS} > {SILENT_SECONDS})"
    f" and on (instance, rank) {UP_BY_RANK_AND_NODE} == 1)"
)
"""PromQL for the last update of the feed of live ranks that is older than `SILENT_SECONDS`, the `MAX_ROWS` oldest."""

# Hangs -------------------------------------------------------------------------------------------------------


def _with_gpu(rows: str) -> str:
    """Return PromQL that adds one GPU to rows of ranks; a rank without a known GPU and a row without a rank remain unchanged."""
    gpus = f"topk by (instance, rank) (1, {LAST_GPUS_BY_RANK})"
    return f"({rows} + on (instance, rank) group_left (gpu) 0 * {gpus} or on (instance, rank) {rows})"


ODD_RANK = f"max by (instance, rank, {HANG_LABELS}) (training_hang_info{{@run}} and on (cluster, run, {HANG_LABELS}) {ODD_GROUP_SIZE} == 1)"
"""PromQL for a series of value 1 for the rank that causes a hang, by the rule of the alert TrainingHang, with the position as labels.

The result is absent if a group of several ranks causes the hang, or if several groups may be the cause.
"""


def _with_place(positions: str) -> str:
    """Return PromQL that adds the label `place` to positions of a hang: `read data.py:40, phase data_loading`.

    Ranks may wait in the same line, for example of a helper, so that only the phase tells their positions apart.
    """
    with_line = f'label_join({positions}, "place", " ", "function", "location")'
    with_phase = f'label_replace({with_line}, "in_phase", ", phase $1", "phase", "(.+)")'
    return f'label_join({with_phase}, "place", "", "place", "in_phase")'


_HANGING_PLACES = (
    f"{_with_place(f'{ODD_RANK} unless on (instance, rank) ({LOST_GPU_STARTS})')}"
    f" or {_with_place(f'max by ({HANG_LABELS}) ({ODD_GROUP_SIZE} > 1)')}"
)
"""PromQL for the odd rank of a hang, or for the position of an odd group, with line and phase as the label `place`.

An odd rank with a lost GPU is left out: the row of the lost GPU explains the hang.
"""
ODD_PHASE = (
    "(max by (instance, rank, phase) (run:training_odd_phase:info{@run} and on (cluster, run) run:training_standstill:info)"
    " unless on () max(training_hang_info{@run}))"
)
"""PromQL for the only rank that is in another phase while all other ranks wait in `grad_sync`, by node, rank and phase.

The result has a value only during a standstill, until the stacks of the ranks are known.
"""
_LAST_PROGRESS_TIME = "max(training_last_progress_timestamp_seconds{@run})"
"""PromQL for the time of the last step or validation batch of any rank, in Unix seconds, without labels."""
HANGING_PLACE_ROWS = with_text(
    _with_gpu(f"({_HANGING_PLACES}) * 0 + on () group_left () {_LAST_PROGRESS_TIME}"),
    "holds up the others: $1",
    "place",
)
"""PromQL for the rank or the group that causes a hang, with the line in the label `problem`. The start is the last step of the run."""
_RANK_IN_ODD_PHASE = with_text(
    f"{ODD_PHASE} unless on (instance, rank) ({LOST_GPU_STARTS})",
    "all other ranks wait for this rank: phase $1",
    "phase",
)
ODD_PHASE_ROW = _with_gpu(f"({_RANK_IN_ODD_PHASE}) * 0 + on () group_left () {_LAST_PROGRESS_TIME}")
"""PromQL for the rank for which all other ranks wait, with the phase in the label `problem`; absent if the GPU of the rank is lost."""
STANDSTILL_START = f"({_LAST_PROGRESS_TIME} and on () {STANDSTILL})"
"""PromQL for the time of the last step or validation batch of a run with an overdue step, or that is stalled or hung."""

_CURRENT_STEP = f"max(last_over_time(training_step{{@run}}[{LOOKBACK}]))"
_STEP_TARGET = f"max(last_over_time(training_step_target{{@run}}[{LOOKBACK}]))"
_STEP_AND_TARGET = (
    f'count_values("step", {_CURRENT_STEP}) * on () group_left (target)'
    f' count_values("target", {_STEP_TARGET} > {_CURRENT_STEP})'
)
"""PromQL for a series with the labels `step` and `target`, if the last step is before the target."""
STEPS_OF_EARLY_END = f'label_join({_STEP_AND_TARGET}, "steps", " of ", "step", "target")'
"""PromQL for a series with the last step and the step target as the label `steps`, such as `850 of 6000`, before the target."""
EARLY_END_ROW = with_text(
    f'({STEPS_OF_EARLY_END} and on () max(last_over_time(training_run_state{{@run, state="finished"}}[{LOOKBACK}])) == 1)'
    f" * 0 + on () group_left () {STATE_START}",
    "finished early, at step $1",
    "steps",
)
"""PromQL for the end of a run that finished before its step target, with the step and the target in the label `problem`."""
