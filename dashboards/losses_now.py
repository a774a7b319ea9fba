"""PromQL for what runs lose now: share of the time, cost and power by cause, with the rank, the GPU and the reason of each loss.

The ledger adds the whole time of a hang or a crash at once, so a rate over five minutes would exceed 100 %. A hang is therefore
shown as `standstill`, with a share of 100 %. The losses of a restart are over: they are no current loss.

A loss is a series with the labels `run` and `cause`. A share is a ratio of the wall time. `dashboards.queries` explains the recurring forms
of PromQL.
"""

from __future__ import annotations

from dashboards.cost_and_loss import (
    MIN_LARGE_LOSS_SHARE,
    MIN_LOSS_SHARE,
    cost_per_hour_by_run,
    gpus_by_run,
    lost_share_by_cause,
    lost_share_by_run,
    standstill_by_run,
)
from dashboards.energy_devices import HELD_GPUS, HELD_GPUS_TEMPLATE
from dashboards.energy_loss import RUN_POWER_5M, START_CAUSES, as_cause
from dashboards.gpu_problems import (
    LAST_XID_BY_UUID,
    MAX_THROTTLED_RATIO,
    THROTTLED_RATIO_FAMILY,
)
from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import value_mappings
from dashboards.queries import (
    ENDING_RUNS,
    HANG_LABELS,
    LAST_PROGRESS_TIME_BY_RUN,
    ODD_GROUP_SIZE,
    blank_if_incomplete,
)
from dashboards.rank_problems import EXIT_REASON_PATTERN, FOLLOWING_EXITS_SECONDS, MAX_DATA_WAIT_RATIO
from dashboards.tables import NO_SAMPLE_OF_RUN
from dashboards.verdicts import VERDICT_TEXTS, Verdict, verdict_by_run

RUNNING_WITHOUT_PROGRESS_SECONDS = 120
"""Time without a step or validation batch from which a run in state `running` stands still, as in `run:training_standstill:info`."""
STANDSTILL_BY_RUN = standstill_by_run("@run")
"""PromQL with the value 1 for each selected run that stands still."""
COST_PER_HOUR_BY_RUN = cost_per_hour_by_run("@run")
"""PromQL for the cost per hour of each selected run, by run and currency."""
_LIVE_RUNS = '(max by (run) (training_run_state{@run, state=~"starting|running|stalled|hung"}) == 1)'
"""PromQL with the value 1 for each run that has neither ended nor started to end."""
LOST_SHARE_NOW_BY_CAUSE = f"({lost_share_by_cause('@run')} and on (run) {_LIVE_RUNS})"
"""PromQL for the share of the time that each live run loses now, by cause. A run that stands still has no other cause.

The rules are evaluated every 15 s. The current state ends the losses of a run that was killed since the last evaluation.
"""
MIN_DISPLAYED_SHARE = 0.01
"""Share of the time above which a loss is displayed."""

# Rank, GPU and reason of a loss ------------------------------------------------------------------------------

