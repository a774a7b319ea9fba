"""Panels of Grafana dashboards.

A panel has a title, a unit and queries; the descriptions are in `text/`. No line spans a gap. A single number is an
instant query at the end of the time range, because the last value of a series may be an hour old.
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
    """Panel without a position."""

    width: int  # columns, of 24
    height: int  # rows of 38 pixels
    body: Json  # JSON without `id` and `gridPos`


def steps(*bounds: tuple[float | None, str]) -> Json:
    """Return thresholds from (lower bound, colour) pairs; the first bound is None."""
    return {"mode": "absolute", "steps": [{"value": bound, "color": color} for bound, color in bounds]}


NEUTRAL = steps((None, PLAIN))


def above(warning: float, bad: float | None = None) -> Json:
    """Return thresholds that colour values above a bound."""
    bounds: list[tuple[float | None, str]] = [(None, PLAIN), (warning, WARNING)]
    return steps(*bounds, *([] if bad is None else [(bad, BAD)]))


def below(warning: float, bad: float) -> Json:
    """Return thresholds that colour values below a bound."""
    return steps((None, BAD), (bad, WARNING), (warning, PLAIN))


def words(meaning: Mapping[int, tuple[str, str]] | Mapping[str, tuple[str, str]]) -> list[Json]:
    """Return mappings from values to texts with colours."""
    options = {
        str(value): {"text": text, "color": color, "index": place}
        for place, (value, (text, color)) in enumerate(meaning.items())
    }
    return [{"type": "value", "options": options}]


YES_NO = words({1: ("yes", GOOD), 0: ("no", BAD)})
SEVERITIES = words({"critical": ("critical", BAD), "warning": ("warning", WARNING), "info": ("info", PLAIN)})


SOFT_MOST = {"none": 1, "s": 0.01, "cps": 1, "percentunit": 0.05, "Bps": 1000}
"""Smallest upper end of an axis by unit, so that small noise does not fill the panel."""

POINTS = 120
"""Columns of a heat map."""


def link(title: str, url: str) -> Json:
    """Return a link of a series or a cell."""
    return {"title": title, "url": url, "targetBlank": False}


def to(uid: str, title: str, **variables: str) -> Json:
    """Return a link to another dashboard with the same time range and data source; variables are URL-encoded."""
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
    """Return a time-series panel.

    Colours come from the queries, then from `overrides`, then from `color`, else from a hash of the series name. The legend
    is a `list` below, a table on the `right`, or `hidden`. Thresholds are dashed lines. With `steps_drawn` a value holds
    until the next value. The axis reaches at least `most`, with `soft` the usual maximum of the unit, and always the
    largest value: a line that leaves the panel would look like a gap.
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
    """Return the override for the series of a query: colour, or shades for several series, and line style."""
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
    """Return a stat panel of values at the end of the time range; `text` is `value`, `name` or `value_and_name`.

    The colour of a query applies from 1 on: a count of failures is shown as a plain 0.
    """
    defaults = defaults_of(unit, thresholds or NEUTRAL, None, None, decimals)
    defaults |= {"color": color or {"mode": "thresholds"}, "links": []}
    options: Json = {
        "colorMode": "value",
        "graphMode": "none",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": text,
    }
    own = [
        {
            "matcher": {"id": "byName", "options": query.legend},
            "properties": [{"id": "thresholds", "value": steps((None, PLAIN), (1, query.color))}],
        }
        for query in queries
        if query.color
    ]
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
    """Return a bar-gauge panel of values at the end of the time range."""
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
    """Return a state-timeline panel with a row for each series."""
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
    """Return a heat map with a row for each series; colours span the values `between`, from blue to yellow."""
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
    """Return the field configuration of all kinds of panels."""
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
    """Return a panel of a kind."""
    body: Json = {
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": list(overrides)},
        "options": options,
        "targets": [query.target(place) for place, query in enumerate(queries)],
        "title": title,
        "type": kind,
    }
    return Panel(w, h, body)
