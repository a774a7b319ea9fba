"""Packaged machines through the code of the NVML child and the real pynvml: expected expositions."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from collectors_support import assert_golden
from gpu_support import GPU_DATA, ReplayResult, assert_sound, replay, values
from prometheus_client import generate_latest

from exporter.collectors.gpu.families import GPU_FAMILIES
from exporter.replay.machine import LoadCurve
from exporter.replay.machines import machine_names

REPLAYS = {
    "no-gpu": (5, None),
    "t4": (65, None),
    "a100-mig": (65, "0,7"),
    "h100": (65, "0,7"),
    "h100-real": (65, None),
    "h100-lost": (60, "2,3"),
    "h100-hang": (15, "4,5"),
    "counters": (40, None),
    "old-driver": (65, None),
}
"""Duration of the replay and CUDA_VISIBLE_DEVICES, by machine."""


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_has_the_expected_exposition(name: str) -> None:
    seconds, visible = REPLAYS[name]
    result = replay(name, seconds, visible=visible)
    if name == "h100-hang":
        result.registry.clear_readings(hanging=4)
    families = result.families(reason="hung" if name == "h100-hang" else None)
    assert_sound(families)
    exposition = generate_latest(SimpleNamespace(collect=lambda: families)).decode()

    assert_golden(exposition, GPU_DATA / f"{name}.metrics")


@pytest.fixture(scope="module")
def h100() -> ReplayResult:
    return replay("h100", 65)


def test_eight_large_gpus_have_at_most_730_series_of_gpus_and_900_in_total(h100: ReplayResult) -> None:
    families = h100.families()
    gpu_families = [family for family in families if family.name.startswith("gpu_")]

    assert sum(len(family.samples) for family in gpu_families) <= 730
    assert sum(len(family.samples) for family in families) <= 900


def test_the_integral_of_a_replayed_load_never_falls() -> None:
    steps = [{"seconds": 3.0, "level": 0.0}, {"seconds": 5.0, "level": 0.99}]
    load = LoadCurve({"steps": steps, "ripple": 0.1}, shift_seconds=1.7)
    totals = [load.total(index / 10) for index in range(1000)]

    for total, next_total in itertools.pairwise(totals):
        assert -1e-9 <= next_total - total <= 0.1 + 1e-9
    assert totals[-1] == pytest.approx(sum(load.level_at(index / 10) for index in range(1000)) / 10, rel=0.02)


def test_every_reading_of_the_child_is_the_source_of_a_family() -> None:
    readings = {source.reading for family in GPU_FAMILIES for source in family.sources}
    result = replay("h100", 12)

    readings_of_child = {
        reading
        for message in result.samples
        for gpu in message["gpus"]
        for reading in (*gpu["values"], *gpu["replaced"])
    }
    assert len(readings_of_child) > 20
    assert readings_of_child - readings == set()


def test_gpm_can_be_switched_off() -> None:
    results = {gpm: replay("h100", 15, gpm=gpm) for gpm in (True, False)}

    assert results[True].values("gpu_sm_activity_ratio")
    assert results[False].values("gpu_sm_activity_ratio") == {}


def test_the_replayed_h100_shows_the_recorded_values() -> None:
    """Compare the families with values captured on the hardware, whose source the machine's description names."""
    families = replay("h100-real", 65).families()

    def only_value(name: str, *labels: str) -> float:
        (only,) = [value for key, value in values(families, name).items() if key[2:] == labels]
        return only

    assert only_value("gpu_power_watts") == 76.001
    assert only_value("gpu_power_limit_watts", "enforced") == 700
    assert only_value("gpu_temperature_threshold_celsius", "slowdown") == 89
    assert only_value("gpu_pcie_link_generation", "max") == 5
    # 0.64 MiB/s by performance counters; the registers are not used.
    assert only_value("gpu_pcie_transmit_bytes_total") == pytest.approx(0.636 * 2**20 * 65, rel=0.1)
