"""Integrals of the driver's sample buffers: power every 20 ms and utilization every 200 ms.

Runs in the NVML child, on the sampling thread. The driver keeps samples in a ring; a pass adds the samples after the
last pass. If the ring has no new samples (an idle GPU, or a GPU without a ring), the instantaneous reading is used. A
time without samples is bridged up to five seconds, or up to the pass period if that is longer.
"""

from __future__ import annotations

import itertools
import struct

from exporter.collectors.gpu.nvml.device import NvmlDevice
from exporter.collectors.gpu.nvml.library import GARBAGE, CallFailedError
from exporter.collectors.gpu.nvml.readings import PassReadings
from exporter.collectors.gpu.nvml.units import Convert, GarbageError, ratio, watts

LONGEST_GAP_SECONDS = 5.0
_FUTURE_MICROSECONDS = int(LONGEST_GAP_SECONDS * 1e6)
_DRY_MICROSECONDS = 500_000

_CALL = "nvmlDeviceGetSamples"
_POWER, _UTILIZATION = 0, 1

# A pass reads up to a hundred samples, and attributes of the binding's structures take microseconds each: parse the bytes.
# Time and value of nvmlSample_t by NVML's code of the value's type.
_LAYOUTS = {kind: struct.Struct(f"=Q{letter}") for kind, letter in enumerate("dIQQqiH")}

Totals = dict[str, float]
"""Sums since the NVML child started, by reading; samples and performance counters share them."""

BUSY = "busy_seconds"

Sample = tuple[int, float]
"""Microseconds of the driver's clock (Unix time), and a value."""


class SampleRing:
    """Integral of a GPU's sample buffer; gaps up to a length are bridged."""

    def __init__(self, gap_seconds: float = LONGEST_GAP_SECONDS) -> None:
        self.integral = 0.0  # value times seconds since the first sample
        self.last: int | None = None  # driver's time of the newest sample; None before the first
        self._gap = int(gap_seconds * 1e6)

    def take(self, samples: list[Sample], *, wall_microseconds: int, moment: float | None) -> list[Sample]:
        """Add samples in any order; return the new ones, oldest first.

        Args:
            samples: Samples, old ones among them.
            wall_microseconds: The present, on the driver's clock.
            moment: The instantaneous reading, used without new samples.
        """
        future = wall_microseconds + _FUTURE_MICROSECONDS
        if self.last is not None and self.last > future:
            self.last = None  # the wall clock was set back
        new_samples = sorted(sample for sample in samples if (self.last or 0) < sample[0] <= future)
        if self.last is None:
            # The first ring is full of samples from before the start, also before a restart of this child.
            self.last = wall_microseconds
            return [sample for sample in new_samples if sample[0] > wall_microseconds - self._gap]
        for time, value in new_samples:
            self._add(time, value)
        if moment is not None and wall_microseconds - self.last > _DRY_MICROSECONDS:
            self._add(wall_microseconds, moment)
            new_samples.append((wall_microseconds, moment))
        return new_samples

    def _add(self, time: int, value: float) -> None:
        elapsed = time - (self.last or 0)
        if elapsed <= self._gap:
            self.integral += value * elapsed / 1e6
        self.last = time


class DriverSamples:
    """Reader of a GPU's sample buffers."""

    def __init__(self, device: NvmlDevice, period_seconds: float, totals: Totals) -> None:
        self._device = device
        gap = max(LONGEST_GAP_SECONDS, 1.5 * period_seconds)
        self._power, self._utilization = SampleRing(gap), SampleRing(gap)
        self._totals = totals

    def read_power(self, *, wall: float, readings: PassReadings) -> None:
        """Read the power since the last pass: integral and samples."""
        new_samples = self._read(self._power, _POWER, watts, wall=wall, moment=readings.get("power_watts"))
        if new_samples is None or self._power.last is None:
            return
        first = new_samples[0][0] if new_samples else self._power.last
        readings.power = {
            "integral_joules": self._power.integral,
            "until": self._device.now - (wall - self._power.last / 1e6),
            "first": first,
            "steps": [
                later - earlier
                for earlier, later in itertools.pairwise((first, *(at for at, _ in new_samples)))
            ],
            "milliwatts": [round(power * 1000) for _, power in new_samples],
        }

    def read_utilization(self, *, wall: float, readings: PassReadings) -> None:
        """Read the utilization since the last pass, for cards without performance counters."""
        previous_integral = self._utilization.integral
        moment = readings.get("utilization_ratio")
        new_samples = self._read(self._utilization, _UTILIZATION, ratio, wall=wall, moment=moment)
        self._totals[BUSY] = self._totals.get(BUSY, 0.0) + self._utilization.integral - previous_integral
        readings.put(BUSY, None if new_samples is None else self._totals[BUSY])

    def _read(
        self, ring: SampleRing, kind: int, convert: Convert, *, wall: float, moment: float | None
    ) -> list[Sample] | None:
        samples = self._drain(kind, ring.last or 0, convert)
        if samples is None and moment is None:
            return None
        return ring.take(samples or [], wall_microseconds=int(wall * 1e6), moment=moment)

    def _drain(self, kind: int, last: int, convert: Convert) -> list[Sample] | None:
        """Return the samples after a time; None without a buffer, and while the driver returns garbage only."""
        device, item = self._device, f"samples.{kind}"
        if not device.may_call(item, _CALL):
            return None
        try:
            value_type, samples = device.call(_CALL, kind, last)
        except CallFailedError as failure:
            if failure.error == "not_found":  # no newer sample
                return []
            device.fail(item, _CALL, failure.error)
            return None
        layout = _LAYOUTS.get(value_type)
        if layout is None:
            device.fail(item, _CALL, GARBAGE)
            return None
        raw_samples, refused = [], 0
        for sample in samples:
            time, number = layout.unpack_from(bytes(sample))
            try:
                raw_samples.append((time, convert(number)))
            except GarbageError:
                refused += 1
        if refused:
            device.library.count_error(_CALL, GARBAGE)
        return None if refused and not raw_samples else raw_samples
