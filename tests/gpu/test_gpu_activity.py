"""Performance counters of GPUs and of the instances of a divided one: replays without waiting."""

from __future__ import annotations

import pytest
from gpu_support import DIVIDED, SMALL, machine, replay, values

from exporter.replay.machine import ReplayedMachine

WITH_GPM = SMALL.replace(
    "gpus:",
    '    gpm: {"2": 60, "5": 130, "7": -0.2, "10": 40, "20": 100}\ngpus:',
)


def test_percent_become_ratios_and_rates_bytes() -> None:
    families = replay(machine(WITH_GPM), 21).families()

    assert set(values(families, "gpu_sm_activity_ratio").values()) == {0.6}
    tensor = values(families, "gpu_tensor_activity_ratio")
    assert {labels[2]: number for labels, number in tensor.items()} == {"any": 1.0, "hmma": 0.0}
    assert set(values(families, "gpu_pcie_transmit_bytes_total").values()) == {100 * 2**20 * 21.0}


def test_pcie_bytes_are_right_where_the_driver_s_register_wraps_fourteen_times_a_second() -> None:
    # As on an H100 that is sent 54.8 GB/s: with packet headers 59.2 GB/s by the register, 58.8 by the performance counter.
    registers = 'fields: {"198": {idle: 59180000000, counter_from: 2355698500, bits: 32}}'
    described = machine(SMALL.replace("gpus:", f'    gpm: {{"21": 56079}}\n    {registers}\ngpus:'))
    gpu = ReplayedMachine(described.plain()).gpus[0]
    received = values(replay(described, 61).families(), "gpu_pcie_receive_bytes_total")

    assert max(gpu.readings.at("field.198", moment / 7) or 0 for moment in range(420)) < 2**32
    assert list(received.values()) == [pytest.approx(59.18e9 * 61, rel=0.01)] * 2


def test_samples_that_are_too_close_are_not_compared() -> None:
    played = replay(machine(WITH_GPM), 2, period=0.01)

    # A pass of the tier comes every 50 ms; without the pause every ratio would be NaN.
    assert set(values(played.families(), "gpu_sm_activity_ratio").values()) == {0.6}
    errors = values(played.families(), "exporter_nvml_errors_total")
    assert errors == {}


@pytest.mark.parametrize("newest", [2, 7, 20])
def test_a_metric_that_the_driver_does_not_know_costs_no_other(newest: int) -> None:
    played = replay(machine(f"newest_metric: {newest}\n{WITH_GPM}"), 60, details=True)
    families = played.families()

    assert set(values(families, "gpu_sm_activity_ratio").values()) == {0.6}
    pipes = {labels[2] for labels in values(families, "gpu_tensor_activity_ratio")}
    assert pipes == {"any", "hmma"} if newest >= 7 else not pipes
    assert bool(values(families, "gpu_pcie_transmit_bytes_total")) == (newest >= 20)
    assert values(families, "exporter_nvml_errors_total") == {}


@pytest.mark.parametrize("error", ["UNKNOWN", "NOT_SUPPORTED"])
@pytest.mark.parametrize("call", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_activity_that_is_no_longer_measured_is_not_shown(call: str, error: str) -> None:
    gone = f"\ntimeline:\n  - {{at: 20s, errors: {{{call}: {error}}}}}\n"
    played = replay(machine(WITH_GPM + gone), 40)

    assert 0.6 in played.readings("sm_activity_ratio")
    for name in ("gpu_sm_activity_ratio", "gpu_pcie_transmit_bytes_total"):
        assert values(played.families(), name) == {}, name


def test_instances_have_activity_of_their_own() -> None:
    families = replay(machine(DIVIDED), 20).families()

    assert len(values(families, "gpu_mig_sm_activity_ratio")) == 4
    assert set(values(families, "gpu_mig_sm_activity_ratio").values()) == {0.6}
    assert values(families, "gpu_sm_activity_ratio") == {}  # of the whole: not while it is divided


def test_a_gpu_that_is_divided_anew_shows_its_new_instances_alone() -> None:
    anew = """
timeline:
  - {at: 31s, gpus: [0], mig: [{gi: 1, profile: 3g.40gb, memory: 3000}]}
  - {at: 40s, until: 80s, gpus: [1], mig: []}
"""
    before, after = replay(machine(DIVIDED + anew), 30), replay(machine(DIVIDED + anew), 45)
    families = after.families()

    info = {(labels[0], labels[5]) for labels in values(families, "gpu_mig_info")}
    assert info == {("0", "3g.40gb")}
    (old,) = [
        labels[2]
        for labels in values(before.families(), "gpu_mig_info")
        if labels[0] == "0" and labels[3] == "1"
    ]
    assert {labels[2] for labels in values(families, "gpu_mig_memory_total_bytes")}.isdisjoint({old})
    assert set(values(families, "gpu_mig_sm_activity_ratio").values()) == {0.6}
    later = replay(machine(DIVIDED + anew), 141).families()
    assert len(values(later, "gpu_mig_info")) == 3