_LOCAL_RANKS = (
    'label_replace(max by (run, instance, rank, local_rank) (last_over_time(training_rank_info{@run, local_rank!=""}[$__range])),'
    ' "gpu", "$1", "local_rank", "(.+)")'
)
"""PromQL for the ranks with their local rank as the label `gpu`."""
_GPUS_OF_RANKS = (
    '(max by (run, instance, rank, gpu, uuid) (last_over_time(training_rank_info{@run, uuid!=""}[$__range]))'
    f" or on (run, instance, rank) max by (run, instance, rank, gpu) ({_LOCAL_RANKS})"
    " * on (instance, gpu) group_left (uuid) topk by (instance, gpu) (1, max by (instance, gpu, uuid) (gpu_up * 0 + 1)))"
)
"""PromQL for the GPUs of each rank, by run, node, rank, GPU index and UUID.

The GPUs are those that the rank last reported in the time range, otherwise the GPU with the index of its local rank. The last samples are
used because the driver lists no processes of a lost GPU: the current samples of its rank have no GPU.
"""
_LOST_GPUS = (
    f"{_GPUS_OF_RANKS} and on (uuid) max by (uuid) (gpu_up) == 0"
    " and on (run, instance, rank) training_process_up{@run} == 1"
)
"""PromQL for the lost GPUs of live ranks."""
_LOST_GPUS_WITH_XID = f"({_LOST_GPUS}) * on (uuid) group_left (xid) ({LAST_XID_BY_UUID}) or on (run, instance, rank) ({_LOST_GPUS})"
"""PromQL for the lost GPUs of live ranks, with their last Xid as the label `xid` if it is recent."""
_THROTTLED_GPUS = (
    f"{_GPUS_OF_RANKS} and on (uuid) max by (uuid) ({THROTTLED_RATIO_FAMILY}) > {MAX_THROTTLED_RATIO}"
)
"""PromQL for the GPUs of ranks that are throttled for more than `MAX_THROTTLED_RATIO` of the time."""
_ODD_RANK_BY_RUN = (
    "max by (run, instance, rank, function, location) (training_hang_info{@run}"
    f" and on (cluster, run, {HANG_LABELS}) {ODD_GROUP_SIZE} == 1)"
)
"""PromQL for the rank that causes a hang, if it is a single rank."""
_SLOWEST_RANK_BY_RUN = (
    "bottomk by (run) (1, max by (run, instance, rank) (run:training_slow_rank:ratio{@run}))"
)
"""PromQL for the slowest rank of each run that a slow rank holds up, relative to the fastest rank of its pipeline stage."""
_ALL_WAIT_FOR_DATA = f"max by (run) (run:training_waiting_for_data:min2m{{@run}}) > {MAX_DATA_WAIT_RATIO}"
"""PromQL with a value for each run of which all ranks wait for data: no rank is then the cause."""
_DATA_WAIT_RANK_BY_RUN = (
    "topk by (run) (1, max by (run, instance, rank) (run:training_data_wait_rank:ratio2m{@run}))"
)
"""PromQL for the rank of each run that waits longest for data, over two minutes."""
_RECENT_EXITS = (
    "(max by (run, instance, rank, reason) (training_rank_last_exit_timestamp_seconds{@run}) > time() - 3600)"
)
"""PromQL for the last failed exit of each rank, if it was within the last hour, in Unix seconds, with the reason."""
_EXITS_OF_LAST_FAILURE = f"({_RECENT_EXITS} >= on (run) group_left () (max by (run) ({_RECENT_EXITS}) - {FOLLOWING_EXITS_SECONDS}))"
"""PromQL for the recent exits at most `FOLLOWING_EXITS_SECONDS` before the last exit of the run."""
_RECORDED_FIRST_EXITS = (
    "(max by (run, instance, rank, reason) (run:training_first_exit:timestamp_seconds{@run}"
    " or run:training_exit_before_restart:timestamp_seconds{@run}) > time() - 3600)"
)
_FIRST_EXITS = (
    f"(topk by (run) (1, {_RECORDED_FIRST_EXITS}) or on (run) bottomk by (run) (1, {_EXITS_OF_LAST_FAILURE}))"
)
"""PromQL for the first exit of the last failure of each run, if it was within the last hour, in Unix seconds.

The exit is the recorded one, as on *Fleet*. Before the evaluation of the rules, it is the earliest of `_EXITS_OF_LAST_FAILURE`.
"""


def _with_reason(ranks: str, reason: str, label: str = "", pattern: str = "(.+)") -> str:
    """Return PromQL that adds the label `reason`; `$1` in the reason is the first group of *pattern* in the value of *label*."""
    return f'label_replace({ranks}, "reason", "{reason}", "{label}", "{pattern if label else ""}")'


