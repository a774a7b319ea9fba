"""Panels: what every one of them has, and the kinds that are used.

Each has a title, a unit, queries, a word for the case without data, and a description in four parts: what it
shows, what a bad value looks like, what to do then, what a gap means. None can be made without them.

A line is never drawn over a gap. A single number is asked for at the end of the time range, not as the last of
a series: that one may be an hour old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.palette import ABSENT, BAD, BLUE, GOOD, PLAIN, WARNING, Override, fixed
from dashboards.queries import DATASOURCE, Query

Json = dict[str, Any]

NOTHING = "\N{EN DASH}"
GAP = "nothing was measured then: the exporter was down, or its source was; no line is drawn over it."


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel without its place.

    Attributes:
        width: Of 24 columns.
        height: In rows of 38 pixels.
        body: What Grafana reads, without `id` and `gridPos`.
    """

    width: int
    height: int
    body: Json


@dataclass(frozen=True, slots=True)
class About:
    """The description of a panel.

    Attributes:
        what: Is shown.
        bad: Looks like this.
        do: When it does.
        gap: Means this.
    """

    what: str
    bad: str
    do: str
    gap: str = GAP

    def text(self) -> str:
        """As Markdown, one paragraph each."""
        return f"{self.what}\n\n**Bad:** {self.bad}\n\n**What to do:** {self.do}\n\n**A gap or no data:** {self.gap}"


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


def words(meaning: Mapping[float, tuple[str, str]]) -> list[Json]:
    """Text and colour in the place of numbers."""
    options = {
        f"{value:g}": {"text": text, "color": color, "index": place}
        for place, (value, (text, color)) in enumerate(meaning.items())
    }
    return [{"type": "value", "options": options}]


YES_NO = words({1: ("yes", GOOD), 0: ("no", BAD)})
UP_DOWN = words({1: ("answers", GOOD), 0: ("down", BAD), 2: ("not there", ABSENT)})


SOFT_MOST = {"none": 1, "s": 0.01, "cps": 1, "percentunit": 0.05, "Bps": 1000}
"""Where the axis ends at least, so that a flat line at zero stays at the bottom and is no drama."""


def link(title: str, url: str) -> Json:
    """A link from a series or a cell to another page."""
    return {"title": title, "url": url, "targetBlank": False}


def to(uid: str, title: str, **variables: str) -> Json:
    """A link to another dashboard over the same time, from the same data source."""
    chosen = "".join(f"&var-{name}={value}" for name, value in variables.items())
    return link(title, f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}{chosen}")


def lines(
    title: str,
    *queries: Query,
    unit: str,
    about: About,
    empty: str,
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
    logarithmic: bool = False,
    links: Sequence[Json] = (),
) -> Panel:
    """Series over time.

    The legend is a `list` below, a `table` below with last and maximum, one to the `right`, or `hidden`; thresholds are
    dashed lines; with `steps_drawn` a value holds until the next one. The axis reaches `most`, or with `soft` what is usual
    for the unit, and further where values do: a line that leaves the picture would look like a gap.
    """
    custom: Json = {
        "axisBorderShow": False,
        "axisCenteredZero": False,
        "axisColorMode": "text",
        "axisLabel": "",
        "axisPlacement": "auto",
        "barAlignment": 0,
        "drawStyle": "bars" if bars else "line",
        "fillOpacity": 70 if stacked or bars else fill,
        "gradientMode": "none",
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
        "insertNulls": False,
        "lineInterpolation": "stepAfter" if steps_drawn else "linear",
        "lineWidth": 0 if stacked else 1,
        "pointSize": 4,
        "scaleDistribution": {"type": "log", "log": 10} if logarithmic else {"type": "linear"},
        "showPoints": "never" if stacked or bars else "auto",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if stacked else "none"},
        "thresholdsStyle": {"mode": "dashed" if thresholds else "off"},
    }
    shown: Json = {
        "calcs": ["lastNotNull", "max"] if legend in {"table", "right"} else [],
        "displayMode": "table" if legend in {"table", "right"} else "list",
        "placement": "right" if legend == "right" else "bottom",
        "showLegend": legend != "hidden",
    }
    if most is None and soft and least == 0:
        most = SOFT_MOST.get(unit)
    if most is not None:
        custom["axisSoftMax"] = most
    defaults = _defaults(unit, empty, thresholds or NEUTRAL, None if logarithmic else least, None, decimals)
    defaults |= {"color": color or fixed(BLUE), "custom": custom, "links": list(links)}
    options = {"legend": shown, "tooltip": {"mode": "multi", "sort": "desc"}}
    return _panel("timeseries", title, queries, about, w, h, defaults, overrides, options)


