"""Elements of the status page: coloured text, tables, figures with a name, plots.

The templates write the HTML; here is only the content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from exporter.status.history import DRAWN_SECONDS, Line
from exporter.status.numbers import DASH, age, duration, quantity, share

MOST_ROWS = 200
"""Maximum number of rows of a table; the metrics have all of them."""
COLOURS = 8
WIDTH, HEIGHT = 600.0, 120.0
FEWEST_SECONDS = 300.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StyledText:
    """Text with a style."""

    text: str
    kind: str = ""  # good, warn, bad, dim, missing, code, remark, or "" for none
    colour: int | None = None  # index of a plot colour, drawn as a square before the text


Words = tuple[StyledText, ...]
MISSING: Words = (StyledText(DASH, "missing"),)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its name."""

    name: str
    words: Words
    notes: tuple[str, ...] = ()  # in small print below the number


@dataclass(frozen=True, slots=True)
class Column:
    """The heading of a column."""

    name: str
    numeric: bool


@dataclass(frozen=True, slots=True)
class Table:
    """A table without empty columns."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Words, ...], ...]
    hidden: int  # number of rows beyond the maximum


@dataclass(frozen=True, slots=True)
class PlotData:
    """The input of the script that draws a plot."""

    unit: str
    floor: float | None
    names: tuple[str, ...]
    data: tuple[Sequence[float | None], ...]  # times, then the numbers of each line

    def fields(self) -> dict[str, object]:
        """Return the fields by name, for JSON."""
        return {"unit": self.unit, "floor": self.floor, "names": self.names, "data": self.data}


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over the last hour."""

    key: str  # unique on the page
    title: str
    latest: str
    summary: str
    levels: tuple[str, str, str]  # upper edge, middle, lower edge
    seconds: float
    paths: tuple[str, ...]  # SVG path data for each line
    data: PlotData


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a whole."""

    name: str
    ratio: float
    x: float
    width: float


def words(text: str, kind: str = "") -> Words:
    """Return text of a style; no span for empty text."""
    return (StyledText(text, kind),) if text else ()


def known(value: float | None, write: Callable[[float], str]) -> Words:
    """Return a number as text, or a dash if the number is not known."""
    return MISSING if value is None else words(write(value))


def ago(at: float | None, now: float) -> Words:
    """Return the time since `at`, or a dash if the time is not known."""
    return MISSING if at is None else words(age(at, now))


def figure(name: str, value: Words, *notes: str) -> list[Figure]:
    """Return a list with a figure, or an empty list if the value is not known."""
    return [] if value in {(), MISSING} and not notes else [Figure(name, value, notes)]


def table(
    title: str, items: Sequence[T], row: Callable[[T], Mapping[str, Words]], numeric: Collection[str]
) -> Table:
    """Return a table; `row` gives the cells of an item by the names of their columns."""
    rows = [row(item) for item in items[:MOST_ROWS]]
    first = rows[0] if rows else {}
    names = [name for name in first if any(cells[name] not in {(), MISSING} for cells in rows)]
    return Table(
        title=title,
        columns=tuple(Column(name, name in numeric) for name in names),
        rows=tuple(tuple(cells[name] for name in names) for cells in rows),
        hidden=len(items) - len(rows),
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
    """Return a list with a plot, or an empty list if no line has two points with a number.

    Args:
        title: The title.
        lines: The lines by name, with points at the same times.
        unit: The base unit of the numbers.
        now: The Unix time of the right edge.
        owner: The run of the plot, which makes the key unique.
        floor: The lower edge; None for the minimum.
        latest: The current value of a single line, which the caption shows.
    """
    drawn = {
        name: [point for point in line if now - point[0] <= DRAWN_SECONDS] for name, line in lines.items()
    }
    drawn = {name: line for name, line in drawn.items() if sum(value is not None for _, value in line) > 1}
    numbers = [value for line in drawn.values() for _, value in line if value is not None]
    if not numbers:
        return []
    high = max(numbers)
    # At least a tenth of the value, so that noise is not drawn as a change.
    low = min(*numbers, high - abs(high) / 10) if floor is None else floor
    seconds = max(FEWEST_SECONDS, now - min(line[0][0] for line in drawn.values()))
    write = partial(quantity, unit=unit)
    current = f"{len(drawn)} lines" if len(drawn) > 1 else f"now {write(latest)}"
    rounded = [
        [None if value is None else float(f"{value:.4g}") for _, value in line] for line in drawn.values()
    ]
    times = [round(at) for at, _ in next(iter(drawn.values()))]
    span = f"{title}, last {duration(seconds)}"
    return [
        Plot(
            key=f"{title}-{owner}",
            title=title,
            latest="" if latest is None else write(latest),
            summary=f"{span}: from {write(min(numbers))} to {write(high)}, {current}",
            levels=(write(high), write((high + low) / 2), write(low)),
            seconds=seconds,
            paths=tuple(_path(line, now, seconds, low, high) for line in drawn.values()),
            data=PlotData(unit, floor, tuple(drawn), (times, *rounded)),
        )
    ]


def with_current(line: Line, value: float | None, now: float) -> Line:
    """Return a line that ends with the current value, which the figure shows, too."""
    return (
        line
        if value is None or not line
        else [*(point for point in line if point[0] < now - 1), (now, value)]
    )


def _path(line: Line, now: float, seconds: float, low: float, high: float) -> str:
    pieces, gap = "", True
    for at, value in line:
        if value is not None:
            x = WIDTH * (1 - (now - at) / seconds)
            y = (HEIGHT - 6) * (1 - (value - low) / ((high - low) or 1.0)) + 3
            # A single point between two gaps is a dot: a line of length 0 with round ends.
            pieces += f"M{x:.0f} {y:.0f}h0" if gap else f"L{x:.0f} {y:.0f}"
        gap = value is None
    return pieces


def parts(amounts: Mapping[str, float]) -> list[Part]:
    """Return the largest parts of a whole as segments of a bar."""
    whole = sum(amounts.values())
    found: list[Part] = []
    if whole <= 0:
        return found
    x = 0.0
    for name, amount in sorted(amounts.items(), key=lambda item: -item[1])[:COLOURS]:
        width = WIDTH * amount / whole
        found.append(Part(name, amount / whole, x, width))
        x += width
    return found


def share_of(used: float | None, whole: float | None, write: Callable[[float], str]) -> tuple[Words, str]:
    """Return a share in per cent and the whole in small print."""
    return (words(share(used / whole)), f"of {write(whole)}") if whole and used is not None else ((), "")
