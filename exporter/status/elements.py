"""Elements of the status page: styled text, tables, named figures, plots and bars.

The elements hold content and coordinates; the templates produce the HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from exporter.status.formatting import DASH, age, duration, quantity, share
from exporter.status.history import PLOT_SECONDS, Line

MAX_ROWS = 200
"""Maximum number of rows of a table. The metrics contain all rows."""
COLOR_COUNT = 8
"""Number of plot colors in the style sheet, and maximum number of segments of a bar."""
WIDTH = 600.0
"""Width of the view box of a plot or a bar, in SVG user units."""
HEIGHT = 120.0
"""Height of the view box of a plot, in SVG user units."""
MARGIN = 3.0
"""Distance of the highest and the lowest point from the edges of a plot, in SVG user units, so that a line is not cut."""
MIN_PLOT_SECONDS = 300.0
"""Shortest time range of a plot."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class StyledText:
    """Text with a style."""

    text: str
    style: str = ""  # good, warn, bad, dim, missing, code, remark, or "" for none
    color: int | None = None  # index of a plot color, drawn as a square before the text


RichText = tuple[StyledText, ...]
MISSING: RichText = (StyledText(DASH, "missing"),)


@dataclass(frozen=True, slots=True)
class Figure:
    """Named number of the status page."""

    name: str
    value: RichText
    notes: tuple[str, ...] = ()  # small print below the number


@dataclass(frozen=True, slots=True)
class Column:
    """Heading and alignment of a column."""

    name: str
    is_numeric: bool


