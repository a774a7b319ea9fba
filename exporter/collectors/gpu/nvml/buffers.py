"""The driver's own sample buffers: what happened between two passes.

Used in the NVML child, by the thread that samples. The driver keeps power every 20 ms and utilisation every 200 ms in
a ring; this takes what is newer than the last time seen, and makes of it an integral (joules, busy seconds), and of
the power the least and the most of the last seconds. When the ring is dry (an idle GPU), the reading of the moment
stands in, so that the integral goes on.

A sample tells of the time since the one before it. A gap longer than `LONGEST_GAP_SECONDS` (the driver was gone,
this process stood still longer than the ring is long) is not bridged: nobody measured it. Where somebody asked for
passes that are further apart, the gaps between them are bridged: an estimate from what the ring still holds.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from exporter.collectors.gpu.nvml.device import Device
from exporter.collectors.gpu.nvml.library import GARBAGE, CallFailedError
from exporter.collectors.gpu.nvml.readings import Out
from exporter.collectors.gpu.nvml.units import GarbageError, ratio, watts

LONGEST_GAP_SECONDS = 5.0
_FUTURE_MICROSECONDS = int(LONGEST_GAP_SECONDS * 1e6)
_DRY_MICROSECONDS = 1_000_000

_CALL = "nvmlDeviceGetSamples"
_POWER, _UTILIZATION = 0, 1

# A hundred samples a read, and the binding's structures take microseconds for each attribute: read as bytes.
# Time and value of nvmlSample_t by NVML's code of the value's type.
_LAYOUTS = {kind: struct.Struct(f"=Q{letter}") for kind, letter in enumerate("dIQQqiH")}

Sample = tuple[int, float]
"""Microseconds as the driver counts them (of the wall clock), and a value."""


class Ring:
    """One buffer of one GPU.

    Args:
        window_seconds: Over which the least and the most are taken.
        gap_seconds: The longest that is bridged.

    Attributes:
        integral: Value times seconds since the first sample that was seen.
    """

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
        self, samples: list[Sample], *, now: float, wall_microseconds: int, moment: float | None
    ) -> list[Sample]:
        """Add samples.

        Args:
            samples: In any order, old ones among them.
            now: Monotonic seconds.
            wall_microseconds: The time as the driver would give it to a sample of this moment.
            moment: The reading of this moment, to be used when the ring is dry; None where there is none.

        Returns:
            Those that are new, the oldest first.
        """
        future = wall_microseconds + _FUTURE_MICROSECONDS
        if self._last is not None and self._last > future:
            self._last = None  # the wall clock was set back: begin anew
        values = [] if moment is None else [moment]
        new = sorted(sample for sample in samples if self.last < sample[0] <= future)
        for time, value in new:
            # The first ring that is seen is full of what was before us, and before a restart of this child.
            if self._last is not None:
                self._add(time, value)
                values.append(value)
        if self._last is None:
            self._last = wall_microseconds
        elif moment is not None and wall_microseconds - self._last > _DRY_MICROSECONDS:
            self._add(wall_microseconds, moment)
            new.append((wall_microseconds, moment))
        if values:
            self._extremes.append((now, min(values), max(values)))
        while self._extremes and now - self._extremes[0][0] > self._window_seconds:
            self._extremes.popleft()
        return new

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
    """The buffers of one GPU.

    Args:
        device: Whose.
        window_seconds: Over which the least and the most are taken.
        every_seconds: How often they are read.
    """

    def __init__(self, device: Device, window_seconds: float, every_seconds: float) -> None:
        self._device = device
        gap = max(LONGEST_GAP_SECONDS, 1.5 * every_seconds)
        self._power = Ring(window_seconds, gap)
        self._utilization = Ring(window_seconds, gap)

    def read_power(self, *, wall: float, moment: float | None, out: Out) -> None:
        """Take the power since the last time.

        Args:
            wall: Unix seconds.
            moment: The power of this moment, watts.
            out: Takes the integral, the extremes, and the samples themselves.
        """
        new = self._take(self._power, _POWER, watts, wall=wall, moment=moment)
        out["power_joules"] = None if new is None else self._power.integral
        out["power_min"], out["power_max"] = (self._power.extremes() if new is not None else None) or (
            None,
            None,
        )
        out["power_samples"] = compact(new) if new else None

    def read_utilization(self, *, wall: float, moment: float | None, out: Out) -> None:
        """Take the utilisation since the last time: for cards without performance counters."""
        new = self._take(self._utilization, _UTILIZATION, ratio, wall=wall, moment=moment)
        out["busy_seconds"] = None if new is None else self._utilization.integral

    def _take(
        self, ring: Ring, kind: int, convert: Callable[[Any], float], *, wall: float, moment: float | None
    ) -> list[Sample] | None:
        samples = self._drain(kind, ring.last, convert)
        if samples is None and moment is None:
            return None
        return ring.take(
            samples or [], now=self._device.now, wall_microseconds=int(wall * 1e6), moment=moment
        )

    def _drain(self, kind: int, last: int, convert: Callable[[Any], float]) -> list[Sample] | None:
        """Read the samples after a time; None where this GPU has no such buffer."""
        device, item = self._device, f"samples.{kind}"
        if device.lacks(item):
            return None
        try:
            value_type, samples = device.library.call(_CALL, device.handle, kind, last)
        except CallFailedError as failure:
            if failure.error == "not_found":  # nothing is newer
                return []
            device.fail(item, _CALL, failure.error)
            return None
        layout = _LAYOUTS.get(value_type)
        if layout is None:
            device.fail(item, _CALL, GARBAGE)
            return None
        found = []
        for sample in samples:
            time, number = layout.unpack_from(bytes(sample))
            try:
                found.append((time, convert(number)))
            except GarbageError:
                device.library.count_error(_CALL, GARBAGE)
        return found


def compact(samples: list[Sample]) -> tuple[int, list[int], list[int]]:
    """Samples of power as they go through the pipe: a time, then steps of time and milliwatts."""
    first = samples[0][0]
    times = [first, *(time for time, _ in samples)]
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return first, steps, [round(power * 1000) for _, power in samples]
