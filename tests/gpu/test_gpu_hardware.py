"""Invariants of GPU readings, on replayed machines and on the GPUs of this machine if it has any.

`python -m pytest tests/gpu/test_gpu_hardware.py -m gpu -s` reads the GPUs of this machine and prints the ratio of the energy
counter to the integrated power of each GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from gpu_support import ReplayResult, assert_sound, label_values, replay, value, values
from prometheus_client.core import Metric
from waiting import wait_until

from exporter.collectors.gpu.collector import GpuCollector
from exporter.collectors.gpu.options import GpuOptions
from exporter.collectors.job import EnergyReading

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
OBSERVATION_SECONDS = 25.0

pytestmark = pytest.mark.timeout(120)


@dataclass
class Observation:
    """Metric families of a machine over time, and the energy of its GPUs at the end."""

    collections: list[tuple[float, Sequence[Metric]]]
    energies: Sequence[EnergyReading]

    @property
    def last_families(self) -> Sequence[Metric]:
        return self.collections[-1][1]


def observe_hardware() -> Observation:
    collector = GpuCollector(GpuOptions())
    collector.start()
    wait_until(lambda: value(collector, "gpu_nvml_up") == 1, seconds=60)
    collections: list[tuple[float, Sequence[Metric]]] = []
    end_time = time.monotonic() + OBSERVATION_SECONDS
    while time.monotonic() < end_time:
        collections.append((time.monotonic(), collector.collect()))
        time.sleep(1)
    energies = collector.registry.energies()
    collector.stop()
    return Observation(collections, energies)


def observe_replay(name: str) -> Observation:
    replay_result = replay(name, OBSERVATION_SECONDS)
    received_so_far = ReplayResult(replay_result.messages[:1])
    collections: list[tuple[float, Sequence[Metric]]] = []
    received_so_far.registry.machine = replay_result.registry.machine
    for message in replay_result.samples:
        received_so_far.messages.append(message)
        received_so_far.registry.add_sample(message, 1)
        collections.append((message["time"], received_so_far.families()))
    return Observation(collections, received_so_far.registry.energies())


@pytest.fixture(
    scope="module",
    params=[
        *("h100-real", "h100", "t4"),
        pytest.param(
            "hardware",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="this machine has no NVIDIA GPU")],
        ),
    ],
)
def observation(request: pytest.FixtureRequest) -> Observation:
    return observe_hardware() if request.param == "hardware" else observe_replay(request.param)


def test_every_collection_satisfies_the_invariants_of_families(observation: Observation) -> None:
    assert len(observation.collections) > 20
    for _, families in observation.collections:
        assert_sound(families)


def test_every_gpu_answers(observation: Observation) -> None:
    assert set(values(observation.last_families, "gpu_up").values()) == {1.0}
    for name in ("gpu_info", "gpu_power_watts", "gpu_temperature_celsius", "gpu_clock_hertz"):
        assert values(observation.last_families, name), name


def test_no_counter_falls(observation: Observation) -> None:
    comparisons = 0
    for (_, families), (_, next_families) in itertools.pairwise(observation.collections):
        for family in families:
            if family.type != "counter":
                continue
            name = family.samples[0].name
            next_values = values(next_families, name)
            for labels, value_before in values(families, name).items():
                comparisons += 1
                assert next_values.get(labels, value_before) >= value_before, name
    assert comparisons > 100


def test_throttle_counters_rise_by_at_most_one_second_a_second(observation: Observation) -> None:
    start_seconds, first_families = observation.collections[0]
    end_seconds, last_families = observation.collections[-1]
    first_values = values(first_families, "gpu_clocks_event_seconds_total")
    last_values = values(last_families, "gpu_clocks_event_seconds_total")

    assert last_values
    # The sidecar and the driver read their clocks at different times: a tolerance of 10 %.
    for labels, throttled_seconds in last_values.items():
        assert throttled_seconds - first_values.get(labels, throttled_seconds) <= 1.1 * (
            end_seconds - start_seconds
        ), labels


def test_energy_agrees_with_power(observation: Observation) -> None:
    comparisons = 0
    for energy in observation.energies:
        if energy.joules and energy.power_joules:
            comparisons += 1
            ratio = energy.joules / energy.power_joules
            print(f"GPU {energy.index}: energy counter / integrated power = {ratio:.3f}")
            assert 0.5 < ratio < 1.5
    assert comparisons == len(observation.energies)


def test_no_reading_is_garbage_and_no_counter_jumps(observation: Observation) -> None:
    errors = label_values(observation.last_families, "exporter_nvml_errors_total", "error")
    resets = values(observation.last_families, "exporter_nvml_resets_total")

    assert "garbage" not in errors
    assert set(resets.values()) == {0}


def test_nvml_calls_take_less_than_a_quarter_of_the_time_and_the_child_is_small(
    observation: Observation,
) -> None:
    # The first half of the observation includes the start of the child.
    start_seconds, middle_families = observation.collections[len(observation.collections) // 2]
    end_seconds, last_families = observation.collections[-1]
    initial_seconds = sum(values(middle_families, "exporter_nvml_call_seconds_total").values())
    final_seconds = sum(values(last_families, "exporter_nvml_call_seconds_total").values())
    resident_bytes = values(last_families, "exporter_nvml_child_resident_memory_bytes")

    call_ratio = (final_seconds - initial_seconds) / (end_seconds - start_seconds)
    assert call_ratio < 0.25
    # A replay has no child process and therefore no resident memory.
    assert all(resident < 100 * 2**20 for resident in resident_bytes.values())