_RANK_WITH_LOST_GPU = _with_reason(
    # `label_replace` keeps the first reason if the label `xid` is empty.
    _with_reason(f"topk by (run) (1, {_LOST_GPUS_WITH_XID})", "GPU lost"),
    "GPU lost, Xid $1",
    "xid",
)
_ODD_RANK_WITH_LINE = (
    f'label_join(topk by (run) (1, {_ODD_RANK_BY_RUN}), "reason", " ", "function", "location")'
)
_RANK_IN_ODD_PHASE = _with_reason(
    # `topk` selects one rank: without stale markers, as after a remote write, the former rank keeps a sample for five minutes.
    "topk by (run) (1, max by (run, instance, rank, phase) (run:training_odd_phase:info{@run}))",
    "phase $1",
    "phase",
)
_SLOWEST_RANK_WITH_THROTTLED_GPU = _with_reason(
    f"{_SLOWEST_RANK_BY_RUN} and on (run, instance, rank) ({_THROTTLED_GPUS})", "GPU throttled"
)
_FIRST_EXITED_RANK = _with_reason(_FIRST_EXITS, "$1", "reason", EXIT_REASON_PATTERN)
_RANK_CANDIDATES = (
    as_cause(_RANK_WITH_LOST_GPU, "standstill"),
    as_cause(_ODD_RANK_WITH_LINE, "standstill"),
    as_cause(_RANK_IN_ODD_PHASE, "standstill"),
    as_cause(_SLOWEST_RANK_WITH_THROTTLED_GPU, "slowest_rank"),
    as_cause(_SLOWEST_RANK_BY_RUN, "slowest_rank"),
    as_cause(_with_reason(_ALL_WAIT_FOR_DATA, "all ranks wait"), "data_stall"),
    as_cause(_DATA_WAIT_RANK_BY_RUN, "data_stall"),
    as_cause(_FIRST_EXITED_RANK, "failed"),
)
"""PromQL for the ranks that may explain a loss, with the cause that they explain and the reason. For each cause of a run, the first counts."""
_RANK_BY_CAUSE = (
    f"max by (run, cause, instance, rank, reason) ({' or on (run, cause) '.join(_RANK_CANDIDATES)})"
)
"""PromQL for the rank that explains each loss, with the reason, without a GPU."""
RANK_BY_LOSS = (
    f"0 * ({_RANK_BY_CAUSE} + on (run, instance, rank) group_left (gpu)"
    f" 0 * topk by (run, instance, rank) (1, {_GPUS_OF_RANKS})"
    f" or on (run, cause) {_RANK_BY_CAUSE}) + 1"
)
"""PromQL for a series of value 1 for each loss with a rank or a reason: run, cause, node and rank, and the GPU and reason if known.

    standstill    the rank with a lost GPU, otherwise the rank that causes a hang, otherwise the rank for which all others wait
    slowest_rank  the slowest rank relative to the fastest rank of its pipeline stage
    data_stall    the rank with the most time in `data_loading`; no rank if all ranks wait
    failed        the rank that exited first
    other causes  none
"""

# Amount and start of a loss ----------------------------------------------------------------------------------

_ONSET_SHARE = 0.05
"""Share of the time above which a loss has begun."""


_LAST_TIME_BEFORE_ONSET = (
    f"max_over_time((time() * ({LOST_SHARE_NOW_BY_CAUSE} <= bool {_ONSET_SHARE}))[$__range:$__interval])"
)
"""PromQL for the last time in the range at which the share of each cause was at most `_ONSET_SHARE`; 0 if it was always above."""


def _start_in_range(start: str, cause: str) -> str:
    """Return PromQL for the start of a cause in each run, with the label `cause`; 0 if it lies before the time range."""
    return as_cause(f"({start} * ({start} > bool time() - $__range_s))", cause)


_FAULTS = (
    f"({as_cause('max by (run) (run:training_slow_rank:ratio{@run})', 'slowest_rank')}"
    f" or {as_cause(f'max by (run) (run:training_waiting_for_data:max2m{{@run}}) > {MAX_DATA_WAIT_RATIO}', 'data_stall')}"
    f" or {as_cause(f'max by (run) ({_LIVE_RUNS})', 'nonfinite_loss')})"
)
"""PromQL with a value for each loss that is a fault, however small: a slow rank, a wait for data, a NaN loss."""
_START_OF_LOSS = (
    f"({as_cause(LAST_PROGRESS_TIME_BY_RUN, 'standstill')}"
    f" or {_start_in_range('min by (run) (run:training_slow_start:timestamp_seconds{@run})', 'slowest_rank')}"
    f" or {_start_in_range('min by (run) (run:training_data_wait_start:timestamp_seconds{@run})', 'data_stall')}"
    f" or {_start_in_range('min by (run) (run:training_nonfinite_start:timestamp_seconds{@run})', 'nonfinite_loss')}"
    f" or {_LAST_TIME_BEFORE_ONSET})"
    f" and on (run, cause) ({LOST_SHARE_NOW_BY_CAUSE} >= {MIN_LOSS_SHARE} or {LOST_SHARE_NOW_BY_CAUSE} > {MIN_DISPLAYED_SHARE} and on (run, cause) {_FAULTS})"
)
"""PromQL for the start of each loss that is a fault or is at least `MIN_LOSS_SHARE`, in Unix seconds. Other losses have no start.

    standstill      the last progress
    slowest_rank    the recorded start of the slowness, or of the throttling that causes it
    data_stall      the recorded start of the wait for data
    nonfinite_loss  the recorded first sample with a NaN or infinite loss
    others          the last time in the range at which the share was small; 0 if the loss began before the range
"""

# Runs without a sample ---------------------------------------------------------------------------------------

