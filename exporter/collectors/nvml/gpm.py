"""Performance counters of Hopper and later (GPM): what the SMs, tensor cores and memory really do.

Used in the NVML child, by the thread that samples and by no other: two threads in `nvmlGpmSampleGet`, even for
different GPUs, panic the kernel driver. A metric is made of two samples at least 100 ms apart; the previous one is
kept, so that nothing sleeps and every metric covers the whole time since the last pass.
"""

from __future__ import annotations

from contextlib import suppress
from math import isfinite

from exporter.collectors.nvml.codes import UNSUPPORTED
from exporter.collectors.nvml.conversions import GarbageError, ratio
from exporter.collectors.nvml.gpu import member_error
from exporter.collectors.nvml.library import CallFailedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from exporter.collectors.nvml.gpu import Gpu
    from exporter.collectors.nvml.library import Library
    from exporter.collectors.nvml.options import Options

LEAST_SECONDS = 0.1
"""NVML gives NaN for samples that are closer."""

_MEBIBYTE = 1 << 20
_MOST_COUNT = 2.0**63

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
VIDEO = {
    **{30 + number: ("video_activity", f"nvdec{number}") for number in range(8)},
    **{40 + number: ("video_activity", f"nvjpg{number}") for number in range(8)},
    **{50 + number: ("video_activity", f"nvofa{number}") for number in range(2)},
    **{166 + number: ("video_activity", f"nvenc{number}") for number in range(4)},
}
COUNTERS = {
    248: ("sm_cycles", "elapsed"),
    249: ("sm_cycles", "active"),
    250: ("tensor_cycles", "any"),
    255: ("pcie_transmit_gpm", ""),
    256: ("pcie_receive_gpm", ""),
}
COUNTERS_DETAILS = {
    251: ("tensor_cycles", "dmma"),
    252: ("tensor_cycles", "hmma"),
    253: ("tensor_cycles", "imma"),
    254: ("tensor_cycles", "dfma"),
    257: ("pipe_cycles", "int"),
    258: ("pipe_cycles", "fp64"),
    259: ("pipe_cycles", "fp32"),
    260: ("pipe_cycles", "fp16"),
}
RATES = {
    20: ("pcie_transmit_rate", ""),
    21: ("pcie_receive_rate", ""),
    60: ("nvlink_receive_rate", ""),
    61: ("nvlink_transmit_rate", ""),
    102: ("c2c_transmit_rate", ""),
    103: ("c2c_receive_rate", ""),
}
"""MiB per second, made into bytes since this process began. A link's own counter goes before them."""

OF_INSTANCE = {2: ("sm", ""), 5: ("tensor", ""), 10: ("dram", "")}
"""What is asked of an instance of a MIG GPU."""

_MMA_STALL_FIELD = 297


class SamplePair:
    """The last sample of a GPU, or of an instance, and a second one to take the next.

    Args:
        library: Of the thread that samples.
    """

    __slots__ = ("_library", "_kept", "_spare", "_taken_at", "_seconds")

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
        gpu: Whose.
        options: What to ask for.
    """

    def __init__(self, gpu: Gpu, options: Options) -> None:
        self._gpu = gpu
        self._pair = SamplePair(gpu.library)
        self._totals: dict[str, float] = {}
        activity = {**ACTIVITY, **ACTIVITY_DETAILS} if options.details else ACTIVITY
        counters = {**COUNTERS, **COUNTERS_DETAILS} if options.details else COUNTERS
        # One request for what every Hopper has, others for what not every driver knows.
        self._requests = [activity, RATES, counters]
        if options.video_engines:
            self._requests.append(VIDEO)

    def read(self, out: dict[str, Any]) -> None:
        """Take a sample and read the metrics since the one before."""
        gpu = self._gpu
        stall = gpu.fields((_MMA_STALL_FIELD,)).get(_MMA_STALL_FIELD)
        out["mma_stall"] = None if stall is None or not 0 <= stall <= 100 else stall / 100
        found: dict[str, Any] = {}
        if supported(gpu) and not gpu.lacks("gpm.sample"):
            try:
                pair = self._pair.take(
                    gpu.now, lambda sample: gpu.library.call("nvmlGpmSampleGet", gpu.handle, sample)
                )
            except CallFailedError as failure:
                gpu.fail("gpm.sample", failure.call, failure.error)
            else:
                gpu.succeed("gpm.sample")
                if pair is None:
                    return  # too close, or the first: what is known stays
                for request in self._requests:
                    for number, value in read_metrics(gpu, "gpm", tuple(request), *pair).items():
                        self._put(found, request[number], number, value)
        for request in self._requests:
            for key, _ in request.values():
                out[key] = found.get(key)

    def free(self) -> None:
        """Give NVML's memory back."""
        self._pair.free()

    def _put(self, found: dict[str, Any], place: tuple[str, str], number: int, value: float) -> None:
        key, label = place
        if number in RATES:
            if not 0 <= value * _MEBIBYTE < 1e14:
                self._gpu.library.count_error("nvmlGpmMetricsGet", "garbage")
                return
            self._totals[key] = self._totals.get(key, 0.0) + value * _MEBIBYTE * self._pair.seconds
            value = self._totals[key]
        elif number in COUNTERS or number in COUNTERS_DETAILS:
            if not 0 <= value < _MOST_COUNT:
                self._gpu.library.count_error("nvmlGpmMetricsGet", "garbage")
                return
        else:
            try:
                value = ratio(value)
            except GarbageError:
                self._gpu.library.count_error("nvmlGpmMetricsGet", "garbage")
                return
        if label:
            found.setdefault(key, {})[label] = value
        else:
            found[key] = value


def supported(gpu: Gpu) -> bool:
    """Whether the GPU has performance counters that can be sampled."""
    answer = gpu.ask("gpm", "nvmlGpmQueryDeviceSupport")
    if answer is not None and not answer.isSupportedDevice:
        gpu.fail("gpm", "nvmlGpmQueryDeviceSupport", "not_supported")
        return False
    return answer is not None


def read_metrics(gpu: Gpu, item: str, numbers: Sequence[int], earlier: Any, later: Any) -> dict[int, float]:
    """Read metrics of two samples; NaN, and what the GPU does not have, are left out."""
    asked = [number for number in numbers if not gpu.lacks(f"{item}.{number}")]
    if not asked:
        return {}
    request = gpu.library.binding.c_nvmlGpmMetricsGet_t()
    request.version = 1
    request.numMetrics = len(asked)
    request.sample1 = earlier
    request.sample2 = later
    for place, number in enumerate(asked):
        request.metrics[place].metricId = number
    try:
        gpu.library.call("nvmlGpmMetricsGet", request)
    except CallFailedError as failure:
        if failure.error in UNSUPPORTED and len(asked) > 1:
            # One that the driver does not know must not cost the others: which one is found out once.
            single = (read_metrics(gpu, item, (number,), earlier, later) for number in asked)
            return {number: value for each in single for number, value in each.items()}
        for number in asked:
            gpu.fail(f"{item}.{number}", failure.call, failure.error)
        return {}
    found = {}
    for place, number in enumerate(asked):
        metric = request.metrics[place]
        if metric.nvmlReturn:
            gpu.fail(f"{item}.{number}", "nvmlGpmMetricsGet", member_error(metric.nvmlReturn))
        elif isfinite(metric.value):
            gpu.succeed(f"{item}.{number}")
            found[number] = metric.value
    return found
