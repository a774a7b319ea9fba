"""Counters of a GPU: never falling, right over wraps, resets, glitches and restarts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.collectors.gpu.counters import REASONS, Counter, CounterRule
from exporter.collectors.gpu.families import ENERGY_RULE
from exporter.collectors.gpu.families import OF_CHILD as INTEGRAL_RULE

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


def test_a_counter_that_makes_no_sense_is_not_shown_until_it_does() -> None:
    counter = Counter(ENERGY_RULE)
    run(counter, [0, 1000])

    run(counter, [10**14, 10**17, 5, 10**15], begin=2)
    assert counter.value() is None

    run(counter, [10**15 + 500, 10**15 + 1000], begin=6)
    assert counter.value() == 2.0


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
