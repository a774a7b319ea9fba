"""Grafana table panels: a row for each combination of labels, or a matrix of two labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dashboards.palette import BLUE, NEUTRAL, Override, fixed_color
from dashboards.panels import (
    NO_THRESHOLDS,
    NO_VALUE,
    Json,
    Panel,
    build_panel,
    field_defaults,
    value_mappings,
)
from dashboards.queries import Query, table_query

# Width of a column heading in Grafana: padding, icons, and the mean width of a letter.
HEADING_PADDING_PIXELS = 28
FILTER_ICON_PIXELS = 22
SORT_ARROW_PIXELS = 20
LETTER_PIXELS = 7.5
MIN_COLUMN_WIDTH_PIXELS = 100
"""Minimum width in pixels of a column without a fixed width."""


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table: a label, or the values of a query."""

    source: str  # PromQL or the name of a label; an identifier is a label, so that the PromQL of a metric needs braces: `up{}`
    title: str  # heading
    unit: str | None = None  # Grafana's identifier of the unit; None for a plain number, and for a text
    width: int | None = None  # pixels, or the heading's if wider; None for a share of the remaining width
    thresholds: Json | None = None  # thresholds that color the text, or the bar of a bar gauge
    mappings: Sequence[Json] = ()  # value mappings
    links: Sequence[Json] = ()  # data links of the cells
    bar: tuple[float, float] | None = None  # limits of the bar gauge in each cell; None for no bar gauge
    decimals: int | None = None  # number of decimals; None for automatic
    filterable: bool = True  # the heading of a label has a filter, whose icon makes the column wider

    @property
    def is_query(self) -> bool:
        """True if the source is PromQL."""
        return not self.source.isidentifier()


def percent_column(
    source: str,
    title: str,
    width: int | None = None,
    thresholds: Json | None = None,
    bar: tuple[float, float] | None = None,
) -> Column:
    """Return a column of a ratio, in whole percent. The arguments are those of `Column`."""
    return Column(source, title, "percentunit", width, thresholds, bar=bar, decimals=0)


def table(
    title: str,
    *columns: Column,
    row_query: str = "",
    w: int = 24,
    h: int = 9,
    sort: str | None = None,
    descending: bool = True,
    max_data_points: int | None = None,
) -> Panel:
    """Return a table of values at the end of the time range; the columns are joined on equal labels.

    Args:
        title: Title of the panel, unique on the dashboard.
        columns: Columns from left to right.
        row_query: PromQL whose series are the rows; its values are hidden. Empty if the value columns have all rows and labels.
        w: Width in grid columns.
        h: Height in grid rows.
        sort: Title of the column to sort by; None keeps the order of Prometheus.
        descending: Sort from the largest value.
        max_data_points: Number by which Grafana divides the time range to obtain `$__interval`, the resolution of subqueries; None
            for the width of the panel in pixels.
    """
    value_queries = [column.source for column in columns if column.is_query]
    queries = [table_query(query) for query in ([row_query] if row_query else []) + value_queries]
    query_fields = _query_fields(len(queries))
    hidden_fields = query_fields[:1] if row_query else []
    value_fields = iter(query_fields[len(hidden_fields) :])
    fields = [next(value_fields) if column.is_query else column.source for column in columns]
    defaults = field_defaults("none", NO_THRESHOLDS, None, None, None)
    transformations: list[Json] = [{"id": "merge", "options": {}}] if len(queries) > 1 else []
    transformations.append(
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(["Time", "__name__", "job", *hidden_fields], True),
                "indexByName": {field: index for index, field in enumerate(fields)},
                "renameByName": {field: column.title for field, column in zip(fields, columns, strict=True)},
            },
        }
    )
    overrides = [
        {
            "matcher": {"id": "byName", "options": column.title},
            "properties": [
                {"id": "noValue", "value": NO_VALUE},
                *_column_properties(column, column.title == sort),
            ],
        }
        for column in columns
    ]
    sort_order = [{"displayName": sort, "desc": descending}] if sort else []
    panel = _build_table(title, queries, w, h, defaults, overrides, sort_order)
    panel.body["transformations"] = transformations
    if max_data_points:
        panel.body["maxDataPoints"] = max_data_points
    return panel


def _query_fields(query_count: int) -> list[str]:
    """Return the names of the fields in which Grafana stores the values of a panel's queries."""
    if query_count == 1:
        return ["Value"]
    return [f"Value #{chr(ord('A') + index)}" for index in range(query_count)]


ZERO_AS_DASH = value_mappings({0: (NO_VALUE, NEUTRAL)})
"""Value mappings that show 0 as a dash, for counts and for columns whose value is 0 in the placeholder row."""
NO_SAMPLE_OF_RUN = "unknown: no sample of this run"
"""Text of the placeholder row of a table about a run without samples."""
STANDSTILL_WITHOUT_STACKS = "no step, no stack yet"
"""Text of a standstill before the ranks have reported their stacks."""


