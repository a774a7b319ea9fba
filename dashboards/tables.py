"""Table panels: one row for each combination of labels, or a matrix of two labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dashboards.palette import BLUE, PLAIN, Override, fixed
from dashboards.panels import NEUTRAL, NOTHING, SEVERITIES, Json, Panel, assembled, defaults_of, link, words
from dashboards.queries import Query, rows

HEADING_EDGE, HEADING_FILTER, HEADING_LETTER, HEADING_ARROW = 28, 22, 7.5, 20
"""Width of a heading in pixels: padding, the filter icon of a label, each letter, the sort arrow."""
LEAST_WIDTH = 100
"""Smallest width of a column without a fixed width."""


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table."""

    source: str  # a label, or PromQL
    title: str  # heading
    unit: str | None = None  # unit of values
    width: int | None = None  # pixels; None for the remaining width
    thresholds: Json | None = None  # colour of the text
    mappings: Sequence[Json] = ()  # texts for values
    links: Sequence[Json] = ()  # links of the cells
    bar: tuple[float, float] | None = None  # draw a bar between these values
    decimals: int | None = None  # digits

    @property
    def is_value(self) -> bool:
        """True if the source is PromQL."""
        return not self.source.isidentifier()


def percent(
    source: str,
    title: str,
    width: int | None = None,
    thresholds: Json | None = None,
    bar: tuple[float, float] | None = None,
) -> Column:
    """Return a column of whole percentages."""
    return Column(source, title, "percentunit", width, thresholds, bar=bar, decimals=0)


def table(
    title: str,
    *columns: Column,
    of: str = "",
    w: int = 24,
    h: int = 9,
    sort: str | None = None,
    descending: bool = True,
    points: int | None = None,
) -> Panel:
    """Return a table of values at the end of the time range; columns join on equal labels.

    `of` is PromQL for the rows, if the table shows labels that no value has. `points` sets `$__interval` to the time range
    divided by that number.
    """
    values = [column.source for column in columns if column.is_value]
    queries = [rows(source) for source in ([of, *values] if of else values)]
    defaults = defaults_of("none", NEUTRAL, None, None, None)
    names = [f"Value #{chr(ord('A') + place)}" for place in range(len(queries))]
    if len(names) == 1:
        names = ["Value"]
    hidden, shown = names[: bool(of)], iter(names[bool(of) :])
    fields = [next(shown) if column.is_value else column.source for column in columns]
    transformations: list[Json] = [{"id": "merge", "options": {}}] if len(queries) > 1 else []
    transformations.append(
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(["Time", "__name__", "job", *hidden], True),
                "indexByName": {name: place for place, name in enumerate(fields)},
                "renameByName": {name: column.title for name, column in zip(fields, columns, strict=True)},
            },
        }
    )
    overrides = [
        {
            "matcher": {"id": "byName", "options": column.title},
            "properties": [
                {"id": "noValue", "value": NOTHING},
                *_column_properties(column, column.title == sort),
            ],
        }
        for column in columns
    ]
    order = [{"displayName": sort, "desc": descending}] if sort else []
    made = _assembled(title, queries, w, h, defaults, overrides, order)
    made.body["transformations"] = transformations
    if points:
        made.body["maxDataPoints"] = points
    return made


RUNBOOK = link("Runbook", "${runbook}#${__value.raw}")
"""Link of an alert's name; the variable `runbook` holds the address from the rules."""


NO_ZERO = words({0: (NOTHING, PLAIN)})


def nothing(selected: str, label: str, text: str) -> str:
    """Return PromQL for a row of zeros with a text, for a table that would be empty."""
    return f'max by ({label}) (label_replace(absent({selected}) * 0, "{label}", "{text}", "", ""))'


def firing_alerts(selector: str, columns: Sequence[Column], w: int, h: int) -> Panel:
    """Return the table of the firing alerts of a selector, critical alerts first; one row says that none fires."""
    labels = ", ".join(["alertname", "severity", *(column.source for column in columns)])
    none = nothing(f'ALERTS{{alertstate="firing", {selector}}}', "alertname", "no alert fires")
    return table(
        "Firing alerts",
        Column("severity", "Severity", width=90, mappings=SEVERITIES),
        Column("alertname", "Alert", links=(RUNBOOK,)),
        *columns,
        Column(
            f"time() - max by ({labels}) (ALERTS_FOR_STATE{{{selector}}})"
            f' and on ({labels}) max by ({labels}) (ALERTS{{alertstate="firing", {selector}}})'
            f" or {none}",
            "For",
            unit="s",
            decimals=0,
            width=100,
            mappings=NO_ZERO,
        ),
        sort="Severity",
        descending=False,
        w=w,
        h=h,
    )


