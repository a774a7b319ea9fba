"""Bounded history of the gauges and counters that the status page needs, over the last 80 minutes.

A track is the time series of one gauge or counter. A point of a track without a number is a gap.
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
from typing import NamedTuple

from exporter.status.samples import Labels, SampleIndex

POINT_SECONDS = 10.0
"""Interval of the points."""
PLOT_SECONDS = 3600.0
"""Time range of the plots, and of the usual rate with which `RunSlower` compares."""
RECENT_SECONDS = 60.0
"""Time range of the rates in the numbers and plots of the page."""
STEP_RATE_SECONDS = 300.0
"""Time range of the current rate that the alert RunSlower compares with the usual rate."""
BASELINE_OFFSET_SECONDS = 900.0
"""Time since the end of the hour whose rate is the usual rate of RunSlower."""
RETENTION_SECONDS = BASELINE_OFFSET_SECONDS + PLOT_SECONDS + STEP_RATE_SECONDS
MAX_TRACKS = 600
"""Maximum number of tracks; a page with eight GPUs and eight ranks needs about 200. Tracks that end make room for new tracks."""


@dataclass(frozen=True, slots=True)
class TrackSource:
    """Selector of the samples whose sum is a track."""

    track: str
    family: str
    owner_labels: tuple[str, ...] = ()  # labels that identify the owner of the track; empty for the node
    label_values: Mapping[str, str] = field(default_factory=dict)  # label values that the samples must have


_TRAIN_MODE = {"mode": "train"}
_SOURCES = (
    TrackSource("tokens", "training_tokens_total", ("run",), _TRAIN_MODE),
    TrackSource("loss", "training_loss", ("run",), _TRAIN_MODE),
    TrackSource("saved step", "training_checkpoint_last_step", ("run",)),
    TrackSource("executed steps", "training_steps_total", ("run",), _TRAIN_MODE),
    TrackSource("trainers", "training_process_instances", ("run",), {"role": "trainer"}),
    TrackSource("starting", "training_run_state", ("run",), {"state": "starting"}),
    TrackSource("phase", "training_phase_seconds_total", ("run", "phase")),
    TrackSource("nonfinite", "training_nonfinite_total", ("run", "kind")),
    TrackSource("failed saves", "training_checkpoints_total", ("run",), {"result": "failed"}),
    TrackSource("job CPU", "training_process_cpu_seconds_total", ("run",)),
    TrackSource("cost", "training_cost_total", ("run", "currency")),
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
    TrackSource("OOM kills", "cgroup_memory_events_total", (), {"event": "oom_kill"}),
    TrackSource("working set", "cgroup_memory_working_set_bytes"),
    TrackSource("I/O pressure", "cgroup_pressure_io_waiting_seconds_total"),
    TrackSource("throttled CPU periods", "cgroup_cpu_throttled_periods_total"),
    TrackSource("CPU periods", "cgroup_cpu_periods_total"),
    TrackSource("energy gap", "exporter_energy_gap_seconds_total", ("component",)),
    TrackSource("dropped series", "exporter_series_dropped_total", ("reason",)),
    TrackSource("exporter CPU", "process_cpu_seconds_total"),
)

TrackKey = tuple[str, ...]
"""Name of a track (of `_SOURCES`, "timed steps" or "step seconds"), then the values of the owner labels."""
RankOfRun = tuple[str, str]
"""Run and rank; the rank is "" if unknown."""
Line = Sequence[tuple[float, float | None]]
"""Pairs of Unix time and number, the oldest first. The number None is a gap."""


@dataclass(frozen=True, slots=True)
class Increase:
    """Increase of a counter over a time range."""

    amount: float  # in the unit of the counter
    first_at: float  # Unix time of the first increment
    last_at: float  # Unix time of the last increment


class PassTime(NamedTuple):
    """Time of a point of all tracks, on two clocks."""

    monotonic_seconds: float
    unix_seconds: float


class KnownPoint(NamedTuple):
    """Point of a track that is no gap."""

    monotonic_seconds: float
    number: float


@dataclass(frozen=True, slots=True)
class TrackPoint:
    """Number of a track at a time."""

    monotonic_seconds: float
    unix_seconds: float
    number: float | None  # None for a gap
    # number of a second track, such as a divisor, or None for a gap; without a second track, the monotonic time, so that a quotient is a
    # rate per second
    second_number: float | None


class History:
    """Ring buffer of tracks, with a point about every `interval_seconds` over the last `retention_seconds`."""

    def __init__(
        self,
        *,
        interval_seconds: float = POINT_SECONDS,
        retention_seconds: float = RETENTION_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._lock = threading.Lock()  # held only to append and to copy points
        max_points = round(retention_seconds / interval_seconds) + 1
        self._times: deque[PassTime] = deque(maxlen=max_points)
        self._tracks: dict[TrackKey, array[float]] = {}  # a number for each time, NaN for a gap
        self._holders: dict[str, frozenset[RankOfRun]] = {}  # by GPU UUID
        self._gpu_labels: dict[str, Labels] = {}  # last labels of `gpu_info`, by GPU UUID

    def is_due(self, monotonic_now: float) -> bool:
        """Return True if the next point is due."""
        with self._lock:
            # Passes over the feed may have the same interval, with jitter.
            if not self._times:
                return True
            seconds_since_last = monotonic_now - self._times[-1].monotonic_seconds
            return seconds_since_last >= 0.9 * self._interval_seconds

    def record(self, monotonic_now: float, samples: SampleIndex) -> None:
        """Add a point to each track, or a gap if the page has no sample for it. Tracks without a number are removed.

        Above `MAX_TRACKS`, tracks without a current number are removed first, and further new tracks are not recorded.
        """
        # Replaced as a whole, because requests read the labels on other threads. A lost GPU has no `gpu_info`.
        known_gpus = {labels["uuid"] for labels, _ in samples.select("gpu_up")}
        current = {labels["uuid"]: labels for labels, _ in samples.select("gpu_info")}
        self._gpu_labels = {
            uuid: labels for uuid, labels in self._gpu_labels.items() if uuid in known_gpus
        } | current
        point: dict[TrackKey, float] = {}
        for track, value in _tracks(samples):
            if track in point or len(point) < MAX_TRACKS:
                point[track] = point.get(track, 0.0) + value
        with self._lock:
            self._times.append(PassTime(monotonic_now, self._clock()))
            absent = [track for track in self._tracks if track not in point]
            excess = len(absent) + len(point) - MAX_TRACKS
            for index, track in enumerate(absent):
                if index < excess or all(map(math.isnan, self._tracks[track])):
                    del self._tracks[track]
            for track in {**self._tracks, **point}:
                numbers = self._tracks.setdefault(track, array("d", [math.nan] * (len(self._times) - 1)))
                numbers.append(point.get(track, math.nan))
                del numbers[: -len(self._times)]

    def record_holders(self, holders: Mapping[str, frozenset[RankOfRun]]) -> None:
        """Record the ranks that use each GPU, so that the page can name them after the GPU is lost or the rank ends."""
        self._holders = self._holders | {uuid: ranks for uuid, ranks in holders.items() if ranks}

    def find_last_holders(self, uuid: str) -> frozenset[RankOfRun]:
        """Return the ranks that used a GPU last."""
        return self._holders.get(uuid, frozenset())

    def find_gpu_labels(self, uuid: str) -> Labels:
        """Return the last known labels of a GPU's `gpu_info`, such as its model, serial number and PCI address."""
        return self._gpu_labels.get(uuid, {})

    def list_owners(self, track: str) -> list[tuple[str, ...]]:
        """Return the owners of the tracks with a name, as tuples of label values."""
        with self._lock:
            return [tuple(owner) for name, *owner in self._tracks if name == track]

    def read_levels(self, *track: str, seconds: float = math.inf) -> Line:
        """Return the numbers of a gauge over the last `seconds`."""
        return [(point.unix_seconds, point.number) for point in self._points(track, None, seconds)]

    def compute_rates(self, *track: str, divisor: str | None = None, seconds: float = RECENT_SECONDS) -> Line:
        """Return the increase over `seconds` before each point, per second or per unit of the counter `divisor`.

        The time range is longer if two points are further apart, and shorter after a gap. A reset of the counter is a gap.
        """
        return _rates(self._points(track, divisor), seconds)

    def compute_last_rate(
        self, *track: str, divisor: str | None = None, seconds: float = RECENT_SECONDS
    ) -> float | None:
        """Return the rate over the last `seconds`, which is the last point of `compute_rates`; None for a gap."""
        line = _rates(self._points(track, divisor, seconds), seconds)
        _, rate = line[-1] if line else (None, None)
        return rate

    def compute_mean_rate(self, *track: str, seconds: float) -> float | None:
        """Return the increase per second over the last `seconds`. A decrease counts as a restart of the counter at 0.

        Returns None with fewer than two points.
        """
        points = self._known_points(track, seconds)
        if len(points) < 2:
            return None
        increase = sum(_increment(previous.number, point.number) for previous, point in pairwise(points))
        return increase / (points[-1].monotonic_seconds - points[0].monotonic_seconds)

    def compute_usual_rate(self, *track: str) -> float | None:
        """Return the median five-minute rate of a counter in the hour that ended 15 minutes ago.

        A decrease of the counter counts as a rate of 0. Returns None if less than 90 % of that hour is recorded.
        """
        points = self._known_points(track)
        rates: list[float] = []
        start = 0
        for point in points:
            while points[start].monotonic_seconds < point.monotonic_seconds - STEP_RATE_SECONDS:
                start += 1
            increase = max(0.0, point.number - points[start].number)
            seconds = point.monotonic_seconds - points[start].monotonic_seconds
            age_seconds = points[-1].monotonic_seconds - point.monotonic_seconds
            is_in_baseline = 0.0 <= age_seconds - BASELINE_OFFSET_SECONDS <= PLOT_SECONDS
            if is_in_baseline and seconds > 0.0:
                rates.append(increase / seconds)
        return median(rates) if len(rates) > 0.9 * PLOT_SECONDS / self._interval_seconds else None

    def compute_mean(self, *track: str, seconds: float) -> float | None:
        """Return the mean of a gauge over the last `seconds`, or None without a number."""
        numbers = [point.number for point in self._known_points(track, seconds)]
        return sum(numbers) / len(numbers) if numbers else None

    def predict(self, *track: str, seconds: float, min_seconds: float, ahead_seconds: float) -> float | None:
        """Return the linear prediction of a gauge in `ahead_seconds`, from the points of the last `seconds`.

        Returns None with fewer than two points. Also returns None if the points cover less than `min_seconds`, because a single event, such
        as a save, may determine a short trend.
        """
        points = self._points(track, None, seconds)
        numbers = [point.number for point in points if point.number is not None]
        offsets = [  # seconds from the last point; negative for earlier points
            point.unix_seconds - points[-1].unix_seconds for point in points if point.number is not None
        ]
        if len(offsets) < 2 or offsets[-1] - offsets[0] < min_seconds:
            return None
        mean_offset, mean_number = sum(offsets) / len(offsets), sum(numbers) / len(numbers)
        variance = sum((offset - mean_offset) ** 2 for offset in offsets)
        covariance = sum(
            (offset - mean_offset) * (number - mean_number)
            for offset, number in zip(offsets, numbers, strict=True)
        )
        return mean_number + covariance / variance * (ahead_seconds - mean_offset)

    def compute_increase(
        self,
        *track: str,
        seconds: float = PLOT_SECONDS,
        starts_at_zero: bool = True,
        required_track: str = "",
    ) -> Increase | None:
        """Return the increase of a counter over the last `seconds`, or None without an increase.

        A decrease counts as a restart of the counter at 0. The first number of the counter does not count if it is at the first point of
        the history. At a later point, it counts in the cases that the arguments name.

        Args:
            track: Name of the track, and values of its owner labels.
            seconds: Length of the time range.
            starts_at_zero: True for a counter that appears with its first increment, so that its first number counts. False for a counter
                that appears with its source, which may have counted before.
            required_track: Name of a second track, or "". The second track has one owner label, the first of this track, such as the run.
                The first number counts only if the second track had a number at the point before. Otherwise, the run has just been
                resumed, and the first number is its old total.
        """
        amount, times = 0.0, []
        points = self._points(track, required_track or None, second_owner_labels=1)
        range_start = _first_in_range([point.monotonic_seconds for point in points], seconds)
        previous_number: float | None = None
        for index, point in enumerate(points):
            if point.number is None:
                continue
            if previous_number is not None:
                increment = _increment(previous_number, point.number)
            elif (
                index == 0
                or not starts_at_zero
                or (required_track and points[index - 1].second_number is None)
            ):
                increment = 0.0
            else:
                increment = point.number
            if index > range_start and increment > 0:
                amount += increment
                times.append(point.unix_seconds)
            previous_number = point.number
        return Increase(amount, times[0], times[-1]) if times else None

    def _known_points(self, track: TrackKey, seconds: float = math.inf) -> list[KnownPoint]:
        """Return the points of the last `seconds` that are no gaps."""
        return [
            KnownPoint(point.monotonic_seconds, point.number)
            for point in self._points(track, None, seconds)
            if point.number is not None
        ]

    def _points(
        self,
        track: TrackKey,
        second_track: str | None = None,
        seconds: float = math.inf,
        *,
        second_owner_labels: int | None = None,
    ) -> list[TrackPoint]:
        """Return the points of the last `seconds`, and at least the last two.

        A second track has the same owner labels, or only the first `second_owner_labels` of them. If it has the same labels and does
        not exist, there are no points.
        """
        with self._lock:
            end = None if second_owner_labels is None else 1 + second_owner_labels
            track_numbers = self._tracks.get(track)
            second_track_numbers = self._tracks.get((second_track or "", *track[1:end]))
            if track_numbers is None or (
                second_track and second_track_numbers is None and second_owner_labels is None
            ):
                return []
            times = list(self._times)
            first = _first_in_range([time.monotonic_seconds for time in times], seconds)
            times, numbers = times[first:], track_numbers[first:]
            second_numbers: Sequence[float] = [time.monotonic_seconds for time in times]
            if second_track:
                second_numbers = (
                    second_track_numbers[first:] if second_track_numbers else [math.nan] * len(times)
                )
        return [
            TrackPoint(
                monotonic_seconds=point_time.monotonic_seconds,
                unix_seconds=point_time.unix_seconds,
                number=_none_for_nan(number),
                second_number=_none_for_nan(second_number),
            )
            for point_time, number, second_number in zip(times, numbers, second_numbers, strict=True)
        ]


