"""PromQL for the cost per hour of the runs on a single node, and for the lost part of the cost."""

from __future__ import annotations

from dashboards.cost_and_loss import lost_share_by_run

NODE_COST_PER_HOUR = (
    "3600 * sum by (run, currency) (clamp_min(deriv(training_cost_total{@node_run}[5m]), 0)"
    " and on (instance, run) training_process_up{@node_run} == 1)"
)
"""PromQL for the cost per hour of each live run on the node over five minutes, by run and currency.

A slope, unlike a rate, is right for a run younger than five minutes.
"""
RUNS_LIVE_ON_NODE = "group by (run) (training_process_up{@node_run} == 1)"
"""PromQL for the runs with a live process on the node."""
RUN_LOST_SHARE = lost_share_by_run("@run")
"""PromQL for the share of the time that each run loses on all of its nodes."""
NODE_LOST_PER_HOUR = f"({NODE_COST_PER_HOUR} * on (run) group_left () {RUN_LOST_SHARE})"
"""PromQL for the cost per hour of the time that each run loses on the node, by run and currency: a run loses the same share on all nodes."""
