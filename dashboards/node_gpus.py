"""Panels of the dashboard *Node* about the GPUs of the node: a line for each GPU, and the limits."""

from __future__ import annotations

from dashboards.palette import (
    BLUE,
    BROWN,
    GREEN,
    KHAKI,
    ORANGE,
    PURPLE,
    SKY_BLUE,
    VIOLET,
    fixed_colors_by_name,
)
from dashboards.panels import Panel, dashboard_link, time_series
from dashboards.queries import Query

_GPU_COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE, BROWN, VIOLET, KHAKI)
"""Colors of the GPUs with the indexes 0 to 7, the same in each panel."""
_GPUS_LINK = dashboard_link("training-gpus", "GPUs", node="${node}")
_SLOWDOWN_TEMPERATURES = (
    'gpu_temperature_celsius{@node, sensor="gpu"} + on (instance, gpu) gpu_temperature_margin_celsius{@node, threshold="nearest"}'
    ' or on (instance, gpu) gpu_temperature_threshold_celsius{@node, threshold="slowdown"}'
)
"""PromQL for the temperature at which each GPU reduces its clocks: the temperature plus the margin or, without a margin, the threshold."""


def gpu_panels() -> tuple[Panel, ...]:
    """Return the panels with the activity, power, temperature and clock of each GPU of the node."""
    return (
        _gpu_lines("SM activity", "gpu_sm_activity_ratio{@node}", unit="percentunit", maximum=1),
        _gpu_lines(
            "GPU power",
            "gpu_power_watts{@node}",
            Query('min(gpu_power_limit_watts{@node, limit="enforced"})', "lowest limit", reference=True),
            unit="watt",
        ),
        _gpu_lines(
            "GPU temperature",
            'gpu_temperature_celsius{@node, sensor="gpu"}',
            Query(f"min({_SLOWDOWN_TEMPERATURES})", "lowest limit", reference=True),
            unit="celsius",
            minimum=None,
        ),
        _gpu_lines("SM clock", 'gpu_clock_hertz{@node, clock="sm"}', unit="hertz"),
    )


def _gpu_lines(
    title: str,
    expression: str,
    *references: Query,
    unit: str,
    maximum: float | None = None,
    minimum: float | None = 0,
) -> Panel:
    """Return the plot of a quantity with a line for each GPU of the node."""
    return time_series(
        title,
        Query(f"max by (gpu) ({expression})", "GPU {{gpu}}"),
        *references,
        unit=unit,
        minimum=minimum,
        maximum=maximum,
        overrides=fixed_colors_by_name({f"GPU {index}": color for index, color in enumerate(_GPU_COLORS)}),
        links=(_GPUS_LINK,),
        w=6,
    )