def stat(
    title: str,
    *queries: Query,
    unit: str,
    about: About,
    empty: str = "no data",
    w: int = 4,
    h: int = 4,
    thresholds: Json | None = None,
    mappings: Sequence[Json] = (),
    decimals: int | None = None,
    text: str = "value",
    color: Json | None = None,
    overrides: Sequence[Override] = (),
    links: Sequence[Json] = (),
) -> Panel:
    """One number, or one for each series, as it is at the end of the time range; `text` is `value`, `name` or both."""
    defaults = _defaults(unit, empty, thresholds or NEUTRAL, None, None, decimals)
    defaults |= {"color": color or {"mode": "thresholds"}, "mappings": list(mappings), "links": list(links)}
    options: Json = {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": text,
        "wideLayout": True,
    }
    return _panel("stat", title, queries, about, w, h, defaults, overrides, options)


def bars(
    title: str,
    *queries: Query,
    unit: str,
    about: About,
    empty: str,
    w: int = 8,
    h: int = 8,
    least: float | None = 0,
    most: float | None = None,
    thresholds: Json | None = None,
    color: Json | None = None,
    decimals: int | None = None,
    overrides: Sequence[Override] = (),
    links: Sequence[Json] = (),
) -> Panel:
    """A bar for each series, as it is at the end of the time range."""
    defaults = _defaults(unit, empty, thresholds or steps((None, BLUE)), least, most, decimals)
    defaults |= {"color": color or {"mode": "thresholds"}, "links": list(links)}
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
        "text": {"titleSize": 13, "valueSize": 15},
        "valueMode": "text",
    }
    return _panel("bargauge", title, queries, about, w, h, defaults, overrides, options)