_ACTIVE_STATES = "starting|running|stalled|hung|ending"
ACTIVE_RUNS = (
    f'(max by (run) (last_over_time(training_run_state{{@run, state=~"{_ACTIVE_STATES}"}}[1h]) == 1))'
)
"""PromQL with the value 1 for each run that has not ended, by its last state within an hour."""
ENDED_RUNS = (
    '(max by (run) (last_over_time(training_run_state{@run, state=~"stopped|finished|failed|lost"}[$__range]) == 1)'
    f" unless on (run) {ACTIVE_RUNS})"
)
"""PromQL with the value 1 for each run whose last state in the time range is an end, also after the exporter has dropped its series.

A run that was active again within the last hour has not ended.
"""
UNKNOWN_RUNS = f"({ACTIVE_RUNS} unless on (run) training_run_state{{@run}})"
"""PromQL for the runs that were active within the last hour and that no exporter reports now."""
_PARTLY_UNKNOWN_RUNS = (
    "(max by (run) (training_world_size{@run})"
    f" > count by (run) (group by (run, rank) (training_process_up{{@run}})) and on (run) {_LIVE_RUNS})"
)
"""PromQL for the live runs of which at least one rank has a sample, but fewer ranks than the world size."""
INCOMPLETE_RUNS = f"({UNKNOWN_RUNS} or on (run) {_PARTLY_UNKNOWN_RUNS})"
"""PromQL with a value for each unknown or partly unknown run: the cost and the power of the run are absent or too small."""
_SILENT_NODE_BY_RUN = (
    "(topk by (run) (1, max by (run, instance) (last_over_time(instance:training_last_sample:timestamp_seconds{@run}[1h]))"
    " unless on (run, instance) training_process_up{@run})"
    f" and on (run) {INCOMPLETE_RUNS})"
)
"""PromQL for one node of each incomplete run: among the nodes without current samples, the node with the latest sample.

The value is the time of the last sample.
"""
UNKNOWN_LOSSES = (
    f"({as_cause(f'({_SILENT_NODE_BY_RUN} and on (run) {UNKNOWN_RUNS})', 'no_news')}"
    f" or {as_cause(f'({_SILENT_NODE_BY_RUN} unless on (run) {UNKNOWN_RUNS})', 'partly_unknown')})"
)
"""PromQL for the losses of incomplete runs, as the causes `no_news` and `partly_unknown`, with a node without samples.

The value is the time of the last sample of this node.
"""
NO_COST = (
    "0 * sum by (currency) (training_cost_total{@run}"
    f" or last_over_time(training_cost_total{{@run}}[$__range]) and on (run) {ENDED_RUNS}) unless on () {INCOMPLETE_RUNS}"
)
"""PromQL for a cost per hour of 0 by currency, as the fallback of a sum without active or stopped runs.

Without a value if the cost of a run without a sample is unknown.
"""
_RUNS_WITH_STALE_COST = (
    "(max by (run) (last_over_time(run:training_cost:rate5m{@run}[5m])) unless on (run) run:training_cost:rate5m{@run}"
    ' unless on (run) max by (run) (training_run_state{@run, state=~"stopped|finished|failed|lost"}) == 1)'
)
"""PromQL for the runs that have not ended, have no current cost, and had one within five minutes: a total without them is too small."""
_RANK_COUNT_BY_RUN = (
    "(max by (run) (last_over_time(training_world_size{@run}[5m]))"
    " or on (run) 0 * max by (run) (last_over_time(training_run_state{@run}[5m])) + 1)"
)
"""PromQL for the number of ranks of each run. A run without a reported world size counts as one rank."""
TOO_MUCH_STALE_COST = (
    f"sum({_RANK_COUNT_BY_RUN} and on (run) {_RUNS_WITH_STALE_COST}) / sum({_RANK_COUNT_BY_RUN}) > 0.05"
)
"""PromQL with a value while the cost of more than 5 % of the ranks is unknown, as in the rules: a smaller total would look like a change."""
_COST_PER_HOUR_WHILE_KNOWN = (
    "3600 * max by (run, currency) (max_over_time(run:training_cost:rate5m{@run}[1h]))"
)
"""PromQL for the highest cost per hour of each run in the last hour, by run and currency: the cost while all ranks were known."""
USUAL_COST_PER_HOUR_BY_RUN = (
    "3600 * max by (run, currency) (quantile_over_time(0.5, run:training_cost:rate5m{@run}[1h]))"
)
"""PromQL for the median cost per hour of each run in the last hour, by run and currency, because a run that has ended has no current cost."""
_FAILED_RUNS = '(max by (run) (training_run_state{@run, state=~"failed|lost"}) == 1)'
"""PromQL with the value 1 for each run that failed or is lost, until it restarts or its exporter drops it."""
STOPPED_RUN_CAUSES = (
    f"({as_cause(f'0 * {_FAILED_RUNS}', 'failed')} or {as_cause(f'0 * ({ENDING_RUNS})', 'ending')})"
)
"""PromQL with the value 0 for each run whose ranks have ended without a result, as the causes `failed` and `ending`."""

