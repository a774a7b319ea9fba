"""Performance counters of Hopper and later (GPM): what the SMs, tensor cores and memory really do.

Used in the NVML child, by the thread that samples and by no other: two threads in `nvmlGpmSampleGet`, even for
different GPUs, panic the kernel driver. A metric is made of two samples at least 100 ms apart; the previous one is
kept, so that nothing sleeps and every metric covers the whole time since the last pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

from exporter.collectors.gpu.nvml.device import Device, member_error
from exporter.collectors.gpu.nvml.library import GARBAGE, UNSUPPORTED, CallFailedError, Library
from exporter.collectors.gpu.nvml.readings import Out
from exporter.collectors.gpu.nvml.units import GarbageError, ratio
from exporter.collectors.gpu.options import GpuOptions

LEAST_SECONDS = 0.1
"""NVML gives NaN for samples that are closer."""

_MEBIBYTE = 1 << 20
_MOST_COUNT = 2.0**63
_MOST_BYTES = 1e14

ACTIVITY = {
    1: ("graphics_activity", ""),
    2: ("sm_activity", ""),
    3: ("sm_occupancy", ""),
    5: ("tensor_activity", "any"),
    7: ("tensor_activity", "hmma"),
    9: ("tensor_activity", "imma"),
    10: ("dram_activity", ""),
    12: ("pipe_activity", "fp32"),
    13: ("pipe_activity", "fp16"),
}
ACTIVITY_DETAILS = {
    4: ("pipe_activity", "int"),
    6: ("tensor_activity", "dfma"),
    8: ("tensor_activity", "dmma"),
    11: ("pipe_activity", "fp64"),
}
COUNTERS_DETAILS = {
    248: ("sm_cycles", "elapsed"),
    249: ("sm_cycles", "active"),
    250: ("tensor_cycles", "any"),
    251: ("tensor_cycles", "dmma"),
    252: ("tensor_cycles", "hmma"),
    253: ("tensor_cycles", "imma"),
    254: ("tensor_cycles", "dfma"),
}
RATES = {
    20: ("pcie_transmit_gpm", ""),
    21: ("pcie_receive_gpm", ""),
    60: ("nvlink_receive_gpm", ""),
    61: ("nvlink_transmit_gpm", ""),
    102: ("c2c_transmit_gpm", ""),
    103: ("c2c_receive_gpm", ""),
}
"""MiB per second, made into bytes since this process began."""

OF_INSTANCE = {2: ("sm", ""), 5: ("tensor", ""), 10: ("dram", "")}
"""What is asked of an instance of a MIG GPU."""

BUSY = "busy_seconds_gpm"
"""Seconds in which anything ran, since this process began: the sum of the graphics activity."""

_GRAPHICS_ACTIVITY = 1


class SamplePair:
    """The last sample of a GPU, or of an instance, and a second one to take the next.

    Args:
        library: Of the thread that samples.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kept: Any = None
        self._spare: Any = None
        self._taken_at: float | None = None
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """What the pair that `take` gave last is apart."""
        return self._seconds

    def take(self, now: float, fill: Callable[[Any], object]) -> tuple[Any, Any] | None:
        """Take a sample.

        Args:
            now: Monotonic seconds.
            fill: Calls NVML with the sample to fill.

        Returns:
            The earlier and the later one; None with the first, or when the last one was just now.

        Raises:
            CallFailedError: There is no sample; the one before is forgotten.
        """
        if self._taken_at is not None and now - self._taken_at < LEAST_SECONDS:
            return None
        if self._spare is None:
            self._spare = self._library.call("nvmlGpmSampleAlloc")
        try:
            fill(self._spare)
        except CallFailedError:
            self._taken_at = None
            raise
        earlier, later = self._kept, self._spare
        self._kept, self._spare = later, earlier
        before, self._taken_at = self._taken_at, now
        if before is None:
            return None
        self._seconds = now - before
        return earlier, later

    def free(self) -> None:
        """Give the samples back."""
        for sample in (self._kept, self._spare):
            if sample is not None:
                with suppress(CallFailedError):  # the GPU is gone, and the sample with it
                    self._library.call("nvmlGpmSampleFree", sample)
        self._kept = self._spare = self._taken_at = None


