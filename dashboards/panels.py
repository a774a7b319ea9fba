"""Panels: what every one of them has, and the kinds that are used.

Each has a title, a unit and queries; what a reader is told about it is in text/ (see `texts`).

A line is never drawn over a gap. A single number is asked for at the end of the time range, not as the last of
a series: that one may be an hour old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.palette import (
    BAD,
    BLUE,
    BY_NAME,
    GOOD,
    GREY,
    PLAIN,
    WARNING,
    Override,
    fixed,
    of_series,
    shades,
)
from dashboards.queries import DATASOURCE, Query

Json = dict[str, Any]

NOTHING = "\N{EN DASH}"


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel without its place."""

    width: int  # of 24 columns
    height: int  # in rows of 38 pixels
    body: Json  # what Grafana reads, without `id` and `gridPos`


def steps(*bounds: tuple[float | None, str]) -> Json:
    """Thresholds: from which value on which colour; the first bound is None."""
    return {"mode": "absolute", "steps": [{"value": bound, "color": color} for bound, color in bounds]}


NEUTRAL = steps((None, PLAIN))


def above(warning: float, bad: float | None = None) -> Json:
    """Plain below a bound, and coloured above it."""
    bounds: list[tuple[float | None, str]] = [(None, PLAIN), (warning, WARNING)]
    return steps(*bounds, *([] if bad is None else [(bad, BAD)]))


def below(warning: float, bad: float) -> Json:
    """Plain above a bound, and coloured below it."""
    return steps((None, BAD), (bad, WARNING), (warning, PLAIN))


def words(meaning: Mapping[int, tuple[str, str]] | Mapping[str, tuple[str, str]]) -> list[Json]:
    """Text and colour in the place of numbers, or of other texts."""
    options = {
        str(value): {"text": text, "color": color, "index": place}
        for place, (value, (text, color)) in enumerate(meaning.items())
    }
    return [{"type": "value", "options": options}]


YES_NO = words({1: ("yes", GOOD), 0: ("no", BAD)})
SEVERITIES = words({"critical": ("critical", BAD), "warning": ("warning", WARNING), "info": ("info", PLAIN)})


SOFT_MOST = {"none": 1, "s": 0.01, "cps": 1, "percentunit": 0.05, "Bps": 1000}
"""Where the axis ends at least, so that a flat line at zero stays at the bottom and is no drama."""

POINTS = 120
"""Of a heat map, from left to right."""


def link(title: str, url: str) -> Json:
    """A link from a series or a cell to another page."""
    return {"title": title, "url": url, "targetBlank": False}


def to(uid: str, title: str, **variables: str) -> Json:
    """A link to another dashboard over the same time, from the same data source; variables are `${…}`, put in encoded."""
    chosen = "".join(
        f"&var-{name}={value.replace('}', ':percentencode}')}" for name, value in variables.items()
    )
    return link(title, f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}{chosen}")


def lines(
    title: str,
    *queries: Query,
    unit: str,
    w: int = 12,
    h: int = 8,
    least: float | None = 0,
    most: float | None = None,
    fill: int = 0,
    stacked: bool = False,
    bars: bool = False,
    steps_drawn: bool = False,
    color: Json | None = None,
    overrides: Sequence[Override] = (),
    legend: str = "list",
    thresholds: Json | None = None,
    decimals: int | None = None,
    soft: bool = True,
    log_scale: bool = False,
    links: Sequence[Json] = (),
) -> Panel:
    """Series over time.

    Colours are those of the queries, then what `overrides` say, then `color`; without any of them a series' colour is that
    chosen by Grafana from a hash of its whole name. The legend is a `list` below, a table to the `right`, or `hidden`; thresholds are dashed
    lines; with `steps_drawn` a value holds until the next one. The axis reaches `most`, or with `soft` what is usual for the
    unit, and further where values do: a line that leaves the picture would look like a gap.
    """
    custom: Json = {
        "drawStyle": "bars" if bars else "line",
        "fillOpacity": 70 if stacked or bars else fill,
        "insertNulls": False,
        "lineInterpolation": "stepAfter" if steps_drawn else "linear",
        "lineWidth": 0 if stacked or bars else 1,
        "pointSize": 4,
        "scaleDistribution": {"type": "log", "log": 2} if log_scale else {"type": "linear"},
        "showPoints": "never" if stacked or bars else "auto",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if stacked or bars else "none"},
        "thresholdsStyle": {"mode": "dashed" if thresholds else "off"},
    }
    shown: Json = {
        "calcs": ["lastNotNull"] if legend == "right" else [],
        "displayMode": "table" if legend == "right" else "list",
        "placement": "right" if legend == "right" else "bottom",
        "showLegend": legend != "hidden",
    }
    if log_scale:
        least = None  # a logarithmic axis has no zero
    elif most is None and soft and least == 0:
        most = SOFT_MOST.get(unit)
    if most is not None:
        custom["axisSoftMax"] = most
    defaults = defaults_of(unit, thresholds or NEUTRAL, least, None, decimals)
    options = {"legend": shown, "tooltip": {"mode": "multi", "sort": "desc"}}
    own = [
        _colored(query, place)
        for place, query in enumerate(queries)
        if query.color or query.bound or query.dashed
    ]
    if color is None and not overrides and not any(query.color for query in queries):
        color = BY_NAME
    defaults |= {"color": color or fixed(BLUE), "custom": custom, "links": list(links)}
    return assembled("timeseries", title, queries, w, h, defaults, [*own, *overrides], options)


