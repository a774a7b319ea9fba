"""Recorded power of a real H100, replayed at the level of the NVML library."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from energy_support import SidecarNode
from gpu_support import DATA
from ledger_support import Page, make_process, make_snapshot
from training_support import SimulatedTraining

from exporter.collectors.gpu.nvml import encode, parse
from exporter.collectors.gpu.nvml.device import NvmlDevice
from exporter.collectors.gpu.nvml.driver_samples import DriverSamples
from exporter.collectors.gpu.nvml.library import NvmlLibrary
from exporter.collectors.gpu.nvml.readings import ENERGY, PassReadings
from exporter.collectors.gpu.state import GpuRegistry
from exporter.collectors.job import EnergyReading, GpuProcessUse
from exporter.training.kinds import named_kind

TRACE = json.loads((DATA / "h100-power-trace.json").read_text())
EPOCH = 1_700_000_000.0
"""Start of the trace, Unix time."""


class Trace:
    """NVML readings at a time of the trace."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.now = 0.0

    def nvmlDeviceGetSamples(self, _handle: object, _kind: int, last: int) -> tuple[int, list[Any]]:  # noqa: N802
        pynvml = pytest.importorskip("pynvml")
        ring = [sample for sample in TRACE["power_samples_watts"] if sample[0] <= self.now][-119:]
        samples = (pynvml.c_nvmlSample_t * len(ring))()
        for sample, (at, watts) in zip(samples, ring, strict=True):
            sample.timeStamp = int((EPOCH + at) * 1e6)
            sample.sampleValue.uiVal = int(watts * 1000)
        return 1, [sample for sample in samples if sample.timeStamp > last]


def counter_at(moment: float) -> float:
    """Energy counter in joules; the trace has a value every half second."""
    points = TRACE["energy_counter_joules"]
    (begin, low), (end, high) = next(pair for pair in itertools.pairwise(points) if moment < pair[1][0])
    return float(low + (high - low) * (moment - begin) / (end - begin))


class Card:
    """The card of the trace, by way of the child's reader, the pipe and the sidecar's registry."""

    uuid = "GPU-a"

    def __init__(self, every_seconds: float = 2.0) -> None:
        self.trace = Trace()
        self.registry = GpuRegistry()
        library = NvmlLibrary(self.trace, clock=time.monotonic)
        self._device = NvmlDevice(library, None)
        self._buffers = DriverSamples(self._device, every_seconds, {})

    def read(self, now: float, *, counter: bool) -> None:
        """Let the child read the samples, and the counter if due."""
        self.trace.now = self._device.now = now
        out = PassReadings()
        self._buffers.read_power(wall=EPOCH + now, readings=out)
        if counter:
            out.put(ENERGY, 1000 * counter_at(now))
        entry = {"index": 0, "uuid": self.uuid, "number": 0, **out.message()}
        self.registry.take_sample(parse(encode({"kind": "sample", "time": now, "gpus": [entry]})), 1)


# The complete sidecar ------------------------------------------------------------------------------------

BEGIN, END = 0.01, 19.51
MONOTONIC = 5000.0
"""The monotonic clock at the trace's begin."""
PHASE_OF = {
    "gemm_400ms": "forward",
    "idle_400ms": "logging",
    "gemm_100ms": "backward",
    "copy_100ms": "data_loading",
    "gemm_40ms": "optimizer",
    "idle_40ms": "zero_grad",
    "idle_long": "validation",
}

Window = tuple[str, float, float]
"""Phase with start and end, seconds of the trace."""

WINDOWS: Sequence[Window] = [(PHASE_OF[name], begin, end) for name, begin, end in TRACE["marks"]]
"""Phases of the card."""


class Node(SidecarNode):
    """Card, a job that records the phases of the card, and the sidecar; foreign processes can hold the card."""

    def __init__(self, directory: Path, *, strangers: int = 0, did: Sequence[Window] = WINDOWS) -> None:
        self.card, self.strangers = Card(), strangers
        self.job = SimulatedTraining(began=MONOTONIC)
        self.process = make_process(started=EPOCH)
        ends = [(end, False, phase) for phase, _, end in did]
        self.marks = sorted([*((begin, True, phase) for phase, begin, _ in did), *ends])
        self.sequence, self.now = 0, 0.0
        super().__init__(directory)

    def readings(self) -> Sequence[EnergyReading]:
        return self.card.registry.energies()

    def gpu_use(self) -> Sequence[GpuProcessUse]:
        return tuple(GpuProcessUse(7 + index, "0", self.card.uuid) for index in range(1 + self.strangers))

    def power(self, after: Mapping[str, float]) -> Mapping[str, Sequence[tuple[float, float]]]:
        return self.card.registry.power_samples(after)

    def flush(self) -> None:
        """Write the feed of the job, and read it in the sidecar."""
        while self.marks and self.marks[0][0] <= self.now:
            at, begins, phase = self.marks.pop(0)
            if begins:
                self.job.enter(named_kind(phase, phase=True), MONOTONIC + at)
            else:
                self.job.leave(MONOTONIC + at)
        self.job.publish(MONOTONIC + self.now)
        self.sequence += 1
        snapshot = make_snapshot(self.process, sequence=self.sequence, written=self.clock.wall)
        received = snapshot.replace(recording=snapshot.recording.replace(training=self.job.reading()))
        self.sidecar.feed.publish(received, pid=7)
        self.sidecar.collect()

    def play(self) -> Page:
        """Play the trace: samples every 2 s, the counter every 10 s, the feed every second, a division every 5 s."""
        for tenth in range(int(10 * (END - BEGIN)) + 1):
            self.now = BEGIN + tenth / 10
            self.clock.wall, self.clock.monotonic = EPOCH + self.now, MONOTONIC + self.now
            if tenth % 20 == 0:
                self.card.read(self.now, counter=tenth % 100 == 0)
            if tenth % 10 == 3:
                self.flush()
            if tenth % 50 == 5:
                self.collect()
        self.card.read(self.now, counter=True)
        self.flush()
        return self.collect()


def joules(page: Page, family: str, **wanted: str) -> dict[str, float]:
    """By phase."""
    found: dict[str, float] = {}
    for labels, value in page.all(family).items():
        named = dict(labels)
        if wanted.items() <= named.items():
            found[named["phase"]] = found.get(named["phase"], 0.0) + value
    return found
