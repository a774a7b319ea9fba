"""Performance counters of Hopper and later (GPM): what the SMs, tensor cores and memory really do.

Used in the NVML child, by the thread that samples and by no other: two threads in `nvmlGpmSampleGet`, even for
different GPUs, panic the kernel driver. A metric is made of two samples at least 100 ms apart; the previous one is
kept, so that nothing sleeps and every metric covers the whole time since the last pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from math import isfinite
from typing import Any

from exporter.collectors.gpu.nvml.device import Device, Out, member_error
from exporter.collectors.gpu.nvml.library import GARBAGE, UNSUPPORTED, CallFailedError
from exporter.collectors.gpu.nvml.units import GarbageError, ratio
from exporter.collectors.gpu.options import GpuOptions

LEAST_SECONDS = 0.1
"""NVML gives NaN for samples that are closer."""

_MEBIBYTE = 1 << 20
_MOST_BYTES = 1e14

GRAPHICS_ACTIVITY = 1
ACTIVITY = {
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
RATES = {
    20: "pcie_transmit_gpm",
    21: "pcie_receive_gpm",
    60: "nvlink_receive_gpm",
    61: "nvlink_transmit_gpm",
    102: "c2c_transmit_gpm",
    103: "c2c_receive_gpm",
}
"""MiB per second, made into bytes since this process began."""

_BUSY = "busy_seconds_gpm"
"""Seconds in which anything ran, since this process began: the sum of the graphics activity."""


class Metrics:
    """The metrics of a GPU, or of an instance, between two samples.

    Args:
        device: The GPU.
        item: The name under which it is remembered what there is not.
        call: Takes a sample.
        arguments: Of the call, between the handle and the sample.

    Attributes:
        seconds: What the samples that were read last are apart.
    """

    def __init__(self, device: Device, item: str, call: str, *arguments: int) -> None:
        self.seconds = 0.0
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

    def ratios(self, found: dict[int, float]) -> dict[int, float]:
        """Percent into ratios; what is none is left out and counted."""
        ratios = {}
        for number, value in found.items():
            try:
                ratios[number] = ratio(value)
            except GarbageError:  # noqa: PERF203 - one wrong number must not cost the others
                self._device.library.count_error("nvmlGpmMetricsGet", GARBAGE)
        return ratios

    def free(self) -> None:
        """Give NVML's memory back."""
        for sample in (self._earlier, self._later):
            if sample is not None:
                with suppress(CallFailedError):  # the GPU is gone, and the sample with it
                    self._device.library.call("nvmlGpmSampleFree", sample)
        self._earlier = self._later = self._taken_at = None

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


class Gpm:
    """The performance counters of one GPU."""

    def __init__(self, device: Device, options: GpuOptions) -> None:
        self._library = device.library
        self._metrics = Metrics(device, "gpm.sample", "nvmlGpmSampleGet")
        self._activity = {**ACTIVITY, **ACTIVITY_DETAILS} if options.details else ACTIVITY
        self._totals: dict[str, float] = {}
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
        out.update(dict.fromkeys((_BUSY, *RATES.values(), *(key for key, _ in self._activity.values()))))
        rates = {number: values.pop(number) for number in RATES if number in values}
        for number, value in self._metrics.ratios(values).items():
            if number == GRAPHICS_ACTIVITY:
                out[_BUSY] = self._total(_BUSY, value)
                continue
            key, label = self._activity[number]
            out[key] = {**(out[key] or {}), label: value} if label else value
        for number, value in rates.items():
            if 0 <= value * _MEBIBYTE < _MOST_BYTES:
                out[RATES[number]] = self._total(RATES[number], value * _MEBIBYTE)
            else:
                self._library.count_error("nvmlGpmMetricsGet", GARBAGE)

    def free(self) -> None:
        """Give NVML's memory back."""
        self._metrics.free()

    def _total(self, key: str, pace: float) -> float:
        self._totals[key] = self._totals.get(key, 0.0) + pace * self._metrics.seconds
        return self._totals[key]
