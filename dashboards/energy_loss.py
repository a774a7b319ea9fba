"""PromQL for the time, energy and cost of runs in the time range, by cause. The causes add up to the whole.

    time   = progress + slowest_rank + causes of badput
    energy = progress + slowest_rank + causes of wasted energy

Progress is work, saved or not yet saved, without the waits for the slowest rank. The ledger of the node of rank 0 knows the
outcome of the work; the shares of its energy are applied to the energy of all nodes of the run. Cost is divided by time, so that the costs of
the causes add up to the cost of the run.
"""

from __future__ import annotations

from dashboards.fleet_runs import STATE_MAPPINGS
from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import Panel, dashboard_link, value_mappings
from dashboards.queries import STAGE_OF_RANK
from dashboards.tables import Column, percent, table

_ON_NODE_OF_LEDGER = " and on (instance, run) last_over_time(training_wall_seconds_total{@run}[$__range])"


def _increase(selection: str, by: str, aggregation: str = "sum", condition: str = "") -> str:
    """Return PromQL for the increase of counters in the time range.

    The last values count of a run that ended or whose exporter is down; a counter that starts in the time range starts at 0.
    The difference of each series looks back six hours, so that an outage of one exporter over the start of the range does not
    count the whole total of its node.
    """
    current = f"last_over_time({selection}[$__range])"
    previous = f"last_over_time({selection}[6h] offset $__range)"
    return f"{aggregation} by ({by}) (clamp_min({current} - ({previous} or 0 * {current}), 0){condition})"


def _as_cause(expression: str, cause: str) -> str:
    return f'label_replace({expression}, "cause", "{cause}", "", "")'


RUN_ENERGY = _increase("training_energy_joules_total{@run}", "run")
_ACCOUNTED_ENERGY = _increase("training_energy_joules_total{@run}", "run", condition=_ON_NODE_OF_LEDGER)
_WASTED_ENERGY = _increase(
    "training_wasted_energy_joules_total{@run}", "run, cause", condition=_ON_NODE_OF_LEDGER
)
WALL_SECONDS = _increase("training_wall_seconds_total{@run}", "run", "max")
_BOOKED_BADPUT = _increase("training_badput_seconds_total{@run}", "run, cause", "max")
_OVERDUE = _as_cause(
    "clamp_max(max by (run) (run:training_step_overdue:seconds{@run}) > 0, $__range_s)", "hang"
)
_BADPUT = f"({_BOOKED_BADPUT} + on (run, cause) {_OVERDUE} or {_BOOKED_BADPUT} or {_OVERDUE})"
"""PromQL for the badput of each run by cause; a standstill counts from the overdue step on, before the ledger decides that the run hangs."""
_WORK = f"(({WALL_SECONDS}) - sum by (run) ({_BADPUT}))"
_COMPUTE_BY_STAGE = f"training_rank_compute_seconds{{@run}} * {STAGE_OF_RANK}"
_WAIT_PER_STEP = f"avg by (run) (max by (run, label_stage) ({_COMPUTE_BY_STAGE}) - avg by (run, label_stage) ({_COMPUTE_BY_STAGE}))"
"""PromQL for the mean time for which the ranks of a pipeline stage wait for the slowest rank of the stage in a step."""
_STEPS = _increase('training_steps_total{@run, mode="train"}', "run", "max")
_WAIT = (
    f"(avg_over_time(({_WAIT_PER_STEP})[$__range:$__interval]) * on (run) {_STEPS} < {_WORK} or 0 * {_WORK})"
)
TIME_BY_CAUSE = (
    f"({_BADPUT} or {_as_cause(_WAIT, 'slowest_rank')} or {_as_cause(f'({_WORK} - {_WAIT})', 'progress')})"
)
"""PromQL for the seconds of each run by cause."""
_WASTED_SHARE = f"({_WASTED_ENERGY} / on (run) group_left () ({_ACCOUNTED_ENERGY} > 0))"
_WORK_SHARE = f"(1 - sum by (run) {_WASTED_SHARE})"
_WAIT_SHARE = f"({_WAIT} / ({_WORK} > 0) or 0 * {_WORK})"
ENERGY_BY_CAUSE = (
    f"(({_WASTED_SHARE} or {_as_cause(f'({_WORK_SHARE} * {_WAIT_SHARE})', 'slowest_rank')}"
    f" or {_as_cause(f'({_WORK_SHARE} * (1 - {_WAIT_SHARE}))', 'progress')})"
    f" * on (run) group_left () {RUN_ENERGY} / 3.6e6)"
)
"""PromQL for the kilowatt-hours of each run by cause."""
_LOST_SECONDS = f"(sum by (run) ({_BADPUT}) + {_WAIT})"
LOST_SHARE_BY_RUN = f"({_LOST_SECONDS} / ({WALL_SECONDS} > 0))"
"""PromQL for the share of each run's time that was without progress."""
_COST = _increase("training_cost_total{@run}", "run, currency")
LOST_COST_BY_RUN = f"({_COST} * on (run) group_left () {LOST_SHARE_BY_RUN})"
"""PromQL for the cost of each run's time without progress."""
COST_BY_CAUSE = f"({TIME_BY_CAUSE} / on (run) group_left () ({WALL_SECONDS} > 0) * on (run) group_left (currency) ({_COST}))"
"""PromQL for the cost of each run by cause. The cost is divided in proportion to the time."""
PROGRESS_CAUSE = _as_cause("vector(1)", "progress")
NO_PROGRESS_SECONDS = 120
_STANDSTILL = (
    f"(max by (run) (run:training_step_overdue:seconds{{@run}}) > 0 or on (run)"
    ' max by (run) (training_run_state{@run, state=~"stalled|hung"}) == 1 or on (run)'
    f" (time() - max by (run) (training_last_progress_timestamp_seconds{{@run}}) > {NO_PROGRESS_SECONDS}"
    ' and on (run) max by (run) (training_run_state{@run, state="running"}) == 1))'
)
COST_PER_HOUR = "3600 * max by (run, currency) (run:training_cost:rate5m{@run})"
"""PromQL for the cost per hour of each run, as on *Fleet*."""
_OBSERVED = "clamp_max(max by (run) (rate(training_wall_seconds_total{@run}[5m])) > 0, 1)"
_RECENT_BADPUT = (
    'max by (run, cause) (rate(training_badput_seconds_total{@run, cause!~"hang|lost_progress|downtime"}[5m]))'
    f" / on (run) group_left () {_OBSERVED}"
)
_RESTARTS = 'sum by (run) (max by (run, cause) (increase(training_badput_seconds_total{@run, cause=~"lost_progress|downtime"}[1h]))) / 3600'
_LOST_SHARE_NOW = (
    f"({_as_cause(f'(0 * {_STANDSTILL} + 1)', 'standstill')}"
    f" or ({_RECENT_BADPUT} or {_as_cause('max by (run) (run:training_straggler_wait:ratio{@run})', 'slowest_rank')})"
    f" unless on (run) {_STANDSTILL} or {_as_cause(_RESTARTS, 'restarts')} unless on (run) {_STANDSTILL})"
)
"""PromQL for the share of the time that each run loses now, by cause: a standstill loses all of the time.

The ledger books a hang and the loss of a crash at once, so that a rate over five minutes would exceed the loss: a hang is a
standstill, and restarts count over the last hour.
"""
LOST_PER_HOUR_BY_CAUSE = f"({_LOST_SHARE_NOW} * on (run) group_left (currency) ({COST_PER_HOUR}) > 0)"
"""PromQL for the cost per hour of the time that each run loses now, by cause."""

