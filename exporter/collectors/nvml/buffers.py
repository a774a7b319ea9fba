"""The driver's own sample buffers: what happened between two passes.

Used in the NVML child, by the thread that samples. The driver keeps utilisation and power every 20 to 200 ms in a
ring; this takes what is newer than the last time seen, and makes of it an integral (busy seconds, joules) and
the least and the most of the last seconds. When the ring is dry (an idle GPU), the reading of the
moment stands in, so that the integral goes on.

A sample tells of the time since the one before it. A gap longer than `LONGEST_GAP_SECONDS` (the driver was gone,
this process stood still longer than the ring is long) is not bridged: nobody measured it. Where somebody asked for
passes that are further apart, the gaps between them are bridged: an estimate from what the ring still holds.
"""

from __future__ import annotations

from collections import deque

from exporter.collectors.nvml.codes import GARBAGE
from exporter.collectors.nvml.conversions import GarbageError, ratio, watts
from exporter.collectors.nvml.gpu import decode
from exporter.collectors.nvml.library import CallFailedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from exporter.collectors.nvml.gpu import Gpu

LONGEST_GAP_SECONDS = 5.0
_FUTURE_MICROSECONDS = int(LONGEST_GAP_SECONDS * 1e6)
_DRY_MICROSECONDS = 1_000_000

_CALL = "nvmlDeviceGetSamples"
_POWER, _GPU, _MEMORY = 0, 1, 2


class Ring:
    """One buffer of one GPU.

    Args:
        window_seconds: Over which the least and the most are taken.
        gap_seconds: The longest that is bridged.

    Attributes:
        integral: Value times seconds since the first sample that was seen.
    """

    __slots__ = ("integral", "_window_seconds", "_gap", "_last", "_extremes")

    def __init__(self, window_seconds: float, gap_seconds: float = LONGEST_GAP_SECONDS) -> None:
        self.integral = 0.0
        self._window_seconds = window_seconds
        self._gap = int(gap_seconds * 1e6)
        self._last: int | None = None  # driver's time of the newest sample, µs
        self._extremes: deque[tuple[float, float, float]] = deque()

    @property
    def last(self) -> int:
        """The time after which samples are new, microseconds as the driver counts them."""
        return self._last or 0

    def take(
        self, samples: list[tuple[int, float]], *, now: float, wall_microseconds: int, moment: float | None
    ) -> None:
        """Add samples.

        Args:
            samples: Time in microseconds and value; in any order, old ones among them.
            now: Monotonic seconds.
            wall_microseconds: The time as the driver would give it to a sample of this moment.
            moment: The reading of this moment, to be used when the ring is dry; None where there is none.
        """
        future = wall_microseconds + _FUTURE_MICROSECONDS
        if self._last is not None and self._last > future:
            self._last = None  # the wall clock was set back: begin anew
        values = [] if moment is None else [moment]
        for time, value in sorted(sample for sample in samples if self.last < sample[0] <= future):
            # The first ring that is seen is full of what was before us, and before a restart of this child.
            if self._last is not None:
                self._add(time, value)
                values.append(value)
        if self._last is None:
            self._last = wall_microseconds
        elif moment is not None and wall_microseconds - self._last > _DRY_MICROSECONDS:
            self._add(wall_microseconds, moment)
        if values:
            self._extremes.append((now, min(values), max(values)))
        while self._extremes and now - self._extremes[0][0] > self._window_seconds:
            self._extremes.popleft()

    def _add(self, time: int, value: float) -> None:
        if self._last is not None:
            elapsed = time - self._last
            if elapsed <= self._gap:
                self.integral += value * elapsed / 1e6
        self._last = time

    def extremes(self) -> tuple[float, float] | None:
        """Give the least and the most of the window; None without any sample in it."""
        if not self._extremes:
            return None
        return min(least for _, least, _ in self._extremes), max(most for _, _, most in self._extremes)


class Buffers:
    """The buffers of one GPU that are read.

    Args:
        window_seconds: Over which the least and the most are taken.
        every_seconds: How often they are read.
    """

    __slots__ = ("_utilization", "_bandwidth", "_power")

    def __init__(self, window_seconds: float, every_seconds: float) -> None:
        gap = max(LONGEST_GAP_SECONDS, 1.5 * every_seconds)
        self._utilization = Ring(window_seconds, gap)
        self._bandwidth = Ring(window_seconds, gap)
        self._power = Ring(window_seconds, gap)

    def read(self, gpu: Gpu, *, wall: float, recent: dict[str, Any], out: dict[str, Any]) -> None:
        """Take what is new.

        Args:
            gpu: Whose.
            wall: Unix seconds.
            recent: The readings of the moment, in base units.
            out: Takes integrals and extremes.
        """
        plan = (
            (self._utilization, _GPU, ratio, "utilization", "busy_seconds", "utilization"),
            (self._bandwidth, _MEMORY, ratio, "bandwidth_utilization", "memory_busy_seconds", None),
            (self._power, _POWER, watts, "power", "power_joules", "power"),
        )
        for ring, kind, convert, moment, integral, extremes in plan:
            samples = drain(gpu, kind, ring.last, convert)
            if samples is None and recent.get(moment) is None:
                out[integral] = None
                found = None
            else:
                ring.take(
                    samples or [],
                    now=gpu.now,
                    wall_microseconds=int(wall * 1e6),
                    moment=recent.get(moment),
                )
                out[integral] = ring.integral
                found = ring.extremes()
            if extremes is not None:
                out[f"{extremes}_min"], out[f"{extremes}_max"] = found or (None, None)


def drain(gpu: Gpu, kind: int, last: int, convert: Callable[[Any], float]) -> list[tuple[int, float]] | None:
    """Read the samples after a time; None where this GPU has no such buffer."""
    item = f"samples.{kind}"
    if gpu.lacks(item):
        return None
    try:
        value_type, samples = gpu.library.call(_CALL, gpu.handle, kind, last)
    except CallFailedError as failure:
        if failure.error == "not_found":  # nothing is newer
            gpu.succeed(item)
            return []
        gpu.fail(item, _CALL, failure.error)
        return None
    found = []
    for sample in samples:
        number = decode(value_type, sample.sampleValue)
        try:
            found.append((int(sample.timeStamp), convert(_number(number))))
        except GarbageError:
            gpu.library.count_error(_CALL, GARBAGE)
    gpu.succeed(item)
    return found


def _number(number: float | None) -> float:
    if number is None:
        raise GarbageError(number)
    return number
