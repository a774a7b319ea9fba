"""PromQL for the time, energy and cost of runs in the time range, by cause. The causes add up to the whole.

    time   = progress + slowest_rank + causes of badput
    energy = progress + slowest_rank + causes of wasted energy

Progress is work, saved or not yet saved, without the waits for the slowest rank. The ledger on the node of rank 0 knows the
outcome of the work; the shares of its energy are applied to the energy of all nodes of the run. Cost is divided by time, so that the costs of
the causes add up to the cost of the run.

Before the ledger decides that a run hangs, a standstill counts as a hang from the overdue step on. Afterwards only the hang in the
ledger counts.
"""

from __future__ import annotations

from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import value_mappings
from dashboards.queries import STAGE_OF_RANK

_BEFORE_RANGE = "last_over_time({selection}[6h] offset $__range)"
"""Template of the values at the start of the time range, for instant queries.

Looks back six hours, so that an outage of one exporter over the start of the range does not count the whole total of its node.
"""
_BEFORE_PLOT = (
    "(last_over_time({selection}[6h] @ start()) or last_over_time({selection}[$__range] @ start()))"
)
"""Template of the values at the start of the time range, for range queries, also for runs that had ended before."""


def increase_in_range(
    selection: str, by: str, aggregation: str = "sum", condition: str = "", before: str = _BEFORE_RANGE
) -> str:
    """Return PromQL for the increase of counters in the time range.

    The last values count of a run that ended or whose exporter is down; a counter that starts in the time range starts at 0.
    """
    current = f"last_over_time({selection}[$__range])"
    previous = before.format(selection=selection)
    return f"{aggregation} by ({by}) (clamp_min({current} - ({previous} or 0 * {current}), 0){condition})"


def _as_cause(expression: str, cause: str) -> str:
    return f'label_replace({expression}, "cause", "{cause}", "", "")'


_ON_NODE_OF_LEDGER = " and on (instance, run) last_over_time(training_wall_seconds_total{@run}[$__range])"
_OVERDUE_SECONDS = (
    "(clamp_max(max by (run) (run:training_step_overdue:seconds{@run}) > 0, $__range_s)"
    ' and on (run) max by (run) (training_run_state{@run, state="running"}) == 1'
    " and on (run) time() - max by (run) (training_last_progress_timestamp_seconds{@run}) > 30)"
)
"""PromQL for the time since the last step of a run that is overdue; the conditions end with the standstill, up to 30 s before the rule."""

WALL_SECONDS = increase_in_range("training_wall_seconds_total{@run}", "run", "max")
_BOOKED_BADPUT = increase_in_range("training_badput_seconds_total{@run}", "run, cause", "max")
_OVERDUE = _as_cause(_OVERDUE_SECONDS, "hang")
_BADPUT = f"({_BOOKED_BADPUT} + on (run, cause) {_OVERDUE} or {_BOOKED_BADPUT} or {_OVERDUE})"
"""PromQL for the badput of each run by cause."""
_WORK = f"clamp_min(({WALL_SECONDS}) - sum by (run) ({_BADPUT}), 0)"
_COMPUTE_BY_STAGE = f"training_rank_compute_seconds{{@run}} * {STAGE_OF_RANK}"
_WAIT_PER_STEP = f"avg by (run) (max by (run, label_stage) ({_COMPUTE_BY_STAGE}) - avg by (run, label_stage) ({_COMPUTE_BY_STAGE}))"
"""PromQL for the mean time for which the ranks of a pipeline stage wait for the slowest rank of the stage in a step."""
_STEPS = increase_in_range('training_steps_total{@run, mode="train"}', "run", "max")
_WAIT = (
    f"(avg_over_time(({_WAIT_PER_STEP})[$__range:$__interval]) * on (run) {_STEPS} < {_WORK} or 0 * {_WORK})"
)
TIME_BY_CAUSE = (
    f"({_BADPUT} or {_as_cause(_WAIT, 'slowest_rank')} or {_as_cause(f'({_WORK} - {_WAIT})', 'progress')})"
)
"""PromQL for the seconds of each run by cause."""


def _run_energy(before: str) -> str:
    return increase_in_range("training_energy_joules_total{@run}", "run", before=before)


