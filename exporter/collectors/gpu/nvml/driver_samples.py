"""Integrals of the driver's sample buffers: power every 20 ms and utilization every 200 ms.

Runs in the NVML child, on the sampling thread. The driver stores samples in a ring buffer; each pass adds the samples since the previous
pass. On an idle GPU or without a buffer, the newest sample may be older than half a second. The instantaneous reading is then added as a
sample. The value of a sample applies to the time since the previous sample. A gap of more than five seconds and more than 1.5 periods is
not integrated.
"""

from __future__ import annotations

import itertools
import struct

from exporter.collectors.gpu.nvml.device import NvmlDevice
from exporter.collectors.gpu.nvml.library import GARBAGE, CallFailedError
from exporter.collectors.gpu.nvml.readings import PassReadings
from exporter.collectors.gpu.nvml.units import Convert, GarbageError, ratio, watts

MAX_GAP_SECONDS = 5.0
"""Longest time between two samples over which a value is integrated, unless 1.5 periods are longer."""
_MAX_FUTURE_MICROSECONDS = int(MAX_GAP_SECONDS * 1e6)
"""Time by which a sample may be ahead of the wall clock; later samples are garbage, or the clock was set back."""
_MAX_DELAY_MICROSECONDS = 500_000
"""Age of the newest sample from which the instantaneous reading is used."""

_CALL = "nvmlDeviceGetSamples"
# NVML's kinds of samples.
_POWER = 0
_UTILIZATION = 1

# Layout of nvmlSample_t (time and value) by NVML's type code of the value. The bytes are parsed because a pass reads up to a
# hundred samples, and each attribute access on a structure of pynvml takes microseconds.
_LAYOUTS = {value_type: struct.Struct(f"=Q{letter}") for value_type, letter in enumerate("dIQQqiH")}

Totals = dict[str, float]
"""Totals since the NVML child started, by reading; shared by the samples and the performance counters."""

BUSY = "busy_seconds"
"""Reading of the totals: integral of the utilization over time."""

Sample = tuple[int, float]
"""Unix time on the driver's clock, in microseconds, and a value."""


class SampleIntegral:
    """Integral of a GPU's samples over time, without gaps longer than `max_gap_seconds`."""

    def __init__(self, max_gap_seconds: float = MAX_GAP_SECONDS) -> None:
        self.integral = 0.0  # of the values over time, in value-seconds, since the first sample
        self.seconds = 0.0  # time over which values were integrated
        # Time of the newest sample on the driver's clock; None before the first sample.
        self.newest_microseconds: int | None = None
        self._max_gap_microseconds = int(max_gap_seconds * 1e6)

    def add(
        self, samples: list[Sample], *, wall_microseconds: int, instantaneous: float | None
    ) -> list[Sample]:
        """Add samples, which may have any order, and return the new samples, oldest first.

        The first call, and the first call after the wall clock was set back, integrate nothing.

        Args:
            samples: Samples of the buffer, which may contain samples of earlier passes.
            wall_microseconds: Current time on the driver's clock.
            instantaneous: The instantaneous reading, used if the buffer has no recent sample.
        """
        latest_time = wall_microseconds + _MAX_FUTURE_MICROSECONDS
        newest = self.newest_microseconds
        if newest is not None and newest > latest_time:
            newest = None  # the wall clock was set back
        new_samples = sorted((time, value) for time, value in samples if (newest or 0) < time <= latest_time)
        if newest is None:
            # The samples are older than this child: the recent ones are returned, but not integrated.
            self.newest_microseconds = wall_microseconds
            earliest_time = wall_microseconds - self._max_gap_microseconds
            return [(time, value) for time, value in new_samples if time > earliest_time]
        for time, value in new_samples:
            newest = self._integrate(newest, time, value)
        if instantaneous is not None and wall_microseconds - newest > _MAX_DELAY_MICROSECONDS:
            newest = self._integrate(newest, wall_microseconds, instantaneous)
            new_samples.append((wall_microseconds, instantaneous))
        self.newest_microseconds = newest
        return new_samples

    def _integrate(self, previous_time: int, time: int, value: float) -> int:
        """Integrate a value since the previous sample, unless the gap is too long. Return the time of the new sample."""
        microseconds = time - previous_time
        if microseconds <= self._max_gap_microseconds:
            self.integral += value * microseconds / 1e6
            self.seconds += microseconds / 1e6
        return time


