"""Counters of a GPU: never falling, right over wraps, resets, glitches and restarts; integrals of samples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.collectors.gpu.counters import REASONS, Counter, CounterRule
from exporter.collectors.gpu.families import ENERGY_RULE
from exporter.collectors.gpu.families import OF_CHILD as INTEGRAL_RULE
from exporter.collectors.gpu.nvml.integrals import Ring

SECONDS = CounterRule(scale=1e-9, most_per_second=1.0)
RULES = (ENERGY_RULE, INTEGRAL_RULE, SECONDS, CounterRule(), CounterRule(most_per_second=1e12))


def run(counter: Counter, numbers: list[float], *, child: int = 1, begin: float = 0) -> float:
    """Feed one number a second; the total at the end."""
    for place, number in enumerate(numbers):
        counter.advance(number, begin + place, child)
    return counter.total


@given(
    st.sampled_from(RULES),
    st.lists(st.tuples(st.integers(0, 2**64), st.floats(0, 100), st.integers(0, 3)), max_size=30),
)
def test_a_total_never_falls_whatever_comes(
    rule: CounterRule, readings: list[tuple[int, float, int]]
) -> None:
    counter, time, child, before = Counter(rule), 0.0, 0, 0.0
    for raw, seconds, children in readings:
        time, child = time + seconds, child + children
        grown = counter.advance(raw, time, child)

        assert grown >= 0
        assert counter.total >= before
        assert set(counter.resets) <= set(REASONS)
        before = counter.total


def test_energy_begins_at_zero_and_other_counters_where_the_driver_is() -> None:
    assert run(Counter(ENERGY_RULE), [5_000_000, 5_100_000]) == 100_000
    assert run(Counter(CounterRule()), [7, 9]) == 9


@pytest.mark.parametrize(
    ("numbers", "total", "resets"),
    [
        # A register of 32 bits.
        ([2**32 - 100_000, 2**32 - 1, 99_999], 199_999, {"wrap": 1}),
        # A driver that is loaded anew: energy after the load is counted, that before it cannot be known.
        ([9_000_000_000, 9_000_300_000, 150_000, 450_000], 300_000 + 450_000, {"reset": 1}),
        # What no hardware does.
        ([1000, 2000, 10**15, 10**15 + 1000, 10**15 + 2000], 1000 + 2000, {"reset": 1}),
        ([10**13, 10**13 + 500, 10**12, 10**12 + 500], 1000, {"reset": 1}),
        ([1000, 2000, 10**18, 4000, 5000], 4000, {"glitch": 1}),
    ],
    ids=["wrap", "reset", "jump", "backwards", "glitch"],
)
def test_numbers_that_do_not_follow_on_are_corrected(
    numbers: list[float], total: float, resets: dict[str, int]
) -> None:
    counter = Counter(ENERGY_RULE)

    assert run(counter, numbers) == total
    assert counter.resets == resets


def test_seconds_that_run_faster_than_the_clock_are_not_shown() -> None:
    counter = Counter(SECONDS)
    run(counter, [0, 1e9, 2e9])
    assert counter.value() == 2.0

    run(counter, [40e9, 80e9, 120e9], begin=3)
    assert counter.value() is None

    run(counter, [120.5e9, 121e9], begin=6)
    assert counter.value() == 3.0


def test_a_new_child_counts_from_zero_and_the_driver_goes_on() -> None:
    of_child, of_driver = Counter(INTEGRAL_RULE), Counter(ENERGY_RULE)
    for counter in (of_child, of_driver):
        run(counter, [100, 200])

    of_child.advance(50, 10, 2)
    of_driver.advance(5000, 10, 2)

    assert of_child.total == 250
    assert of_driver.total == 4900


@given(st.lists(st.integers(0, 500_000), min_size=2, max_size=20), st.integers(1, 18))
def test_a_counter_that_was_kept_goes_on(steps: list[int], cut: int) -> None:
    numbers = [1000 + sum(steps[:count]) for count in range(len(steps) + 1)]
    whole = Counter(ENERGY_RULE)
    run(whole, [float(number) for number in numbers])
    first, second = Counter(ENERGY_RULE), Counter(ENERGY_RULE)
    cut = min(cut, len(numbers) - 1)
    run(first, [float(number) for number in numbers[:cut]])
    kept = first.keep()
    assert kept is not None

    second.resume(kept[0], kept[1], 995.0)
    run(second, [float(number) for number in numbers[cut:]], begin=1001.0)

    assert second.total == whole.total


# The driver's sample buffers: integrals of what came between two passes ------------------------------


def take(ring: Ring, samples: list[tuple[float, float]], at: float, moment: float | None = None) -> None:
    """Let a ring take samples, whose times are seconds."""
    ring.take(
        [(int(time * 1e6), value) for time, value in samples],
        wall_microseconds=int(at * 1e6),
        moment=moment,
    )


def test_a_ring_counts_what_is_newer_than_the_first_look() -> None:
    ring = Ring()

    take(ring, [(90, 1.0), (95, 1.0), (99.9, 1.0)], at=100)
    take(ring, [(99.9, 1.0), (100.5, 0.5), (101, 1.0)], at=101)

    assert ring.integral == pytest.approx(0.5 * 0.5 + 1.0 * 0.5)


def test_the_reading_of_the_moment_stands_in_when_the_ring_is_dry() -> None:
    ring = Ring()
    take(ring, [], at=100, moment=0.2)

    for second in range(102, 112, 2):
        take(ring, [], at=second, moment=0.2)

    assert ring.integral == pytest.approx(0.2 * 10)


def test_a_gap_that_nobody_measured_is_not_bridged() -> None:
    ring = Ring()
    take(ring, [], at=100)

    take(ring, [(160, 1.0), (160.5, 1.0)], at=160.5)

    assert ring.integral == pytest.approx(0.5)


def test_a_clock_that_was_set_back_begins_the_ring_anew() -> None:
    ring = Ring()
    take(ring, [], at=10_000)
    take(ring, [(10_001, 1.0)], at=10_001)

    take(ring, [(9000.5, 1.0)], at=9001)
    take(ring, [(9001.5, 1.0), (9002, 1.0)], at=9002)

    assert ring.integral == pytest.approx(2.0)


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(-(2**40), 2**64), st.floats(0, 1)), max_size=5),
        min_size=1,
        max_size=10,
    )
)
def test_an_integral_never_falls_and_never_outruns_the_clock(batches: list[list[tuple[int, float]]]) -> None:
    ring, before = Ring(), 0.0
    for place, batch in enumerate(batches):
        at = 1000 + 2 * place
        ring.take(batch, wall_microseconds=at * 1_000_000, moment=0.5)

        assert before <= ring.integral <= 2 * place + 5.001
        before = ring.integral
