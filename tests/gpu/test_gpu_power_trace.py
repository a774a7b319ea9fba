"""Recorded power trace of a real H100: samples of the child resolve phases of 100 ms."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from gpu_support import replay, small_machine
from power_trace_support import EPOCH, TRACE, TracedGpu, energy_joules_at

from exporter.collectors.gpu.energy import GpuEnergy, PassPower
from exporter.collectors.gpu.state import GpuRegistry

READ_INTERVAL_SECONDS = 2.0
COUNTER_INTERVAL_SECONDS = 10.0
FIRST_READ_SECONDS, LAST_READ_SECONDS = 0.01, 18.01

TraceResult = tuple[GpuRegistry, dict[float, float]]
"""Registry of the sidecar, and power in watts by Unix time."""


@pytest.fixture(scope="module")
def trace_result() -> TraceResult:
    """Replay the trace through the reader of the child, the messages and the registry of the sidecar."""
    gpu, watts_by_time = TracedGpu(), dict[float, float]()
    read_at, counter_read_at = FIRST_READ_SECONDS, -COUNTER_INTERVAL_SECONDS
    while read_at <= LAST_READ_SECONDS:
        is_counter_due = read_at - counter_read_at >= COUNTER_INTERVAL_SECONDS
        counter_read_at = read_at if is_counter_due else counter_read_at
        gpu.read(read_at, reads_counter=is_counter_due)
        watts_by_time.update(gpu.registry.power_samples({})[gpu.uuid])
        read_at += READ_INTERVAL_SECONDS
    return gpu.registry, watts_by_time


def test_the_mean_power_of_phases_of_100_ms_or_longer_is_that_of_their_load(
    trace_result: TraceResult,
) -> None:
    _, watts_by_time = trace_result
    joules, seconds = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, start, end in TRACE["marks"]:
        seconds[name] += end - start
        for previous_time, time in itertools.pairwise(sorted(watts_by_time)):
            overlap_seconds = min(end, time - EPOCH) - max(start, previous_time - EPOCH)
            joules[name] += watts_by_time[time] * max(0.0, overlap_seconds)

    # Power in the longest phases: matrix product 750 to 800 W, copy 400 to 420 W, idle 130 W.
    watts = {name: joules[name] / seconds[name] for name in seconds}
    assert 745 < watts["gemm_400ms"] < 800
    assert 745 < watts["gemm_100ms"] < 800
    assert 395 < watts["copy_100ms"] < 425
    assert watts["gemm_40ms"] > 2 * watts["idle_40ms"]  # averaged with neighboring phases


def test_samples_are_delivered_once_and_kept_for_a_bounded_time(trace_result: TraceResult) -> None:
    registry, watts_by_time = trace_result
    stored_times = [time for time, _ in registry.power_samples({})["GPU-a"]]

    assert stored_times == sorted(set(stored_times))
    assert len(watts_by_time) == sum(time <= LAST_READ_SECONDS for time, _ in TRACE["power_samples_watts"])


def test_energy_follows_the_counter_and_samples_interpolate_it(trace_result: TraceResult) -> None:
    registry, _ = trace_result
    (integral_reading,) = registry.energies()
    energy_millijoules = 1000 * energy_joules_at(19.6)
    entry = {
        "index": 0,
        "uuid": "GPU-a",
        "job_index": 0,
        "values": {},
        "replaced": {},
        "energy_millijoules": energy_millijoules,
    }
    registry.add_sample({"kind": "sample", "time": 19.6, "gpus": [entry]}, 1)
    (counter_reading,) = registry.energies()

    # The counter is read at 0 and at 10 s. The energy after 10 s is integrated from the samples.
    assert integral_reading.joules == pytest.approx(
        energy_joules_at(LAST_READ_SECONDS) - energy_joules_at(FIRST_READ_SECONDS), rel=0.01
    )
    assert integral_reading.source == "nvml_counter"
    assert counter_reading.joules == pytest.approx(
        energy_joules_at(19.6) - energy_joules_at(FIRST_READ_SECONDS), rel=0.003
    )


def test_energy_after_the_last_sample_is_not_counted_twice_if_the_counter_is_read_late() -> None:
    energy = GpuEnergy()
    # At a constant 500 W, the pass at 2 s reads the counter 0.8 s after the last sample, as on a busy machine.
    for end_seconds, counter_seconds in ((0.0, 0.0), (1.0, None), (2.0, 2.8), (3.0, None), (4.0, 4.0)):
        pass_power = PassPower(
            integral_joules=500.0 * end_seconds,
            end_time=end_seconds,
            start_microseconds=int(end_seconds * 1e6),
            step_microseconds=[1_000_000],
            milliwatts=[500_000],
        )
        millijoules = None if counter_seconds is None else 500_000.0 * counter_seconds
        energy.add(pass_power, millijoules, counter_seconds or 0.0, child=1, is_paused=False)

    assert [point.time for point in energy.history] == [0.0, 1.0, 2.8, 3.0, 4.0]
    assert [point.joules for point in energy.history] == pytest.approx(
        [500.0 * point.time for point in energy.history]
    )


def add_constant_power(
    energy: GpuEnergy,
    seconds: int,
    *,
    counter_delay_seconds: float | None,
    is_paused: bool = False,
    outage_seconds: int = 0,
) -> None:
    """Add a pass at a constant 500 W.

    *counter_delay_seconds* is the time between the last power sample and the reading of the counter, None without a reading. The
    power integral lacks *outage_seconds*, in which no power was read.
    """
    pass_power = PassPower(
        integral_joules=500.0 * (seconds - outage_seconds),
        end_time=float(seconds),
        start_microseconds=seconds * 1_000_000,
        step_microseconds=[1_000_000],
        milliwatts=[500_000],
    )
    counter_seconds = seconds + (counter_delay_seconds or 0.0)
    millijoules = None if counter_delay_seconds is None else 500_000.0 * counter_seconds
    energy.add(pass_power, millijoules, counter_seconds, child=1, is_paused=is_paused)


@pytest.mark.parametrize("counter_delay_seconds", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("first_counter_seconds", [0, 25])
def test_energy_after_a_pause_is_counted_in_full(
    counter_delay_seconds: float, first_counter_seconds: int
) -> None:
    energy = GpuEnergy()
    for seconds in range(3601):
        has_counter = seconds >= first_counter_seconds and seconds % 10 == 0
        delay = counter_delay_seconds if has_counter else None
        add_constant_power(energy, seconds, counter_delay_seconds=delay, is_paused=True)
    assert energy.total_joules == pytest.approx(0)

    for seconds in range(3601, 3701):
        add_constant_power(
            energy, seconds, counter_delay_seconds=None if seconds % 10 else counter_delay_seconds
        )

    # The counter also counts the energy between the last power sample and the last counter reading of the pause.
    assert energy.total_joules == pytest.approx(500.0 * 100, abs=1)


@pytest.mark.parametrize("counter_delay_seconds", [0.0, 0.1, 3.0])
def test_the_total_and_the_gap_of_an_outage_are_the_energy_of_the_counter(
    counter_delay_seconds: float,
) -> None:
    energy = GpuEnergy()
    for seconds in (*range(101), *range(160, 601)):
        add_constant_power(
            energy, seconds, counter_delay_seconds=None if seconds % 10 else counter_delay_seconds
        )

    assert energy.total_joules is not None
    assert energy.total_joules + energy.gap_joules == pytest.approx(500.0 * 600)


def test_the_gap_grows_during_an_outage_and_counts_no_time_twice() -> None:
    energy = GpuEnergy()
    for seconds in range(101):
        add_constant_power(energy, seconds, counter_delay_seconds=None if seconds % 10 else 0.0)
    gaps = {}
    for now in (105.0, 130.0, 160.5):
        energy.count_gap(now)
        gaps[now] = energy.gap_seconds
    # The driver took the first sample after the outage before the last count.
    add_constant_power(energy, 160, counter_delay_seconds=0.0, outage_seconds=60)
    energy.count_gap(161.0)

    assert gaps == {105.0: 0.0, 130.0: 30.0, 160.5: 60.5}
    assert energy.gap_seconds == 60.5


def test_a_wrong_number_after_an_outage_does_not_move_the_energy_of_the_gap_to_the_total() -> None:
    energy = GpuEnergy()
    for seconds in range(101):
        add_constant_power(energy, seconds, counter_delay_seconds=None if seconds % 10 else 0.0)
    energy.add(None, 0.0, 160.0, child=1, is_paused=False)  # the counter returns a wrong number
    for seconds in range(161, 601):
        delay = None if seconds % 10 else 0.0
        add_constant_power(energy, seconds, counter_delay_seconds=delay, outage_seconds=60)

    # No power was read from 100 s to 160 s.
    assert energy.gap_joules == pytest.approx(500.0 * 60)
    assert energy.total_joules == pytest.approx(500.0 * 540)


def test_energy_is_counted_once_if_the_first_reading_of_the_counter_follows_power_readings() -> None:
    energy = GpuEnergy()
    for seconds in range(31):
        add_constant_power(energy, seconds, counter_delay_seconds=None if seconds < 10 else 0.0)
        assert energy.total_joules == pytest.approx(500.0 * seconds)


def test_the_counter_has_the_time_at_which_the_call_returned() -> None:
    result = replay(small_machine("at: 0s, delay: {nvmlDeviceGetPowerUsage: 50ms}", count=1), 12)
    delays = [
        message["gpus"][0]["energy_delay"]
        for message in result.samples
        if "energy_millijoules" in message["gpus"][0]
    ]

    assert len(delays) >= 2
    assert delays == pytest.approx([0.05] * len(delays), abs=1e-6)


def test_samples_continue_over_a_new_child() -> None:
    registry = replay(small_machine(), 1).registry
    first_samples = registry.power_samples({})
    # The second child starts with the buffer that the first child has already read.
    for message in replay(small_machine(), 2).samples:
        registry.add_sample(message, 2)
    new_samples = registry.power_samples({uuid: samples[-1][0] for uuid, samples in first_samples.items()})

    assert new_samples.keys() == first_samples.keys() != set()
    for uuid, samples in new_samples.items():
        times, first_times = (
            [time for time, _ in timed_watts] for timed_watts in (samples, first_samples[uuid])
        )
        assert times == sorted({*times} - {*first_times})
        assert [*first_samples[uuid], *samples] == registry.power_samples({})[uuid]


def test_samples_restart_when_the_clock_is_set_back() -> None:
    registry = replay(small_machine(), 60).registry
    last_times = {uuid: samples[-1][0] for uuid, samples in registry.power_samples({}).items()}
    for message in replay(small_machine(), 10).samples:
        registry.add_sample(message, 2)

    new_samples = registry.power_samples(last_times)
    assert new_samples.keys() == last_times.keys() != set()
    for uuid, samples in new_samples.items():
        assert samples[-1][0] < last_times[uuid]
        assert len(samples) > 400
