"""The pieces that the status page is made of: escaped text, numbers or dashes, tables, folds.

Used in the sidecar, on a worker thread of the web server. Values come in, HTML goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Generic, TypeVar

from exporter.status.history import KEPT_SECONDS, POINT_SECONDS, Point
from exporter.status.sparkline import sparkline
from exporter.status.text import DASH, duration

MOST_ROWS = 200
"""Rows of a table at most; the metrics have them all."""
LONGEST_TEXT = 300
MISSING = f'<span class="dim" title="no data">{DASH}</span>'

_FEWEST_SLOTS, _MOST_SLOTS = 24, round(KEPT_SECONDS / POINT_SECONDS) + 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table.

    Attributes:
        head: What it is called; trusted.
        cell: Makes the HTML of a row's cell.
        kind: Class of its cells: "" for words, "n" for numbers.
    """

    head: str
    cell: Callable[[T], str]
    kind: str = ""


def table(columns: Sequence[Column[T]], items: Sequence[T]) -> str:
    """A table without the columns that no row has anything for."""
    shown = items[:MOST_ROWS]
    made = [(column, [column.cell(item) for item in shown]) for column in columns]
    kept = [(column, cells) for column, cells in made if any(cell not in {"", MISSING} for cell in cells)]
    heads = "".join(f'<th scope="col"{_class(column.kind)}>{column.head}</th>' for column, _ in kept)
    rows = "".join(
        f"<tr>{''.join(f'<td{_class(column.kind)}>{cells[row]}</td>' for column, cells in kept)}</tr>"
        for row in range(len(shown))
    )
    more = f'<p class="empty dim">and {len(items) - len(shown)} more</p>' if len(items) > len(shown) else ""
    return f'<div class="card wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{more}</div>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def folded(name: str, title: str, content: str, *, unfolded: bool) -> str:
    """A section that can be folded; a reader's choice is kept while the page renews itself."""
    state = " open" if unfolded else ""
    return f'<details id="{name}"{state}><summary><h2>{title}</h2></summary>{content}</details>'


def cell(name: str, value: str, below: str = "") -> str:
    """One number under its name; nothing where there is none, so that a page without training shows no dashes."""
    return f"<div><dt>{name}</dt><dd>{value}{below}</dd></div>" if value and value != MISSING else ""


def known(value: float | None, words: Callable[[float], str]) -> str:
    """A number, or a dash."""
    return MISSING if value is None else words(value)


def ago(at: float | None, now: float) -> str:
    """How long ago something was."""
    return MISSING if at is None else f"{duration(max(0.0, now - at))} ago"


def spark(
    points: Sequence[Point], name: str, words: Callable[[float | None], str], *, floor: float | None = None
) -> str:
    """A line of what was; as long as the exporter runs, at most a quarter of an hour."""
    slots = min(max(len(points), _FEWEST_SLOTS), _MOST_SLOTS)
    return sparkline(
        points,
        slots=slots,
        name=f"{name}, last {duration(POINT_SECONDS * len(points))}",
        words=words,
        floor=floor,
    )


def text(foreign: str) -> str:
    """Foreign text, harmless in HTML and of bounded length."""
    shown = foreign if len(foreign) <= LONGEST_TEXT else foreign[: LONGEST_TEXT - 1] + "…"
    return escape("".join(c if c.isprintable() else "\ufffd" for c in shown))
