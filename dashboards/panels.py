"""Grafana panels: time series, stat, bar gauge, state timeline and heat map.

A panel has a title, a unit and queries; the descriptions are in `text/`. No line connects samples across a gap. The queries of stat
panels and bar gauges are instant queries at the end of the time range, because the last value of a range query may be an hour old.
Widths `w` and heights `h` are in cells of Grafana's grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dashboards.palette import (
    BAD,
    BLUE,
    GOOD,
    GREY,
    HASHED_COLOR,
    NEUTRAL,
    WARNING,
    Override,
    fixed_color,
    series_override,
    shades,
)
from dashboards.queries import DATASOURCE, Query

Json = dict[str, Any]

NO_VALUE = "\N{EN DASH}"
"""Text of a cell without a value."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Panel without a position on the dashboard."""

    width: int  # grid columns; a dashboard has 24
    height: int  # grid rows of 38 pixels
    body: Json  # JSON model without `id` and `gridPos`


def threshold_steps(*bounds: tuple[float | None, str]) -> Json:
    """Return thresholds from (lower bound, color) pairs in ascending order. The bound of the first pair is None: no lower bound."""
    return {
        "mode": "absolute",
        "steps": [{"value": lower_bound, "color": color} for lower_bound, color in bounds],
    }


NO_THRESHOLDS = threshold_steps((None, NEUTRAL))


def warn_from(warning: float, bad: float | None = None) -> Json:
    """Return thresholds that color values >= `warning` as warning, and values >= `bad` as bad."""
    bounds: list[tuple[float | None, str]] = [(None, NEUTRAL), (warning, WARNING)]
    return threshold_steps(*bounds, *([] if bad is None else [(bad, BAD)]))


def bad_from(bad: float) -> Json:
    """Return thresholds that color values >= `bad` as bad."""
    return warn_from(bad, bad)


def warn_below(warning: float, bad: float) -> Json:
    """Return thresholds that color values from -1 on: values < `bad` as bad, other values < `warning` as warning.

    An absent value has the color of the first step, which is therefore neutral and ends at -1.
    """
    return threshold_steps((None, NEUTRAL), (-1, BAD), (bad, WARNING), (warning, NEUTRAL))


def value_mappings(texts: Mapping[int, tuple[str, str]] | Mapping[str, tuple[str, str]]) -> list[Json]:
    """Return value mappings from {value: (text, color)}. Grafana shows the text in the color instead of the value."""
    options = {
        str(value): {"text": text, "color": color, "index": index}
        for index, (value, (text, color)) in enumerate(texts.items())
    }
    return [{"type": "value", "options": options}]


YES_NO = value_mappings({1: ("yes", GOOD), 0: ("no", BAD)})
"""Value mappings of a condition that should be true."""
DEFAULT_SOFT_MAX_BY_UNIT = {"none": 1, "s": 0.01, "cps": 1, "percentunit": 0.05, "Bps": 1000}
"""Soft maximum of the axis by unit, so that noise does not fill the panel. Larger values extend the axis."""

NAME_SIZE = 14
"""Font size of the names of several numbers in a stat panel. The automatic size of a long name is too small to read."""
HEATMAP_POINTS = 120
"""Number of time buckets of a heat map."""


def link(title: str, url: str) -> Json:
    """Return a data link of a series or a table cell."""
    return {"title": title, "url": url, "targetBlank": False}


def dashboard_link(uid: str, title: str, **variables: str) -> Json:
    """Return a data link to another dashboard with the same time range and data source.

    Args:
        uid: Identifier of the other dashboard.
        title: Text of the link.
        variables: Values of the other dashboard's variables, as templates such as `${__value.raw}`. Grafana URL-encodes the results.
    """
    variable_parameters = "".join(
        f"&var-{name}={value.replace('}', ':percentencode}')}" for name, value in variables.items()
    )
    return link(title, f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}{variable_parameters}")


RUN_LINK = dashboard_link("training-run", "Run", run="${__value.raw}")
NODE_LINK = dashboard_link("training-node", "Node", node="${__value.raw}")
"""Data links of a table column whose cells are runs or nodes."""


