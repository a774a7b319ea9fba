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

from dashboards.queries import LAST_PROGRESS_TIME_BY_RUN, STAGE_OF_RANK

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


def as_cause(expression: str, cause: str) -> str:
    """Return PromQL that adds the label `cause`."""
    return f'label_replace({expression}, "cause", "{cause}", "", "")'


_ON_NODE_OF_LEDGER = " and on (instance, run) last_over_time(training_wall_seconds_total{@run}[$__range])"
_OVERDUE_SECONDS = (
    "(clamp_max(max by (run) (run:training_step_overdue:seconds{@run}) > 0, $__range_s)"
    ' and on (run) max by (run) (training_run_state{@run, state="running"}) == 1'
    f" and on (run) time() - {LAST_PROGRESS_TIME_BY_RUN} > 30)"
)
"""PromQL for the time since the last step of a run that is overdue; the conditions end with the standstill, up to 30 s before the rule."""

RUN_POWER = "sum by (run) (rate(training_energy_joules_total{@run}[$__rate_interval]))"
"""PromQL for the power of each run over a rate interval; too low while an exporter of the run is down."""
RUN_POWER_5M = "clamp_min(sum by (run) (deriv(training_energy_joules_total{@run}[5m])), 0)"
"""PromQL for the power of each run over five minutes.

A slope, unlike a rate, is right for a run younger than five minutes. Five minutes are long enough for the energy of half a minute that
the exporter adds at once when the phase of a rank is known late.
"""
WALL_SECONDS_IN_RANGE = increase_in_range("training_wall_seconds_total{@run}", "run", "max")
_BOOKED_BADPUT = increase_in_range("training_badput_seconds_total{@run}", "run, cause", "max")
_OVERDUE_AS_HANG = as_cause(_OVERDUE_SECONDS, "hang")
_BADPUT = f"({_BOOKED_BADPUT} + on (run, cause) {_OVERDUE_AS_HANG} or {_BOOKED_BADPUT} or {_OVERDUE_AS_HANG})"
"""PromQL for the badput of each run by cause."""
_WORK = f"clamp_min(({WALL_SECONDS_IN_RANGE}) - sum by (run) ({_BADPUT}), 0)"
_COMPUTE_BY_STAGE = f"training_rank_compute_seconds{{@run}} * {STAGE_OF_RANK}"
_WAIT_PER_STEP = f"avg by (run) (max by (run, label_stage) ({_COMPUTE_BY_STAGE}) - avg by (run, label_stage) ({_COMPUTE_BY_STAGE}))"
"""PromQL for the mean time for which the ranks of a pipeline stage wait for the slowest rank of the stage in a step."""
_STEPS_IN_RANGE = increase_in_range('training_steps_total{@run, mode="train"}', "run", "max")
_WAIT = f"(avg_over_time(({_WAIT_PER_STEP})[$__range:$__interval]) * on (run) {_STEPS_IN_RANGE} < {_WORK} or 0 * {_WORK})"
TIME_BY_CAUSE = (
    f"({_BADPUT} or {as_cause(_WAIT, 'slowest_rank')} or {as_cause(f'({_WORK} - {_WAIT})', 'progress')})"
)
"""PromQL for the seconds of each run by cause."""
GPU_COUNT_IN_RANGE = f"(max by (run) (max_over_time(run:training_gpus:count{{@run}}[$__range])) or on (run) 0 * {WALL_SECONDS_IN_RANGE} + 1)"
"""PromQL for the GPUs of each run in the time range; a run without a GPU counts as one GPU."""
GPU_SECONDS_BY_CAUSE = f"({TIME_BY_CAUSE} * on (run) group_left () {GPU_COUNT_IN_RANGE})"
"""PromQL for the GPU seconds of each run by cause, so that a minute of a large run counts more than a minute of a small run."""


def _run_energy(before: str) -> str:
    return increase_in_range("training_energy_joules_total{@run}", "run", before=before)


