"""Panel of the dashboard *Ranks* for the time, GPU hours and cost that a run loses to its slowest rank or a hang."""

from __future__ import annotations

from dashboards.panels import Panel, stat, warn_from
from dashboards.queries import COST_PER_HOUR_BY_CURRENCY, instant_query

_LOST_SHARE = (
    '((max(training_run_state{@run, state="hung"}) == 1)'
    " or on () 0 * (max(run:training_step_overdue:seconds{@run}) > 0) + 1"
    " or on () max(run:training_straggler_lost:ratio{@run}))"
)
"""PromQL for the share of the GPU time that the run loses: 1 while the run is hung, or while a step is overdue in a compute phase.

Otherwise, the share of the time that the run loses to its slowest rank, also while the run is `stalled`.
"""
_LOST_GPU_HOURS_PER_HOUR = f"{_LOST_SHARE} * on () max(run:training_gpus:count{{@run}})"
_LOST_COST_PER_HOUR = f"{COST_PER_HOUR_BY_CURRENCY} * on () group_left () {_LOST_SHARE}"


def lost_time() -> Panel:
    """Return the panel with the lost share of the GPU time, the GPU hours lost per hour, and the cost lost per hour."""
    share_legend = "of GPU time"
    return stat(
        "Lost to the slowest rank or a hang",
        instant_query(_LOST_SHARE, share_legend),
        instant_query(_LOST_GPU_HOURS_PER_HOUR, "GPU hours per hour"),
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
