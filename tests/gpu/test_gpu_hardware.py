"""Invariants of every card, replayed and, where present, real.

python -m pytest tests/gpu/test_gpu_hardware.py -m gpu -s     # also prints a capture of the machine, and the duration
of calls
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from gpu_support import ReplayResult, assert_sound, replay, value, values
from prometheus_client.core import Metric
from waiting import wait_until

from exporter.collectors.gpu.collector import GpuCollector
from exporter.collectors.gpu.options import GpuOptions
from exporter.collectors.job import EnergyReading

HARDWARE = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
OBSERVATION_SECONDS = 25.0

pytestmark = pytest.mark.timeout(120)


@dataclass
class ObservedMachine:
    """Observed machine: families by time, and the final energy."""

    passes: list[tuple[float, Sequence[Metric]]]
    energies: Sequence[EnergyReading]

    @property
    def last(self) -> Sequence[Metric]:
        return self.passes[-1][1]


def hardware() -> ObservedMachine:
    collector = GpuCollector(GpuOptions())
    collector.start()
    wait_until(lambda: value(collector, "gpu_nvml_up") == 1, seconds=60)
    passes: list[tuple[float, Sequence[Metric]]] = []
    end = time.monotonic() + OBSERVATION_SECONDS
    while time.monotonic() < end:
        passes.append((time.monotonic(), collector.collect()))
        time.sleep(1)
    energies = collector.registry.energies()
    collector.stop()
    return ObservedMachine(passes, energies)


def replayed(name: str) -> ObservedMachine:
    result = replay(name, OBSERVATION_SECONDS)
    partial_result = ReplayResult(result.messages[:1])
    passes: list[tuple[float, Sequence[Metric]]] = []
    partial_result.registry.machine = result.registry.machine
    for message in result.samples:
        partial_result.messages.append(message)
        partial_result.registry.take_sample(message, 1)
        passes.append((message["time"], partial_result.families()))
    return ObservedMachine(passes, partial_result.registry.energies())


@pytest.fixture(
    scope="module",
    params=[
        *("h100-real", "h100", "t4"),
        pytest.param(
            "hardware",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not HARDWARE, reason="there is no NVIDIA GPU here")],
        ),
    ],
)
def machine(request: pytest.FixtureRequest) -> ObservedMachine:
    return hardware() if request.param == "hardware" else replayed(request.param)


def test_every_pass_is_sound(machine: ObservedMachine) -> None:
    assert len(machine.passes) > 20
    for _, families in machine.passes:
        assert_sound(families)


def test_every_card_answers(machine: ObservedMachine) -> None:
    assert set(values(machine.last, "gpu_up").values()) == {1.0}
    for name in ("gpu_info", "gpu_power_watts", "gpu_temperature_celsius", "gpu_clock_hertz"):
        assert values(machine.last, name), name


def test_no_counter_falls(machine: ObservedMachine) -> None:
    comparisons = 0
    for (_, earlier), (_, later) in itertools.pairwise(machine.passes):
        for family in earlier:
            if family.type != "counter":
                continue
            name = family.samples[0].name
            later_values = values(later, name)
            for labels, number in values(earlier, name).items():
                comparisons += 1
                assert later_values.get(labels, number) >= number, name
    assert comparisons > 100


def test_throttle_counters_are_nanoseconds(machine: ObservedMachine) -> None:
    (begin, first), (end, last) = machine.passes[0], machine.passes[-1]
    earlier = values(first, "gpu_clocks_event_seconds_total")
    later = values(last, "gpu_clocks_event_seconds_total")

    assert later
    for labels, number in later.items():
        assert number - earlier.get(labels, number) <= 1.1 * (end - begin), labels


def test_energy_agrees_with_power(machine: ObservedMachine) -> None:
    comparisons = 0
    for energy in machine.energies:
        if energy.joules and energy.power_joules:
            comparisons += 1
            ratio = energy.joules / energy.power_joules
            print(f"GPU {energy.index}: energy counter / integrated power = {ratio:.3f}")
            assert 0.5 < ratio < 1.5
    assert comparisons == len(machine.energies)


def test_no_reading_is_garbage_and_no_counter_jumps(machine: ObservedMachine) -> None:
    errors = values(machine.last, "exporter_nvml_errors_total")
    resets = values(machine.last, "exporter_nvml_resets_total")

    assert not [labels for labels in errors if labels[1] == "garbage"]
    assert set(resets.values()) == {0}


def test_a_pass_is_cheap(machine: ObservedMachine) -> None:
    (begin, first), (end, last) = machine.passes[len(machine.passes) // 2], machine.passes[-1]
    seconds = values(last, "exporter_nvml_call_seconds_total")
    call_seconds = sum(seconds.values()) - sum(values(first, "exporter_nvml_call_seconds_total").values())
    memory = values(last, "exporter_nvml_child_resident_memory_bytes")

    assert call_seconds / (end - begin) < 0.25 * len(values(last, "gpu_up"))
    assert all(resident < 100 * 2**20 for resident in memory.values())
