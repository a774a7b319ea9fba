"""Panel of the dashboard *Ranks* for the time, GPU hours and cost that a run loses to its slowest rank or a hang."""

from __future__ import annotations

from dashboards.panels import Panel, stat, warn_from
from dashboards.queries import (
    LOST_COST_PER_HOUR_BY_CURRENCY,
    LOST_GPU_HOURS_PER_HOUR,
    LOST_RATIO,
    instant_query,
)


def straggler_cost() -> Panel:
    """Return the panel of what is lost to the slowest rank or a hang: share of time, GPU hours and cost per hour."""
    share_legend = "of time"
    return stat(
        "Lost to the slowest rank or a hang",
        instant_query(LOST_RATIO, share_legend),
        instant_query(LOST_GPU_HOURS_PER_HOUR, "GPU hours per hour"),
        instant_query(LOST_COST_PER_HOUR_BY_CURRENCY, "{{currency}}/h"),
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