def _wasted_energy(before: str) -> str:
    """Return PromQL for the wasted joules of each run by cause, over all nodes of the run."""
    accounted = increase_in_range(
        "training_energy_joules_total{@run}", "run", condition=_ON_NODE_OF_LEDGER, before=before
    )
    booked = increase_in_range(
        "training_wasted_energy_joules_total{@run}", "run, cause", condition=_ON_NODE_OF_LEDGER, before=before
    )
    scaled = f"({booked} * on (run) group_left () ({_run_energy(before)} / ({accounted} > 0)))"
    power = "sum by (run) (rate(training_energy_joules_total{@run}[$__rate_interval]))"
    overdue = _as_cause(f"({_OVERDUE_SECONDS} * on (run) {power})", "hang")
    return f"({scaled} + on (run, cause) {overdue} or {scaled} or {overdue})"


RUN_ENERGY = _run_energy(_BEFORE_RANGE)
_WASTED_ENERGY = _wasted_energy(_BEFORE_RANGE)
_WORK_ENERGY = f"clamp_min({RUN_ENERGY} - on (run) sum by (run) ({_WASTED_ENERGY}), 0)"
_WAIT_SHARE = f"({_WAIT} / ({_WORK} > 0) or 0 * {_WORK})"
ENERGY_BY_CAUSE = (
    f"(({_WASTED_ENERGY} or {_as_cause(f'({_WORK_ENERGY} * on (run) {_WAIT_SHARE})', 'slowest_rank')}"
    f" or {_as_cause(f'({_WORK_ENERGY} * on (run) (1 - {_WAIT_SHARE}))', 'progress')}) / 3600)"
)
"""PromQL for the watt-hours of each run by cause."""
WASTED_ENERGY_SINCE_START = f"sum by (cause) ({_wasted_energy(_BEFORE_PLOT)}) / 3600 > 0"
"""PromQL for the wasted watt-hours by cause, from the start of the time range to each point of a plot."""
_LOST_SECONDS = f"(sum by (run) ({_BADPUT}) + {_WAIT})"
LOST_SHARE_BY_RUN = f"clamp_max({_LOST_SECONDS} / ({WALL_SECONDS} > 0), 1)"
"""PromQL for the share of each run's time that was without progress."""
RUN_COST = increase_in_range("training_cost_total{@run}", "run, currency")
"""PromQL for the cost of each run."""
LOST_COST_BY_RUN = f"({RUN_COST} * on (run) group_left () {LOST_SHARE_BY_RUN})"
"""PromQL for the cost of each run's time without progress."""
COST_BY_CAUSE = f"({TIME_BY_CAUSE} / on (run) group_left () ({WALL_SECONDS} > 0) * on (run) group_left (currency) ({RUN_COST}))"
"""PromQL for the cost of each run by cause. The cost is divided in proportion to the time."""
PROGRESS_CAUSE = _as_cause("vector(1)", "progress")