class DriverSamples:
    """Reader of a GPU's sample buffers."""

    def __init__(self, device: NvmlDevice, period_seconds: float, totals: Totals) -> None:
        self._device = device
        max_gap_seconds = max(MAX_GAP_SECONDS, 1.5 * period_seconds)
        self._power, self._utilization = SampleIntegral(max_gap_seconds), SampleIntegral(max_gap_seconds)
        self._totals = totals

    def read_power(self, *, wall: float, readings: PassReadings) -> None:
        """Read the power samples since the last pass, and set `readings.power` unless the GPU has no power reading."""
        new_samples = self._read(
            self._power, _POWER, watts, wall=wall, instantaneous=readings.get("power_watts")
        )
        newest_microseconds = self._power.newest_microseconds
        if new_samples is None or newest_microseconds is None:
            return
        start_microseconds = min((time for time, _ in new_samples), default=newest_microseconds)
        readings.power = {
            "integral_joules": self._power.integral,
            "end_time": self._device.pass_time - (wall - newest_microseconds / 1e6),
            "start_microseconds": start_microseconds,
            "step_microseconds": [
                later - earlier
                for earlier, later in itertools.pairwise(
                    (start_microseconds, *(time for time, _ in new_samples))
                )
            ],
            "milliwatts": [round(power * 1000) for _, power in new_samples],
        }

    def read_utilization(self, *, wall: float, readings: PassReadings) -> None:
        """Read the utilization samples since the last pass and set the busy time, for a GPU without performance counters."""
        previous_integral = self._utilization.integral
        instantaneous = readings.get("utilization_ratio")
        new_samples = self._read(
            self._utilization, _UTILIZATION, ratio, wall=wall, instantaneous=instantaneous
        )
        self._totals[BUSY] = self._totals.get(BUSY, 0.0) + self._utilization.integral - previous_integral
        readings.set_value(BUSY, None if new_samples is None else self._totals[BUSY])

    def end_utilization(self) -> float:
        """Return the seconds since the last call for which the utilization samples have counted the busy time.

        The time of the last sample is discarded, because the performance counters count the busy time from now on.
        """
        seconds, self._utilization.seconds = self._utilization.seconds, 0.0
        self._utilization.newest_microseconds = None
        return seconds

    def _read(
        self,
        integral: SampleIntegral,
        sample_type: int,
        convert: Convert,
        *,
        wall: float,
        instantaneous: float | None,
    ) -> list[Sample] | None:
        """Add the samples of a buffer to an integral, and return the new samples. Returns None without a buffer and a reading."""
        samples = self._read_buffer(sample_type, integral.newest_microseconds or 0, convert)
        if samples is None and instantaneous is None:
            return None
        return integral.add(samples or [], wall_microseconds=int(wall * 1e6), instantaneous=instantaneous)

    def _read_buffer(
        self, sample_type: int, since_microseconds: int, convert: Convert
    ) -> list[Sample] | None:
        """Return the samples after a time. Returns None without a buffer, after a failed call, and if all samples are garbage."""
        device, query_name = self._device, f"samples.{sample_type}"
        if not device.may_call(query_name, _CALL):
            return None
        try:
            value_type, samples = device.call(_CALL, sample_type, since_microseconds)
        except CallFailedError as failure:
            if failure.error == "not_found":  # no new samples
                return []
            device.record_failure(query_name, _CALL, failure.error)
            return None
        layout = _LAYOUTS.get(value_type)
        if layout is None:
            device.record_failure(query_name, _CALL, GARBAGE)
            return None
        valid_samples, garbage_count = [], 0
        for sample in samples:
            time, number = layout.unpack_from(bytes(sample))
            try:
                valid_samples.append((time, convert(number)))
            except GarbageError:
                garbage_count += 1
        if garbage_count:
            device.library.count_error(_CALL, GARBAGE)
        return None if garbage_count and not valid_samples else valid_samples
