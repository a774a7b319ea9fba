"""The power of a real H100, recorded with what it did, played back at the level of the NVML library."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from gpu_support import DATA

from exporter.collectors.gpu.nvml import encode, parse
from exporter.collectors.gpu.nvml.device import Device
from exporter.collectors.gpu.nvml.integrals import Buffers
from exporter.collectors.gpu.nvml.library import Library
from exporter.collectors.gpu.state import GpuRegistry

TRACE = json.loads((DATA / "h100-power-trace.json").read_text())
EPOCH = 1_700_000_000.0
"""When it begins, Unix time."""


class Trace:
    """What NVML would have said at a moment of the trace."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.now = 0.0

    def nvmlDeviceGetSamples(self, _handle: object, _kind: int, last: int) -> tuple[int, list[Any]]:  # noqa: N802
        pynvml = pytest.importorskip("pynvml")
        ring = [each for each in TRACE["power_samples_watts"] if each[0] <= self.now][-119:]
        samples = (pynvml.c_nvmlSample_t * len(ring))()
        for sample, (at, watts) in zip(samples, ring, strict=True):
            sample.timeStamp = int((EPOCH + at) * 1e6)
            sample.sampleValue.uiVal = int(watts * 1000)
        return 1, [sample for sample in samples if sample.timeStamp > last]


def counter_at(moment: float) -> float:
    """The energy counter, joules; the trace has it every half second."""
    points = TRACE["energy_counter_joules"]
    (begin, low), (end, high) = next(pair for pair in itertools.pairwise(points) if moment < pair[1][0])
    return float(low + (high - low) * (moment - begin) / (end - begin))


class Card:
    """The card of the trace, by way of the child's reader, the pipe and the sidecar's registry."""

    uuid = "GPU-a"

    def __init__(self, every_seconds: float = 2.0) -> None:
        self.trace = Trace()
        self.registry = GpuRegistry()
        library = Library(self.trace, clock=time.monotonic)
        self._device = Device(library, None)
        self._buffers = Buffers(self._device, every_seconds, {})

    def read(self, now: float, *, counter: bool) -> None:
        """Have the child read the samples, and the counter where it is due."""
        self.trace.now = self._device.now = now
        out: dict[str, Any] = {}
        self._buffers.read_power(wall=EPOCH + now, out=out)
        if counter:
            out["energy_millijoules"] = 1000 * counter_at(now)
        entry = {"index": 0, "uuid": self.uuid, "number": 0, "values": out}
        self.registry.take_sample(parse(encode({"kind": "sample", "time": now, "gpus": [entry]})), 1)
