"""Measured energy by phase.

The first tests replay the recorded power and phases of a real H100 through the complete sidecar. The further tests simulate a GPU
whose power follows the phases, and join the phases of snapshots.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from energy_support import EnergyNode, energy_of, gpu_reading
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_support import Clock, Page
from power_trace_support import (
    EPOCH,
    PHASE_BY_MARK,
    PLAY_END_SECONDS,
    PLAY_START_SECONDS,
    TRACE,
    Node,
    energy_joules_at,
    joules,
)
from training_support import SimulatedTraining

from exporter.collectors.job import EnergyReading
from exporter.ledger.energy.power_split import PowerSplitter
from exporter.ledger.energy.work import PhaseInterval, ProcessWork, WorkSnapshot, extend_intervals
from exporter.training.kinds import MODEL_FORWARD

PHASE_JOULES = "training_phase_energy_joules_total"
QUALITY_RATIO = "training_phase_energy_quality_ratio"


def test_phases_have_the_power_of_the_gpu_and_sum_to_its_counter(tmp_path: Path) -> None:
    page = Node(tmp_path).play()
    measured_joules = joules(page, PHASE_JOULES, method="power_samples")
    seconds = dict.fromkeys(PHASE_BY_MARK, 0.0)
    for name, start, end in TRACE["marks"]:
        seconds[name] += end - start
    watts = {name: measured_joules[phase] / seconds[name] for name, phase in PHASE_BY_MARK.items()}

    # The GPU draws about 775 W in a matrix product, 410 W in a copy and 135 W without work.
    assert 745 < watts["gemm_400ms"] < 800
    assert 750 < watts["gemm_100ms"] < 800
    assert 395 < watts["copy_100ms"] < 425
    assert 130 < watts["idle_long"] < 140
    assert sum(measured_joules.values()) == pytest.approx(
        energy_joules_at(PLAY_END_SECONDS) - energy_joules_at(PLAY_START_SECONDS), rel=0.003
    )
    assert sum(joules(page, PHASE_JOULES).values()) == pytest.approx(energy_of(page), abs=1e-6)
    # The quality of phases that are too short for the samples is low.
    quality = joules(page, QUALITY_RATIO)
    assert {phase for phase, ratio in quality.items() if ratio < 0.1} == {"optimizer", "zero_grad"}
    long_phases = ("forward", "backward", "data_loading", "logging", "validation")
    assert {quality[phase] for phase in long_phases} == {1.0}


def test_a_gpu_shared_with_another_process_is_split_by_time(tmp_path: Path) -> None:
    page = Node(tmp_path, other_processes=1).play()

    assert joules(page, PHASE_JOULES, method="power_samples") == {}


# Simulated nodes -----------------------------------------------------------------------


class SimulatedGpu(EnergyNode):
    """GPU that draws 700 W in even seconds and 100 W in odd seconds, synchronously with the phases of the job."""

    def __init__(self, directory: Path, *, step_seconds: float = 0.02, has_samples: bool = True) -> None:
        self.step_seconds, self.has_samples = step_seconds, has_samples
        self.samples: list[tuple[float, float]] = []
        self.joules, self.wall_offset = 0.0, EPOCH
        self.flushed_intervals: tuple[PhaseInterval, ...] = ()
        self.phases: dict[str, float] = {}
        super().__init__(directory, clock=Clock(wall=EPOCH + 100.0))

    def readings(self) -> Sequence[EnergyReading]:
        return (gpu_reading(self.joules, self.clock.monotonic),)

    def work(self) -> WorkSnapshot:
        return WorkSnapshot((ProcessWork("r", 0, "p", dict(self.phases), "GPU-a", self.flushed_intervals),))

    def power(self, since_by_uuid: Mapping[str, float]) -> Mapping[str, Sequence[tuple[float, float]]]:
        return {"GPU-a": [sample for sample in self.samples if sample[0] > since_by_uuid.get("GPU-a", 0.0)]}

    def collect_after(self, seconds: float, *, flush: bool = True) -> Page:
        """Advance the time, possibly without a new snapshot of the job, and run a pass."""
        clock = self.clock
        for _ in range(round(seconds / self.step_seconds)):
            clock.monotonic = round(clock.monotonic + self.step_seconds, 6)
            clock.wall = clock.monotonic + self.wall_offset
            watts = 100.0 if int(clock.monotonic - self.step_seconds / 2) % 2 else 700.0
            self.joules += watts * self.step_seconds
            if self.has_samples:
                self.samples.append((clock.wall, watts))
        if flush:
            self.flush_intervals()
        return self.collect()

    def flush_intervals(self) -> None:
        now_seconds = self.clock.monotonic
        edges = [*(float(second) for second in range(100, int(now_seconds) + 1)), now_seconds]
        intervals = [
            PhaseInterval(start, end, "data_loading" if int(start) % 2 else "forward")
            for start, end in itertools.pairwise(edges)
            if end > start
        ]
        self.flushed_intervals = tuple(intervals[-30:])
        self.phases = {}
        for interval in intervals:
            self.phases[interval.phase] = self.phases.get(interval.phase, 0.0) + interval.end - interval.start


def observed_gpu(directory: Path, **options: Any) -> SimulatedGpu:
    """Return a GPU after a pass at the start and a pass after four seconds."""
    gpu = SimulatedGpu(directory, **options)
    gpu.collect()
    gpu.collect_after(4.0)
    return gpu


def test_energy_after_the_last_known_phase_waits_for_the_next_snapshot(tmp_path: Path) -> None:
    gpu = observed_gpu(tmp_path)
    gpu.collect_after(4.0)
    incomplete_page = gpu.collect_after(1.0, flush=False)
    complete_page = gpu.collect_after(0.02)

    assert energy_of(incomplete_page) == pytest.approx(3200.0)
    assert joules(incomplete_page, PHASE_JOULES, method="power_samples") == pytest.approx(
        {"forward": 1400.0, "data_loading": 200.0, "unattributed": 0.0}
    )
    assert energy_of(complete_page) == pytest.approx(3902.0)
    assert joules(complete_page, PHASE_JOULES, method="power_samples")["forward"] == pytest.approx(2100.0)


def test_waiting_for_phases_of_a_silent_job_is_bounded(tmp_path: Path) -> None:
    assert energy_of(observed_gpu(tmp_path).collect_after(22.0, flush=False)) == pytest.approx(26 * 400.0)


def test_an_interval_with_a_clock_step_is_split_by_time(tmp_path: Path) -> None:
    gpu = observed_gpu(tmp_path)
    gpu.wall_offset += 0.5
    gpu.collect_after(4.0)
    page = gpu.collect_after(4.0)

    assert joules(page, PHASE_JOULES, method="power_samples")["forward"] == pytest.approx(1400.0)
    assert sum(joules(page, PHASE_JOULES, method="time_share").values()) == pytest.approx(3200.0)


@pytest.mark.parametrize(("step_seconds", "has_samples"), [(1.0, True), (0.02, False)], ids=["rare", "none"])
def test_without_samples_energy_is_split_by_time(
    tmp_path: Path, step_seconds: float, has_samples: bool
) -> None:
    gpu = SimulatedGpu(tmp_path, step_seconds=step_seconds, has_samples=has_samples)
    gpu.collect()
    gpu.collect_after(1.0)
    gpu.collect_after(1.0)
    page = gpu.collect_after(4.0)

    assert joules(page, PHASE_JOULES, method="power_samples") == {}
    assert joules(page, PHASE_JOULES, method="exclusive") == pytest.approx(
        {"forward": 700, "data_loading": 100}
    )
    assert joules(page, PHASE_JOULES, method="time_share")["forward"] >= 800.0


events = st.lists(
    st.tuples(st.sampled_from(["", "kill", "no flush", "clock step", "no samples"]), st.floats(0.1, 8.0)),
    max_size=12,
)


@settings(max_examples=40)
@given(events)
def test_phases_sum_to_the_energy_of_a_run_that_reports_training(
    further_events: Sequence[tuple[str, float]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        gpu = SimulatedGpu(Path(directory))
        previous_joules: Mapping[str, float] = {}
        true_joules: list[float] = []
        for event, seconds in [("", 1.0), *further_events, ("", 30.0), ("", 0.1)]:
            gpu.has_samples = event != "no samples"
            if event == "kill":
                gpu.restart()
            if event == "clock step":
                gpu.wall_offset += 100.0
            page = gpu.collect_after(seconds, flush=event != "no flush")
            true_joules.append(gpu.joules)
            joules_by_phase = joules(page, PHASE_JOULES)
            assert sum(joules_by_phase.values()) == pytest.approx(energy_of(page), abs=1e-6)
            assert all(joules_by_phase[phase] >= value - 1e-9 for phase, value in previous_joules.items())
            previous_joules = joules_by_phase

    # The run has all energy since the first pass.
    assert energy_of(page) == pytest.approx(true_joules[-1] - true_joules[0], abs=1e-3)


# Phases in the feed ----------------------------------------------------------------------------------------


def test_overlapping_histories_of_snapshots_give_each_interval_once() -> None:
    job = SimulatedTraining(start_seconds=0.0)
    intervals: tuple[PhaseInterval, ...] = ()
    for second in range(20):
        job.run_block(MODEL_FORWARD, second + 0.25, second + 0.5)
        job.publish(second + 0.9)
        intervals = extend_intervals(intervals, job.last_published())

    forward_seconds = sum(
        interval.end - interval.start for interval in intervals if interval.phase == "forward"
    )
    assert forward_seconds == pytest.approx(20 * 0.25, abs=1e-4)
    assert all(
        interval.end == pytest.approx(next_interval.start, abs=1e-5)
        for interval, next_interval in itertools.pairwise(intervals)
    )
    assert len(intervals) == 41


def test_ranks_that_share_a_gpu_share_its_power() -> None:
    splitter = PowerSplitter()
    samples = [(0.02 * index, 500.0) for index in range(1, 101)]
    for first_sample, now_seconds in ((0, 1.0), (50, 2.0)):
        splitter.read(
            lambda _after: {"GPU-a": samples[first_sample : first_sample + 50]},  # noqa: B023
            wall=now_seconds,
            now=now_seconds,
        )
        split = splitter.split_since_last_call(
            "GPU-a",
            [
                (PhaseInterval(0.0, 2.0, "forward"),),
                (PhaseInterval(0.0, 1.5, "data_loading"), PhaseInterval(1.5, 2.0, "forward")),
            ],
            now_seconds,
        )

    assert split is not None
    # From 1 s to 2 s, the two ranks together spend 1.5 s in forward and 0.5 s in data_loading, at 500 W.
    assert split.weight_by_phase == pytest.approx({"forward": 750.0, "data_loading": 250.0})
