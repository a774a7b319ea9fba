"""Panel of the dashboard *Ranks* for the time, GPU hours and cost that a run loses to its slowest rank, or while no step finishes."""

from __future__ import annotations

from dashboards.losses_now import STOPPED_RUN_CAUSES
from dashboards.panels import Panel, stat, warn_from
from dashboards.queries import COST_PER_HOUR_BY_CURRENCY, STANDSTILL, instant_query

_STOPPED_SHARE = f"(max({STOPPED_RUN_CAUSES}) + 1)"
"""PromQL with the value 1 while the ranks of the run have ended without a result, without labels."""
_LOST_SHARE = f"(0 * {STANDSTILL} + 1 or on () {_STOPPED_SHARE} or on () max(run:training_straggler_lost:ratio{{@run}}))"
"""PromQL for the share of the GPU time that the run loses, without labels.

The share is 1 while no step finishes, as decided by `STANDSTILL`, and while the ranks have ended without a result. Otherwise it is the
recorded share that the run loses to its slowest rank, which is absent without steps in the last two minutes.
"""
_LOST_GPU_HOURS_PER_HOUR = f"{_LOST_SHARE} * on () max(max_over_time(run:training_gpus:count{{@run}}[5m]))"
"""PromQL for the GPU hours that the run loses per hour, without labels."""
_LOST_COST_PER_HOUR = f"({COST_PER_HOUR_BY_CURRENCY} * on () group_left () {_LOST_SHARE})"
"""PromQL for the cost per hour of the lost share, by currency."""


def lost_time_panel() -> Panel:
    """Return the panel with the lost share of the GPU time, the GPU hours lost per hour, and the cost lost per hour."""
    share_legend = "of GPU time"
    return stat(
        "Lost: slowest rank or no step",
        instant_query(_LOST_SHARE, share_legend),
        instant_query(_LOST_GPU_HOURS_PER_HOUR, "GPU h/h"),
        instant_query(_LOST_COST_PER_HOUR, "{{currency}}/h"),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=[
            {
                "matcher": {"id": "byName", "options": share_legend},
                "properties": [
                    {"id": "unit", "value": "percentunit"},
                    {"id": "decimals", "value": 0},
                    {"id": "thresholds", "value": warn_from(0.1, 0.3)},
                ],
            }
        ],
        w=5,
    )
