"""PromQL for the time, energy and cost of runs in the time range, by cause. The causes add up to the whole.

    time   = progress + slowest_rank + causes of badput
    energy = progress + slowest_rank + causes of wasted energy + unattributed

Progress is work, saved or not yet saved, without the time lost to the slowest rank. Unattributed is energy of unknown phases: the exporter
has not read the phases of a rank in time, or no rank of the run exists.

- Time: the ledger of the exporter records badput only after it has decided the cause. Before that, the time since an overdue step counts as
  a hang, the unsaved work of a failed run as lost progress, and the time since the end of its ranks as downtime.
- Energy: only the exporter on the node of rank 0 records which energy was wasted. Its shares are applied to the energy of all nodes.
- Cost: the charged cost is divided among the causes in proportion to time. The exporter charges nothing between attempts, but the job may
  hold the GPUs: this time costs the median of the cost per hour.

Unless a docstring says otherwise, the PromQL has a series for each run, the unit of time is seconds, and the unit of energy is joules.
`dashboards.queries` explains the recurring forms of PromQL.
"""

from __future__ import annotations

from dashboards.queries import LAST_PROGRESS_TIME_BY_RUN

RULE_INTERVAL_SECONDS = 15
"""Time between two values of the recorded state of a run, as in the group `training-state` of the rules."""
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

    If a run has ended or an exporter is down, the last values count. A counter that starts in the time range starts at 0.

    Args:
        selection: Counters with selectors.
        by: Labels of the result.
        aggregation: Aggregation of the increases with equal labels: `sum`, or `max` for counters that several exporters publish.
        condition: PromQL that follows the increase of each counter, such as ` and on (run) …`.
        before: Template of the values at the start of the time range, `_BEFORE_RANGE` or `_BEFORE_PLOT`.
    """
    current = f"last_over_time({selection}[$__range])"
    previous = before.format(selection=selection)
    return f"{aggregation} by ({by}) (clamp_min({current} - ({previous} or 0 * {current}), 0){condition})"


def as_cause(expression: str, cause: str) -> str:
    """Return PromQL that adds the label `cause`."""
    return f'label_replace({expression}, "cause", "{cause}", "", "")'


_ON_NODE_OF_LEDGER = " and on (instance, run) last_over_time(training_wall_seconds_total{@run}[$__range])"
"""Condition that a series is from the exporter that records the outcome of the work."""
_OVERDUE_SECONDS = (
    "(clamp_max(max by (run) (run:training_step_overdue:seconds{@run}) > 0, $__range_s)"
    ' and on (run) max by (run) (training_run_state{@run, state="running"}) == 1'
    f" and on (run) time() - {LAST_PROGRESS_TIME_BY_RUN} > 30)"
)
"""PromQL for the seconds since the last step of each `running` run with an overdue step, at most the time range.

The rule keeps its value until its next evaluation. With the last two conditions, the value ends with the standstill, up to 15 s earlier.
"""

RUN_POWER_5M = "clamp_min(sum by (run) (deriv(training_energy_joules_total{@run}[5m])), 0)"
"""PromQL for the power of each run over five minutes in watts.

A slope, unlike a rate, is right for a run younger than five minutes. The exporter adds the energy of up to half a minute at once when
the phase of a rank is known late: over a shorter time, the power would exceed the limits of the GPUs after a gap.
"""
_RECORDED_WALL_SECONDS = increase_in_range("training_wall_seconds_total{@run}", "run", "max")
"""PromQL for the seconds of each run in the time range that the ledger counts: the attempts, and the time between attempts."""
_RECORDED_BADPUT = increase_in_range("training_badput_seconds_total{@run}", "run, cause", "max")
"""PromQL for the seconds of badput of each run in the time range that the ledger counts, by run and cause."""
_RECORDED_DOWN_SECONDS = increase_in_range(
    'training_badput_seconds_total{@run, cause="downtime"}', "run", "max"
)
"""PromQL for the seconds between the attempts of each run in the time range that the ledger counts."""
_STOPPED_SECONDS = (
    f"({RULE_INTERVAL_SECONDS} * sum by (run)"
    ' (count_over_time(run:training_run_state:info{@run, state=~"ending|failed|lost"}[$__range])))'
)
"""PromQL for the seconds in which no rank of each run ran and the job may have held the GPUs, as in `run:training_cost_held:rate5m`."""
_UNRECORDED_DOWN_SECONDS = (
    f"(({_STOPPED_SECONDS} - on (run) ({_RECORDED_DOWN_SECONDS}) or on (run) {_STOPPED_SECONDS}) > 0 and on (run)"
    ' max by (run) (last_over_time(training_run_state{@run, state=~"ending|failed|lost"}[$__range])) == 1)'
)
"""PromQL for the seconds of each stopped run since the last attempt. The ledger counts them when the next attempt starts."""
WALL_SECONDS_IN_RANGE = (
    f"({_RECORDED_WALL_SECONDS} + on (run) {_UNRECORDED_DOWN_SECONDS} or {_RECORDED_WALL_SECONDS})"
)
"""PromQL for the wall time of each run in the time range, with the time since the last attempt of a stopped run."""
_LOST_WORK_SECONDS = (
    "(clamp_max(max by (run) (training_uncommitted_seconds{@run}) > 0, $__range_s)"
    ' and on (run) max by (run) (training_run_state{@run, state=~"failed|lost|starting"}) == 1)'
)
"""PromQL for the seconds of work that each run with the state `failed`, `lost` or `starting` has lost: the work since the last checkpoint.

