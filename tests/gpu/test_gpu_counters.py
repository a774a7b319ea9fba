"""Counters of a GPU after wraps, resets, glitches and restarts, and integrals of samples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.collectors.gpu.counters import CORRECTION_REASONS, CounterRule, MonotonicCounter
from exporter.collectors.gpu.family import CHILD_COUNTER
from exporter.collectors.gpu.nvml.driver_samples import SampleIntegral

ENERGY_RULE = CounterRule(scale=0.001, max_per_second=10_000.0, starts_at_zero=True)
SECONDS_RULE = CounterRule(scale=1e-9, max_per_second=1.0)
RULES = (ENERGY_RULE, CHILD_COUNTER, SECONDS_RULE, CounterRule(), CounterRule(max_per_second=1e12))


def advance_each_second(
    counter: MonotonicCounter, readings: list[float], *, start_seconds: float = 0
) -> float:
    """Advance a counter by a reading per second, and return the final total."""
    for index, reading in enumerate(readings):
        counter.advance(reading, start_seconds + index, 1)
    return counter.total


@given(
    st.sampled_from(RULES),
    st.lists(st.tuples(st.integers(0, 2**64), st.floats(0, 100), st.integers(0, 3)), max_size=30),
)
def test_a_total_never_decreases(rule: CounterRule, readings: list[tuple[int, float, int]]) -> None:
    counter, read_at, child, previous_total = MonotonicCounter(rule), 0.0, 0, 0.0
    for register, elapsed_seconds, new_children in readings:
        read_at, child = read_at + elapsed_seconds, child + new_children
        increase = counter.advance(register, read_at, child)

        assert increase >= 0
        assert counter.total >= previous_total
        assert set(counter.corrections) <= set(CORRECTION_REASONS)
        previous_total = counter.total


@pytest.mark.parametrize(
    ("readings", "total", "corrections"),
    [
        ([5_000_000, 5_100_000], 100_000, {}),  # energy starts at zero
        # A register of 32 bits.
        ([2**32 - 100_000, 2**32 - 1, 99_999], 199_999, {"wrap": 1}),
        # A reloaded driver: energy after the load is counted; energy before it is unknown.
        ([9_000_000_000, 9_000_300_000, 150_000, 450_000], 300_000 + 450_000, {"reset": 1}),
        # Values that hardware never returns.
        ([1000, 2000, 10**15, 10**15 + 1000, 10**15 + 2000], 1000 + 2000, {"reset": 1}),
        ([10**13, 10**13 + 500, 10**12, 10**12 + 500], 1000, {"reset": 1}),
        ([1000, 2000, 10**18, 4000, 5000], 4000, {"glitch": 1}),
    ],
    ids=["order", "wrap", "reset", "jump", "backwards", "glitch"],
)
def test_a_reset_counter_is_corrected(
    readings: list[float], total: float, corrections: dict[str, int]
) -> None:
    counter = MonotonicCounter(ENERGY_RULE)

    assert advance_each_second(counter, readings) == total
    assert counter.corrections == corrections


@pytest.mark.parametrize(
    ("reading", "increase", "corrections"),
    [(2**29 - 200, 2**29 - 100, {"wrap": 1}), (2**29, 0, {})],
    ids=["below 2^29", "above 2^29"],
)
def test_without_a_maximum_rate_a_fall_is_a_wrap_only_if_the_increase_is_below_2_to_29(
    reading: int, increase: int, corrections: dict[str, int]
) -> None:
    counter = MonotonicCounter(CounterRule())
    counter.advance(2**32 - 100, 0, 1)

    assert counter.advance(reading, 1, 1) == increase
    assert counter.corrections == corrections


def test_seconds_that_exceed_the_elapsed_time_are_absent() -> None:
    counter, values = MonotonicCounter(SECONDS_RULE), list[float | None]()
    for start_seconds, readings in ((0, [0, 1e9, 2e9]), (3, [40e9, 80e9, 120e9]), (6, [120.5e9, 121e9])):
        advance_each_second(counter, readings, start_seconds=start_seconds)
        values.append(counter.value())

    assert values == [2.0, None, 3.0]


def test_a_new_child_counts_from_zero_and_driver_counters_continue() -> None:
    totals = []
    for rule, register in ((CHILD_COUNTER, 50), (ENERGY_RULE, 5000)):
        counter = MonotonicCounter(rule)
        advance_each_second(counter, [100, 200])
        counter.advance(register, 10, 2)
        totals.append(counter.total)

    assert totals == [250, 4900]


# Sample buffers of the driver: integrals between two passes ------------------------------

SamplePass = tuple[float, list[tuple[float, float]]]
"""Time of a pass, and the samples of the buffer with their times."""


@pytest.mark.parametrize(
    ("passes", "integral"),
    [
        # Samples newer than the first pass count.
        (
            [(100, [(90, 1.0), (95, 1.0), (99.9, 1.0)]), (101, [(99.9, 1.0), (100.5, 0.5), (101, 1.0)])],
            0.5 * 0.5 + 1.0 * 0.5,
        ),
        # A long gap is not interpolated.
        ([(100, []), (160.5, [(160, 1.0), (160.5, 1.0)])], 0.5),
        # The clock was set back: the integral continues from the second pass on.
        (
            [
                *((10_000, []), (10_001, [(10_001, 1.0)])),
                *((9001, [(9000.5, 1.0)]), (9002, [(9001.5, 1.0), (9002, 1.0)])),
            ],
            2.0,
        ),
    ],
    ids=["first pass", "gap", "clock set back"],
)
def test_a_pass_adds_the_samples_since_the_last_pass_to_the_integral(
    passes: list[SamplePass], integral: float
) -> None:
    sample_integral = SampleIntegral()
    for seconds, samples in passes:
        samples_by_microseconds = [(int(time * 1e6), ratio) for time, ratio in samples]
        sample_integral.add(samples_by_microseconds, wall_microseconds=int(seconds * 1e6), instantaneous=None)

    assert sample_integral.integral == pytest.approx(integral)


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(-(2**40), 2**64), st.floats(0, 1)), max_size=5),
        min_size=1,
        max_size=10,
    )
)
def test_an_integral_never_decreases_and_never_exceeds_the_elapsed_time(
    batches: list[list[tuple[int, float]]],
) -> None:
    sample_integral, previous_integral = SampleIntegral(), 0.0
    for index, batch in enumerate(batches):
        seconds = 1000 + 2 * index
        sample_integral.add(batch, wall_microseconds=seconds * 1_000_000, instantaneous=0.5)

        # A sample may be up to 5 s ahead of the clock.
        assert previous_integral <= sample_integral.integral <= 2 * index + 5.001
        previous_integral = sample_integral.integral
