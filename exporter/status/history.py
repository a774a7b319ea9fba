"""History: a few numbers of the last quarter of an hour, so that the status page can draw them.

Used in the sidecar. `note` is called after each pass over the feed, the rest by the web server's worker threads.
Memory is bounded: a number of tracks, each of a fixed number of points. A point without a number is a gap.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from exporter.status.readings import Readings

POINT_SECONDS = 5.0
KEPT_SECONDS = 900.0
PACE_SECONDS = 300.0
BEFORE_SECONDS = 3600.0
FEWEST_BEFORE_SECONDS = 600.0
MINUTE = 60.0
MOST_TRACKS = 400
"""Runs, GPUs and what is drawn of them; a page shows far fewer."""

Track = tuple[str, str]
"""What is drawn, and of which run or GPU."""

STEP_SUM, STEP_COUNT, TOKENS, LOSS, NONFINITE = "step seconds", "steps", "tokens", "loss", "nonfinite"
POWER, CPU, THROTTLED = "power", "cpu", "throttled"
HEAT = "thermal"
"""All heat, the only word of drivers before 575; the others are parts of it, and the brake."""
HEAT_AND_POWER = frozenset({"hw_thermal", "sw_thermal", "hw_power_brake"})

Point = float | None
_Noted = tuple[float, dict[Track, float]]


class History:
    """Notes numbers at even intervals.

    Args:
        seconds: Between two points.
        kept: How far it reaches back.
    """

    def __init__(self, *, seconds: float = POINT_SECONDS, kept: float = KEPT_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()  # held for copying and appending only
        self._points: deque[_Noted] = deque(maxlen=round(kept / seconds) + 1)
        # Of the steps alone, so that the last minutes can be compared with the hour before.
        self._minutes: deque[_Noted] = deque(maxlen=round((BEFORE_SECONDS + PACE_SECONDS) / MINUTE) + 1)

    def is_due(self, now: float) -> bool:
        """Whether a point is to be noted; `now` is monotonic."""
        with self._lock:
            # Passes over the feed may be as far apart themselves, give or take a little.
            return not self._points or now - self._points[-1][0] >= 0.9 * self._seconds

    def note(self, now: float, readings: Readings) -> None:
        """Add a point; `now` is monotonic."""
        point: dict[Track, float] = {}
        for track, value in _tracks(readings):
            if len(point) >= MOST_TRACKS and track not in point:
                break
            point[track] = point.get(track, 0.0) + value
        with self._lock:
            self._points.append((now, point))
            if not self._minutes or now - self._minutes[-1][0] >= 0.9 * MINUTE:
                steps = {track: value for track, value in point.items() if track[0] in {STEP_SUM, STEP_COUNT}}
                self._minutes.append((now, steps))

    def levels(self, what: str, of: str = "") -> Sequence[Point]:
        """The numbers of a gauge, oldest first, a gap where there was none."""
        return [values.get((what, of)) for _, values in self._copy()]

    def rates(self, what: str, of: str = "", *, per: str | None = None) -> Sequence[Point]:
        """The growth of a counter between points, per second or per unit of another counter.

        A gap where either number was missing, where the counter fell, and where nothing grew to divide by.
        """
        return [_rate(*pair, (what, of), per) for pair in itertools.pairwise(self._copy())]

    def recent(self, what: str, of: str = "", *, per: str | None = None, seconds: float = 60.0) -> Point:
        """The same over the last while as one number."""
        points = self._copy()
        near = [point for point in points if points[-1][0] - point[0] <= seconds]
        return _rate(near[0], near[-1], (what, of), per) if near else None

    def pace(self, run: str) -> tuple[float, float] | None:
        """Seconds a step took in the last minutes, and in the hour before; None where either is not known."""
        with self._lock:
            points = list(self._minutes)
        if not points or points[-1][0] - points[0][0] < PACE_SECONDS + FEWEST_BEFORE_SECONDS:
            return None
        divide = next(point for point in points if points[-1][0] - point[0] <= PACE_SECONDS)
        now = _rate(divide, points[-1], (STEP_SUM, run), STEP_COUNT)
        before = _rate(points[0], divide, (STEP_SUM, run), STEP_COUNT)
        return None if now is None or before is None else (now, before)

    def growth(self, what: str, of: str = "") -> float:
        """How much a counter has grown over all points; 0 where nothing is known."""
        pairs = itertools.pairwise(self._copy())
        return sum(_grown(before, after, (what, of)) or 0.0 for (_, before), (_, after) in pairs)

    def _copy(self) -> list[_Noted]:
        with self._lock:
            return list(self._points)


def _grown(before: dict[Track, float], after: dict[Track, float], track: Track) -> Point:
    first, second = before.get(track), after.get(track)
    return None if first is None or second is None or second < first else second - first


def _rate(first: _Noted, last: _Noted, track: Track, per: str | None) -> Point:
    grown = _grown(first[1], last[1], track)
    over = last[0] - first[0] if per is None else _grown(first[1], last[1], (per, track[1]))
    return None if grown is None or not over else grown / over


def _tracks(readings: Readings) -> Iterator[tuple[Track, float]]:
    for labels, count, seconds in readings.means("training_step_duration_seconds", mode="train"):
        yield (STEP_COUNT, labels["run"]), count
        if seconds is not None:
            yield (STEP_SUM, labels["run"]), seconds
    for what, family, owner, of in (
        (TOKENS, "training_tokens_total", "run", {"mode": "train"}),
        (LOSS, "training_loss", "run", {"mode": "train"}),
        (NONFINITE, "training_nonfinite_total", "run", {}),
        (POWER, "gpu_power_watts", "uuid", {}),
        (CPU, "host_cpu_utilization_ratio", "", {}),
    ):
        for labels, value in readings.rows(family, **of):
            yield (what, labels.get(owner, "")), value
    events = [*readings.rows("gpu_clocks_event_seconds_total")]
    in_parts = {labels["uuid"] for labels, _ in events if labels["reason"] in HEAT_AND_POWER}
    for labels, value in events:
        if labels["reason"] in (HEAT_AND_POWER if labels["uuid"] in in_parts else {HEAT}):
            yield (THROTTLED, labels["uuid"]), value