def time_series(
    title: str,
    *queries: Query,
    unit: str,
    w: int = 12,
    h: int = 8,
    minimum: float | None = 0,
    maximum: float | None = None,
    fill: int = 0,
    stacked: bool = False,
    bars: bool = False,
    step_interpolation: bool = False,
    color: Json | None = None,
    overrides: Sequence[Override] = (),
    legend: str = "list",
    thresholds: Json | None = None,
    decimals: int | None = None,
    use_default_soft_max: bool = True,
    log_base: int | None = None,
    links: Sequence[Json] = (),
) -> Panel:
    """Return a time-series panel.

    Args:
        title: Title of the panel, unique on the dashboard.
        queries: Queries with legends and colors.
        unit: Grafana's identifier of the unit.
        w: Width in grid columns.
        h: Height in grid rows.
        minimum: Lower end of the axis; None for automatic. Ignored on a logarithmic axis.
        maximum: Upper end of the axis; larger values extend the axis, because a clipped line would look like a gap.
        fill: Opacity in percent of the area below a line; ignored for stacked series and bars.
        stacked: Stack the series.
        bars: Draw stacked bars instead of lines.
        step_interpolation: Hold each value until the next value.
        color: Color of series without an override. None derives the colors from the series names if there are neither
            overrides nor queries with a color, and is blue otherwise.
        overrides: Overrides of series; these apply after the colors of the queries.
        legend: `list` for a list below, `right` for a table of the last values on the right, `means` for a table of the mean
            values on the right (the last value of a run that has ended may be old), or `hidden`.
        thresholds: Thresholds, drawn as dashed lines.
        decimals: Number of decimals; None for automatic.
        use_default_soft_max: Use `DEFAULT_SOFT_MAX_BY_UNIT` of the unit on a linear axis from 0 without a `maximum`.
        log_base: Base of a logarithmic axis, 2 or 10; None for a linear axis.
        links: Data links of the series.
    """
    custom: Json = {
        "barMaxWidth": 20,
        "drawStyle": "bars" if bars else "line",
        "fillOpacity": 70 if stacked or bars else fill,
        "insertNulls": False,
        "lineInterpolation": "stepAfter" if step_interpolation else "linear",
        "lineWidth": 0 if stacked or bars else 1,
        "pointSize": 4,
        "scaleDistribution": {"type": "log", "log": log_base} if log_base else {"type": "linear"},
        "showPoints": "never" if stacked or bars else "auto",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if stacked or bars else "none"},
        "thresholdsStyle": {"mode": "dashed" if thresholds else "off"},
    }
    calculation = {"right": "lastNotNull", "means": "mean"}.get(legend)
    legend_options: Json = {
        "calcs": [calculation] if calculation else [],
        "displayMode": "table" if calculation else "list",
        "placement": "right" if calculation else "bottom",
        "showLegend": legend != "hidden",
    }
    if log_base:
        minimum = None  # a logarithmic axis has no zero
    elif maximum is None and use_default_soft_max and minimum == 0:
        maximum = DEFAULT_SOFT_MAX_BY_UNIT.get(unit)
    if maximum is not None:
        custom["axisSoftMax"] = maximum
    defaults = field_defaults(unit, thresholds or NO_THRESHOLDS, minimum, None, decimals)
    options = {"legend": legend_options, "tooltip": {"mode": "multi", "sort": "desc"}}
    query_overrides = [
        _query_override(query, index)
        for index, query in enumerate(queries)
        if query.color or query.reference or query.dashed
    ]
    if color is None and not overrides and not any(query.color for query in queries):
        color = HASHED_COLOR
    defaults |= {"color": color or fixed_color(BLUE), "custom": custom, "links": list(links)}
    return build_panel("timeseries", title, queries, w, h, defaults, [*query_overrides, *overrides], options)


def _query_override(query: Query, index: int) -> Override:
    """Return the override with the line style and the color of a query.

    If the legend contains a label, each series of the query has a shade of the color. A reference line has a single color.
    """
    has_label = "{{" in query.legend
    color = query.color or (GREY if query.reference else None)
    if color is None:
        color_mode = None
    elif has_label and not query.reference:
        color_mode = shades(color)
    else:
        color_mode = fixed_color(color)
    return series_override(
        _query_matcher(query, index),
        color_mode,
        reference=query.reference,
        dashed=query.dashed,
        right_axis=query.right_axis,
    )


def _query_matcher(query: Query, index: int) -> Json:
    """Return the matcher of a query's series: by name or, if the legend contains a label, by the id of the query."""
    if "{{" in query.legend:
        return {"id": "byFrameRefID", "options": chr(ord("A") + index)}
    return {"id": "byName", "options": query.legend}


