"""Cost and lost time of runs: PromQL from recorded series, thresholds, and texts of the causes.

All dashboards that display a current cost or loss use these queries, so that they show the same values.
"""

from __future__ import annotations

from dashboards.palette import NEUTRAL
from dashboards.panels import value_mappings, warn_from

MIN_LOSS_SHARE, MIN_LARGE_LOSS_SHARE = 0.15, 0.3
"""Shares of the time from which a run *loses time*, and from which this is red instead of orange.

Saves, short waits for data and small differences between ranks usually cost less.
"""
LOST_THRESHOLDS = warn_from(MIN_LOSS_SHARE, MIN_LARGE_LOSS_SHARE)
"""Thresholds of a lost share of the time."""
SHORT_CAUSE_NAMES = {
    "standstill": "no step",
    "slowest_rank": "slowest rank",
    "nonfinite_loss": "loss NaN or infinite",
    "data_stall": "waiting for data",
    "checkpoint_save": "saving checkpoints",
    "checkpoint_load": "loading a checkpoint",
    "validation": "validation",
    "init": "start",
    "compile": "compilation",
    "hang": "hang",
    "lost_progress": "work lost in a crash",
    "downtime": "down between attempts",
    "other": "other",
    "failed": "no rank runs",
    "ending": "all ranks have ended",
}
"""Short texts of the causes, for narrow columns and legends. `dashboards.losses_now` has the texts of *Energy and cost* and *Run*."""
SHORT_CAUSE_TEXTS = value_mappings({cause: (text, NEUTRAL) for cause, text in SHORT_CAUSE_NAMES.items()})
"""Value mappings from causes to neutral texts: the column with the share is colored instead."""
MIN_DISPLAYED_CAUSE_SHARE = 0.03
"""Share of the time above which the largest loss of a run is displayed."""


def lost_share_by_cause(selector: str) -> str:
    """Return PromQL for the share of the time that each run loses now, by cause."""
    return f"max by (run, cause) (run:training_lost:ratio{{{selector}}})"


def stopped_runs(selector: str) -> str:
    """Return PromQL with a value for each run of which no rank runs: it failed, is lost, or has ended without a decided outcome."""
    return f'max by (run) (run:training_run_state:info{{{selector}, state=~"ending|failed|lost"}})'


def gpus_by_run(selector: str) -> str:
    """Return PromQL for the number of GPUs of each run. The job of a stopped run still holds the last known GPUs."""
    count = f"run:training_gpus:count{{{selector}}}"
    last_known = f"max by (run) (last_over_time({count}[1h])) and on (run) {stopped_runs(selector)}"
    return f"(max by (run) ({count}) or on (run) {last_known})"


def lost_share_by_run(selector: str) -> str:
    """Return PromQL for the share of the time that each run loses now, over all causes and at most 1. A stopped run loses all of its time."""
    known = f"clamp_max(sum by (run) ({lost_share_by_cause(selector)}), 1)"
    return f"({known} or on (run) 0 * {stopped_runs(selector)} + 1)"


def cost_per_hour_by_run(selector: str) -> str:
    """Return PromQL for the cost per hour of each run, by currency, over five minutes.

    A run that has stopped or starts costs the median of its last hour: the exporter charges the GPUs until the end of a run, but the job
    still holds the GPUs. A run that restarted within five minutes costs the upper quartile: its rate contains the time between the attempts.
    """
    return f"3600 * max by (run, currency) (run:training_cost_held:rate5m{{{selector}}})"


def stopped_cost_per_hour_by_run(selector: str) -> str:
    """Return PromQL for the cost per hour of each stopped run, by currency."""
    return f"({cost_per_hour_by_run(selector)} and on (run) {stopped_runs(selector)})"


def standstill_by_run(selector: str) -> str:
    """Return PromQL with the value 1 for each run that stands still, as decided by the rule `run:training_standstill:info`."""
    return f"max by (run) (run:training_standstill:info{{{selector}}})"


def largest_loss_share_by_run(selector: str) -> str:
    """Return PromQL for the share of the largest loss of each run, by cause, if it is above `MIN_DISPLAYED_CAUSE_SHARE`."""
    return f"topk by (run) (1, {lost_share_by_cause(selector)} > {MIN_DISPLAYED_CAUSE_SHARE})"


CLUSTER_COST_PER_HOUR = cost_per_hour_by_run("@cluster")
"""PromQL for the cost per hour of each run of the selected clusters, by currency. See `cost_per_hour_by_run`."""
CLUSTER_LOST_SHARE = lost_share_by_run("@cluster")
"""PromQL for the share of the time that each run of the selected clusters loses."""
CLUSTER_LOST_COST_PER_HOUR = f"{CLUSTER_COST_PER_HOUR} * on (run) group_left () {CLUSTER_LOST_SHARE}"
"""PromQL for the cost per hour of the lost time of each run of the selected clusters, by currency."""