NO_PROGRESS_SECONDS = 120
STANDSTILL = (
    f"(max by (run) (run:training_step_overdue:seconds{{@run}}) > 0 or on (run)"
    ' max by (run) (training_run_state{@run, state=~"stalled|hung"}) == 1 or on (run)'
    f" (time() - max by (run) (training_last_progress_timestamp_seconds{{@run}}) > {NO_PROGRESS_SECONDS}"
    ' and on (run) max by (run) (training_run_state{@run, state="running"}) == 1))'
)
"""PromQL with a value for each run whose step is overdue, or that has made no step for two minutes."""
COST_PER_HOUR = "3600 * max by (run, currency) (run:training_cost:rate5m{@run})"
"""PromQL for the cost per hour of each run, as on *Fleet*."""
_OBSERVED = "clamp_max(max by (run) (rate(training_wall_seconds_total{@run}[5m])) > 0, 1)"
_RECENT_BADPUT = (
    'max by (run, cause) (rate(training_badput_seconds_total{@run, cause!~"hang|lost_progress|downtime"}[5m]))'
    f" / on (run) group_left () {_OBSERVED}"
)
_STRAGGLER_WAIT = _as_cause("max by (run) (run:training_straggler_wait:ratio{@run})", "slowest_rank")
_RESTARTS = 'sum by (run) (max by (run, cause) (increase(training_badput_seconds_total{@run, cause=~"lost_progress|downtime"}[1h]))) / 3600'
_NONFINITE_STEPS = (
    'sum by (run) (max by (run, value) (increase(training_nonfinite_total{@run, kind="loss"}[5m])))'
    ' / on (run) (max by (run) (increase(training_steps_total{@run, mode="train"}[5m])) > 0)'
)
_NONFINITE_LOSS = _as_cause(f"clamp_max({_NONFINITE_STEPS}, 1)", "nonfinite_loss")
_ACTIVE = 'max by (run) (training_run_state{@run, state=~"starting|running|stalled|hung"}) == 1'
LOST_SHARE_NOW = (
    f"(({_as_cause(f'(0 * {STANDSTILL} + 1)', 'standstill')}"
    f" or ({_RECENT_BADPUT} or {_STRAGGLER_WAIT} or {_NONFINITE_LOSS})"
    f" unless on (run) {STANDSTILL} or {_as_cause(_RESTARTS, 'restarts')} unless on (run) {STANDSTILL}) and on (run) {_ACTIVE})"
)
"""PromQL for the share of the time that each active run loses now, by cause: a standstill loses all of the time.

The ledger books a hang and the loss of a crash at once, so that a rate over five minutes would exceed the loss: a hang is a
standstill, and restarts count over the last hour.
"""
_LOST_SHARE_OF_RUN = f"(clamp_max(sum by (run) ({LOST_SHARE_NOW}), 1) or on (run) 0 * ({_ACTIVE}))"
_GPUS_OF_RUN = (
    f"(max by (run) (run:training_gpus:count{{@run}}) > 0 or on (run) {_LOST_SHARE_OF_RUN} * 0 + 1)"
)
LOST_GPU_SHARE_NOW = f"sum({_LOST_SHARE_OF_RUN} * on (run) {_GPUS_OF_RUN}) / sum({_GPUS_OF_RUN} and on (run) {_LOST_SHARE_OF_RUN})"
"""PromQL for the share of the GPU time that all active runs lose now. A run without a GPU counts as one GPU."""
_RANKS_OF_STANDSTILL = (
    "training_rank_info{@run} * on (uuid) group_left () (max by (uuid) (gpu_up) == bool 0) > 0"
    " or training_hang_info{@run} and on (cluster, run, function, location, phase)"
    " run_group:training_hang_odd:count{@run} == 1"
)
_RANK_OF_LARGEST = "topk by (run) (1, max by (run, instance, rank) ({}))"
RANK_OF_LOSS = " or ".join(
    _as_cause(_RANK_OF_LARGEST.format(series), cause)
    for cause, series in (
        ("slowest_rank", "training_rank_compute_seconds{@run}"),
        ("data_stall", 'rate(training_phase_seconds_total{@run, phase="data_loading"}[5m])'),
        ("standstill", _RANKS_OF_STANDSTILL),
    )
)
"""PromQL for the rank that causes a loss: the slowest, the rank that waits longest for data, or the rank that holds up a hang."""
LOST_PER_HOUR_BY_CAUSE = f"({LOST_SHARE_NOW} * on (run) group_left (currency) ({COST_PER_HOUR}) > 0)"
"""PromQL for the cost per hour of the time that each run loses now, by cause."""
_SMALL_LOSS = 0.05
"""Share of the time up to which a loss has not begun."""


def _last_small(share: str) -> str:
    """Return PromQL for the last time in the time range at which a share was small; 0 if the share was never small."""
    return f"max_over_time((time() * ({share} <= bool {_SMALL_LOSS}))[$__range:$__interval])"


LOSS_SINCE = (
    f"({_as_cause('max by (run) (training_last_progress_timestamp_seconds{@run})', 'standstill')}"
    f" or {_as_cause('max by (run) (training_attempt_start_timestamp_seconds{@run})', 'restarts')}"
    f" or {_last_small(f'({_RECENT_BADPUT})')} or {_last_small(_STRAGGLER_WAIT)}"
    f" or {_last_small(_NONFINITE_LOSS)})"
    f" and on (run, cause) {LOST_SHARE_NOW} > {_SMALL_LOSS}"
)
"""PromQL for the start of each loss in Unix seconds; 0 for a loss that began before the time range."""

CAUSE_TEXTS = value_mappings(
    {
        "progress": ("progress", GOOD),
        "standstill": ("no step", BAD),
        "restarts": ("restarts in the last hour", BAD),
        "slowest_rank": ("waiting for the slowest rank", WARNING),
        "nonfinite_loss": ("loss was NaN or infinite", BAD),
        "data_stall": ("waiting for data", WARNING),
        "hang": ("hang", BAD),
        "lost_progress": ("work lost in a crash", BAD),
        "downtime": ("down between attempts", BAD),
        "checkpoint_save": ("saving checkpoints", NEUTRAL),
        "checkpoint_load": ("loading a checkpoint", NEUTRAL),
        "validation": ("validation", NEUTRAL),
        "init": ("start", NEUTRAL),
        "compile": ("compilation", NEUTRAL),
        "other": ("other, or not attributed", NEUTRAL),
        "nothing": ("nothing is lost now", GOOD),
        "ended": ("the run has ended", NEUTRAL),
        "unknown": ("unknown: no sample of this run", WARNING),
    }
)
"""Value mappings from causes to texts."""
