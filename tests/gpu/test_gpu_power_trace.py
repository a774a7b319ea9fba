"""Recorded power trace of a real H100: samples of the child resolve phases of 100 ms."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from gpu_support import replay, small_machine
from power_trace_support import EPOCH, TRACE, Card, counter_at

from exporter.collectors.gpu.state import GpuRegistry

READ_EVERY_SECONDS = 2.0
COUNTER_EVERY_SECONDS = 10.0
LAST_READ = 18.01

Played = tuple[GpuRegistry, dict[float, float]]
"""Registry of the sidecar, with its watts by time."""


@pytest.fixture(scope="module")
def played() -> Played:
    """Replay of the trace in real time through child, pipe and registry."""
    card, samples = Card(), dict[float, float]()
    now, counted_at = 0.01, -COUNTER_EVERY_SECONDS
    while now < 19.7:
        counts = now - counted_at >= COUNTER_EVERY_SECONDS
        counted_at = now if counts else counted_at
        card.read(now, counter=counts)
        samples.update(card.registry.power_samples({})[card.uuid])
        now += READ_EVERY_SECONDS
    return card.registry, samples


def test_the_mean_power_of_100_ms_phases_is_exact(played: Played) -> None:
    _, found = played
    joules, seconds = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, begin, end in TRACE["marks"]:
        seconds[name] += end - begin
        for before, at in itertools.pairwise(sorted(found)):
            joules[name] += found[at] * max(0.0, min(end, at - EPOCH) - max(begin, before - EPOCH))

    # By the longest phases: matrix product 750 to 800 W, copy 400 to 420 W, idle 130 W.
    watts = {name: joules[name] / seconds[name] for name in seconds}
    assert 745 < watts["gemm_400ms"] < 800
    assert 745 < watts["gemm_100ms"] < 800
    assert 395 < watts["copy_100ms"] < 425
    assert watts["gemm_40ms"] > 2 * watts["idle_40ms"]  # blurred with their neighbours


def test_samples_are_delivered_once_and_kept_for_a_bounded_time(played: Played) -> None:
    registry, found = played
    remembered = [at for at, _ in registry.power_samples({})["GPU-a"]]

    assert remembered == sorted(set(remembered))
    assert len(found) == sum(at <= LAST_READ for at, _ in TRACE["power_samples_watts"])


def test_energy_follows_the_counter_and_samples_interpolate_it(played: Played) -> None:
    registry, _ = played
    (integrated,) = registry.energies()
    energy = 1000 * counter_at(19.6)
    entry = {
        "index": 0,
        "uuid": "GPU-a",
        "number": 0,
        "values": {},
        "replaced": {},
        "energy_millijoules": energy,
    }
    registry.take_sample({"kind": "sample", "time": 19.6, "gpus": [entry]}, 1)
    (corrected,) = registry.energies()

    # Read at 0 and at 10 s, the rest is integrated.
    assert integrated.joules == pytest.approx(counter_at(LAST_READ) - counter_at(0.01), rel=0.01)
    assert integrated.source == "nvml_counter"
    assert corrected.joules == pytest.approx(counter_at(19.6) - counter_at(0.01), rel=0.003)


def test_samples_continue_over_a_new_child() -> None:
    registry = replay(small_machine(), 1).registry
    before = registry.power_samples({})
    for message in replay(
        small_machine(), 2
    ).samples:  # starts with the buffer already read by the first child
        registry.take_sample(message, 2)
    after = registry.power_samples({uuid: samples[-1][0] for uuid, samples in before.items()})

    for uuid, samples in after.items():
        assert [at for at, _ in samples] == sorted({at for at, _ in samples} - {at for at, _ in before[uuid]})
        assert [*before[uuid], *samples] == registry.power_samples({})[uuid]


def test_samples_restart_when_the_clock_is_set_back() -> None:
    registry = replay(small_machine(), 60).registry
    last = {uuid: samples[-1][0] for uuid, samples in registry.power_samples({}).items()}
    for message in replay(small_machine(), 10).samples:
        registry.take_sample(message, 2)

    for uuid, samples in registry.power_samples(last).items():
        assert samples[-1][0] < last[uuid]
        assert len(samples) > 400
