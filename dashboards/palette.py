"""Color palette that is safe for color-blind readers on Grafana's dark and light themes.

The palette is based on that of Okabe and Ito, with further colors. Yellow and black are omitted, because each is invisible on
one theme, and the blue is lighter. In panels of a status, blue is good, the text color is neutral, gray is absent, orange is a
warning, and vermilion is bad. A text or a number next to the color has the same meaning. The panel texts call vermilion red.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BLUE = "#3D85D6"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY_BLUE = "#56B4E9"
VERMILION = "#D55E00"
KHAKI = "#A19251"
RED = "#9C2B08"
GREY = "#8C8C8C"
BROWN = "#A0705A"
VIOLET = "#7B4FA0"
INDIGO = "#4A3FD8"
PALE_BLUE = "#9DBFE6"
SILVER = "#C0C0C0"

HASHED_COLOR = {"mode": "palette-classic-by-name"}
"""Color mode that derives the color from a hash of the series name, for names that are not known in advance."""
COLOR_BY_ORDER = {"mode": "palette-classic"}
"""Color mode that derives the color from the position of the series, so that two names share a color only if there are many."""

# Colors of a status.
GOOD = BLUE
NEUTRAL = "text"
"""Grafana's color of text, dark or light according to the theme."""
WARNING = ORANGE
BAD = VERMILION
ABSENT = GREY

PHASE_COLORS = {
    "iteration": "#2F5F99",
    "forward": BLUE,
    "backward": SKY_BLUE,
    "optimizer": GREEN,
    "grad_sync": VIOLET,
    "zero_grad": "#7FC8A9",
    "data_loading": ORANGE,
    "checkpoint_save_sync": PURPLE,
    "checkpoint_save_async": "#E3B3CF",
    "checkpoint_load": "#9C4F7A",
    "validation": KHAKI,
    "test": "#8A7D1A",
    "init": BROWN,
    "rendezvous": "#C4A08F",
    "model_init": "#8A5A44",
    "optimizer_init": "#B08472",
    "dataloader_init": "#D3B7A8",
    "compile": "#6E4A3A",
    "restart": VERMILION,
    "logging": "#B0B0B0",
    "other": GREY,
}
"""Colors of phases.

Training work is blue, green or violet; data loading is orange. Checkpoints are purple, evaluation is khaki, and the phases of the
start-up are brown. A restart is vermilion, and other time is gray.
"""

BADPUT_CAUSE_COLORS = {
    "data_stall": ORANGE,
    "checkpoint_save": PURPLE,
    "checkpoint_load": VIOLET,
    "validation": KHAKI,
    "init": SKY_BLUE,
    "compile": BLUE,
    "lost_progress": VERMILION,
    "downtime": RED,
    "hang": INDIGO,
    "other": GREY,
}
"""Colors of the causes of badput and of wasted energy."""

THROTTLE_REASON_COLORS = {
    "sw_power_cap": GREY,
    "thermal": RED,
    "hw_thermal": VERMILION,
    "sw_thermal": ORANGE,
    "hw_power_brake": INDIGO,
    "hw_slowdown": PURPLE,
    "sync_boost": KHAKI,
    "board_limit": BROWN,
    "reliability": SKY_BLUE,
    "low_utilization": SILVER,
}
"""Colors of the reasons for which a GPU runs below its full clock."""

Override = dict[str, Any]
"""JSON model of an override: a matcher of series, and the properties of the matching series."""


def fixed_color(color: str) -> dict[str, str]:
    """Return the color mode for one color."""
    return {"mode": "fixed", "fixedColor": color}


def shades(color: str) -> dict[str, str]:
    """Return the color mode for shades of a color, for an unknown number of series."""
    return {"mode": "shades", "fixedColor": color}


def fixed_colors_by_name(colors: Mapping[str, str]) -> list[Override]:
    """Return overrides from {series name: color}."""
    return [
        series_override({"id": "byName", "options": name}, fixed_color(color))
        for name, color in colors.items()
    ]


def colors_by_pattern(colors: Mapping[str, str]) -> list[Override]:
    """Return overrides from {regular expression at the start of the series name: color}; of several matches, the last has the color."""
    return [
        series_override({"id": "byRegexp", "options": f"/^{pattern}/"}, fixed_color(color))
        for pattern, color in colors.items()
    ]


def series_override(
    matcher: dict[str, str],
    color: dict[str, str] | None,
    *,
    reference: bool = False,
    dashed: bool = False,
    right_axis: bool = False,
    name: str = "",
) -> Override:
    """Return an override for the matching series; `name` replaces the name of the series.

    `reference`, `dashed` and `right_axis` have the meaning of the fields of `dashboards.queries.Query`.
    """
    properties: dict[str, Any] = {"color": color} if color else {}
    if reference or dashed or right_axis:
        properties["custom.lineStyle"] = {"dash": [6, 6], "fill": "dash"}
    if reference:
        properties |= {
            "custom.fillOpacity": 0,
            "custom.lineWidth": 1,
            "custom.stacking": {"group": "A", "mode": "none"},
        }
    if right_axis:
        properties["custom.axisPlacement"] = "right"
    if name:
        properties["displayName"] = name
    return {
        "matcher": matcher,
        "properties": [{"id": property_id, "value": value} for property_id, value in properties.items()],
    }