def _colored(query: Query, place: int) -> Override:
    """Give the series of a query its colour, shades of it where there may be several, and its kind of line."""
    several = "{{" in query.legend
    matcher = {"id": "byName", "options": query.legend}
    if several:
        matcher = {"id": "byFrameRefID", "options": chr(ord("A") + place)}
    color = query.color or (GREY if query.bound else None)
    mode = None if color is None else shades(color) if several and not query.bound else fixed(color)
    return of_series(matcher, mode, bound=query.bound, dashed=query.dashed, right=query.right)


def stat(
    title: str,
    *queries: Query,
    unit: str,
    w: int = 4,
    h: int = 4,
    thresholds: Json | None = None,
    decimals: int | None = None,
    text: str = "value",
    color: Json | None = None,
) -> Panel:
    """One number, or one for each series, as it is at the end of the time range; `text` is `value`, `name` or both."""
    defaults = defaults_of(unit, thresholds or NEUTRAL, None, None, decimals)
    defaults |= {"color": color or {"mode": "thresholds"}, "links": []}
    options: Json = {
        "colorMode": "value",
        "graphMode": "none",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": text,
    }
    own = [_colored(query, place) for place, query in enumerate(queries) if query.color]
    return assembled("stat", title, queries, w, h, defaults, own, options)


def bars(
    title: str,
    *queries: Query,
    unit: str,
    w: int = 8,
    h: int = 8,
    most: float | None = None,
    thresholds: Json | None = None,
    color: Json | None = None,
    decimals: int | None = None,
    overrides: Sequence[Override] = (),
) -> Panel:
    """A bar for each series, as it is at the end of the time range."""
    defaults = defaults_of(unit, thresholds or steps((None, BLUE)), 0, most, decimals)
    defaults |= {"color": color or {"mode": "thresholds"}, "links": []}
    options: Json = {
        "displayMode": "basic",
        "maxVizHeight": 40,
        "minVizHeight": 14,
        "minVizWidth": 8,
        "namePlacement": "left",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showUnfilled": True,
        "sizing": "manual",
        "text": {"titleSize": 12, "valueSize": 15},
        "valueMode": "text",
    }
    return assembled("bargauge", title, queries, w, h, defaults, overrides, options)


def states(title: str, *queries: Query, mappings: Sequence[Json], w: int = 24, h: int = 6) -> Panel:
    """What a thing was, and when, in words; a row for each series."""
    defaults = defaults_of("none", NEUTRAL, None, None, None)
    defaults |= {
        "color": {"mode": "thresholds"},
        "custom": {
            "fillOpacity": 85,
            "insertNulls": False,
            "lineWidth": 0,
            "spanNulls": False,
        },
        "mappings": list(mappings),
        "links": [],
    }
    options: Json = {
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
        "mergeValues": True,
        "rowHeight": 0.85,
        "showValue": "auto",
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return assembled("state-timeline", title, queries, w, h, defaults, (), options)


def heatmap(
    title: str,
    query: Query,
    *,
    unit: str,
    w: int,
    h: int,
    between: tuple[float, float],
) -> Panel:
    """A row for each series over time: colour says how much, `between` two values, from blue to yellow; a gap has none.

    A query costs a value for each row and each of its `POINTS`.
    """
    defaults = defaults_of(unit, NEUTRAL, None, None, None)
    options: Json = {
        "calculate": False,
        "cellGap": 0,
        "cellValues": {"unit": unit},
        "color": {
            "exponent": 1,
            "fill": BLUE,
            "max": between[1],
            "min": between[0],
            "mode": "scheme",
            "reverse": False,
            "scale": "exponential",
            "scheme": "Cividis",
            "steps": 64,
        },
        "exemplars": {"color": BAD},
        "filterValues": {"le": -1},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": "none"},
    }
    made = assembled("heatmap", title, (query,), w, h, defaults, (), options)
    made.body["maxDataPoints"] = POINTS
    return made


def defaults_of(
    unit: str, thresholds: Json, least: float | None, most: float | None, decimals: int | None
) -> Json:
    """Give the field configuration that every kind of panel has."""
    defaults: Json = {"mappings": [], "thresholds": thresholds, "unit": unit}
    for name, value in (("min", least), ("max", most), ("decimals", decimals)):
        if value is not None:
            defaults[name] = value
    return defaults


def assembled(
    kind: str,
    title: str,
    queries: Sequence[Query],
    w: int,
    h: int,
    defaults: Json,
    overrides: Sequence[Override],
    options: Json,
) -> Panel:
    """Put a panel together."""
    body: Json = {
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": list(overrides)},
        "options": options,
        "targets": [query.target(place) for place, query in enumerate(queries)],
        "title": title,
        "type": kind,
    }
    return Panel(w, h, body)