def stat(
    title: str,
    *queries: Query,
    unit: str,
    w: int = 4,
    h: int = 4,
    thresholds: Json | None = None,
    decimals: int | None = None,
    text_mode: str = "value",
    color: Json | None = None,
    color_mode: str = "value",
    name_size: int = NAME_SIZE,
    value_size: int | None = None,
    colors_by_name: Mapping[str, str] = MappingProxyType({}),
    overrides: Sequence[Override] = (),
) -> Panel:
    """Return a stat panel of values at the end of the time range.

    Args:
        title: Title of the panel, unique on the dashboard.
        queries: Instant queries with legends. The color of a query applies to values from 1 on, so that zero failures are neutral.
        unit: Grafana's identifier of the unit.
        w: Width in grid columns.
        h: Height in grid rows.
        thresholds: Thresholds that color the values of queries without a color.
        decimals: Number of decimals; None for automatic.
        text_mode: `value`, `name` or `value_and_name`.
        color: Source of the color, such as `fixed_color(BLUE)`; None for the thresholds.
        color_mode: Colored part: `value` for the numbers, or `background` for the tile.
        name_size: Font size of the names of several numbers.
        value_size: Font size of the numbers. None for automatic, which leaves no room for names with two lines.
        colors_by_name: Colors of series by name, for values from 1 on.
        overrides: Overrides of series; these apply after the colors of the queries.
    """
    defaults = field_defaults(unit, thresholds or NO_THRESHOLDS, None, None, decimals)
    defaults |= {"color": color or {"mode": "thresholds"}, "links": []}
    options: Json = {
        "colorMode": color_mode,
        "graphMode": "none",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": text_mode,
    }
    if text_mode == "value_and_name":
        options["text"] = {"titleSize": name_size} | ({"valueSize": value_size} if value_size else {})
    colored = [
        (_query_matcher(query, index), query.color) for index, query in enumerate(queries) if query.color
    ]
    colored += [({"id": "byName", "options": name}, color) for name, color in colors_by_name.items()]
    query_overrides = [
        {
            "matcher": matcher,
            "properties": [{"id": "thresholds", "value": threshold_steps((None, NEUTRAL), (1, color))}],
        }
        for matcher, color in colored
    ]
    return build_panel("stat", title, queries, w, h, defaults, [*query_overrides, *overrides], options)


def bar_gauge(
    title: str,
    *queries: Query,
    unit: str,
    w: int = 8,
    h: int = 8,
    maximum: float | None = None,
    thresholds: Json | None = None,
    color: Json | None = None,
    decimals: int | None = None,
    overrides: Sequence[Override] = (),
) -> Panel:
    """Return a bar-gauge panel: a horizontal bar from 0 for each series of the queries, at the end of the time range.

    The arguments are those of `stat`, and `maximum`, the right end of the bars. None is the largest value.
    """
    defaults = field_defaults(unit, thresholds or threshold_steps((None, BLUE)), 0, maximum, decimals)
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
    return build_panel("bargauge", title, queries, w, h, defaults, overrides, options)


def state_timeline(title: str, *queries: Query, mappings: Sequence[Json], w: int = 24, h: int = 6) -> Panel:
    """Return a state-timeline panel with a row for each series; *mappings* give each value its text and color."""
    defaults = field_defaults("none", NO_THRESHOLDS, None, None, None)
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
    return build_panel("state-timeline", title, queries, w, h, defaults, (), options)


def heatmap(
    title: str,
    query: Query,
    *,
    unit: str,
    w: int,
    h: int,
    color_range: tuple[float, float],
) -> Panel:
    """Return a heat map with a row for each series; the colors from blue to yellow span `color_range`."""
    defaults = field_defaults(unit, NO_THRESHOLDS, None, None, None)
    options: Json = {
        "calculate": False,
        "cellGap": 0,
        "cellValues": {"unit": unit},
        "color": {
            "exponent": 1,
            "fill": BLUE,
            "max": color_range[1],
            "min": color_range[0],
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
    panel = build_panel("heatmap", title, (query,), w, h, defaults, (), options)
    panel.body["maxDataPoints"] = HEATMAP_POINTS
    return panel


def field_defaults(
    unit: str, thresholds: Json, minimum: float | None, maximum: float | None, decimals: int | None
) -> Json:
    """Return `fieldConfig.defaults` with the settings that all panel types share."""
    defaults: Json = {"mappings": [], "thresholds": thresholds, "unit": unit}
    for name, value in (("min", minimum), ("max", maximum), ("decimals", decimals)):
        if value is not None:
            defaults[name] = value
    return defaults


def build_panel(
    panel_type: str,
    title: str,
    queries: Sequence[Query],
    w: int,
    h: int,
    defaults: Json,
    overrides: Sequence[Override],
    options: Json,
) -> Panel:
    """Return a panel with its queries, field configuration and options."""
    body: Json = {
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": list(overrides)},
        "options": options,
        "targets": [query.target(index) for index, query in enumerate(queries)],
        "title": title,
        "type": panel_type,
    }
    return Panel(w, h, body)
