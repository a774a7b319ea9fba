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
from gpu_support import GPU_DATA
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

TRACE = json.loads((GPU_DATA / "h100-power-trace.json").read_text())
EPOCH = 1_700_000_000.0
"""Start of the trace, Unix time."""
BUFFER_SAMPLES = 119
"""Number of samples that the simulated driver buffer holds."""


class FakePynvml:
    """Stand-in for pynvml. Returns the power samples that the driver buffer holds at `seconds` of the trace."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.seconds = 0.0

    def nvmlDeviceGetSamples(self, _handle: object, _value_type: int, since_us: int) -> tuple[int, list[Any]]:  # noqa: N802
        pynvml = pytest.importorskip("pynvml")
        past_samples = [sample for sample in TRACE["power_samples_watts"] if sample[0] <= self.seconds]
        buffered_samples = past_samples[-BUFFER_SAMPLES:]
        samples = (pynvml.c_nvmlSample_t * len(buffered_samples))()
        for sample, (sample_seconds, watts) in zip(samples, buffered_samples, strict=True):
            sample.timeStamp = int((EPOCH + sample_seconds) * 1e6)
            sample.sampleValue.uiVal = int(watts * 1000)
        return 1, [sample for sample in samples if sample.timeStamp > since_us]


def energy_joules_at(at_seconds: float) -> float:
    """Return the energy counter in joules, interpolated between the values of the trace, which has one every half second."""
    points = TRACE["energy_counter_joules"]
    (start_seconds, start_joules), (end_seconds, end_joules) = next(
        (start, end) for start, end in itertools.pairwise(points) if at_seconds < end[0]
    )
    elapsed_ratio = (at_seconds - start_seconds) / (end_seconds - start_seconds)
    return float(start_joules + (end_joules - start_joules) * elapsed_ratio)


class TracedGpu:
    """GPU whose power comes from the trace. The samples pass through the NVML reader and the registry of the sidecar."""

    uuid = "GPU-a"

    def __init__(self, sample_interval_seconds: float = 2.0) -> None:
        self.pynvml = FakePynvml()
        self.registry = GpuRegistry()
        library = NvmlLibrary(self.pynvml, clock=time.monotonic)
        self._device = NvmlDevice(library, None)
        self._buffers = DriverSamples(self._device, sample_interval_seconds, {})

    def read(self, at_seconds: float, *, reads_counter: bool) -> None:
        """Read the power samples at a time of the trace, and optionally the energy counter, as the NVML child does."""
        self.pynvml.seconds = self._device.pass_time = at_seconds
        readings = PassReadings()
        self._buffers.read_power(wall=EPOCH + at_seconds, readings=readings)
        if reads_counter:
            readings.set_value(ENERGY, 1000 * energy_joules_at(at_seconds))
        entry = {"index": 0, "uuid": self.uuid, "job_index": 0, **readings.message()}
        self.registry.add_sample(parse(encode({"kind": "sample", "time": at_seconds, "gpus": [entry]})), 1)


PLAY_START_SECONDS, PLAY_END_SECONDS = 0.01, 19.51
"""Part of the trace that a test replays, from the start of the first phase to a moment after the end of the last, in seconds."""
MONOTONIC_START_SECONDS = 5000.0
"""Time of the monotonic clock at the start of the trace."""
JOB_PID = 7
PHASE_BY_MARK = {
    "gemm_400ms": "forward",
    "idle_400ms": "logging",
    "gemm_100ms": "backward",
    "copy_100ms": "data_loading",
    "gemm_40ms": "optimizer",
    "idle_40ms": "zero_grad",
    "idle_long": "validation",
}

PhaseSpan = tuple[str, float, float]
"""Phase with its start and end in seconds of the trace."""

PHASE_SPANS: Sequence[PhaseSpan] = [(PHASE_BY_MARK[name], start, end) for name, start, end in TRACE["marks"]]
"""Phases of the trace, under the names of training phases."""


class Node(SidecarNode):
    """Node with the GPU, a job that records the phases, and the sidecar.

    `other_processes` is the number of other processes that use the GPU.
    """

    def __init__(
        self, directory: Path, *, other_processes: int = 0, phase_spans: Sequence[PhaseSpan] = PHASE_SPANS
    ) -> None:
        self.traced_gpu, self.other_processes = TracedGpu(), other_processes
        self.job = SimulatedTraining(start_seconds=MONOTONIC_START_SECONDS)
        self.process = make_process(started=EPOCH)
        # Sorted, so that a phase ends before another phase starts at the same time.
        ends = [(end, False, phase) for phase, _, end in phase_spans]
        self.phase_boundaries = sorted([*((start, True, phase) for phase, start, _ in phase_spans), *ends])
        self.sequence, self.seconds = 0, 0.0
        super().__init__(directory)

    def readings(self) -> Sequence[EnergyReading]:
        return self.traced_gpu.registry.energies()

    def gpu_use(self) -> Sequence[GpuProcessUse]:
        return tuple(
            GpuProcessUse(JOB_PID + index, "0", self.traced_gpu.uuid)
            for index in range(1 + self.other_processes)
        )

    def power(self, since_by_uuid: Mapping[str, float]) -> Mapping[str, Sequence[tuple[float, float]]]:
        return self.traced_gpu.registry.power_samples(since_by_uuid)

    def publish_and_collect(self) -> None:
        """Write the feed of the job, and read it in the sidecar."""
        while self.phase_boundaries and self.phase_boundaries[0][0] <= self.seconds:
            boundary_seconds, is_start, phase = self.phase_boundaries.pop(0)
            if is_start:
                self.job.enter(named_kind(phase, is_phase=True), MONOTONIC_START_SECONDS + boundary_seconds)
            else:
                self.job.leave(MONOTONIC_START_SECONDS + boundary_seconds)
        self.job.publish(MONOTONIC_START_SECONDS + self.seconds)
        self.sequence += 1
        snapshot = make_snapshot(self.process, sequence=self.sequence, written=self.clock.wall)
        snapshot = snapshot.replace(recording=snapshot.recording.replace(training=self.job.last_published()))
        self.sidecar.feed.publish(snapshot, pid=JOB_PID)
        self.sidecar.collect()

    def play(self) -> Page:
        """Replay the trace with samples every 2 s, the counter every 10 s, a flush every second and an attribution every 5 s."""
        for tenth in range(int(10 * (PLAY_END_SECONDS - PLAY_START_SECONDS)) + 1):
            self.seconds = PLAY_START_SECONDS + tenth / 10
            self.clock.wall, self.clock.monotonic = (
                EPOCH + self.seconds,
                MONOTONIC_START_SECONDS + self.seconds,
            )
            if tenth % 20 == 0:
                self.traced_gpu.read(self.seconds, reads_counter=tenth % 100 == 0)
            if tenth % 10 == 3:
                self.publish_and_collect()
            if tenth % 50 == 5:
                self.collect()
        self.traced_gpu.read(self.seconds, reads_counter=True)
        self.publish_and_collect()
        return self.collect()


def joules(page: Page, family: str, **expected_labels: str) -> dict[str, float]:
    """Return the energy of a family in joules by phase, summed over the series with these labels."""
    joules_by_phase: dict[str, float] = {}
    for labels, value in page.all(family).items():
        label_values = dict(labels)
        if expected_labels.items() <= label_values.items():
            joules_by_phase[label_values["phase"]] = joules_by_phase.get(label_values["phase"], 0.0) + value
    return joules_by_phase
