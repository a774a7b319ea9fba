"""Colours for colour-blind readers, on Grafana's dark and light themes.

The set of Okabe and Ito, with replacements for yellow and black, which disappear on one of the themes. Blue or plain is
good, vermilion is bad; a text or a number always repeats the meaning of a colour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BLUE = "#3D85D6"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
VERMILION = "#D55E00"
KHAKI = "#A19251"
RED = "#9C2B08"
GREY = "#8C8C8C"
BROWN = "#A0705A"
VIOLET = "#7B4FA0"
INDIGO = "#4A3FD8"
PALE = "#9DBFE6"
SILVER = "#C0C0C0"

BY_NAME = {"mode": "palette-classic-by-name"}
"""Colours by a hash of the whole series name, for names that are unknown here."""

GOOD, PLAIN, WARNING, BAD, ABSENT = BLUE, "text", ORANGE, VERMILION, GREY

PHASES = {
    "iteration": "#2F5F99",
    "forward": BLUE,
    "backward": SKY,
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
"""Blue and green for work, orange for waiting, purple for checkpoints, brown for starting."""

CAUSES = {
    "data_stall": ORANGE,
    "checkpoint_save": PURPLE,
    "checkpoint_load": VIOLET,
    "validation": KHAKI,
    "init": SKY,
    "compile": BLUE,
    "lost_progress": VERMILION,
    "downtime": RED,
    "hang": INDIGO,
    "other": GREY,
}
"""Causes of badput and of wasted energy."""

COMPONENTS = {"gpu": BLUE, "cpu": ORANGE, "dram": GREEN, "soc": PURPLE}

THROTTLES = {
    "sw_power_cap": GREY,
    "thermal": RED,
    "hw_thermal": VERMILION,
    "sw_thermal": ORANGE,
    "hw_power_brake": INDIGO,
    "hw_slowdown": PURPLE,
    "sync_boost": KHAKI,
    "board_limit": BROWN,
    "reliability": SKY,
    "low_utilization": SILVER,
}

Override = dict[str, Any]


def fixed(color: str) -> dict[str, str]:
    """Return a fixed colour."""
    return {"mode": "fixed", "fixedColor": color}


def shades(color: str) -> dict[str, str]:
    """Return shades of a colour, for an unknown number of series."""
    return {"mode": "shades", "fixedColor": color}


def named(colors: Mapping[str, str]) -> list[Override]:
    """Return overrides that colour series by name."""
    return [of_series({"id": "byName", "options": name}, fixed(color)) for name, color in colors.items()]


def by_first_word(colors: Mapping[str, str]) -> list[Override]:
    """Return overrides that colour series by the first word of the name."""
    return [
        of_series({"id": "byRegexp", "options": f"/^{word}/"}, fixed(color)) for word, color in colors.items()
    ]


def of_series(
    matcher: dict[str, str],
    color: dict[str, str] | None,
    *,
    bound: bool = False,
    dashed: bool = False,
    right: bool = False,
) -> Override:
    """Return an override for matching series: the colour, and `bound`, `dashed` and `right` as in `Query`."""
    looks: dict[str, Any] = {"color": color} if color else {}
    if bound or dashed or right:
        looks["custom.lineStyle"] = {"dash": [6, 6], "fill": "dash"}
    if bound:
        looks |= {
            "custom.fillOpacity": 0,
            "custom.lineWidth": 1,
            "custom.stacking": {"group": "A", "mode": "none"},
        }
    if right:
        looks["custom.axisPlacement"] = "right"
    return {"matcher": matcher, "properties": [{"id": name, "value": look} for name, look in looks.items()]}
