"""Readings: the samples of a page by the names of their families, and history: a few numbers of the last hour.

`History.note` is called after a pass over the feed. Its memory is bounded. A point without a number is a gap.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from prometheus_client.core import Metric

from exporter.families import visible_name

POINT_SECONDS = 10.0
DRAWN_SECONDS = 3600.0
PACE_SECONDS = 300.0
FEWEST_BEFORE_SECONDS = 600.0
MOST_TRACKS = 400
"""Runs, GPUs and what is drawn of them; a page shows far fewer."""

HEAT = "thermal"
"""All heat, the only word of drivers before 575; the others are parts of it, and the brake."""
HEAT_AND_POWER = frozenset({"hw_thermal", "sw_thermal", "hw_power_brake"})
_DRAWN: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("tokens", "training_tokens_total", "run", {"mode": "train"}),
    ("loss", "training_loss", "run", {"mode": "train"}),
    ("nonfinite", "training_nonfinite_total", "run", {}),
    ("power", "gpu_power_watts", "uuid", {}),
    ("memory", "gpu_memory_used_bytes", "uuid", {}),
    ("cpu", "host_cpu_utilization_ratio", "", {}),
    ("network", "host_network_receive_bytes_total", "", {}),
    ("network", "host_network_transmit_bytes_total", "", {}),
    ("disk", "host_disk_read_bytes_total", "", {}),
    ("disk", "host_disk_written_bytes_total", "", {}),
)
"""Track, family, the label that tells whose it is, and which samples; those of one track add up."""

Labels = Mapping[str, str]
Track = tuple[str, ...]
"""What is noted (a name of `_DRAWN`, or steps, step seconds, phase, throttled), and of which run, GPU or phase."""
Line = Sequence[tuple[float, float | None]]
"""Numbers by Unix time, oldest first; None is a gap."""


class Readings:
    """What a page says, by name; families of one name may stand in several blocks."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, list[Metric]] = {}
        for family in families:
            self._families.setdefault(visible_name(family), []).append(family)

    def names(self) -> Iterable[str]:
        """Every family there is."""
        return self._families

    def unit(self, name: str) -> str:
        """The base unit of a family; "" for none, and for one that is not there."""
        return next((family.unit for family in self._families.get(name, ())), "")

    def rows(self, name: str, suffix: str = "", **labels: str) -> Iterator[tuple[Labels, float]]:
        """Give labels and value of every sample of a family that has this suffix and these labels."""
        for family in self._families.get(name, ()):
            for sample in family.samples:
                found = sample.labels
                if sample.name == name + suffix and all(
                    found.get(key, "") == value for key, value in labels.items()
                ):
                    yield found, sample.value

    def value(self, name: str, **labels: str) -> float | None:
        """The first of them; None when there is none."""
        return next((value for _, value in self.rows(name, **labels)), None)

    def total(self, name: str, **labels: str) -> float | None:
        """Their sum; None when there is none."""
        values = [value for _, value in self.rows(name, **labels)]
        return sum(values) if values else None

    def means(self, name: str, **labels: str) -> Iterator[tuple[Labels, float, float | None]]:
        """The same for histograms and summaries: labels, count, and the sum where there is one."""
        sums = {frozenset(found.items()): value for found, value in self.rows(name, "_sum", **labels)}
        for found, count in self.rows(name, "_count", **labels):
            yield found, count, sums.get(frozenset(found.items()))


