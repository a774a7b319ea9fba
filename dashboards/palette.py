"""Colours that stay apart for colour-blind eyes, on a dark and on a light ground.

After Okabe and Ito's set, with yellow and black replaced: each can be seen on both of Grafana's grounds, and all are told
apart with each kind of colour blindness. Good is blue or plain, bad is vermilion, and a word or a number says it too.
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
"""Colour of series whose names are not known beforehand: Grafana hashes the whole name, so that node and card decide."""

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
"""One hue for each kind: work is blue and green, waiting for data orange, checkpoints purple, starting brown."""

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
"""Causes of badput, and of wasted energy."""

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
    """A colour of its own."""
    return {"mode": "fixed", "fixedColor": color}


def shades(color: str) -> dict[str, str]:
    """Lighter and darker shades of one colour, for series whose number is not known."""
    return {"mode": "shades", "fixedColor": color}


def named(colors: Mapping[str, str]) -> list[Override]:
    """Give each series of a known name its colour."""
    return [of_series({"id": "byName", "options": name}, fixed(color)) for name, color in colors.items()]


def by_first_word(colors: Mapping[str, str]) -> list[Override]:
    """Give each series its colour by what its name begins with."""
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
    """Give the series that match a colour, if it is said; `bound`, `dashed` and `right` as a query has them."""
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
