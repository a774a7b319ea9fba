"""The pieces of the status page: numbers as people read them, escaped text, tables, folds, plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from math import isfinite
from typing import TypeVar

from exporter.status.readings import DRAWN_SECONDS, Line

DASH = "\u2013"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MOST_ROWS = 200
"""Rows of a table at most; the metrics have them all."""
LONGEST_TEXT = 300
MISSING = f'<span class="dim" title="no data">{DASH}</span>'

WIDTH, HEIGHT = 600.0, 120.0
FEWEST_SECONDS = 300.0
COLOURS = 8

T = TypeVar("T")


def table(title: str, items: Sequence[T], row: Callable[[T], Mapping[str, str]], *, numbers: str = "") -> str:
    """A table without the columns that no row has anything for; items beyond `MOST_ROWS` are counted.

    `row` gives HTML, which is trusted, by heading; `numbers` are the headings of numbers, separated by commas.
    """
    rows = [row(item) for item in items[:MOST_ROWS]]
    heads = [
        head for head in (rows[0] if rows else ()) if any(cells[head] not in {"", MISSING} for cells in rows)
    ]
    kind = dict.fromkeys(numbers.split(", "), ' class="n"')
    top = "".join(f'<th scope="col"{kind.get(head, "")}>{head}</th>' for head in heads)
    body = "".join(
        "<tr>" + "".join(f"<td{kind.get(head, '')}>{cells[head]}</td>" for head in heads) + "</tr>"
        for cells in rows
    )
    more = f'<p class="empty dim">and {len(items) - len(rows)} more</p>' if len(items) > len(rows) else ""
    return (
        f'<div class="card wide" role="region" tabindex="0" aria-label="{title}"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table>{more}</div>"
    )


def folded(name: str, title: str, content: str, *, unfolded: bool = False) -> str:
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


def plot(
    title: str, lines: Mapping[str, Line], unit: str, now: float, *, of: str = "", floor: float | None = None
) -> str:
    """What was in the last hour, as lines over the same times; nothing where no line has two points with a number.

    The data goes along for the script, which draws it so that numbers can be pointed at. `of` tells it from others on the
    page; the lower edge is `floor`, or the least number.
    """
    drawn = {name: [each for each in line if now - each[0] <= DRAWN_SECONDS] for name, line in lines.items()}
    drawn = {name: line for name, line in drawn.items() if sum(value is not None for _, value in line) > 1}
    numbers = [value for line in drawn.values() for _, value in line if value is not None]
    if not numbers:
        return ""
    low, high = min(numbers) if floor is None else floor, max(numbers)
    span = max(FEWEST_SECONDS, now - min(line[0][0] for line in drawn.values()))
    paths = []
    for place, line in enumerate(drawn.values()):
        pieces, gap = "", True
        for at, value in line:
            if value is not None:
                x = WIDTH * (1 - (now - at) / span)
                y = (HEIGHT - 6) * (1 - (value - low) / ((high - low) or 1.0)) + 3
                # A lone point between two gaps is a dot: a line of no length with round ends.
                pieces += f"M{x:.0f} {y:.0f}h0" if gap else f"L{x:.0f} {y:.0f}"
            gap = value is None
        paths.append(f'<path class="c{place % COLOURS}" d="{pieces}" vector-effect="non-scaling-stroke"/>')
    words = partial(quantity, unit=unit)
    ends = [line[-1][1] for line in drawn.values()]
    latest = words(ends[0]) if len(ends) == 1 else f"{len(ends)} lines"
    told = f"{title}, last {duration(span)}: from {words(min(numbers))} to {words(high)}, now {latest}"
    rounded = [
        [None if value is None else float(f"{value:.4g}") for _, value in line] for line in drawn.values()
    ]
    times = [round(at) for at, _ in next(iter(drawn.values()))]
    told_script = {"unit": unit, "floor": floor, "names": list(drawn), "data": [times, *rounded]}
    data = json.dumps(told_script, separators=(",", ":"))
    levels = "".join(f"<span>{words(value)}</span>" for value in (high, (high + low) / 2, low))
    return (
        f'<figure class="plot" id="{text(f"{title}-{of}")}" data-plot="{escape(data)}"><figcaption>{title} '
        f'<b>{latest if len(ends) == 1 else ""}</b></figcaption><div class="area"><div class="y">{levels}</div>'
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" aria-label="{text(told)}">'
        f'<path class="axes" d="M0 3H600M0 60H600M0 117H600" vector-effect="non-scaling-stroke"/>{"".join(paths)}</svg>'
        f'<div class="x"><span>{duration(span)} ago</span><span>{duration(span / 2)}</span><span>now</span></div></div>'
        "</figure>"
    )


def swatch(place: int) -> str:
    """The colour of a plot's line, by its place among them."""
    return f'<i class="c{place % COLOURS}"></i>'


def shares(parts: Mapping[str, float], title: str) -> str:
    """What a whole is made of: a bar, and each part in words, the largest first."""
    whole = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1])[:COLOURS] if whole > 0 else []
    bars, words, x = [], [], 0.0
    for place, (name, part) in enumerate(ordered):
        width = WIDTH * part / whole
        bars.append(f'<rect class="c{place}" x="{x:.1f}" width="{width:.1f}" height="10"/>')
        words.append(f'<span class="whole">{swatch(place)}{text(name)} {share(part / whole)}</span>')
        x += width
    if not words:
        return ""
    return (
        f'<figure class="shares"><figcaption>{title}: {" ".join(words)}</figcaption><svg viewBox="0 0 {WIDTH:.0f} 10" '
        f'preserveAspectRatio="none" aria-hidden="true">{"".join(bars)}</svg></figure>'
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
        return f"{seconds:.3g} s" if seconds < 1 else f"{seconds:.1f} s"
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def size(count: float) -> str:
    """Bytes in binary units."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.3g} {unit}"
    return f"{count:.0f} B"


def number(value: float, unit: str = "") -> str:
    """A number with a decimal prefix where it is large."""
    if not isfinite(value):
        return DASH
    tail = f" {unit}" if unit else ""
    if value == int(value) and abs(value) < 1e5:
        return f"{value:.0f}{tail}"
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor and (abs(value) >= 1e4 or unit):
            return f"{value / factor:.3g} {prefix}{unit}" if unit else f"{value / factor:.3g}{prefix}"
    return f"{value:.4g}{tail}"


def share(ratio: float) -> str:
    """A ratio in per cent."""
    return f"{100 * ratio:.1f} %" if 0 < ratio < 0.1 else f"{100 * ratio:.0f} %"


def energy(joules: float) -> str:
    """Joules, or kilowatt-hours where they are many."""
    return f"{joules / 3.6e6:.3g} kWh" if joules >= 3.6e5 else number(joules, "J")


def watts(value: float) -> str:
    """Watts."""
    return number(value, "W")


_WORDS: Mapping[str, Callable[[float], str]] = {
    "seconds": duration,
    "bytes": size,
    "ratio": share,
    "joules": energy,
    "watts": watts,
}


def quantity(value: float | None, unit: str) -> str:
    """A number in a base unit of Prometheus."""
    return DASH if value is None else _WORDS.get(unit, number)(value)