KWH = "suffix: kWh"
CAUSE_TEXTS = value_mappings(
    {
        "progress": ("progress", GOOD),
        "standstill": ("no step", BAD),
        "restarts": ("restarts in the last hour", BAD),
        "slowest_rank": ("waiting for the slowest rank", WARNING),
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
    }
)


def loss_by_cause() -> Panel:
    """Return the table of time, energy and cost by cause. The shares add up to 100 %."""
    seconds, kilowatt_hours = f"sum by (cause) ({TIME_BY_CAUSE})", f"sum by (cause) ({ENERGY_BY_CAUSE})"
    return table(
        "Where time, energy and money went",
        Column("cause", "Cause", mappings=CAUSE_TEXTS),
        Column(f"{seconds} > 0", "Time", unit="s", width=80),
        percent(f"{seconds} / on () group_left () sum({TIME_BY_CAUSE}) > 0", "of time", 125, bar=(0, 1)),
        Column(f"{kilowatt_hours} > 0", "Energy", unit=KWH, decimals=2, width=90),
        percent(f"{kilowatt_hours} / on () group_left () sum({ENERGY_BY_CAUSE}) > 0", "of energy", 80),
        Column(f"sum by (cause, currency) ({COST_BY_CAUSE}) > 0", "Cost", decimals=2, width=70),
        Column("currency", "Currency", width=70),
        sort="Time",
        w=12,
        h=11,
        max_data_points=120,
    )


def loss_now() -> Panel:
    """Return the table of what each run loses now, by cause, the most expensive first."""
    return table(
        "Losses now",
        Column("run", "Run", links=(dashboard_link("training-run", "Run", run="${__value.raw}"),)),
        Column("cause", "Cause", mappings=CAUSE_TEXTS),
        Column(LOST_PER_HOUR_BY_CAUSE, "Cost per hour", decimals=2, width=120),
        percent(f"{_LOST_SHARE_NOW} > 0", "of its time", 140, bar=(0, 1)),
        Column("currency", "Currency", width=90),
        sort="Cost per hour",
        w=24,
        h=6,
    )


def loss_by_run() -> Panel:
    """Return the table of the totals and losses of each run, the largest loss first."""
    return table(
        "Cost and loss of each run",
        Column("run", "Run", links=(dashboard_link("training-run", "Run", run="${__value.raw}"),)),
        Column("state", "State", width=85, mappings=STATE_MAPPINGS),
        Column(
            "time() - max by (run) (training_last_progress_timestamp_seconds{@run})"
            " and on (run) max by (run) (training_process_up{@run}) == 1",
            "Last step",
            unit="s",
            decimals=0,
            width=80,
        ),
        percent(LOST_SHARE_BY_RUN, "Lost time", 80),
        Column(f"sum by (run) ({LOST_COST_BY_RUN})", "Lost cost", decimals=2, width=80),
        Column(f"sum by (run) ({_COST})", "Cost", decimals=2, width=80),
        Column(f"{RUN_ENERGY} / 3.6e6", "Energy", unit=KWH, decimals=2, width=90),
        Column(
            _increase("training_carbon_grams_total{@run}", "run"),
            "CO2",
            unit="massg",
            decimals=1,
            width=80,
        ),
        row_query="max by (run, state) (training_run_state{@run} == 1)",
        sort="Lost cost",
        w=12,
        h=11,
        max_data_points=120,
    )