class History:
    """Notes numbers at about even intervals of `seconds`, and keeps those of the last `kept` seconds."""

    def __init__(
        self,
        *,
        seconds: float = POINT_SECONDS,
        kept: float = DRAWN_SECONDS + PACE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()  # held for copying and appending only
        self._times: deque[tuple[float, float]] = deque(maxlen=round(kept / seconds) + 1)  # monotonic, Unix
        self._tracks: dict[Track, array[float]] = {}  # a number for each time, NaN for none

    def is_due(self, now: float) -> bool:
        """Whether a point is to be noted; `now` is monotonic."""
        with self._lock:
            # Passes over the feed may be as far apart themselves, give or take a little.
            return not self._times or now - self._times[-1][0] >= 0.9 * self._seconds

    def note(self, now: float, readings: Readings) -> None:
        """Add a point; `now` is monotonic."""
        point: dict[Track, float] = {}
        for track, value in _tracks(readings):
            if track in point or len(point) < MOST_TRACKS:
                point[track] = point.get(track, 0.0) + value
        with self._lock:
            self._times.append((now, self._clock()))
            gone = [track for track in self._tracks if track not in point]
            excess = len(gone) + len(point) - MOST_TRACKS
            for place, track in enumerate(gone):
                if place < excess or all(map(math.isnan, self._tracks[track])):
                    del self._tracks[track]
            for track in {**self._tracks, **point}:
                numbers = self._tracks.setdefault(track, array("d", [math.nan] * (len(self._times) - 1)))
                numbers.append(point.get(track, math.nan))
                del numbers[: -len(self._times)]

    def levels(self, *track: str) -> Line:
        """The numbers of a gauge."""
        return [(at, value) for _, at, value, _ in self._points(track)]

    def rates(self, *track: str, per: str | None = None) -> Line:
        """The growth of a counter from point to point, per second or per unit of another counter; a gap where it fell."""
        spans = pairwise(self._points(track, per))
        return [(after[1], _rate(before, after)) for before, after in spans]

    def recent(self, *track: str, per: str | None = None, seconds: float = 60.0) -> float | None:
        """The same over the last while as one number; over the last two points where they are further apart."""
        points = self._points(track, per, seconds)
        return _rate(points[0], points[-1]) if points else None

    def pace(self, run: str) -> tuple[float, float] | None:
        """Seconds a step took in the last minutes, and in the hour before; None where either is not known."""
        points = [point for point in self._points(("step seconds", run), "steps") if point[2] is not None]
        if not points or points[-1][0] - points[0][0] < PACE_SECONDS + FEWEST_BEFORE_SECONDS:
            return None
        divide = next(point for point in points if points[-1][0] - point[0] <= PACE_SECONDS)
        now, before = _rate(divide, points[-1]), _rate(points[0], divide)
        return None if now is None or before is None else (now, before)

    def growth(self, *track: str, seconds: float = 900.0) -> float:
        """How much a counter has grown over the last while; 0 where nothing is known."""
        spans = pairwise(self._points(track, seconds=seconds))
        return sum(_grown(before[2], after[2]) or 0.0 for before, after in spans)

    def _points(self, track: Track, per: str | None = None, seconds: float = math.inf) -> list[_Point]:
        """The points of the last while, and at least the last two."""
        with self._lock:
            numbers, units = self._tracks.get(track), self._tracks.get((per or "", *track[1:]))
            if numbers is None or (per and units is None):
                return []
            times = list(self._times)
            first = min(bisect_left(times, (times[-1][0] - seconds,)), max(0, len(times) - 2))
            times, found = times[first:], numbers[first:]
            over = units[first:] if units else [now for now, _ in times]
        known = [None if math.isnan(number) else number for number in found]
        return [
            (now, at, number, None if math.isnan(unit) else unit)
            for (now, at), number, unit in zip(times, known, over, strict=True)
        ]


_Point = tuple[float, float, float | None, float | None]
"""Monotonic and Unix time, the number, and what its growth is divided by."""


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None or after < before else after - before


def _rate(first: _Point, last: _Point) -> float | None:
    grown, over = _grown(first[2], last[2]), _grown(first[3], last[3])
    return None if grown is None or not over else grown / over


def _tracks(readings: Readings) -> Iterator[tuple[Track, float]]:
    for labels, count, seconds in readings.means("training_step_duration_seconds", mode="train"):
        yield ("steps", labels["run"]), count
        if seconds is not None:
            yield ("step seconds", labels["run"]), seconds
    for what, family, owner, of in _DRAWN:
        for labels, value in readings.rows(family, **of):
            yield (what, labels.get(owner, "")), value
    for labels, value in readings.rows("training_phase_seconds_total"):
        yield ("phase", labels["run"], labels["phase"]), value
    events = [*readings.rows("gpu_clocks_event_seconds_total")]
    in_parts = {labels["uuid"] for labels, _ in events if labels["reason"] in HEAT_AND_POWER}
    for labels, value in events:
        if labels["reason"] in (HEAT_AND_POWER if labels["uuid"] in in_parts else {HEAT}):
            yield ("throttled", labels["uuid"]), value
