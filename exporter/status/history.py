"""Bounded history of the samples that the status page needs: gauges and counters of the last 80 minutes.

`History.note` is called after each pass over the feed. A point without a number is a gap.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from exporter.status.readings import Readings

POINT_SECONDS = 10.0
DRAWN_SECONDS = 3600.0
RECENT_SECONDS = 60.0
"""Time of a rate; figures and plots have the same."""
PACE_SECONDS = 300.0
BEFORE_SECONDS = 900.0
"""The alert RunSlower compares the last five minutes with the hour that ended 15 minutes ago."""
KEPT_SECONDS = BEFORE_SECONDS + DRAWN_SECONDS + PACE_SECONDS
MOST_TRACKS = 600
"""Maximum number of tracks; a page with eight GPUs and eight ranks needs about 200."""


@dataclass(frozen=True, slots=True)
class TrackSource:
    """The samples that add up to a track."""

    track: str
    family: str
    owners: tuple[str, ...] = ()  # the labels that name the owner of the track, none for the node
    labels: Mapping[str, str] = field(default_factory=dict)  # labels of the samples


_TRAIN = {"mode": "train"}
_SOURCES = (
    TrackSource("tokens", "training_tokens_total", ("run",), _TRAIN),
    TrackSource("loss", "training_loss", ("run",), _TRAIN),
    TrackSource("executed steps", "training_steps_total", ("run",), _TRAIN),
    TrackSource("phase", "training_phase_seconds_total", ("run", "phase")),
    TrackSource("nonfinite", "training_nonfinite_total", ("run", "kind")),
    TrackSource("failed saves", "training_checkpoints_total", ("run",), {"result": "failed"}),
    TrackSource("restarts", "training_restarts_total", ("run",)),
    TrackSource("allocation retries", "training_gpu_alloc_retries_total", ("run", "rank", "gpu")),
    TrackSource("checkpoint room", "training_checkpoint_dir_available_bytes", ("run", "path")),
    TrackSource("xid", "gpu_xid_errors_total", ("uuid", "xid")),
    TrackSource("uncorrected", "gpu_ecc_errors_total", ("uuid",), {"kind": "uncorrected"}),
    TrackSource("clock events", "gpu_clocks_event_seconds_total", ("uuid", "reason")),
    TrackSource("nvlink errors", "gpu_nvlink_errors_total", ("uuid", "kind")),
    TrackSource("pcie replays", "gpu_pcie_replays_total", ("uuid",)),
    TrackSource("busy seconds", "gpu_utilization_busy_seconds_total", ("uuid",)),
    TrackSource("busy", "gpu_utilization_ratio", ("uuid",)),
    TrackSource("clock", "gpu_clock_hertz", ("uuid",), {"clock": "sm"}),
    TrackSource("power", "gpu_power_watts", ("uuid",)),
    TrackSource("SM activity", "gpu_sm_activity_ratio", ("uuid",)),
    TrackSource("memory", "gpu_memory_used_bytes", ("uuid",)),
    TrackSource("cpu", "host_cpu_utilization_ratio"),
    TrackSource("network", "host_network_receive_bytes_total"),
    TrackSource("network", "host_network_transmit_bytes_total"),
    TrackSource("disk", "host_disk_read_bytes_total"),
    TrackSource("disk", "host_disk_written_bytes_total"),
    TrackSource("port state", "host_rdma_port_state", ("device", "port")),
    TrackSource("link failures", "host_rdma_link_downed_total", ("device", "port")),
    TrackSource("killed", "cgroup_memory_events_total", (), {"event": "oom_kill"}),
    TrackSource("working set", "cgroup_memory_working_set_bytes"),
    TrackSource("I/O pressure", "cgroup_pressure_io_waiting_seconds_total"),
    TrackSource("throttled periods", "cgroup_cpu_throttled_periods_total"),
    TrackSource("periods", "cgroup_cpu_periods_total"),
    TrackSource("energy gap", "exporter_energy_gap_seconds_total", ("component",)),
    TrackSource("dropped series", "exporter_series_dropped_total", ("reason",)),
    TrackSource("exporter CPU", "process_cpu_seconds_total"),
)

Track = tuple[str, ...]
"""Name of a track (of `_SOURCES`, or steps, step seconds) and the values of the owner's labels."""
Holder = tuple[str, str]
"""Run and rank; the rank is "" if it is not known."""
Line = Sequence[tuple[float, float | None]]
"""Numbers by Unix time, oldest first; None is a gap."""


@dataclass(frozen=True, slots=True)
class Increase:
    """Growth of a counter; times are Unix times."""

    count: float
    first: float
    last: float