# Amounts of the losses ---------------------------------------------------------------------------------------

LOST_SHARE_NOW_WITH_STOPPED_RUNS = f"({LOST_SHARE_NOW_BY_CAUSE} or {STOPPED_RUN_CAUSES} + 1)"
"""PromQL for the share of the time that each run loses now, by cause. A stopped run loses all of it, with a cause of `STOPPED_RUN_CAUSES`."""
LOST_SHARE_NOW_BY_RUN = (
    f"(max by (run) ({STOPPED_RUN_CAUSES} + 1) or on (run) {lost_share_by_run('@run')} and on (run) {_LIVE_RUNS}"
    f" or on (run) 0 * {_LIVE_RUNS})"
)
"""PromQL for the share of the time that each live or stopped run loses now, over all causes and at most 1; 0 for a run without a loss."""
_GPU_WEIGHT_BY_RUN = (
    "(max by (run) (last_over_time(run:training_gpus:count{@run}[5m])) > 0"
    f" or on (run) {LOST_SHARE_NOW_BY_RUN} * 0 + 1)"
)
"""PromQL for the weight of each live or stopped run in a mean: its number of GPUs, and 1 for a run without a GPU."""
LOST_GPU_SHARE_NOW = f"sum({LOST_SHARE_NOW_BY_RUN} * on (run) {_GPU_WEIGHT_BY_RUN}) / sum({_GPU_WEIGHT_BY_RUN} and on (run) {LOST_SHARE_NOW_BY_RUN})"
"""PromQL for the share of the GPU time that all live and stopped runs together lose now."""
LOST_COST_PER_HOUR_BY_RUN = f"({COST_PER_HOUR_BY_RUN} * on (run) group_left () {LOST_SHARE_NOW_BY_RUN})"
"""PromQL for the cost per hour of the time that each live or stopped run loses now, by run and currency."""
_COST_PER_HOUR_BY_CURRENCY = f"sum by (currency) ({COST_PER_HOUR_BY_RUN})"
LOST_COST_PER_HOUR_BY_CURRENCY = f"sum by (currency) ({LOST_COST_PER_HOUR_BY_RUN})"
"""PromQL for the cost per hour of the time that all live and stopped runs together lose now, by currency."""
LOST_COST_SHARE_NOW = (
    f"(sum({LOST_COST_PER_HOUR_BY_CURRENCY} or 0 * {_COST_PER_HOUR_BY_CURRENCY}) / (sum({_COST_PER_HOUR_BY_CURRENCY}) > 0)"
    f" and on () count({_COST_PER_HOUR_BY_CURRENCY}) == 1)"
)
"""PromQL for the share of the cost per hour that all live and stopped runs together lose now.

The result is absent if no price is known or if there are several currencies.
"""
LOST_COST_PER_HOUR_BY_CAUSE = (
    f"({LOST_SHARE_NOW_WITH_STOPPED_RUNS} * on (run) group_left (currency) ({COST_PER_HOUR_BY_RUN}) > 0)"
)
"""PromQL for the cost per hour of each loss, by run, cause and currency: the cost per hour of the run times the lost share."""
_COST_WITHOUT_KNOWN_LOSSES = (
    f"({_COST_PER_HOUR_WHILE_KNOWN} - on (run, currency) sum by (run, currency) ({LOST_COST_PER_HOUR_BY_CAUSE})"
    f" or {_COST_PER_HOUR_WHILE_KNOWN})"
)
"""PromQL for the largest possible unknown cost per hour of each run, by run and currency: the cost while known, minus the known losses."""
_UNSEEN_SHARE = (
    "(1 - count by (run) (group by (run, rank) (training_process_up{@run}))"
    " / on (run) max by (run) (training_world_size{@run}))"
)
"""PromQL for the share of the ranks of a run that have no sample."""
UNKNOWN_COST = (
    f"({_COST_WITHOUT_KNOWN_LOSSES} * on (run) group_left (cause) {as_cause(f'(0 * {UNKNOWN_RUNS} + 1)', 'no_news')}"
    f" or {_COST_PER_HOUR_WHILE_KNOWN} * on (run) group_left (cause)"
    f" {as_cause(f'({_UNSEEN_SHARE} and on (run) {_PARTLY_UNKNOWN_RUNS})', 'partly_unknown')})"
)
"""PromQL for the largest possible cost per hour of the losses with an unknown cost, by run, currency and cause.

    no_news         the highest cost of the last hour minus the known losses
    partly_unknown  the highest cost of the last hour times the share of the ranks without a sample
"""
RUNS_WITHOUT_DRIVER = (
    "(group by (run) (training_process_up{@run} and on (cluster, instance)"
    " (max by (cluster, instance) (gpu_nvml_up{@cluster}) == 0"
    " and on (cluster, instance) max by (cluster, instance) (gpu_devices_expected{@cluster}) > 0)))"
)
"""PromQL with a value for each run with a rank on a node whose GPU driver does not respond: the energy of its GPUs is not read."""
COMPLETE_RUN_POWER = f"({blank_if_incomplete(RUN_POWER_5M, 'run')} unless on (run) {RUNS_WITHOUT_DRIVER})"
"""PromQL for the power of each run over five minutes in watts, without a value while a rank has no sample or a driver does not respond."""
_HELD_BY_ANY_RUN = HELD_GPUS_TEMPLATE.format(selector="@cluster")
GPUS_OF_RUNS_NOW = (
    f"({HELD_GPUS} or group by (instance, uuid, run) (last_over_time(run_gpu:training_gpu_held:group{{@run}}[1h]))"
    f" and on (run) {STOPPED_RUN_CAUSES} unless on (uuid) {_HELD_BY_ANY_RUN})"
)
"""PromQL for a series of value 1 for each GPU that a selected run holds now, by node, UUID and run.

A stopped run holds the GPUs that it held before, until another run holds them.
"""
_POWER_BY_UUID = "max by (uuid) (gpu_power_watts{@cluster})"
_POWER_OF_HELD_GPUS = (
    f"({GPUS_OF_RUNS_NOW} * on (uuid) group_left ()"
    f" ({_POWER_BY_UUID} / on (uuid) count by (uuid) ({_HELD_BY_ANY_RUN}) or on (uuid) {_POWER_BY_UUID}))"
)
"""PromQL for the power of each GPU of the selected runs at the last sample, by node, UUID and run, divided by the runs that share the GPU."""
GPU_WATTS_BY_RUN = f"sum by (run) ({_POWER_OF_HELD_GPUS})"
"""PromQL for the power of the GPUs of each run at the last sample in watts. A GPU without a sample does not count."""
READ_GPU_COUNT_BY_RUN = f"count by (run) ({_POWER_OF_HELD_GPUS})"
"""PromQL for the number of GPUs of each run whose power is known now."""
_GPUS_OF_ACTIVE_RUNS = (
    f"(max by (run) (max_over_time(run:training_gpus:count{{@run}}[15m])) and on (run) {ACTIVE_RUNS})"
)
"""PromQL for the number of GPUs of each active run: the largest number of the last 15 minutes."""
UNREAD_GPU_COUNT_BY_RUN = f"({_GPUS_OF_ACTIVE_RUNS} - on (run) ({READ_GPU_COUNT_BY_RUN} or on (run) 0 * {_GPUS_OF_ACTIVE_RUNS}) > 0)"
"""PromQL for the number of GPUs of each run without a current power: a GPU is lost, or its driver or its exporter does not respond."""
GPU_COUNT_BY_RUN = (
    f"(max by (run) (max_over_time(run:training_gpus:count{{@run}}[1h])) and on (run) {INCOMPLETE_RUNS}"
    f" or on (run) {gpus_by_run('@run')} or on (run) max by (run) (last_over_time(run:training_gpus:count{{@run}}[5m])))"
)
"""PromQL for the number of GPUs of each run: of an incomplete run, the largest number of the last hour; of others, the last known number."""
NO_LOSS = (
    f"({as_cause('0 * max(run:training_live:info{@run})', 'nothing')}"
    f" or on () {as_cause(f'0 * max({ENDED_RUNS})', 'ended')})"
)
"""PromQL for the only row of a table without a loss: active runs lose nothing, or else all runs have ended.

The result is absent if all runs are unknown.
"""
_END_OF_STOPPED_RUN = (
    "(max by (run) (run:training_first_exit:timestamp_seconds{@run})"
    " or on (run) max by (run) (training_run_state_since_timestamp_seconds{@run})"
    f" or on (run) {LAST_PROGRESS_TIME_BY_RUN})"
)
"""PromQL for the end of each stopped run in Unix seconds: its first exit, else the start of its state as on *Fleet*, else its last step."""

