"""The same collector on real hardware: what a replay cannot tell. Skipped without an NVIDIA GPU.

python -m pytest tests/gpu/test_gpu_hardware.py -m gpu -s     # also prints a capture of the machine, and what calls cost
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from gpu_support import assert_sound, machine, replay, value, values
from prometheus_client.core import Metric
from waiting import wait_until

from exporter.collectors.gpu.collector import GpuCollector
from exporter.collectors.gpu.options import GpuOptions
from exporter.replay.description import MachineDescription

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists(),
        reason="there is no NVIDIA GPU on this machine (no /dev/nvidia0)",
    ),
]

WATCHED_SECONDS = 25.0


@pytest.fixture(scope="module")
def captured() -> MachineDescription:
    """This machine as a description; made before anybody else samples performance counters."""
    command = [sys.executable, "-m", "exporter.replay.capture"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(text)
    return machine(text)


@pytest.fixture(scope="module")
def collector(captured: MachineDescription) -> Iterator[GpuCollector]:
    assert captured.gpus
    watched = GpuCollector(GpuOptions(details=True))
    watched.start()
    wait_until(lambda: value(watched, "gpu_nvml_up") == 1, seconds=60)
    yield watched
    watched.stop()


@pytest.fixture(scope="module")
def passes(collector: GpuCollector) -> list[tuple[float, Sequence[Metric]]]:
    """What was shown over time."""
    found: list[tuple[float, Sequence[Metric]]] = []
    end = time.monotonic() + WATCHED_SECONDS
    while time.monotonic() < end:
        found.append((time.monotonic(), collector.collect()))
        time.sleep(1)
    return found


def test_every_pass_is_sound(passes: list[tuple[float, Sequence[Metric]]]) -> None:
    for _, families in passes:
        assert_sound(families)


def test_a_capture_shows_what_the_machine_does(
    captured: MachineDescription, passes: list[tuple[float, Sequence[Metric]]]
) -> None:
    _, families = passes[-1]
    again = replay(captured, 70, details=True).families()
    gauges = {each.name for each in families if each.name.startswith("gpu_")}

    assert_sound(again)
    missing = gauges - {each.name for each in again}
    print("shown by the machine and not by its replay:", sorted(missing))
    assert len(missing) <= 0.1 * len(gauges)


def test_every_card_answers(passes: list[tuple[float, Sequence[Metric]]]) -> None:
    _, families = passes[-1]

    assert set(values(families, "gpu_up").values()) == {1.0}
    for name in ("gpu_info", "gpu_power_watts", "gpu_temperature_celsius", "gpu_clock_hertz"):
        assert values(families, name), name


def test_no_counter_falls(passes: list[tuple[float, Sequence[Metric]]]) -> None:
    compared = 0
    for (_, before), (_, after) in itertools.pairwise(passes):
        for family in before:
            if family.type != "counter":
                continue
            name = family.samples[0].name
            later = values(after, name)
            for labels, number in values(before, name).items():
                compared += 1
                assert later.get(labels, number) >= number, name
    assert compared > 100


def test_throttle_counters_are_nanoseconds(passes: list[tuple[float, Sequence[Metric]]]) -> None:
    (begin, first), (end, last) = passes[0], passes[-1]
    before = values(first, "gpu_clocks_event_seconds_total")
    after = values(last, "gpu_clocks_event_seconds_total")

    assert after
    for labels, number in after.items():
        assert number - before.get(labels, number) <= 1.1 * (end - begin), labels


def test_energy_agrees_with_power(collector: GpuCollector, passes: object) -> None:
    assert passes
    for energy in collector.energies():
        if energy.joules and energy.power_joules:
            ratio = energy.joules / energy.power_joules
            print(f"GPU {energy.index}: energy counter / integrated power = {ratio:.3f}")
            assert 0.5 < ratio < 1.5


def test_nothing_is_garbage_and_no_counter_jumped(passes: list[tuple[float, Sequence[Metric]]]) -> None:
    _, families = passes[-1]
    errors = values(families, "exporter_nvml_errors_total")
    resets = values(families, "exporter_nvml_resets_total")

    assert not [labels for labels in errors if labels[1] == "garbage"]
    assert set(resets.values()) == {0}


def test_a_pass_is_cheap(passes: list[tuple[float, Sequence[Metric]]]) -> None:
    (begin, first), (end, last) = passes[len(passes) // 2], passes[-1]
    seconds = values(last, "exporter_nvml_call_seconds_total")
    calls = values(last, "exporter_nvml_calls_total")
    for (call,), spent in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{call:45} {calls[(call,)]:7.0f} calls {spent / calls[(call,)] * 1e6:10.1f} us each")
    grown = sum(seconds.values()) - sum(values(first, "exporter_nvml_call_seconds_total").values())

    assert grown / (end - begin) < 0.25 * len(values(last, "gpu_up"))
    assert (values(last, "exporter_nvml_child_resident_memory_bytes") or {(): 0})[()] < 100 * 2**20
