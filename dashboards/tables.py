"""Tables: a row for each thing, or a value for each pair of two labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dashboards.palette import BLUE, fixed
from dashboards.panels import NEUTRAL, NOTHING, About, Json, Panel, assembled, defaults_of
from dashboards.queries import Query


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
    defaults = defaults_of("none", empty, NEUTRAL, None, None, None)
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
    made = assembled("table", title, queries, about, w, h, defaults, overrides, options)
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
    defaults = defaults_of(unit, empty, NEUTRAL, None, None, decimals)
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
    made = assembled("table", title, (query,), about, w, h, defaults, overrides, options)
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
