"""GPU performance monitoring (GPM): activity of SMs, tensor cores and memory, bytes over PCIe and NVLink.

GPM is available from Hopper on. This module runs in the NVML child, on the sampling thread. NVML computes a metric
from two samples that are at least 100 ms apart. The previous sample is kept, so that no call sleeps and a metric
covers the whole time since the previous pass. Only one thread may sample: two simultaneous calls of
`nvmlGpmSampleGet`, even for different GPUs, panic the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from exporter.collectors.gpu.nvml.device import NvmlDevice, member_error
from exporter.collectors.gpu.nvml.driver_samples import BUSY, DriverSamples, Totals
from exporter.collectors.gpu.nvml.library import GARBAGE, UNSUPPORTED_ERRORS, CallFailedError
from exporter.collectors.gpu.nvml.readings import Labels, PassReadings
from exporter.collectors.gpu.nvml.units import Convert, GarbageError, byte_rate, ratio

MIN_INTERVAL_SECONDS = 0.1
"""Minimum time between two samples; NVML returns NaN for a shorter time."""

SM_ACTIVITY = 2
"""NVML's id of the metric (NVML_GPM_METRIC_SM_UTIL)."""

_SUPPORT_INTERVAL_SECONDS = 10.0
"""Minimum time between two queries of the GPM support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpmRow:
    """GPM metric, and the reading that it becomes."""

    metric: int  # NVML's id
    reading: str
    labels: Labels = ()


ACTIVITY = (
    GpmRow(metric=SM_ACTIVITY, reading="sm_activity_ratio"),
    GpmRow(metric=3, reading="sm_occupancy_ratio"),
    GpmRow(metric=5, reading="tensor_activity_ratio"),
    GpmRow(metric=7, reading="pipe_activity_ratio", labels=("hmma",)),
    GpmRow(metric=9, reading="pipe_activity_ratio", labels=("imma",)),
    GpmRow(metric=10, reading="dram_activity_ratio"),
    GpmRow(metric=12, reading="pipe_activity_ratio", labels=("fp32",)),
    GpmRow(metric=13, reading="pipe_activity_ratio", labels=("fp16",)),
)
"""Metrics in percent, published as ratios."""

BUSY_ROW = GpmRow(metric=1, reading=BUSY)
"""Metric in percent of the time in which a kernel ran, published as its integral."""

PCIE = (
    GpmRow(metric=20, reading="pcie_transmit_bytes"),
    GpmRow(metric=21, reading="pcie_receive_bytes"),
)
"""Metrics in MiB per second, published as integrals. NVML's own 32-bit counters (fields 197, 198) wrap every 72 ms on a busy link."""

NVLINK = (
    GpmRow(metric=60, reading="nvlink_receive_gpm"),
    GpmRow(metric=61, reading="nvlink_transmit_gpm"),
)
"""Metrics in MiB per second, published as integrals, for GPUs whose NVLinks have no counters."""