The seconds are at most the time range. The ledger counts this work as lost progress when a restarted run trains again.
"""
_UNRECORDED_BADPUT = (
    f"({as_cause(_OVERDUE_SECONDS, 'hang')} or {as_cause(_LOST_WORK_SECONDS, 'lost_progress')}"
    f" or {as_cause(_UNRECORDED_DOWN_SECONDS, 'downtime')})"
)
"""PromQL for the badput of each run that the ledger records only later, by run and cause."""
_BADPUT = f"({_RECORDED_BADPUT} + on (run, cause) {_UNRECORDED_BADPUT} or {_RECORDED_BADPUT} or {_UNRECORDED_BADPUT})"
"""PromQL for the badput of each run by cause: the recorded badput, and the badput that the ledger records later."""
_WORK_SECONDS = f"clamp_min(({WALL_SECONDS_IN_RANGE}) - sum by (run) ({_BADPUT}), 0)"
"""PromQL for the seconds of each run without badput. These include the time lost to the slowest rank."""
_STRAGGLER_SHARE = f"(max by (run) (avg_over_time(run:training_straggler_lost:ratio{{@run}}[$__range])) or 0 * {_WORK_SECONDS})"
"""PromQL for the mean share of the work that each run lost to its slowest rank; 0 without the compute times of its ranks."""
_STRAGGLER_SECONDS = f"({_WORK_SECONDS} * on (run) {_STRAGGLER_SHARE})"
"""PromQL for the seconds of work that each run lost to its slowest rank."""
SECONDS_BY_CAUSE = f"({_BADPUT} or {as_cause(_STRAGGLER_SECONDS, 'slowest_rank')} or {as_cause(f'({_WORK_SECONDS} - {_STRAGGLER_SECONDS})', 'progress')})"
"""PromQL for the seconds of each run by cause, including `progress` and `slowest_rank`."""
GPU_COUNT_IN_RANGE = f"(max by (run) (max_over_time(run:training_gpus:count{{@run}}[$__range])) or on (run) 0 * {_RECORDED_WALL_SECONDS} + 1)"
"""PromQL for the largest number of GPUs of each run in the time range; a run without a GPU counts as one GPU."""
GPU_SECONDS_BY_CAUSE = f"({SECONDS_BY_CAUSE} * on (run) group_left () {GPU_COUNT_IN_RANGE})"
"""PromQL for the GPU seconds of each run by cause, so that a minute of a large run counts more than a minute of a small run."""


_HANG_WITHOUT_ENERGY = (
    '(max by (run) (training_badput_seconds_total{@run, cause="hang"} - training_badput_seconds_total{@run, cause="hang"} offset 1m) > 60'
    " unless on (run) max by (run) ("
    'training_wasted_energy_joules_total{@run, cause="hang"} - training_wasted_energy_joules_total{@run, cause="hang"} offset 1m) > 0)'
)
"""PromQL for the seconds of a hang that the ledger has counted in the last minute, while the wasted energy of this time is not yet counted."""


_MEAN_POWER = "(sum by (run) (training_energy_joules_total{@run}) / on (run) (max by (run) (training_wall_seconds_total{@run}) > 0))"
"""PromQL for the mean power of each run since its start in watts."""


def _run_energy(before: str) -> str:
    """Return PromQL for the joules of each run; *before* is a template as for `increase_in_range`."""
    return increase_in_range("training_energy_joules_total{@run}", "run", before=before)


def _scale_to_all_nodes(energy: str, before: str) -> str:
    """Return PromQL for energy of each run on the node of the ledger, scaled by the ratio of the energies of all nodes and of this node."""
    energy_on_node_of_ledger = increase_in_range(
        "training_energy_joules_total{@run}", "run", condition=_ON_NODE_OF_LEDGER, before=before
    )
    return f"({energy} * on (run) group_left () ({_run_energy(before)} / ({energy_on_node_of_ledger} > 0)))"


def _unattributed_energy_on_node_of_ledger(before: str) -> str:
    """Return PromQL for the joules of each run on the node of the ledger whose phase the exporter does not know."""
    return increase_in_range(
        'training_phase_energy_joules_total{@run, phase="unattributed"}',
        "run",
        condition=_ON_NODE_OF_LEDGER,
        before=before,
    )


def _unattributed_energy(before: str) -> str:
    """Return PromQL for the joules of each run whose phase the exporter does not know, over all nodes of the run."""
    return _scale_to_all_nodes(_unattributed_energy_on_node_of_ledger(before), before)


def _wasted_energy(before: str) -> str:
    """Return PromQL for the wasted joules of each run by cause, over all nodes of the run.

    The waste on the node of the ledger is scaled to all nodes. The energy since an overdue step is added to the cause `hang`. The lost work
    of a failed run, at the mean power of the run, is added to the cause `lost_progress`.
    """
    recorded_waste = increase_in_range(
        "training_wasted_energy_joules_total{@run}", "run, cause", condition=_ON_NODE_OF_LEDGER, before=before
    )
    # The exporter counts the energy of unknown phases as a waste of the cause `other`, although most of this energy is usually work.
    unattributed_energy = as_cause(_unattributed_energy_on_node_of_ledger(before), "other")
    attributed_waste = (
        f"(clamp_min({recorded_waste} - on (run, cause) {unattributed_energy}, 0) or {recorded_waste})"
    )
    scaled_waste = _scale_to_all_nodes(attributed_waste, before)
    overdue_energy = as_cause(
        f"(({_OVERDUE_SECONDS} or on (run) {_HANG_WITHOUT_ENERGY}) * on (run) {RUN_POWER_5M})", "hang"
    )
    energy_of_lost_work = as_cause(f"({_LOST_WORK_SECONDS} * on (run) {_MEAN_POWER})", "lost_progress")
    unrecorded_waste = f"({overdue_energy} or {energy_of_lost_work})"
    return f"({scaled_waste} + on (run, cause) {unrecorded_waste} or {scaled_waste} or {unrecorded_waste})"


def _work_energy(before: str) -> str:
    """Return PromQL for the joules of each run in known phases that no cause of badput wasted."""
    energy = _run_energy(before)
    energy_of_known_phases = f"({energy} - on (run) {_unattributed_energy(before)} or {energy})"
    return f"clamp_min({energy_of_known_phases} - on (run) sum by (run) ({_wasted_energy(before)}), 0)"


JOULES_IN_RANGE_BY_RUN = _run_energy(_BEFORE_RANGE)
"""PromQL for the joules of each run in the time range."""
_WASTED_JOULES_IN_RANGE = _wasted_energy(_BEFORE_RANGE)
_UNATTRIBUTED_JOULES_IN_RANGE = _unattributed_energy(_BEFORE_RANGE)
_WORK_JOULES_IN_RANGE = _work_energy(_BEFORE_RANGE)
WATT_HOURS_BY_CAUSE = (
    f"(({_WASTED_JOULES_IN_RANGE} or {as_cause(f'({_WORK_JOULES_IN_RANGE} * on (run) {_STRAGGLER_SHARE})', 'slowest_rank')}"
    f" or {as_cause(f'({_WORK_JOULES_IN_RANGE} * on (run) (1 - {_STRAGGLER_SHARE}))', 'progress')}"
    f" or {as_cause(_UNATTRIBUTED_JOULES_IN_RANGE, 'unattributed')}) / 3600)"
)
"""PromQL for the watt-hours of each run by cause, including `progress`, `slowest_rank` and `unattributed`: joules divided by 3600."""
_STRAGGLER_SHARE_SINCE_START = (
    "avg_over_time((max by (run) (run:training_straggler_lost:ratio{@run}) and on () vector(time()) >= $__from / 1000)"
    "[$__range:$__interval])"
)
"""PromQL for the mean share of the work that each run lost to its slowest rank, from the start of the time range to each point of a plot."""
WASTED_WATT_HOURS_SINCE_START = (
    f"sum by (cause) ({_wasted_energy(_BEFORE_PLOT)}"
    f" or {as_cause(f'{_work_energy(_BEFORE_PLOT)} * on (run) {_STRAGGLER_SHARE_SINCE_START}', 'slowest_rank')}) / 3600 > 0"
)
"""PromQL for the wasted watt-hours by cause, from the start of the time range to each point of a plot."""
_LOST_SECONDS = f"(sum by (run) ({_BADPUT}) + {_STRAGGLER_SECONDS})"
"""PromQL for the seconds of each run without progress: badput, and the time lost to the slowest rank."""
LOST_SHARE_IN_RANGE_BY_RUN = f"clamp_max({_LOST_SECONDS} / ({WALL_SECONDS_IN_RANGE} > 0), 1)"
"""PromQL for the share of each run's time that was without progress, at most 1."""
START_CAUSES = f"({as_cause('vector(1)', 'init')} or {as_cause('vector(1)', 'compile')})"
"""PromQL for a series for each cause that every run has at its start, as the operand of `and on (cause)` and `unless on (cause)`."""
_CHARGED_COST = increase_in_range("training_cost_total{@run}", "run, currency")
"""PromQL for the cost of each run that the exporter charges, by run and currency."""
_CHARGED_SECONDS = (
    f"({_RECORDED_WALL_SECONDS} - on (run) ({_RECORDED_DOWN_SECONDS}) or {_RECORDED_WALL_SECONDS})"
)
"""PromQL for the seconds of each run that the exporter charges: all but the time between attempts."""
_RECORDED_AND_UNRECORDED_DOWN_SECONDS = (
    f"sum by (run) ({_BADPUT} and on (cause) {as_cause('vector(1)', 'downtime')})"
)
"""PromQL for the seconds between the attempts of each run, also since the last attempt of a stopped run."""
_DOWN_SECONDS_WITH_GPUS = (
    f"({_RECORDED_AND_UNRECORDED_DOWN_SECONDS} < on (run) {_STOPPED_SECONDS}"
    f" or on (run) ({_STOPPED_SECONDS} and on (run) {_RECORDED_AND_UNRECORDED_DOWN_SECONDS}))"
)
"""PromQL for the seconds between the attempts of each run in which the job may have held the GPUs: the smaller of two times.

The time between the attempts also counts after a stop on purpose; `_STOPPED_SECONDS` counts only while the run is ending, failed or lost.
"""
_DOWN_COST = (
    "(max by (run, currency) (quantile_over_time(0.5, run:training_cost_held:rate5m{@run}[$__range]))"
    f" * on (run) group_left () {_DOWN_SECONDS_WITH_GPUS})"
)
"""PromQL for the cost of the time between the attempts of each run, by run and currency: the median cost per hour times this time."""
COST_IN_RANGE_BY_RUN = f"({_CHARGED_COST} + on (run, currency) {_DOWN_COST} or {_CHARGED_COST})"
"""PromQL for the cost of each run, by run and currency, with the cost of the time between its attempts."""
_PROGRESS_COST = f"({_CHARGED_COST} * on (run) group_left () clamp_max(({_WORK_SECONDS} - {_STRAGGLER_SECONDS}) / on (run) ({_CHARGED_SECONDS} > 0), 1))"
"""PromQL for the cost of each run's time with progress, by run and currency."""
LOST_COST_IN_RANGE_BY_RUN = f"({COST_IN_RANGE_BY_RUN} - on (run, currency) {_PROGRESS_COST})"
"""PromQL for the cost of each run's time without progress, by run and currency."""
COST_BY_CAUSE = (
    f"(({SECONDS_BY_CAUSE} unless on (cause) {as_cause('vector(1)', 'downtime')}) / on (run) group_left () ({_CHARGED_SECONDS} > 0)"
    f" * on (run) group_left (currency) ({_CHARGED_COST}) or {as_cause(_DOWN_COST, 'downtime')})"
)
"""PromQL for the cost of each run by cause and currency. The charged cost is divided in proportion to the time."""
NO_LOSS_CAUSES = f"({as_cause('vector(1)', 'progress')} or {as_cause('vector(1)', 'unattributed')})"
"""PromQL for a series for each cause that is no loss, as the operand of `unless on (cause)`: work, and energy of unknown phases."""