class Gpm:
    """The performance counters of one GPU.

    Args:
        device: Whose.
        options: What to ask for.
    """

    def __init__(self, device: Device, options: GpuOptions) -> None:
        self._device = device
        self._pair = SamplePair(device.library)
        self._totals: dict[str, float] = {}
        # One request for what every Hopper has, others for what not every driver knows.
        self._requests = [{**ACTIVITY, **ACTIVITY_DETAILS} if options.details else ACTIVITY, RATES]
        if options.details:
            self._requests.append(COUNTERS_DETAILS)
        self._wanted = options.gpm

    def counts_busy_seconds(self) -> bool:
        """Whether the utilisation need not be asked for by more costly means."""
        return self._wanted and supported(self._device) and not self._device.lacks("gpm.sample")

    def read(self, out: Out) -> None:
        """Take a sample and read the metrics since the one before."""
        device = self._device
        if not self._wanted:
            return
        found: Out = {}
        if supported(device) and not device.lacks("gpm.sample"):
            try:
                pair = self._pair.take(
                    device.now, lambda sample: device.library.call("nvmlGpmSampleGet", device.handle, sample)
                )
            except CallFailedError as failure:
                device.fail("gpm.sample", failure.call, failure.error)
            else:
                if pair is None:
                    return  # too close, or the first: what is known stays
                for request in self._requests:
                    for number, value in read_metrics(device, "gpm", tuple(request), *pair).items():
                        self._put(found, request[number], number, value)
        for request in self._requests:
            out.update((key, found.get(key)) for key, _ in request.values())
        out[BUSY] = found.get(BUSY)

    def free(self) -> None:
        """Give NVML's memory back."""
        self._pair.free()

    def _put(self, found: Out, place: tuple[str, str], number: int, value: float) -> None:
        key, label = place
        try:
            if number in RATES:
                value = self._total(key, _within(value * _MEBIBYTE, _MOST_BYTES))
            elif number in COUNTERS_DETAILS:
                value = _within(value, _MOST_COUNT)
            else:
                value = ratio(value)
        except GarbageError:
            self._device.library.count_error("nvmlGpmMetricsGet", GARBAGE)
            return
        if number == _GRAPHICS_ACTIVITY:
            found[BUSY] = self._total(BUSY, value)
        if label:
            found.setdefault(key, {})[label] = value
        else:
            found[key] = value

    def _total(self, key: str, pace: float) -> float:
        self._totals[key] = self._totals.get(key, 0.0) + pace * self._pair.seconds
        return self._totals[key]


def _within(number: float, most: float) -> float:
    if not 0 <= number < most:
        raise GarbageError(number)
    return number


def supported(device: Device) -> bool:
    """Whether the GPU has performance counters that can be sampled."""
    answer = device.ask("gpm", "nvmlGpmQueryDeviceSupport")
    if answer is not None and not answer.isSupportedDevice:
        device.fail("gpm", "nvmlGpmQueryDeviceSupport", "not_supported")
        return False
    return answer is not None


def read_metrics(
    device: Device, item: str, numbers: Sequence[int], earlier: Any, later: Any
) -> dict[int, float]:
    """Read metrics of two samples; NaN, and what the GPU does not have, are left out."""
    asked = [number for number in numbers if not device.lacks(f"{item}.{number}")]
    if not asked:
        return {}
    request = device.library.binding.c_nvmlGpmMetricsGet_t()
    request.version = 1
    request.numMetrics = len(asked)
    request.sample1 = earlier
    request.sample2 = later
    for place, number in enumerate(asked):
        request.metrics[place].metricId = number
    try:
        device.library.call("nvmlGpmMetricsGet", request)
    except CallFailedError as failure:
        if failure.error in UNSUPPORTED and len(asked) > 1:
            # One that the driver does not know must not cost the others: which one is found out once.
            single = (read_metrics(device, item, (number,), earlier, later) for number in asked)
            return {number: value for each in single for number, value in each.items()}
        for number in asked:
            device.fail(f"{item}.{number}", failure.call, failure.error)
        return {}
    found = {}
    for place, number in enumerate(asked):
        metric = request.metrics[place]
        if metric.nvmlReturn:
            device.fail(f"{item}.{number}", "nvmlGpmMetricsGet", member_error(metric.nvmlReturn))
        elif isfinite(metric.value):
            found[number] = metric.value
    return found