def states(
    title: str,
    *queries: Query,
    mappings: Sequence[Json],
    about: About,
    empty: str,
    w: int = 24,
    h: int = 6,
    overrides: Sequence[Override] = (),
    thresholds: Json | None = None,
    links: Sequence[Json] = (),
) -> Panel:
    """What a thing was, and when, in words; a row for each series."""
    defaults = _defaults("none", empty, thresholds or NEUTRAL, None, None, None)
    defaults |= {
        "color": {"mode": "thresholds"},
        "custom": {
            "fillOpacity": 85,
            "hideFrom": {"legend": False, "tooltip": False, "viz": False},
            "insertNulls": False,
            "lineWidth": 0,
            "spanNulls": False,
        },
        "mappings": list(mappings),
        "links": list(links),
    }
    options: Json = {
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
        "mergeValues": True,
        "rowHeight": 0.85,
        "showValue": "auto",
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return _panel("state-timeline", title, queries, about, w, h, defaults, overrides, options)


def heatmap(
    title: str,
    query: Query,
    *,
    unit: str,
    axis: str,
    about: About,
    empty: str,
    w: int = 12,
    h: int = 8,
    scheme: str = "Cividis",
    least: float | None = None,
    most: float | None = None,
    points: int = 120,
    exponent: float = 0.5,
) -> Panel:
    """Where values lie over time: colour says how many, or how much; what is more stands out in either theme.

    `unit` is that of the colour and `axis` that of the rows; `least` and `most` are the values of the first and the last
    colour, in proportion with an `exponent` of 1. A query costs a value for each row and each of its `points`.
    """
    defaults = _defaults(unit, empty, NEUTRAL, None, None, None)
    defaults["custom"] = {
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
        "scaleDistribution": {"type": "linear"},
    }
    options: Json = {
        "calculate": False,
        "cellGap": 0,
        "cellValues": {"unit": unit},
        "color": {
            "exponent": exponent,
            "fill": BLUE,
            "mode": "scheme",
            "reverse": False,
            "scale": "exponential",
            "scheme": scheme,
            "steps": 64,
        }
        | ({} if least is None else {"min": least})
        | ({} if most is None else {"max": most}),
        "exemplars": {"color": BAD},
        "filterValues": {"le": 1e-9 if query.heatmap else -1},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": axis},
    }
    made = _panel("heatmap", title, (query,), about, w, h, defaults, (), options)
    made.body["maxDataPoints"] = points
    return made


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        source: A label, or the letter of a query for its value.
        title: Its heading.
        unit: Of a value.
        width: In pixels; None for what is left.
        thresholds: Colour of the text.
        mappings: Words for values.
        links: From its cells.
        bar: Draw the value as a bar as well, of this least and most.
        decimals: Digits.
    """

    source: str
    title: str
    unit: str | None = None
    width: int | None = None
    thresholds: Json | None = None
    mappings: Sequence[Json] = ()
    links: Sequence[Json] = ()
    bar: tuple[float, float] | None = None
    decimals: int | None = None


def table(
    title: str,
    *queries: Query,
    columns: Sequence[Column],
    about: About,
    empty: str,
    w: int = 24,
    h: int = 9,
    sort: str | None = None,
    descending: bool = True,
    points: int | None = None,
) -> Panel:
    """A row for each thing, as it is at the end of the time range; rows of several queries meet by equal labels.

    With `points`, `$__interval` is the time range divided by them.
    """
    defaults = _defaults("none", empty, NEUTRAL, None, None, None)
    defaults["custom"] = {
        "align": "auto",
        "cellOptions": {"type": "auto"},
        "filterable": True,
        "inspect": False,
    }
    value = "Value #" if len(queries) > 1 else "Value"
    fields = [_field(column.source, value) for column in columns]
    unused = {
        f"{value}{chr(ord('A') + place)}" if value.endswith("#") else value for place in range(len(queries))
    }
    transformations: list[Json] = [{"id": "merge", "options": {}}] if len(queries) > 1 else []
    transformations.append(
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(
                    ["Time", "__name__", "job", *sorted(unused.difference(fields))], True
                ),
                "indexByName": {name: place for place, name in enumerate(fields)},
                "renameByName": {name: column.title for name, column in zip(fields, columns, strict=True)},
            },
        }
    )
    overrides = [
        {
            "matcher": {"id": "byName", "options": column.title},
            "properties": [{"id": "noValue", "value": NOTHING}, *_column_properties(column)],
        }
        for column in columns
    ]
    options: Json = {
        "cellHeight": "sm",
        "footer": {"countRows": False, "fields": "", "reducer": ["sum"], "show": False},
        "showHeader": True,
        "sortBy": [{"displayName": sort, "desc": descending}] if sort else [],
    }
    made = _panel("table", title, queries, about, w, h, defaults, overrides, options)
    made.body["transformations"] = transformations
    if points:
        made.body["maxDataPoints"] = points
    return made


def matrix(
    title: str,
    query: Query,
    *,
    across: str,
    down: str,
    unit: str,
    about: About,
    empty: str,
    w: int = 12,
    h: int = 9,
    decimals: int | None = None,
) -> Panel:
    """A value for each pair of two labels, as it is at the end of the time range: one makes the columns, one the rows."""
    defaults = _defaults(unit, empty, NEUTRAL, None, None, decimals)
    defaults["custom"] = {
        "align": "auto",
        "cellOptions": {"type": "auto"},
        "filterable": False,
        "inspect": False,
    }
    options: Json = {
        "cellHeight": "sm",
        "footer": {"countRows": False, "fields": "", "reducer": ["sum"], "show": False},
        "showHeader": True,
        "sortBy": [],
    }
    overrides = [
        {
            "matcher": {"id": "byRegexp", "options": "/.*/"},
            "properties": [{"id": "noValue", "value": NOTHING}],
        }
    ]
    made = _panel("table", title, (query,), about, w, h, defaults, overrides, options)
    made.body["transformations"] = [
        {
            "id": "groupingToMatrix",
            "options": {"columnField": across, "rowField": down, "valueField": "Value", "emptyValue": "null"},
        },
        {
            "id": "organize",
            "options": {
                "excludeByName": {},
                "indexByName": {},
                "renameByName": {f"{down}\\{across}": down.capitalize()},
            },
        },
    ]
    return made


def _field(source: str, value: str) -> str:
    if len(source) == 1 and source.isupper():
        return f"{value}{source}" if value.endswith("#") else value
    return source


def _column_properties(column: Column) -> list[Json]:
    properties: list[Json] = []
    if column.unit:
        properties.append({"id": "unit", "value": column.unit})
    if column.width:
        properties.append({"id": "custom.width", "value": column.width})
    if column.decimals is not None:
        properties.append({"id": "decimals", "value": column.decimals})
    if column.thresholds or column.mappings:
        properties.append({"id": "thresholds", "value": column.thresholds or NEUTRAL})
        properties.append({"id": "color", "value": {"mode": "thresholds"}})
        if not column.bar:
            properties.append({"id": "custom.cellOptions", "value": {"type": "color-text"}})
    if column.mappings:
        properties.append({"id": "mappings", "value": list(column.mappings)})
    if column.bar:
        least, most = column.bar
        properties.append({"id": "min", "value": least})
        properties.append({"id": "max", "value": most})
        properties.append(
            {
                "id": "custom.cellOptions",
                "value": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"},
            }
        )
        if not column.thresholds:
            properties.append({"id": "color", "value": fixed(BLUE)})
    if column.links:
        properties.append({"id": "links", "value": list(column.links)})
    return properties


def _defaults(
    unit: str,
    empty: str,
    thresholds: Json,
    least: float | None,
    most: float | None,
    decimals: int | None,
) -> Json:
    defaults: Json = {"mappings": [], "noValue": empty, "thresholds": thresholds, "unit": unit}
    for name, value in (("min", least), ("max", most), ("decimals", decimals)):
        if value is not None:
            defaults[name] = value
    return defaults


def _panel(
    kind: str,
    title: str,
    queries: Sequence[Query],
    about: About,
    w: int,
    h: int,
    defaults: Json,
    overrides: Sequence[Override],
    options: Json,
) -> Panel:
    body: Json = {
        "datasource": DATASOURCE,
        "description": about.text(),
        "fieldConfig": {"defaults": defaults, "overrides": list(overrides)},
        "options": options,
        "targets": [query.target(place) for place, query in enumerate(queries)],
        "title": title,
        "type": kind,
    }
    return Panel(w, h, body)