# Start, total and verdict of a loss -------------------------------------------------------------------------

_START_OF_NONFINITE_WORK = (
    "((max by (run) (max_over_time((max by (run) (training_checkpoint_last_success_timestamp_seconds{@run})"
    ' unless on (run) max by (run) (training_nonfinite_total{@run, kind="loss"}) > 0)[$__range:$__interval]))'
    " or on (run) max by (run) (run:training_nonfinite_start:timestamp_seconds{@run}))"
    " and on (run) max by (run) (run:training_nonfinite_start:timestamp_seconds{@run}))"
)
"""PromQL for the time of the last checkpoint before the first NaN loss of each run, else of the first NaN loss, in Unix seconds.

Later checkpoints may contain the NaN. The result is absent from 15 minutes after the last NaN loss. An infinite loss counts as a NaN loss.
"""
_UNSAVED_HOURS = (
    "(max by (run) (label_replace("
    "clamp_min(max by (run) (training_uncommitted_seconds{@run})"
    " - on (run) (max by (run) (run:training_step_overdue:seconds{@run}) > 0), 0)"
    ' or on (run) max by (run) (training_uncommitted_seconds{@run}), "since", "save", "", "")'
    f' or label_replace(time() - {_START_OF_NONFINITE_WORK} and on (run) {_LIVE_RUNS}, "since", "NaN", "", "")) / 3600)'
)
"""PromQL for the hours of work of each run that no usable checkpoint contains: the larger of two times.

- the time since the last checkpoint, without the time since an overdue step, which is no work
- for a live run with NaN losses, the time since `_START_OF_NONFINITE_WORK`

The label `since` keeps both times apart; without it, `or` would drop the second.
"""
COST_OF_WORK_AT_RISK = (
    f"({COST_PER_HOUR_BY_RUN} * on (run) group_left () {_UNSAVED_HOURS} and on (run) {_LIVE_RUNS})"
)
"""PromQL for the cost of the work of each live run that a crash would lose, by run and currency."""
_STARTS_OF_STANDSTILLS = (
    f"({as_cause(LAST_PROGRESS_TIME_BY_RUN, 'standstill')}"
    f" or {STOPPED_RUN_CAUSES} + on (run) group_left () {_END_OF_STOPPED_RUN})"
)
LOST_COST_SINCE_START = (
    f"({LOST_COST_PER_HOUR_BY_CAUSE} * on (run, cause) group_left ()"
    f" ((time() - {_STARTS_OF_STANDSTILLS}) / 3600 + on (run) group_left () ({_UNSAVED_HOURS} and on (run) {_FAILED_RUNS})"
    f" or (time() - {_STARTS_OF_STANDSTILLS}) / 3600))"
)
"""PromQL for the cost of each standstill and of each stopped run since its start, by run, cause and currency.

The cost of a failed run includes the work since its last checkpoint, which is lost. Other causes are absent, because their share of the time
varies.
"""
START_BY_LOSS = (
    f"({_START_OF_LOSS}) or max by (run, cause) ({UNKNOWN_LOSSES})"
    f" or {STOPPED_RUN_CAUSES} + on (run) group_left () {_END_OF_STOPPED_RUN}"
)
"""PromQL for the start of each known loss, the last sample of an unknown loss, and the end of a stopped run, in Unix seconds.

0 if the loss began before the time range.
"""
_KNOWN_LOSSES = f"{LOST_SHARE_NOW_BY_CAUSE} > {MIN_DISPLAYED_SHARE}"
_PLANNED_CAUSES = f"({as_cause('vector(1)', 'checkpoint_save')} or {as_cause('vector(1)', 'validation')})"
"""PromQL for a series for each cause that the user has planned, as the operand of `unless on (cause)`."""
_VERDICT_BY_SHARE = (
    f"(({Verdict.LOSES_TIME} * ({_KNOWN_LOSSES} >= bool {MIN_LOSS_SHARE})"
    f" + {Verdict.LOSES_MUCH_TIME - Verdict.LOSES_TIME} * ({_KNOWN_LOSSES} >= bool {MIN_LARGE_LOSS_SHARE}))"
    f" unless on (cause) ({START_CAUSES} or {_PLANNED_CAUSES})"
    f" or {Verdict.NO_PROBLEM} * ({_KNOWN_LOSSES}))"
)
"""PromQL for the verdict of each known loss, by its share. The start, saves and validation are no problem: they are planned.

Each comparison with `bool` is 1 if it is true, otherwise 0, so that the sum is `LOSES_MUCH_TIME`, `LOSES_TIME` or 0, which is `NO_PROBLEM`.
"""
_VERDICT_OF_LARGEST_LOSS = (
    f"(0 * topk by (run) (1, {_KNOWN_LOSSES} unless on (cause) ({START_CAUSES} or {_PLANNED_CAUSES}))"
    f" + on (run) group_left () ({verdict_by_run('@run')} == {Verdict.LOSES_TIME} or {verdict_by_run('@run')} == {Verdict.LOSES_MUCH_TIME}))"
)
"""PromQL for the largest loss of each run that loses time, with the verdict of the run.

Several losses together may give the run a verdict that none of them has alone.
"""
VERDICT_BY_LOSS = (
    f"({_VERDICT_BY_SHARE} and on (cause) {as_cause('vector(1)', 'standstill')}) * 0 + {Verdict.NO_PROGRESS}"
    f" or {_VERDICT_OF_LARGEST_LOSS}"
    f" or clamp_min({_VERDICT_BY_SHARE} and on (run, cause) {_FAULTS}, {Verdict.LOSES_A_LITTLE}) or {_VERDICT_BY_SHARE}"
    f" or 0 * max by (run, cause) ({UNKNOWN_LOSSES}) + on (cause) group_left ()"
    f" ({as_cause(f'vector({Verdict.UNKNOWN})', 'no_news')} or {as_cause(f'vector({Verdict.PARTLY_UNKNOWN})', 'partly_unknown')})"
    f" or {STOPPED_RUN_CAUSES} + on (run) group_left () ({Verdict.NO_PROGRESS} * {_FAILED_RUNS} or {Verdict.ENDING} * ({ENDING_RUNS}))"
)
"""PromQL for the verdict of each loss, by run and cause. The share decides, not the cost: a small loss of an expensive run is no problem.

The first of these cases applies:

    a standstill                  `NO_PROGRESS`
    the largest loss of a run     the verdict of the run, if it is `LOSES_TIME` or `LOSES_MUCH_TIME`
    a fault, such as a slow rank  the verdict by its share, at least `LOSES_A_LITTLE`
    any other known loss          the verdict by its share
    an unknown loss               `UNKNOWN` or `PARTLY_UNKNOWN`
    a stopped run                 `NO_PROGRESS` if it failed or is lost, `ENDING` if its outcome is not decided
"""
VERDICT_BY_RUN = verdict_by_run("@run")
"""PromQL for the `Verdict` of each selected run, as on *Fleet*."""
VERDICTS_BY_TEXT = {
    text: [verdict for verdict, (other, _) in VERDICT_TEXTS.items() if other == text]
    for text, _ in VERDICT_TEXTS.values()
}
"""Verdicts by their text, the most urgent first."""
RUN_COUNTS_BY_VERDICT = {
    text: f"count({' or '.join(f'{VERDICT_BY_RUN} == {verdict}' for verdict in verdicts)})"
    for text, verdicts in VERDICTS_BY_TEXT.items()
}
"""PromQL for the number of runs by the text of their verdict, as on *Fleet*; without a value instead of 0."""