@dataclass(frozen=True, slots=True)
class Table:
    """Table without empty columns."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[RichText, ...], ...]
    hidden_count: int  # number of rows beyond `MAX_ROWS`


@dataclass(frozen=True, slots=True)
class PlotData:
    """Input of the script that draws a plot."""

    unit: str
    floor: float | None  # lower edge of the plot; None for the minimum of the lines
    names: tuple[str, ...]
    colors: tuple[int, ...]  # index of the plot color of each line
    data: tuple[Sequence[float | None], ...]  # Unix times, then the numbers of each line

    def fields(self) -> dict[str, object]:
        """Return the fields by name, for JSON."""
        return {
            "unit": self.unit,
            "floor": self.floor,
            "names": self.names,
            "colors": self.colors,
            "data": self.data,
        }


@dataclass(frozen=True, slots=True)
class Plot:
    """Plot of one or more lines over at most the last hour."""

    key: str  # unique on the page
    title: str
    latest_text: str
    accessible_label: str
    axis_labels: tuple[str, str, str]  # numbers at the upper edge, the middle and the lower edge
    seconds: float  # length of the time range
    paths: tuple[str, ...]  # SVG path data for each line
    data: PlotData


@dataclass(frozen=True, slots=True)
class BarSegment:
    """Segment of a stacked bar."""

    name: str
    ratio: float  # share of the bar, from 0 to 1
    x: float  # left edge, in SVG user units
    width: float  # in SVG user units


def styled(text: str, style: str = "") -> RichText:
    """Return rich text of one `StyledText`, or of none for an empty text."""
    return (StyledText(text, style),) if text else ()


def value_or_dash(value: float | None, format_value: Callable[[float], str]) -> RichText:
    """Return a number as text, or a dash if the number is unknown."""
    return MISSING if value is None else styled(format_value(value))


def age_or_dash(timestamp: float | None, now: float) -> RichText:
    """Return the time since a timestamp, or a dash if the timestamp is unknown."""
    return MISSING if timestamp is None else styled(age(timestamp, now))


def figure(name: str, value: RichText, *notes: str) -> list[Figure]:
    """Return a list with the figure, or an empty list if the figure has neither a value nor notes."""
    return [] if value in {(), MISSING} and not notes else [Figure(name, value, notes)]


def table(
    title: str,
    items: Sequence[Item],
    row: Callable[[Item], Mapping[str, RichText]],
    numeric_columns: Collection[str],
) -> Table:
    """Return a table with a row for each item. Columns without a known value in these rows are omitted.

    Args:
        title: Accessible name of the table.
        items: Items of the rows; at most `MAX_ROWS` are shown.
        row: Returns the cells of an item by column name.
        numeric_columns: Names of the columns with numbers.
    """
    rows = [row(item) for item in items[:MAX_ROWS]]
    first = rows[0] if rows else {}
    names = [name for name in first if any(cells[name] not in {(), MISSING} for cells in rows)]
    return Table(
        title=title,
        columns=tuple(Column(name, name in numeric_columns) for name in names),
        rows=tuple(tuple(cells[name] for name in names) for cells in rows),
        hidden_count=len(items) - len(rows),
    )


def plot(
    title: str,
    lines: Mapping[str, Line],
    unit: str,
    now: float,
    *,
    owner: str = "",
    floor: float | None = None,
    latest: float | None = None,
) -> list[Plot]:
    """Return a list with the plot, or an empty list if no line has two points with a number in the last hour.

    Args:
        title: Title and accessible name of the plot.
        lines: Lines by name, with points at the same times. A line with fewer than two such points is not drawn, and does not change the
            colors of the other lines.
        unit: Base unit of the numbers.
        now: Unix time of the right edge.
        owner: Name of the plot's run, which makes the key unique.
        floor: Lower edge of the plot; None for the minimum of the lines.
        latest: Current value of a single line, for the caption and the accessible label.
    """
    drawn_lines = {
        name: [point for point in line if now - point[0] <= PLOT_SECONDS] for name, line in lines.items()
    }
    drawn_lines = {
        name: line for name, line in drawn_lines.items() if sum(value is not None for _, value in line) > 1
    }
    numbers = [value for line in drawn_lines.values() for _, value in line if value is not None]
    if not numbers:
        return []
    high = max(numbers)
    # The axis spans at least a tenth of the highest number, so that noise is not drawn as a change.
    low = min(*numbers, high - abs(high) / 10) if floor is None else floor
    first_times = [first_time for (first_time, _), *_ in drawn_lines.values()]
    seconds = max(MIN_PLOT_SECONDS, now - min(first_times))
    format_value = partial(quantity, unit=unit)
    current_text = f"{len(drawn_lines)} lines" if len(drawn_lines) > 1 else f"now {format_value(latest)}"
    range_text = f"from {format_value(min(numbers))} to {format_value(high)}"
    rounded_lines = [
        [None if value is None else float(f"{value:.4g}") for _, value in line]
        for line in drawn_lines.values()
    ]
    colors = tuple(index for index, name in enumerate(lines) if name in drawn_lines)
    times = [round(timestamp) for timestamp, _ in next(iter(drawn_lines.values()))]
    return [
        Plot(
            key=f"{title}-{owner}",
            title=title,
            latest_text="" if latest is None else format_value(latest),
            accessible_label=f"{title}, last {duration(seconds)}: {range_text}, {current_text}",
            axis_labels=(format_value(high), format_value((high + low) / 2), format_value(low)),
            seconds=seconds,
            paths=tuple(_path(line, now, seconds, low, high) for line in drawn_lines.values()),
            data=PlotData(
                unit=unit, floor=floor, names=tuple(drawn_lines), colors=colors, data=(times, *rounded_lines)
            ),
        )
    ]


def append_current(line: Line, value: float | None, now: float) -> Line:
    """Return a line that ends with the current value, or with a gap if *value* is None, so that the plot agrees with the figure.

    Points of the last second are dropped. An empty line stays unchanged.
    """
    if not line:
        return line
    return [*(point for point in line if point[0] < now - 1), (now, value)]


def _path(line: Line, now: float, seconds: float, low: float, high: float) -> str:
    """Return the SVG path data of a line over the last `seconds`, between the numbers *low* and *high*."""
    path, is_gap = "", True
    for timestamp, value in line:
        if value is not None:
            x = WIDTH * (1 - (now - timestamp) / seconds)
            y = (HEIGHT - 2 * MARGIN) * (1 - (value - low) / ((high - low) or 1.0)) + MARGIN
            # A single point between two gaps is a dot: a line of length 0 with round ends.
            path += f"M{x:.0f} {y:.0f}h0" if is_gap else f"L{x:.0f} {y:.0f}"
        is_gap = value is None
    return path


def bar_segments(amounts: Mapping[str, float]) -> list[BarSegment]:
    """Return the `COLOR_COUNT` largest amounts as segments of a stacked bar, the largest first; no segments if the sum is 0."""
    total = sum(amounts.values())
    segments: list[BarSegment] = []
    if total <= 0:
        return segments
    x = 0.0
    for name in sorted(amounts, key=lambda name: -amounts[name])[:COLOR_COUNT]:
        amount = amounts[name]
        width = WIDTH * amount / total
        segments.append(BarSegment(name=name, ratio=amount / total, x=x, width=width))
        x += width
    return segments


def used_share(
    used: float | None, total: float | None, format_value: Callable[[float], str]
) -> tuple[RichText, str]:
    """Return the used share in per cent, and a note with the total. Both are empty if a number is unknown or the total is 0."""
    if used is None or not total:
        return (), ""
    return styled(share(used / total)), f"of {format_value(total)}"
