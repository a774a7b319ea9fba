"""The pieces that the status page is made of: numbers as people read them, escaped text, tables, folds, small charts.

Used in the sidecar, on a worker thread of the web server. Values come in, HTML goes out; what is not known is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import isfinite
from typing import TypeVar

from exporter.status.history import KEPT_SECONDS, POINT_SECONDS, Point

DASH = "\u2013"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MOST_ROWS = 200
"""Rows of a table at most; the metrics have them all."""
LONGEST_TEXT = 300
MISSING = f'<span class="dim" title="no data">{DASH}</span>'

WIDTH, HEIGHT, MARGIN = 180.0, 36.0, 3.0
_FEWEST_SLOTS, _MOST_SLOTS = 24, round(KEPT_SECONDS / POINT_SECONDS) + 1

T = TypeVar("T")


def table(items: Sequence[T], row: Callable[[T], Mapping[str, str]], *, numbers: str = "") -> str:
    """A table without the columns that no row has anything for.

    Args:
        items: What the rows are made of; those beyond `MOST_ROWS` are counted.
        row: HTML by heading, which is trusted; the same headings for all.
        numbers: The headings of numbers, separated by commas.
    """
    rows = [row(item) for item in items[:MOST_ROWS]]
    kept = (
        [head for head in rows[0] if any(cells[head] not in {"", MISSING} for cells in rows)] if rows else []
    )
    kind = dict.fromkeys(numbers.split(", "), ' class="n"')
    heads = "".join(f'<th scope="col"{kind.get(head, "")}>{head}</th>' for head in kept)
    body = "".join(
        "<tr>" + "".join(f"<td{kind.get(head, '')}>{cells[head]}</td>" for head in kept) + "</tr>"
        for cells in rows
    )
    more = f'<p class="empty dim">and {len(items) - len(rows)} more</p>' if len(items) > len(rows) else ""
    return f'<div class="card wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{more}</div>'


def folded(name: str, title: str, content: str, *, unfolded: bool) -> str:
    """A section that can be folded; a reader's choice is kept while the page renews itself."""
    state = " open" if unfolded else ""
    return f'<details id="{name}"{state}><summary><h2>{title}</h2></summary>{content}</details>'


def marked(kind: str, words: str) -> str:
    """Words in the colour of "good", "warn", "bad" or "dim"."""
    return f'<span class="{kind}">{words}</span>'


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
    """A line of what was, the latest at the right edge; nothing where fewer than two points have a number.

    Args:
        points: Oldest first, at most a quarter of an hour; None is a gap.
        name: What it shows, for those who cannot see it.
        words: Writes a number.
        floor: What the lower edge stands for; None for the least of the points.
    """
    known = [value for value in points if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    bottom = low if floor is None else floor
    step = WIDTH / (min(max(len(points), _FEWEST_SLOTS), _MOST_SLOTS) - 1)
    pieces: list[str] = []
    before: Point = None
    for index, value in enumerate(points):
        if value is not None:
            x = WIDTH - step * (len(points) - 1 - index)
            y = HEIGHT - MARGIN - (value - bottom) / ((high - bottom) or 1.0) * (HEIGHT - 2 * MARGIN)
            # A lone point between two gaps is a dot: a line of no length with round ends.
            pieces.append(f"M{x:.1f} {y:.1f}h0" if before is None else f"L{x:.1f} {y:.1f}")
        before = value
    shown = f"{name}, last {duration(POINT_SECONDS * len(points))}"
    label = escape(f"{shown}: from {words(low)} to {words(high)}, now {words(points[-1])}")
    return (
        f'<svg class="spark" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}"><title>{label}</title>'
        f'<path d="{"".join(pieces)}" vector-effect="non-scaling-stroke"/></svg>'
    )


def text(foreign: str) -> str:
    """Foreign text, harmless in HTML and of bounded length."""
    shown = foreign if len(foreign) <= LONGEST_TEXT else foreign[: LONGEST_TEXT - 1] + "…"
    return escape("".join(c if c.isprintable() else "\ufffd" for c in shown))


def duration(seconds: float | None) -> str:
    """A span of time in one unit."""
    if seconds is None or not isfinite(seconds):
        return DASH
    if seconds < 0.1:
        return f"{max(0.0, seconds) * 1e3:.3g} ms"
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def size(count: float | None) -> str:
    """Bytes in binary units."""
    if count is None:
        return DASH
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.3g} {unit}"
    return f"{count:.0f} B"


def number(value: float | None, unit: str = "") -> str:
    """A number with a decimal prefix where it is large."""
    if value is None or not isfinite(value):
        return DASH
    tail = f" {unit}" if unit else ""
    if value == int(value) and abs(value) < 1e5:
        return f"{value:.0f}{tail}"
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor and (abs(value) >= 1e4 or unit):
            return f"{value / factor:.3g} {prefix}{unit}" if unit else f"{value / factor:.3g}{prefix}"
    return f"{value:.4g}{tail}"


def share(ratio: float | None) -> str:
    """A ratio in per cent."""
    if ratio is None:
        return DASH
    return f"{100 * ratio:.1f} %" if 0 < ratio < 0.1 else f"{100 * ratio:.0f} %"


def energy(joules: float | None) -> str:
    """Joules, or kilowatt-hours where they are many."""
    if joules is None:
        return DASH
    return f"{joules / 3.6e6:.3g} kWh" if joules >= 3.6e5 else number(joules, "J")


_WORDS = {"seconds": duration, "bytes": size, "ratio": share, "joules": energy}


def quantity(value: float | None, unit: str) -> str:
    """A number in a base unit of Prometheus."""
    return _WORDS[unit](value) if unit in _WORDS else number(value)
