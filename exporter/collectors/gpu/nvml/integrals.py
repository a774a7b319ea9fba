"""What happened between two passes, by the driver's own sample buffers and performance counters, added up.

Used in the NVML child, by the thread that samples. The driver keeps power every 20 ms and utilisation every 200 ms in a
ring; this takes what is newer than the last time seen and makes an integral of it (joules, busy seconds). When the ring
is dry (an idle GPU), the reading of the moment stands in. A gap in which nobody measured is not bridged, unless somebody
asked for passes that are so far apart: then it is an estimate from what the ring still holds.

Performance counters (GPM, Hopper and later) tell what the SMs, tensor cores and memory really do. A metric is made of two
samples at least 100 ms apart; the previous one is kept, so that nothing sleeps and every metric covers the whole time
since the last pass. No other thread may take any: two in `nvmlGpmSampleGet`, even for different GPUs, panic the driver.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable
from math import isfinite
from typing import Any

from exporter.collectors.gpu.nvml.device import (
    Convert,
    Device,
    GarbageError,
    Out,
    bounded,
    member_error,
    ratio,
    watts,
)
from exporter.collectors.gpu.nvml.library import GARBAGE, UNSUPPORTED, CallFailedError
from exporter.collectors.gpu.options import GpuOptions

LONGEST_GAP_SECONDS = 5.0
_FUTURE_MICROSECONDS = int(LONGEST_GAP_SECONDS * 1e6)
_DRY_MICROSECONDS = 1_000_000

_CALL = "nvmlDeviceGetSamples"
_POWER, _UTILIZATION = 0, 1

# A hundred samples a read, and the binding's structures take microseconds for each attribute: read as bytes.
# Time and value of nvmlSample_t by NVML's code of the value's type.
_LAYOUTS = {kind: struct.Struct(f"=Q{letter}") for kind, letter in enumerate("dIQQqiH")}

LEAST_SECONDS = 0.1
"""NVML gives NaN for samples that are closer."""

GRAPHICS_ACTIVITY = 1
ACTIVITY = {
    2: ("sm_activity_ratio", ""),
    3: ("sm_occupancy_ratio", ""),
    5: ("tensor_activity_ratio", "any"),
    7: ("tensor_activity_ratio", "hmma"),
    9: ("tensor_activity_ratio", "imma"),
    10: ("dram_activity_ratio", ""),
    12: ("pipe_activity_ratio", "fp32"),
    13: ("pipe_activity_ratio", "fp16"),
}
ACTIVITY_DETAILS = {
    4: ("pipe_activity_ratio", "int"),
    6: ("tensor_activity_ratio", "dfma"),
    8: ("tensor_activity_ratio", "dmma"),
    11: ("pipe_activity_ratio", "fp64"),
}
RATES = {
    20: "pcie_transmit_bytes_total",
    21: "pcie_receive_bytes_total",
    60: "nvlink_receive_gpm",
    61: "nvlink_transmit_gpm",
}
"""MiB per second, made into bytes since this process began."""
_rate = bounded(0, 1e8, lambda mebibytes: mebibytes * (1 << 20))

Totals = dict[str, float]
"""What has been added up since this process began, by reading."""

_BUSY = "utilization_busy_seconds_total"

Sample = tuple[int, float]
"""Microseconds as the driver counts them (of the wall clock), and a value."""


class Ring:
    """One buffer of one GPU, of which gaps up to a length are bridged."""

    def __init__(self, gap_seconds: float = LONGEST_GAP_SECONDS) -> None:
        self.integral = 0.0  # value times seconds since the first sample that was seen
        # The time after which samples are new, microseconds as the driver counts them; None before the first.
        self.last: int | None = None
        self._gap = int(gap_seconds * 1e6)

    def take(self, samples: list[Sample], *, wall_microseconds: int, moment: float | None) -> list[Sample]:
        """Add samples, given in any order and old ones among them; returns those that are new, the oldest first.

        `moment` is the reading of this moment, for when the ring is dry; the time is as the driver would give it.
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

    def __init__(self, device: Device, every_seconds: float, totals: Totals) -> None:
        self._device = device
        gap = max(LONGEST_GAP_SECONDS, 1.5 * every_seconds)
        self._power, self._utilization = Ring(gap), Ring(gap)
        self._totals = totals

    def read_power(self, *, wall: float, out: Out) -> None:
        """Take the power since the last time: the integral, and the samples themselves."""
        new = self._read(self._power, _POWER, watts, wall=wall, moment=out.get("power_watts"))
        out["power_joules"] = None if new is None else self._power.integral
        out["power_samples"] = _compact(new) if new else None

    def read_utilization(self, *, wall: float, out: Out) -> None:
        """Take the utilisation since the last time: for cards without performance counters."""
        before = self._utilization.integral
        moment = out.get("utilization_ratio")
        new = self._read(self._utilization, _UTILIZATION, ratio, wall=wall, moment=moment)
        self._totals[_BUSY] = self._totals.get(_BUSY, 0.0) + self._utilization.integral - before
        out[_BUSY] = None if new is None else self._totals[_BUSY]

    def _read(
        self, ring: Ring, kind: int, convert: Convert, *, wall: float, moment: float | None
    ) -> list[Sample] | None:
        samples = self._drain(kind, ring.last or 0, convert)
        if samples is None and moment is None:
            return None
        return ring.take(samples or [], wall_microseconds=int(wall * 1e6), moment=moment)

    def _drain(self, kind: int, last: int, convert: Convert) -> list[Sample] | None:
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


