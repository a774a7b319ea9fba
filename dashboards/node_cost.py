"""PromQL for the cost per hour of the runs on a single node, and for its lost part."""

from __future__ import annotations

from dashboards.recorded_losses import lost_share

# A slope, because it does not depend on the age of the run.
_SLOPE = (
    "3600 * sum by (run, currency) (clamp_min(deriv(training_cost_total{@node_run}[5m]), 0)"
    " and on (instance, run) training_process_up{@node_run} == 1)"
)
RUNS_LIVE_ON_NODE = "group by (run) (training_process_up{@node_run} == 1)"
"""PromQL for the runs with a live process on the node."""
NODE_COST_PER_HOUR = f"(max_over_time(({_SLOPE})[30m:1m]) and on (run) {RUNS_LIVE_ON_NODE} and on () max(gpu_up{{@node}} == bool 0) == 1 or {_SLOPE})"
"""PromQL for the cost per hour of each live run on the node.

The ledger charges the rent of a lost GPU later and in one step, so that the slope falls at first. While a GPU is lost, the
highest slope of the last 30 minutes counts.
"""
RUN_LOST_SHARE = lost_share("@run")
"""PromQL for the share of the time that each run loses on all of its nodes."""
NODE_LOST_PER_HOUR = f"({NODE_COST_PER_HOUR} * on (run) group_left () {RUN_LOST_SHARE})"
"""PromQL for the cost per hour of the time that each run loses, on the node."""
