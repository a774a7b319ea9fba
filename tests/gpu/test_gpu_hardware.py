"""Invariants of every card, replayed and, where present, real.

python -m pytest tests/gpu/test_gpu_hardware.py -m gpu -s     # also prints a capture of the machine, and the duration of calls
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
WATCHED_SECONDS = 25.0

pytestmark = pytest.mark.timeout(120)


@dataclass
class Watched:
    """Observed machine: families by time, and the final energy."""

    passes: list[tuple[float, Sequence[Metric]]]
    energies: Sequence[EnergyReading]

    @property
    def last(self) -> Sequence[Metric]:
        return self.passes[-1][1]


def hardware() -> Watched:
    collector = GpuCollector(GpuOptions())
    collector.start()
    wait_until(lambda: value(collector, "gpu_nvml_up") == 1, seconds=60)
    passes: list[tuple[float, Sequence[Metric]]] = []
    end = time.monotonic() + WATCHED_SECONDS
    while time.monotonic() < end:
        passes.append((time.monotonic(), collector.collect()))
        time.sleep(1)
    energies = collector.registry.energies()
    collector.stop()
    return Watched(passes, energies)


def replayed(name: str) -> Watched:
    found = replay(name, WATCHED_SECONDS)
    so_far = ReplayResult(found.messages[:1])
    passes: list[tuple[float, Sequence[Metric]]] = []
    so_far.registry.machine = found.registry.machine
    for message in found.samples:
        so_far.messages.append(message)
        so_far.registry.take_sample(message, 1)
        passes.append((message["time"], so_far.families()))
    return Watched(passes, so_far.registry.energies())


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
def monitored(request: pytest.FixtureRequest) -> Watched:
    return hardware() if request.param == "hardware" else replayed(request.param)


def test_every_pass_is_sound(monitored: Watched) -> None:
    assert len(monitored.passes) > 20
    for _, families in monitored.passes:
        assert_sound(families)


def test_every_card_answers(monitored: Watched) -> None:
    assert set(values(monitored.last, "gpu_up").values()) == {1.0}
    for name in ("gpu_info", "gpu_power_watts", "gpu_temperature_celsius", "gpu_clock_hertz"):
        assert values(monitored.last, name), name


def test_no_counter_falls(monitored: Watched) -> None:
    compared = 0
    for (_, before), (_, after) in itertools.pairwise(monitored.passes):
        for family in before:
            if family.type != "counter":
                continue
            name = family.samples[0].name
            later = values(after, name)
            for labels, number in values(before, name).items():
                compared += 1
                assert later.get(labels, number) >= number, name
    assert compared > 100


def test_throttle_counters_are_nanoseconds(monitored: Watched) -> None:
    (begin, first), (end, last) = monitored.passes[0], monitored.passes[-1]
    before = values(first, "gpu_clocks_event_seconds_total")
    after = values(last, "gpu_clocks_event_seconds_total")

    assert after
    for labels, number in after.items():
        assert number - before.get(labels, number) <= 1.1 * (end - begin), labels


def test_energy_agrees_with_power(monitored: Watched) -> None:
    compared = 0
    for energy in monitored.energies:
        if energy.joules and energy.power_joules:
            compared += 1
            ratio = energy.joules / energy.power_joules
            print(f"GPU {energy.index}: energy counter / integrated power = {ratio:.3f}")
            assert 0.5 < ratio < 1.5
    assert compared == len(monitored.energies)


def test_no_reading_is_garbage_and_no_counter_jumps(monitored: Watched) -> None:
    errors = values(monitored.last, "exporter_nvml_errors_total")
    resets = values(monitored.last, "exporter_nvml_resets_total")

    assert not [labels for labels in errors if labels[1] == "garbage"]
    assert set(resets.values()) == {0}


def test_a_pass_is_cheap(monitored: Watched) -> None:
    (begin, first), (end, last) = monitored.passes[len(monitored.passes) // 2], monitored.passes[-1]
    seconds = values(last, "exporter_nvml_call_seconds_total")
    grown = sum(seconds.values()) - sum(values(first, "exporter_nvml_call_seconds_total").values())
    memory = values(last, "exporter_nvml_child_resident_memory_bytes")

    assert grown / (end - begin) < 0.25 * len(values(last, "gpu_up"))
    assert all(resident < 100 * 2**20 for resident in memory.values())
