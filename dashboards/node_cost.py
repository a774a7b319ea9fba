"""PromQL for the cost per hour of the runs on a single node, and for the lost part of the cost."""

from __future__ import annotations

from dashboards.cost_and_loss import cost_per_hour_by_run, lost_share_by_run, stopped_cost_per_hour_by_run

RUNS_LIVE_ON_NODE = "group by (run) (training_process_up{@node_run} == 1)"
"""PromQL for the runs with a live process on the node."""
_COST_PER_SECOND_ON_NODE = (
    "sum by (run, currency) (clamp_min(deriv(training_cost_total{@node_run}[5m]), 0)"
    " and on (instance, run) training_process_up{@node_run} == 1)"
)
"""PromQL for the cost per second of each live run on the node over five minutes. A slope is right for a run younger than five minutes."""
_COST_PER_SECOND_ON_ALL_NODES = "sum by (run, currency) (clamp_min(deriv(training_cost_total{@run}[5m]), 0))"
"""PromQL for the cost per second of each run on all nodes, from the same slopes."""
_SHARE_OF_RANKS = (
    "(count by (run) (group by (run, rank) (training_process_up{@node_run}))"
    " / on (run) max by (run) (training_world_size{@run}))"
)
"""PromQL for the share of the ranks of each run that are on the node."""
_STOPPED_COST = (
    f"({stopped_cost_per_hour_by_run('@run')} * on (run) group_left () {_SHARE_OF_RANKS}"
    f" unless on (run) {RUNS_LIVE_ON_NODE})"
)
"""PromQL for the cost per hour of each stopped run on the node, by run and currency: the usual cost of the run times the node's share of ranks."""
_LIVE_COST = (
    f"({cost_per_hour_by_run('@run')} * on (run, currency) ({_COST_PER_SECOND_ON_NODE} / ({_COST_PER_SECOND_ON_ALL_NODES} > 0))"
    f" or on (run, currency) 3600 * {_COST_PER_SECOND_ON_NODE})"
)
"""PromQL for the cost per hour of each live run on the node, by run and currency.

The recorded cost of the run, which the other dashboards show, is divided among the nodes in proportion to their cost per second. Without a
recorded cost, the cost per second on the node is used.
"""
NODE_COST_PER_HOUR = f"({_LIVE_COST} or on (run, currency) {_STOPPED_COST})"
"""PromQL for the cost per hour of each run on the node over five minutes, by run and currency.

A stopped run costs the usual rate while its job holds the GPUs.
"""
RUN_LOST_SHARE = lost_share_by_run("@run")
"""PromQL for the share of the time that each run loses on all of its nodes: 1 for a stopped run."""
NODE_LOST_PER_HOUR = f"({NODE_COST_PER_HOUR} * on (run) group_left () {RUN_LOST_SHARE})"
"""PromQL for the cost per hour of the time that each run loses on the node, by run and currency: a run loses the same share on all nodes."""