class History:
    """Numbers at intervals of about `seconds`, for the last `kept` seconds."""

    def __init__(
        self,
        *,
        seconds: float = POINT_SECONDS,
        kept: float = KEPT_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()  # held for copying and appending only
        self._times: deque[tuple[float, float]] = deque(maxlen=round(kept / seconds) + 1)  # monotonic, Unix
        self._tracks: dict[Track, array[float]] = {}  # a number for each time, NaN for a gap
        self._holders: dict[str, frozenset[Holder]] = {}  # by card, the last known

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

    def note_holders(self, holders: Mapping[str, frozenset[Holder]]) -> None:
        """Remember which ranks hold which card, for cards that answer no more and for ranks that end."""
        self._holders = self._holders | {uuid: found for uuid, found in holders.items() if found}

    def last_holders(self, uuid: str) -> frozenset[Holder]:
        """Return the ranks that held a card last."""
        return self._holders.get(uuid, frozenset())

    def owners(self, track: str) -> list[tuple[str, ...]]:
        """Return the owners of the tracks of this name."""
        with self._lock:
            return [found[1:] for found in self._tracks if found[0] == track]

    def levels(self, *track: str, seconds: float = math.inf) -> Line:
        """Return the numbers of a gauge over the last `seconds`."""
        return [(at, value) for _, at, value, _ in self._points(track, None, seconds)]

    def rates(self, *track: str, per: str | None = None, seconds: float = RECENT_SECONDS) -> Line:
        """Return the growth over `seconds` before each point, per second or per unit of the counter `per`.

        The time is longer if two points are further apart, and shorter after a gap. A gap is also where the counter fell.
        """
        return _rates(self._points(track, per), seconds)

    def recent(self, *track: str, per: str | None = None, seconds: float = RECENT_SECONDS) -> float | None:
        """Return the growth over the last `seconds`, the last point of `rates`."""
        line = _rates(self._points(track, per, seconds), seconds)
        return line[-1][1] if line else None

    def rate(self, *track: str, seconds: float) -> float | None:
        """Return the growth per second over the last `seconds`; a fall of the counter is a restart from 0."""
        points = self._points(track, None, seconds)
        found = [(now, value) for now, _, value, _ in points if value is not None]
        if len(found) < 2:
            return None
        grown = sum(
            after if after < before else after - before for (_, before), (_, after) in pairwise(found)
        )
        return grown / (found[-1][0] - found[0][0])

    def usual_rate(self, *track: str) -> float | None:
        """Return the median rate over `PACE_SECONDS` in the hour that ended `BEFORE_SECONDS` ago; None without that hour."""
        found = [(now, value) for now, _, value, _ in self._points(track) if value is not None]
        rates: list[float] = []
        start = 0
        for now, value in found:
            while found[start][0] < now - PACE_SECONDS:
                start += 1
            if (
                BEFORE_SECONDS <= found[-1][0] - now <= BEFORE_SECONDS + DRAWN_SECONDS
                and now > found[start][0]
            ):
                rates.append(max(0.0, value - found[start][1]) / (now - found[start][0]))
        return median(rates) if len(rates) > 0.9 * DRAWN_SECONDS / self._seconds else None

    def mean(self, *track: str, seconds: float) -> float | None:
        """Return the mean of a gauge over the last `seconds`."""
        found = [value for _, _, value, _ in self._points(track, None, seconds) if value is not None]
        return sum(found) / len(found) if found else None

    def predicted(self, *track: str, seconds: float, ahead: float) -> float | None:
        """Return a gauge `ahead` seconds from now, on the line through the last `seconds`."""
        points = self._points(track, None, seconds)
        found = [(at - points[-1][1], value) for _, at, value, _ in points if value is not None]
        if len(found) < 2:
            return None
        mean_at, mean = sum(at for at, _ in found) / len(found), sum(value for _, value in found) / len(found)
        spread = sum((at - mean_at) ** 2 for at, _ in found)
        slope = sum((at - mean_at) * (value - mean) for at, value in found) / spread
        return mean + slope * (ahead - mean_at)

    def increase(self, *track: str, seconds: float = DRAWN_SECONDS, known: str = "") -> Increase | None:
        """Return the growth of a counter over the last `seconds`; None without growth.

        The first event of a counter that appears after the first point counts as growth from 0. With `known`, it counts only
        if that track of the first owner had a number before: a run that returns brings old totals along.
        """
        count, times = 0.0, []
        points = self._points(track, known or None, seconds, owners=1)
        before: float | None = None
        for index, (_, at, number, _) in enumerate(points):
            if number is None:
                continue
            born = before is None and (not index or (bool(known) and points[index - 1][3] is None))
            grown = number if before is None or number < before else number - before
            if not born and grown > 0:
                count += grown
                times.append(at)
            before = number
        return Increase(count, times[0], times[-1]) if times else None

    def _points(
        self, track: Track, per: str | None = None, seconds: float = math.inf, owners: int | None = None
    ) -> list[_Point]:
        """Return the points of the last `seconds`, and at least the last two; `owners` limits the owner of `per`."""
        with self._lock:
            end = None if owners is None else 1 + owners
            numbers, units = self._tracks.get(track), self._tracks.get((per or "", *track[1:end]))
            if numbers is None or (per and units is None and owners is None):
                return []
            times = list(self._times)
            first = min(bisect_left(times, (times[-1][0] - seconds,)), max(0, len(times) - 2))
            times, found = times[first:], numbers[first:]
            over: Sequence[float] = [now for now, _ in times]
            if per:
                over = units[first:] if units else [math.nan] * len(times)
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


def _rates(points: Sequence[_Point], seconds: float) -> list[tuple[float, float | None]]:
    line: list[tuple[float, float | None]] = []
    start = 0
    for place, point in enumerate(points):
        if point[2] is None or (place and _grown(points[place - 1][2], point[2]) is None):
            start = place
        while start < place - 1 and points[start][0] < point[0] - seconds:
            start += 1
        if place:
            line.append((point[1], _rate(points[start], point) if start < place else None))
    return line


def _tracks(readings: Readings) -> Iterator[tuple[Track, float]]:
    for labels, count, seconds in readings.means("training_step_duration_seconds", mode="train"):
        yield ("steps", labels["run"]), count
        if seconds is not None:
            yield ("step seconds", labels["run"]), seconds
    for source in _SOURCES:
        for labels, value in readings.rows(source.family, **source.labels):
            yield (source.track, *(labels.get(owner, "") for owner in source.owners)), value
