"""The driver's own sample buffers: what happened between two passes.

Used in the NVML child, by the thread that samples. The driver keeps power every 20 ms and utilisation every 200 ms in a
ring; this takes what is newer than the last time seen and makes an integral of it (joules, busy seconds). When the ring
is dry (an idle GPU), the reading of the moment stands in. A gap in which nobody measured is not bridged, unless somebody
asked for passes that are so far apart: then it is an estimate from what the ring still holds.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any

from exporter.collectors.gpu.nvml.device import Device, Out
from exporter.collectors.gpu.nvml.library import GARBAGE, CallFailedError
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
    """One buffer of one GPU, of which gaps up to a length are bridged.

    Attributes:
        integral: Value times seconds since the first sample that was seen.
        last: The time after which samples are new, microseconds as the driver counts them; None before the first.
    """

    def __init__(self, gap_seconds: float = LONGEST_GAP_SECONDS) -> None:
        self.integral = 0.0
        self.last: int | None = None
        self._gap = int(gap_seconds * 1e6)

    def take(self, samples: list[Sample], *, wall_microseconds: int, moment: float | None) -> list[Sample]:
        """Add samples.

        Args:
            samples: In any order, old ones among them.
            wall_microseconds: The time as the driver would give it to a sample of this moment.
            moment: The reading of this moment, to be used when the ring is dry; None where there is none.

        Returns:
            Those that are new, the oldest first.
        """
        future = wall_microseconds + _FUTURE_MICROSECONDS
        if self.last is not None and self.last > future:
            self.last = None  # the wall clock was set back: begin anew
        new = sorted(sample for sample in samples if (self.last or 0) < sample[0] <= future)
        if self.last is None:
            # The first ring that is seen is full of what was before us, and before a restart of this child.
            self.last = wall_microseconds
            return [sample for sample in new if sample[0] > wall_microseconds - self._gap]
        for time, value in new:
            self._add(time, value)
        if moment is not None and wall_microseconds - self.last > _DRY_MICROSECONDS:
            self._add(wall_microseconds, moment)
            new.append((wall_microseconds, moment))
        return new

    def _add(self, time: int, value: float) -> None:
        elapsed = time - (self.last or 0)
        if elapsed <= self._gap:
            self.integral += value * elapsed / 1e6
        self.last = time


class Buffers:
    """The buffers of one GPU, which are read every so many seconds."""

    def __init__(self, device: Device, every_seconds: float) -> None:
        self._device = device
        gap = max(LONGEST_GAP_SECONDS, 1.5 * every_seconds)
        self._power, self._utilization = Ring(gap), Ring(gap)

    def read_power(self, *, wall: float, out: Out) -> None:
        """Take the power since the last time: the integral, and the samples themselves."""
        new = self._take(self._power, _POWER, watts, wall=wall, moment=out.get("power"))
        out["power_joules"] = None if new is None else self._power.integral
        out["power_samples"] = _compact(new) if new else None

    def read_utilization(self, *, wall: float, out: Out) -> None:
        """Take the utilisation since the last time: for cards without performance counters."""
        moment = out.get("utilization")
        new = self._take(self._utilization, _UTILIZATION, ratio, wall=wall, moment=moment)
        out["busy_seconds"] = None if new is None else self._utilization.integral

    def _take(
        self, ring: Ring, kind: int, convert: Callable[[Any], float], *, wall: float, moment: float | None
    ) -> list[Sample] | None:
        samples = self._drain(kind, ring.last or 0, convert)
        if samples is None and moment is None:
            return None
        return ring.take(samples or [], wall_microseconds=int(wall * 1e6), moment=moment)

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


def _compact(samples: list[Sample]) -> tuple[int, list[int], list[int]]:
    """Samples of power as they go through the pipe: a time, then steps of time and milliwatts."""
    first = samples[0][0]
    times = [first, *(time for time, _ in samples)]
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return first, steps, [round(power * 1000) for _, power in samples]