class Metrics:
    """The metrics of a GPU, or of an instance, between two samples.

    Args:
        item: The name under which it is remembered what there is not.
        call: Takes a sample; `arguments` stand between the handle and the sample.
    """

    def __init__(self, device: Device, item: str, call: str, *arguments: int) -> None:
        self.seconds = 0.0  # what the samples that were read last are apart
        self._device = device
        self._item = item
        self._call, self._arguments = call, arguments
        self._later: Any = None
        self._earlier: Any = None
        self._taken_at: float | None = None

    def supported(self) -> bool:
        """Whether the GPU has performance counters that can be sampled."""
        answer = self._device.ask("gpm", "nvmlGpmQueryDeviceSupport")
        if answer is not None and not answer.isSupportedDevice:
            self._device.fail("gpm", "nvmlGpmQueryDeviceSupport", "not_supported")
            return False
        return answer is not None and not self._device.lacks(self._item)

    def read(self, *requests: Iterable[int]) -> dict[int, float] | None:
        """Take a sample, and read metrics since the one before, each request by itself.

        Returns:
            Those that have a value; None with the first sample, or when the last one was just now.
        """
        device = self._device
        if not self.supported():
            return {}
        if self._taken_at is not None and device.now - self._taken_at < LEAST_SECONDS:
            return None
        try:
            if self._earlier is None:
                self._earlier = device.library.call("nvmlGpmSampleAlloc")
            device.library.call(self._call, device.handle, *self._arguments, self._earlier)
        except CallFailedError as failure:
            self._taken_at = None
            device.fail(self._item, failure.call, failure.error)
            return {}
        self._earlier, self._later = self._later, self._earlier
        before, self._taken_at = self._taken_at, device.now
        if before is None:
            return None
        self.seconds = device.now - before
        return {
            number: value for request in requests for number, value in self._between(list(request)).items()
        }

    def restart(self) -> None:
        """Begin anew with the next sample."""
        self._taken_at = None

    def _between(self, numbers: list[int]) -> dict[int, float]:
        """Metrics of the two samples; NaN, and what the GPU does not have, are left out."""
        device = self._device
        asked = [number for number in numbers if not device.lacks(f"{self._item}.{number}")]
        if not asked:
            return {}
        request = device.library.binding.c_nvmlGpmMetricsGet_t()
        request.version = 1
        request.numMetrics = len(asked)
        request.sample1, request.sample2 = self._earlier, self._later
        for place, number in enumerate(asked):
            request.metrics[place].metricId = number
        try:
            device.library.call("nvmlGpmMetricsGet", request)
        except CallFailedError as failure:
            if failure.error in UNSUPPORTED and len(asked) > 1:
                # One that the driver does not know must not cost the others: which one is found out once.
                return {key: value for each in asked for key, value in self._between([each]).items()}
            for number in asked:
                device.fail(f"{self._item}.{number}", failure.call, failure.error)
            return {}
        found = {}
        for place, number in enumerate(asked):
            metric = request.metrics[place]
            if metric.nvmlReturn:
                device.fail(f"{self._item}.{number}", "nvmlGpmMetricsGet", member_error(metric.nvmlReturn))
            elif isfinite(metric.value):
                found[number] = metric.value
        return found


def in_base_units(device: Device, found: dict[int, float]) -> dict[int, float]:
    """Percent into ratios, rates into bytes; what cannot be is left out and counted."""
    good = {}
    for number, value in found.items():
        try:
            good[number] = (_rate if number in RATES else ratio)(value)
        except GarbageError:  # noqa: PERF203 - one wrong number must not cost the others
            device.library.count_error("nvmlGpmMetricsGet", GARBAGE)
    return good


class Gpm:
    """The performance counters of one GPU."""

    def __init__(self, device: Device, options: GpuOptions, totals: Totals) -> None:
        self._device = device
        self._metrics = Metrics(device, "gpm.sample", "nvmlGpmSampleGet")
        self._activity = {**ACTIVITY, **ACTIVITY_DETAILS} if options.details else ACTIVITY
        self._totals = totals
        self._wanted = options.gpm

    def counts_busy_seconds(self) -> bool:
        """Whether the utilisation need not be asked for by more costly means."""
        return self._wanted and self._metrics.supported()

    def read(self, out: Out) -> None:
        """Take a sample and read the metrics since the one before."""
        if not self._wanted:
            return
        # One request for what every Hopper has, one for what not every driver knows.
        values = self._metrics.read((GRAPHICS_ACTIVITY, *self._activity), RATES)
        if values is None:
            return  # too close, or the first: what is known stays
        out.update(dict.fromkeys((*RATES.values(), *(key for key, _ in self._activity.values()))))
        if GRAPHICS_ACTIVITY not in values and self.counts_busy_seconds():
            out[_BUSY] = None
        for number, value in in_base_units(self._device, values).items():
            if number in self._activity:
                key, label = self._activity[number]
                out[key] = {**(out[key] or {}), label: value} if label else value
            else:
                reading = RATES.get(number, _BUSY)
                self._totals[reading] = self._totals.get(reading, 0.0) + value * self._metrics.seconds
                out[reading] = self._totals[reading]