def _wasted_energy(before: str) -> str:
    """Return PromQL for the wasted joules of each run by cause, over all nodes of the run."""
    accounted_energy = increase_in_range(
        "training_energy_joules_total{@run}", "run", condition=_ON_NODE_OF_LEDGER, before=before
    )
    booked_energy = increase_in_range(
        "training_wasted_energy_joules_total{@run}", "run, cause", condition=_ON_NODE_OF_LEDGER, before=before
    )
    scaled_energy = (
        f"({booked_energy} * on (run) group_left () ({_run_energy(before)} / ({accounted_energy} > 0)))"
    )
    overdue_energy = as_cause(f"({_OVERDUE_SECONDS} * on (run) {RUN_POWER_5M})", "hang")
    return f"({scaled_energy} + on (run, cause) {overdue_energy} or {scaled_energy} or {overdue_energy})"


def _work_energy(before: str) -> str:
    """Return PromQL for the joules of each run that no cause of badput wasted."""
    return f"clamp_min({_run_energy(before)} - on (run) sum by (run) ({_wasted_energy(before)}), 0)"


RUN_ENERGY = _run_energy(_BEFORE_RANGE)
_WASTED_ENERGY = _wasted_energy(_BEFORE_RANGE)
_WORK_ENERGY = _work_energy(_BEFORE_RANGE)
_WAIT_SHARE = f"({_WAIT} / ({_WORK} > 0) or 0 * {_WORK})"
ENERGY_BY_CAUSE = (
    f"(({_WASTED_ENERGY} or {as_cause(f'({_WORK_ENERGY} * on (run) {_WAIT_SHARE})', 'slowest_rank')}"
    f" or {as_cause(f'({_WORK_ENERGY} * on (run) (1 - {_WAIT_SHARE}))', 'progress')}) / 3600)"
)
"""PromQL for the watt-hours of each run by cause."""
_WAIT_SHARE_SINCE_START = (
    "avg_over_time((max by (run) (run:training_straggler_wait:ratio{@run}) and on () vector(time()) >= $__from / 1000)"
    "[$__range:$__interval])"
)
"""PromQL for the share of the work in which ranks wait for the slowest rank, from the start of the time range to each point of a plot.

The recorded share makes the subquery of each point fast.
"""
WASTED_ENERGY_SINCE_START = (
    f"sum by (cause) ({_wasted_energy(_BEFORE_PLOT)}"
    f" or {as_cause(f'{_work_energy(_BEFORE_PLOT)} * on (run) {_WAIT_SHARE_SINCE_START}', 'slowest_rank')}) / 3600 > 0"
)
"""PromQL for the wasted watt-hours by cause, from the start of the time range to each point of a plot."""
_LOST_SECONDS = f"(sum by (run) ({_BADPUT}) + {_WAIT})"
LOST_SHARE_BY_RUN = f"clamp_max({_LOST_SECONDS} / ({WALL_SECONDS_IN_RANGE} > 0), 1)"
"""PromQL for the share of each run's time that was without progress."""
START_CAUSES = f"({as_cause('vector(1)', 'init')} or {as_cause('vector(1)', 'compile')})"
_START_SECONDS = (
    f"(sum by (run) ({_BOOKED_BADPUT} and on (cause) {START_CAUSES}) or 0 * {WALL_SECONDS_IN_RANGE})"
)
SECONDS_AFTER_START = f"({WALL_SECONDS_IN_RANGE} - {_START_SECONDS} > 0)"
"""PromQL for the seconds of each run without start and compilation."""
LOST_SHARE_AFTER_START = f"clamp(({_LOST_SECONDS} - {_START_SECONDS}) / {SECONDS_AFTER_START}, 0, 1)"
"""PromQL for the share of each run's time that was without progress, without start and compilation, which every run has."""
RUN_COST = increase_in_range("training_cost_total{@run}", "run, currency")
"""PromQL for the cost of each run."""
LOST_COST_BY_RUN = f"({RUN_COST} * on (run) group_left () {LOST_SHARE_BY_RUN})"
"""PromQL for the cost of each run's time without progress."""
COST_BY_CAUSE = f"({TIME_BY_CAUSE} / on (run) group_left () ({WALL_SECONDS_IN_RANGE} > 0) * on (run) group_left (currency) ({RUN_COST}))"
"""PromQL for the cost of each run by cause. The cost is divided in proportion to the time."""
PROGRESS_CAUSE = as_cause("vector(1)", "progress")