_CAUSES = {
    "progress": ("work", GOOD),
    "standstill": ("no step", BAD),
    "slowest_rank": ("slowest rank", NEUTRAL),
    "nonfinite_loss": ("loss NaN or infinite", BAD),
    "data_stall": ("waiting for data", NEUTRAL),
    "hang": ("hang", BAD),
    "lost_progress": ("work lost in a crash", BAD),
    "downtime": ("down between attempts", BAD),
    "checkpoint_save": ("saving checkpoints", NEUTRAL),
    "checkpoint_load": ("loading a checkpoint", NEUTRAL),
    "validation": ("validation", NEUTRAL),
    "init": ("start", NEUTRAL),
    "compile": ("compilation", NEUTRAL),
    "other": ("other", NEUTRAL),
    "unattributed": ("phase unknown", NEUTRAL),
    "nothing": ("nothing is lost now", GOOD),
    "failed": ("no rank runs", BAD),
    "ending": ("all ranks have ended", WARNING),
    "ended": ("the run has ended", NEUTRAL),
    "unknown": (NO_SAMPLE_OF_RUN, WARNING),
    "no_news": ("unknown: no sample", WARNING),
    "partly_unknown": ("unknown: some ranks", WARNING),
}
"""Texts and colors of the causes, and of rows without a loss. Waits are neutral, because their share decides whether they are bad."""
CAUSE_NAMES = {cause: text for cause, (text, _) in _CAUSES.items()}
"""Texts of the causes."""
CAUSE_TEXTS = value_mappings(_CAUSES)
"""Value mappings from causes to texts."""