def hanging_ranks(w: int = 24) -> Panel:
    """Return the table of the ranks of a hung or stalled run: where each rank waits, the odd rank first."""
    of = "max by (instance, rank, function, location, phase) (training_hang_info{@run})"
    same = "count by (function, location) (training_hang_info{@run})"
    none = nothing("training_hang_info{@run}", "function", "no rank hangs")
    return table(
        "Where hanging ranks wait",
        Column("rank", "Rank", width=70),
        Column("instance", "Node", width=120),
        Column("function", "Function"),
        Column("location", "Line"),
        Column("phase", "Phase", width=120),
        Column(
            f'({of}) * on (instance, rank) group_left () max by (instance, rank) (training_collective_sequence{{@run, group="default"}})'
            f" or {none}",
            "Collectives",
            decimals=0,
            width=110,
            mappings=NO_ZERO,
        ),
        Column(
            f"({of}) * on (function, location) group_left () {same} or {none}",
            "Ranks at this line",
            decimals=0,
            width=140,
            mappings=NO_ZERO,
        ),
        of=f"{of} or {none}",
        sort="Ranks at this line",
        descending=False,
        w=w,
        h=5,
    )


def matrix(
    title: str,
    query: Query,
    *,
    across: str,
    down: str,
    unit: str,
    w: int = 12,
    h: int = 9,
    decimals: int | None = None,
    numbers: bool = False,
) -> Panel:
    """Return a matrix of values at the end of the time range: one label names the columns, the other the rows.

    With `numbers` the rows are sorted as numbers.
    """
    defaults = defaults_of(unit, NEUTRAL, None, None, decimals)
    overrides = [
        {
            "matcher": {"id": "byRegexp", "options": "/.*/"},
            "properties": [{"id": "noValue", "value": NOTHING}],
        }
    ]
    if numbers:
        matcher = {"id": "byName", "options": down.capitalize()}
        overrides.append({"matcher": matcher, "properties": [{"id": "decimals", "value": 0}]})
    made = _assembled(title, (query,), w, h, defaults, overrides)
    ordered = [
        {
            "id": "convertFieldType",
            "options": {"conversions": [{"targetField": down, "destinationType": "number"}], "fields": {}},
        },
        {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": down}]}},
    ]
    made.body["transformations"] = [
        *(ordered if numbers else ()),
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


def _assembled(
    title: str,
    queries: Sequence[Query],
    w: int,
    h: int,
    defaults: Json,
    overrides: Sequence[Override],
    order: Sequence[Json] | None = None,
) -> Panel:
    """Return a table panel."""
    defaults["custom"] = {
        "align": "auto",
        "cellOptions": {"type": "auto"},
        "filterable": False,
        "inspect": False,
        "minWidth": LEAST_WIDTH,
    }
    options: Json = {
        "cellHeight": "sm",
        "footer": {"countRows": False, "fields": "", "reducer": ["sum"], "show": False},
        "showHeader": True,
        "sortBy": list(order or ()),
    }
    return assembled("table", title, queries, w, h, defaults, overrides, options)


def _column_properties(column: Column, ordered: bool) -> list[Json]:
    properties: list[Json] = []
    unit = column.unit or ("none" if column.is_value and not column.mappings else None)
    if unit:
        properties.append({"id": "unit", "value": unit})
    filtered = not column.is_value
    heading = HEADING_EDGE + HEADING_FILTER * filtered + math.ceil(HEADING_LETTER * len(column.title))
    heading += HEADING_ARROW * ordered
    properties.append({"id": "custom.filterable", "value": filtered})
    if column.width:
        properties.append({"id": "custom.width", "value": max(column.width, heading)})
    else:
        properties.append({"id": "custom.minWidth", "value": max(LEAST_WIDTH, heading)})
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