def placeholder_row(selector: str, label: str, text: str, *, unknown_if: str, unknown_text: str) -> str:
    """Return PromQL for a row of value 0 with a text in a label, if no series matches the selector.

    The text is *unknown_text* if the PromQL *unknown_if* has a value: without samples, the absence of a series means nothing.
    """
    no_series = f"0 * max(absent({selector}))"
    unknown_row = f'label_replace({no_series} and on () {unknown_if}, "{label}", "{unknown_text}", "", "")'
    return f'({unknown_row} or on () label_replace({no_series}, "{label}", "{text}", "", ""))'


def matrix(
    title: str,
    query: Query,
    *,
    column_label: str,
    row_label: str,
    unit: str,
    w: int = 12,
    h: int = 9,
    decimals: int | None = None,
    numeric_rows: bool = False,
) -> Panel:
    """Return a table of values at the end of the time range, with columns from one label and rows from another.

    Args:
        title: Title of the panel, unique on the dashboard.
        query: Query with one series for each cell.
        column_label: Label whose values are the headings of the columns.
        row_label: Label whose values are the first column; its capitalized name is the heading of this column.
        unit: Grafana's identifier of the unit.
        w: Width in grid columns.
        h: Height in grid rows.
        decimals: Number of decimals of a value; None for automatic.
        numeric_rows: Convert *row_label* to numbers without decimals, and sort the rows by them.
    """
    defaults = field_defaults(unit, NO_THRESHOLDS, None, None, decimals)
    overrides = [
        {
            "matcher": {"id": "byRegexp", "options": "/.*/"},
            "properties": [{"id": "noValue", "value": NO_VALUE}],
        }
    ]
    if numeric_rows:
        matcher = {"id": "byName", "options": row_label.capitalize()}
        overrides.append({"matcher": matcher, "properties": [{"id": "decimals", "value": 0}]})
    panel = _build_table(title, (query,), w, h, defaults, overrides)
    sort_by_number = [
        {
            "id": "convertFieldType",
            "options": {
                "conversions": [{"targetField": row_label, "destinationType": "number"}],
                "fields": {},
            },
        },
        {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": row_label}]}},
    ]
    panel.body["transformations"] = [
        *(sort_by_number if numeric_rows else ()),
        {
            "id": "groupingToMatrix",
            "options": {
                "columnField": column_label,
                "rowField": row_label,
                "valueField": "Value",
                "emptyValue": "null",
            },
        },
        {
            "id": "organize",
            "options": {
                "excludeByName": {},
                "indexByName": {},
                "renameByName": {f"{row_label}\\{column_label}": row_label.capitalize()},
            },
        },
    ]
    return panel


def _build_table(
    title: str,
    queries: Sequence[Query],
    w: int,
    h: int,
    defaults: Json,
    overrides: Sequence[Override],
    sort_order: Sequence[Json] | None = None,
) -> Panel:
    """Return a table panel with the settings that all tables share."""
    defaults["custom"] = {
        "align": "auto",
        "cellOptions": {"type": "auto"},
        "filterable": False,
        "inspect": False,
        "minWidth": MIN_COLUMN_WIDTH_PIXELS,
    }
    options: Json = {
        "cellHeight": "sm",
        "footer": {"countRows": False, "fields": "", "reducer": ["sum"], "show": False},
        "showHeader": True,
        "sortBy": list(sort_order or ()),
    }
    return build_panel("table", title, queries, w, h, defaults, overrides, options)


def _column_properties(column: Column, is_sorted: bool) -> list[Json]:
    """Return the override properties of a column. The column becomes at least as wide as its heading."""
    properties: list[Json] = []
    unit = column.unit or ("none" if column.is_query and not column.mappings else None)
    if unit:
        properties.append({"id": "unit", "value": unit})
    is_filterable = column.filterable and not column.is_query
    heading_pixels = (
        HEADING_PADDING_PIXELS
        + FILTER_ICON_PIXELS * is_filterable
        + math.ceil(LETTER_PIXELS * len(column.title))
    )
    heading_pixels += SORT_ARROW_PIXELS * is_sorted
    properties.append({"id": "custom.filterable", "value": is_filterable})
    if column.width:
        properties.append({"id": "custom.width", "value": max(column.width, heading_pixels)})
    else:
        properties.append({"id": "custom.minWidth", "value": max(MIN_COLUMN_WIDTH_PIXELS, heading_pixels)})
    if column.decimals is not None:
        properties.append({"id": "decimals", "value": column.decimals})
    if column.thresholds or column.mappings:
        properties.append({"id": "thresholds", "value": column.thresholds or NO_THRESHOLDS})
        properties.append({"id": "color", "value": {"mode": "thresholds"}})
        if not column.bar:
            properties.append({"id": "custom.cellOptions", "value": {"type": "color-text"}})
    if column.mappings:
        properties.append({"id": "mappings", "value": list(column.mappings)})
    if column.bar:
        minimum, maximum = column.bar
        properties.append({"id": "min", "value": minimum})
        properties.append({"id": "max", "value": maximum})
        properties.append(
            {
                "id": "custom.cellOptions",
                "value": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"},
            }
        )
        if not column.thresholds:
            properties.append({"id": "color", "value": fixed_color(BLUE)})
    if column.links:
        properties.append({"id": "links", "value": list(column.links)})
    return properties
