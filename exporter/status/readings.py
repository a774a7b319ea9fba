"""Samples by family name, and a bounded history of the last hour.

`History.note` is called after each pass over the feed. A point without a number is a gap.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.core import Metric

from exporter.families import visible_name

POINT_SECONDS = 10.0
DRAWN_SECONDS = 3600.0
PACE_SECONDS = 300.0
FEWEST_BEFORE_SECONDS = 600.0
MOST_TRACKS = 400
"""Maximum number of tracks; a page shows far fewer."""

HEAT = "thermal"
"""Any heat; drivers before 575 report no other thermal reason. Later drivers also report the parts of heat."""
HEAT_AND_POWER = frozenset({"hw_thermal", "sw_thermal", "hw_power_brake"})


@dataclass(frozen=True, slots=True)
class TrackSource:
    """The samples that add up to a track."""

    track: str
    family: str
    owner: str = ""  # the label with the owner of the track, "" for the node
    labels: Mapping[str, str] = field(default_factory=dict)  # labels of the samples


_TRAIN = {"mode": "train"}
_SOURCES = (
    TrackSource("tokens", "training_tokens_total", "run", _TRAIN),
    TrackSource("loss", "training_loss", "run", _TRAIN),
    TrackSource("nonfinite", "training_nonfinite_total", "run"),
    TrackSource("failed saves", "training_checkpoints_total", "run", {"result": "failed"}),
    TrackSource("uncorrected", "gpu_ecc_errors_total", "uuid", {"kind": "uncorrected"}),
    TrackSource("power", "gpu_power_watts", "uuid"),
    TrackSource("memory", "gpu_memory_used_bytes", "uuid"),
    TrackSource("cpu", "host_cpu_utilization_ratio"),
    TrackSource("network", "host_network_receive_bytes_total"),
    TrackSource("network", "host_network_transmit_bytes_total"),
    TrackSource("disk", "host_disk_read_bytes_total"),
    TrackSource("disk", "host_disk_written_bytes_total"),
)

Labels = Mapping[str, str]
Track = tuple[str, ...]
"""Name of a track (of `_SOURCES`, or steps, step seconds, phase, throttled) and the run, GPU or phase."""
Line = Sequence[tuple[float, float | None]]
"""Numbers by Unix time, oldest first; None is a gap."""


@dataclass(frozen=True, slots=True)
class Increase:
    """Growth of a counter; times are Unix times."""

    count: float
    first: float
    last: float


class Readings:
    """Samples by family name; several blocks may hold families of the same name."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, list[Metric]] = {}
        for family in families:
            self._families.setdefault(visible_name(family), []).append(family)

    def names(self) -> Iterable[str]:
        """Return the names of all families."""
        return self._families

    def unit(self, name: str) -> str:
        """Return the base unit of a family; "" for no unit or no such family."""
        return next((family.unit for family in self._families.get(name, ())), "")

    def rows(self, name: str, suffix: str = "", **labels: str) -> Iterator[tuple[Labels, float]]:
        """Yield labels and value of the samples of a family with this suffix and these labels."""
        for family in self._families.get(name, ()):
            for sample in family.samples:
                found = sample.labels
                if sample.name == name + suffix and all(
                    found.get(key, "") == value for key, value in labels.items()
                ):
                    yield found, sample.value

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of the first matching sample, or None."""
        return next((value for _, value in self.rows(name, **labels)), None)

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the matching samples; None without samples."""
        values = [value for _, value in self.rows(name, **labels)]
        return sum(values) if values else None

    def means(self, name: str, **labels: str) -> Iterator[tuple[Labels, float, float | None]]:
        """Yield labels, count and sum (None if absent) of a histogram or summary."""
        sums = {frozenset(found.items()): value for found, value in self.rows(name, "_sum", **labels)}
        for found, count in self.rows(name, "_count", **labels):
            yield found, count, sums.get(frozenset(found.items()))


class History:
    """Numbers at intervals of about `seconds`, for the last `kept` seconds."""

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
        self._tracks: dict[Track, array[float]] = {}  # a number for each time, NaN for a gap

    def is_due(self, now: float) -> bool:
        """Return True if the next point is due; `now` is monotonic."""
        with self._lock:
            # The interval of the passes over the feed may be the same, with jitter.
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
        """Return the numbers of a gauge."""
        return [(at, value) for _, at, value, _ in self._points(track)]

    def rates(self, *track: str, per: str | None = None) -> Line:
        """Return the growth between points, per second or per unit of the counter `per`; a gap where the counter fell."""
        spans = pairwise(self._points(track, per))
        return [(after[1], _rate(before, after)) for before, after in spans]

    def recent(self, *track: str, per: str | None = None, seconds: float = 60.0) -> float | None:
        """Return the growth over the last `seconds`, or between the last two points if these are further apart."""
        points = self._points(track, per, seconds)
        return _rate(points[0], points[-1]) if points else None

    def pace(self, run: str) -> tuple[float, float] | None:
        """Return the duration of a step in the last minutes and in the hour before; None if unknown."""
        points = [point for point in self._points(("step seconds", run), "steps") if point[2] is not None]
        if not points or points[-1][0] - points[0][0] < PACE_SECONDS + FEWEST_BEFORE_SECONDS:
            return None
        divide = next(point for point in points if points[-1][0] - point[0] <= PACE_SECONDS)
        now, before = _rate(divide, points[-1]), _rate(points[0], divide)
        return None if now is None or before is None else (now, before)

    def increase(self, *track: str, seconds: float = DRAWN_SECONDS) -> Increase | None:
        """Return the growth of a counter over the last `seconds`; None without growth.

        The first event of a counter that appears after the first point counts as growth from 0.
        """
        count, times = 0.0, []
        before: float | None = None
        for index, (_, at, number, _) in enumerate(self._points(track, seconds=seconds)):
            if number is None:
                continue
            if index and number > (before or 0.0):
                count += number - (before or 0.0)
                times.append(at)
            before = number
        return Increase(count, times[0], times[-1]) if times else None

    def _points(self, track: Track, per: str | None = None, seconds: float = math.inf) -> list[_Point]:
        """Return the points of the last `seconds`, and at least the last two."""
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
"""Monotonic time, Unix time, the number, and the divisor of the growth."""


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
    for source in _SOURCES:
        for labels, value in readings.rows(source.family, **source.labels):
            yield (source.track, labels.get(source.owner, "")), value
    for labels, value in readings.rows("training_phase_seconds_total"):
        yield ("phase", labels["run"], labels["phase"]), value
    events = [*readings.rows("gpu_clocks_event_seconds_total")]
    in_parts = {labels["uuid"] for labels, _ in events if labels["reason"] in HEAT_AND_POWER}
    for labels, value in events:
        if labels["reason"] in (HEAT_AND_POWER if labels["uuid"] in in_parts else {HEAT}):
            yield ("throttled", labels["uuid"]), value
