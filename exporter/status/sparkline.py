"""A small line chart as SVG, without script: the last quarter of an hour of one number, gaps left open.

Used by the status page. Points come in, evenly spaced; one element goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 180.0, 36.0, 3.0


def sparkline(
    points: Sequence[float | None],
    *,
    slots: int,
    name: str,
    words: Callable[[float | None], str],
    floor: float | None = None,
) -> str:
    """Draw a line; nothing where fewer than two points have a number.

    Args:
        points: Oldest first; None is a gap.
        slots: Points that the width has room for; the latest stands at the right edge.
        name: What it shows, for those who cannot see it.
        words: Writes a number.
        floor: What the lower edge stands for; None for the least of the points.
    """
    known = [value for value in points if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    bottom = low if floor is None else floor
    span = (high - bottom) or 1.0
    step = WIDTH / max(slots - 1, 1)
    first = WIDTH - step * (len(points) - 1)
    pieces: list[str] = []
    pen_up = True
    for index, value in enumerate(points):
        if value is None:
            pen_up = True
            continue
        x = first + step * index
        y = HEIGHT - MARGIN - (value - bottom) / span * (HEIGHT - 2 * MARGIN)
        # A lone point between two gaps is a dot: a line of no length with round ends.
        pieces.append(f"M{x:.1f} {y:.1f}h0" if pen_up else f"L{x:.1f} {y:.1f}")
        pen_up = False
    label = escape(f"{name}: from {words(low)} to {words(high)}, now {words(points[-1])}")
    return (
        f'<svg class="spark" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}"><title>{label}</title>'
        f'<path d="{"".join(pieces)}" vector-effect="non-scaling-stroke"/></svg>'
    )