def _first_in_range(times: Sequence[float], seconds: float) -> int:
    """Return the index of the first point within the last `seconds`, but at most the index of the last point but one."""
    return min(bisect_left(times, times[-1] - seconds), max(0, len(times) - 2)) if times else 0


def _increment(previous_number: float, number: float) -> float:
    """Return the increase of a counter between two points; a decrease is a restart at 0."""
    return number if number < previous_number else number - previous_number


def _none_for_nan(number: float) -> float | None:
    return None if math.isnan(number) else number


def _increase_between(first: float | None, last: float | None) -> float | None:
    """Return the increase from the first to the last number, or None if a number is missing or the counter was reset."""
    return None if first is None or last is None or last < first else last - first


def _rate_between(first: TrackPoint, last: TrackPoint) -> float | None:
    """Return the increase between two points, divided by the increase of the second number; None if either is unknown or was reset."""
    increase, divisor = (
        _increase_between(first.number, last.number),
        _increase_between(first.second_number, last.second_number),
    )
    return None if increase is None or not divisor else increase / divisor


def _rates(points: Sequence[TrackPoint], seconds: float) -> list[tuple[float, float | None]]:
    """Return Unix time and rate of each point but the first, as `History.compute_rates` describes."""
    line: list[tuple[float, float | None]] = []
    start = 0  # index of the point from which the rate of the current point is computed; never before the last gap or reset
    for index, point in enumerate(points):
        if point.number is None or (
            index and _increase_between(points[index - 1].number, point.number) is None
        ):
            start = index
        while start < index - 1 and points[start].monotonic_seconds < point.monotonic_seconds - seconds:
            start += 1
        if index:
            line.append((point.unix_seconds, _rate_between(points[start], point) if start < index else None))
    return line


def _tracks(samples: SampleIndex) -> Iterator[tuple[TrackKey, float]]:
    """Yield track and number for each sample of the page that belongs to a track."""
    for steps in samples.observations("training_step_duration_seconds", mode="train"):
        yield ("timed steps", steps.labels["run"]), steps.count
        if steps.sum is not None:
            yield ("step seconds", steps.labels["run"]), steps.sum
    for source in _SOURCES:
        for labels, value in samples.select(source.family, **source.label_values):
            yield (source.track, *(labels.get(name, "") for name in source.owner_labels)), value