class GpmMetrics:
    """Metrics of a GPU or of a GPU instance, between two samples.

    Args:
        device: The GPU.
        query_name: Name by which the support of the query is tracked.
        call: pynvml's sampling function.
        arguments: Arguments between the handle and the sample.
    """

    def __init__(self, device: NvmlDevice, query_name: str, call: str, *arguments: int) -> None:
        self.seconds = 0.0  # between the last two samples
        self.is_first_sample = False  # True if the last sample has no previous sample
        self._device = device
        self._query_name = query_name
        self._call, self._arguments = call, arguments
        # NVML's buffers of the last two samples; None until the buffer is allocated.
        self._sample: Any = None
        self._previous_sample: Any = None
        self._sampled_at: float | None = None  # time of the last sample; None without a sample
        self._queried_at: float | None = None  # time of the last query of the GPM support
        self._is_supported = False

    def is_supported(self) -> bool:
        """Return True if the GPU supports GPM and the sampling call is neither unsupported nor paused.

        The support is queried again after `_SUPPORT_INTERVAL_SECONDS`.
        """
        device = self._device
        if self._queried_at is None or device.pass_time - self._queried_at >= _SUPPORT_INTERVAL_SECONDS:
            self._queried_at = device.pass_time
            answer = device.query("gpm", "nvmlGpmQueryDeviceSupport")
            self._is_supported = answer is not None and bool(answer.isSupportedDevice)
        return self._is_supported and device.may_call(self._query_name, self._call)

    def read(self, rows: Sequence[GpmRow]) -> dict[int, float] | None:
        """Take a sample and compute the metrics since the previous sample.

        Returns:
            The metrics that have a value, by id; an empty dict if GPM is unsupported or the call fails. None after the first
            sample, and if the previous sample is less than 100 ms old: the latest metrics then stay valid.
        """
        device = self._device
        if not self.is_supported():
            return {}
        if self._sampled_at is not None and device.pass_time - self._sampled_at < MIN_INTERVAL_SECONDS:
            return None
        try:
            if self._previous_sample is None:
                self._previous_sample = device.library.call("nvmlGpmSampleAlloc")
            # The older buffer is reused for the new sample.
            device.call(self._call, *self._arguments, self._previous_sample)
        except CallFailedError as failure:
            self._sampled_at = None
            device.record_failure(self._query_name, failure.call, failure.error)
            return {}
        self._previous_sample, self._sample = self._sample, self._previous_sample
        previous_at, self._sampled_at = self._sampled_at, device.pass_time
        self.is_first_sample = previous_at is None
        if previous_at is None:
            return None
        self.seconds = device.pass_time - previous_at
        return self._compute([row.metric for row in rows])

    def discard_sample(self) -> None:
        """Discard the last sample: the next `read` takes a first sample."""
        self._sampled_at = None

    def _compute(self, metric_ids: list[int]) -> dict[int, float]:
        """Return the metrics between the two samples by id, without metrics that are NaN, unsupported or failed."""
        device = self._device
        supported_ids = [
            metric_id
            for metric_id in metric_ids
            if not device.is_unsupported(f"{self._query_name}.{metric_id}")
        ]
        if not supported_ids:
            return {}
        request = device.library.binding.c_nvmlGpmMetricsGet_t()
        request.version = 1
        request.numMetrics = len(supported_ids)
        request.sample1, request.sample2 = self._previous_sample, self._sample
        for position, metric_id in enumerate(supported_ids):
            request.metrics[position].metricId = metric_id
        try:
            device.library.call("nvmlGpmMetricsGet", request)
        except CallFailedError as failure:
            if failure.error in UNSUPPORTED_ERRORS and len(supported_ids) > 1:
                # A request with an unknown metric fails as a whole: request each metric separately.
                values: dict[int, float] = {}
                for metric_id in supported_ids:
                    values |= self._compute([metric_id])
                return values
            for metric_id in supported_ids:
                device.record_failure(f"{self._query_name}.{metric_id}", failure.call, failure.error)
            return {}
        values = {}
        for position, metric_id in enumerate(supported_ids):
            metric = request.metrics[position]
            if metric.nvmlReturn:
                device.record_failure(
                    f"{self._query_name}.{metric_id}", "nvmlGpmMetricsGet", member_error(metric.nvmlReturn)
                )
            elif isfinite(metric.value):
                values[metric_id] = metric.value
        return values


class Gpm:
    """Reader of the GPM metrics of a GPU."""

    def __init__(
        self, device: NvmlDevice, samples: DriverSamples, totals: Totals, *, is_enabled: bool
    ) -> None:
        self._device = device
        self._samples = samples
        self._metrics = GpmMetrics(device, "gpm.sample", "nvmlGpmSampleGet")
        self._totals = totals
        self._is_enabled = is_enabled

    def counts_busy_seconds(self) -> bool:
        """Return True if GPM measures the busy time, so that the more expensive utilization samples are not needed."""
        return self._is_enabled and self._metrics.is_supported()

    def read(self, readings: PassReadings, *, nvlink: bool) -> None:
        """Read the metrics since the previous sample, with the bytes over NVLink if `nvlink` is True."""
        if not self._is_enabled:
            return
        rates = (*PCIE, *NVLINK) if nvlink else PCIE
        values = self._metrics.read((BUSY_ROW, *ACTIVITY, *rates))
        if values is None:
            if self._metrics.is_first_sample:
                self._samples.end_utilization()
            return  # keep the last readings
        for row in ACTIVITY:
            readings.set_value(row.reading, ratio_of(self._device, values, row), *row.labels)
        # Without GPM, the utilization samples provide the busy time.
        if BUSY_ROW.metric in values or self.counts_busy_seconds():
            busy_ratio = ratio_of(self._device, values, BUSY_ROW)
            # After a pause of GPM, the metrics cover the pause, of which the utilization samples have counted a part.
            seconds = max(self._metrics.seconds - self._samples.end_utilization(), 0.0)
            self._add_rate(readings, BUSY_ROW, busy_ratio, seconds)
        for row in (*PCIE, *NVLINK):
            rate = _converted(self._device, values, row, byte_rate) if row in rates else None
            self._add_rate(readings, row, rate, self._metrics.seconds)

    def _add_rate(self, readings: PassReadings, row: GpmRow, rate: float | None, seconds: float) -> None:
        """Add the integral of a rate over a time. Without a rate, the reading becomes absent."""
        if rate is not None:
            self._totals[row.reading] = self._totals.get(row.reading, 0.0) + rate * seconds
        readings.set_value(row.reading, None if rate is None else self._totals[row.reading])


def ratio_of(device: NvmlDevice, values: Mapping[int, float], row: GpmRow) -> float | None:
    """Return the percentage of a metric as a ratio, or None if the metric is absent or impossible."""
    return _converted(device, values, row, ratio)


def _converted(
    device: NvmlDevice, values: Mapping[int, float], row: GpmRow, convert: Convert
) -> float | None:
    """Return the converted value of a metric, or None if the metric is absent or impossible."""
    if row.metric not in values:
        return None
    try:
        number: float = convert(values[row.metric])
    except GarbageError:
        device.library.count_error("nvmlGpmMetricsGet", GARBAGE)
        return None
    return number
