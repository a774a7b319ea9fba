"""History: a few numbers of the last quarter of an hour, so that the status page can draw them.

Used in the sidecar. `note` is called after each pass over the feed, `series` and `rate` by the web server's worker
threads. Memory is bounded: a number of tracks, each of a fixed number of points. A point without a number is a gap,
and is drawn as one.
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

STEP_SUM, STEP_COUNT, TOKENS, LOSS = "step seconds", "steps", "tokens", "loss"
POWER, USE, CPU = "power", "use", "cpu"
THROTTLED = "throttled"
HEAT = "thermal"
"""All heat, the only word of drivers before 575; the others are parts of it, and the brake."""
HEAT_AND_POWER = frozenset({"hw_thermal", "sw_thermal", "hw_power_brake"})
NONFINITE = "nonfinite"

Point = float | None


class History:
    """Notes numbers at even intervals.

    Args:
        seconds: Between two points.
        kept: How far it reaches back.
    """

    def __init__(self, *, seconds: float = POINT_SECONDS, kept: float = KEPT_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()  # held for copying and appending only
        self._points: deque[tuple[float, dict[Track, float]]] = deque(maxlen=round(kept / seconds) + 1)
        # Of the steps alone, so that the last minutes can be compared with the hour before.
        self._minutes: deque[tuple[float, dict[Track, float]]] = deque(
            maxlen=round((BEFORE_SECONDS + PACE_SECONDS) / MINUTE) + 1
        )

    def is_due(self, now: float) -> bool:
        """Whether a point is to be noted.

        Args:
            now: Monotonic seconds.
        """
        with self._lock:
            # Passes over the feed may be as far apart themselves, give or take a little.
            return not self._points or now - self._points[-1][0] >= 0.9 * self._seconds

    def note(self, now: float, readings: Readings) -> None:
        """Add a point.

        Args:
            now: Monotonic seconds.
            readings: What the page says.
        """
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
        track = (what, of)
        return [values.get(track) for _, values in self._copy()]

    def rates(self, what: str, of: str = "", *, per: str | None = None) -> Sequence[Point]:
        """The growth of a counter between points, per second or per unit of another counter.

        A gap where either number was missing, where the counter fell, and where nothing grew to divide by.

        Args:
            what: The counter.
            of: Whose.
            per: Another counter of the same; None for time.
        """
        points = self._copy()
        found: list[Point] = []
        for (before_at, before), (at, values) in itertools.pairwise(points):
            grown = _grown(before, values, (what, of))
            over = at - before_at if per is None else _grown(before, values, (per, of))
            found.append(None if grown is None or not over else grown / over)
        return found

    def recent(self, what: str, of: str = "", *, per: str | None = None, seconds: float = 60.0) -> Point:
        """The same over the last while as one number."""
        points = self._copy()
        if not points:
            return None
        last_at, last = points[-1]
        first_at, first = next((each for each in points if last_at - each[0] <= seconds), points[-1])
        grown = _grown(first, last, (what, of))
        over = last_at - first_at if per is None else _grown(first, last, (per, of))
        return None if grown is None or not over else grown / over

    def pace(self, run: str) -> tuple[float, float] | None:
        """Seconds a step took in the last minutes, and in the hour before; None where either is not known."""
        with self._lock:
            points = list(self._minutes)
        if not points or points[-1][0] - points[0][0] < PACE_SECONDS + FEWEST_BEFORE_SECONDS:
            return None
        divide = next(index for index, (at, _) in enumerate(points) if points[-1][0] - at <= PACE_SECONDS)
        means = []
        for (_, first), (_, last) in ((points[divide], points[-1]), (points[0], points[divide])):
            seconds, steps = (_grown(first, last, (what, run)) for what in (STEP_SUM, STEP_COUNT))
            if seconds is None or not steps:
                return None
            means.append(seconds / steps)
        return means[0], means[1]

    def growth(self, what: str, of: str = "") -> float:
        """How much a counter has grown over all points; 0 where nothing is known."""
        points = self._copy()
        pairs = itertools.pairwise(points)
        return sum(_grown(before, after, (what, of)) or 0.0 for (_, before), (_, after) in pairs)

    def _copy(self) -> list[tuple[float, dict[Track, float]]]:
        with self._lock:
            return list(self._points)


def _grown(before: dict[Track, float], after: dict[Track, float], track: Track) -> float | None:
    first, second = before.get(track), after.get(track)
    return None if first is None or second is None or second < first else second - first


def _tracks(readings: Readings) -> Iterator[tuple[Track, float]]:
    for labels, steps in readings.distributions("training_step_duration_seconds", mode="train"):
        yield (STEP_COUNT, labels["run"]), steps.count
        if steps.sum is not None:
            yield (STEP_SUM, labels["run"]), steps.sum
    for labels, value in readings.rows("training_tokens_total", mode="train"):
        yield (TOKENS, labels["run"]), value
    for labels, value in readings.rows("training_loss", mode="train"):
        yield (LOSS, labels["run"]), value
    for labels, value in readings.rows("training_nonfinite_total"):
        yield (NONFINITE, labels["run"]), value
    for labels, value in readings.rows("gpu_power_watts"):
        yield (POWER, labels["uuid"]), value
    for labels, value in readings.rows("gpu_utilization_ratio"):
        yield (USE, labels["uuid"]), value
    events = [*readings.rows("gpu_clocks_event_seconds_total")]
    in_parts = {labels["uuid"] for labels, _ in events if labels["reason"] in HEAT_AND_POWER}
    for labels, value in events:
        if labels["reason"] in (HEAT_AND_POWER if labels["uuid"] in in_parts else {HEAT}):
            yield (THROTTLED, labels["uuid"]), value
    for _, value in readings.rows("host_cpu_utilization_ratio"):
        yield (CPU, ""), value
