"""Windows: closing by the clock, sums, quantiles, and assignment of samples."""

from __future__ import annotations

import math
import pickle
import random
import statistics
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.recording.definition import check_definition
from exporter.recording.stat_state import StatState
from exporter.recording.values import Aggregation, StatReading
from exporter.recording.windows import (
    EXACT_SAMPLES,
    RELATIVE_ERROR,
    DoubleDoubleSum,
    Quantiles,
    Window,
    WindowClock,
)

ALL_AGGREGATIONS = frozenset(Aggregation)
MAX_FLOAT = 1.7976931348623157e308
# Squares of smaller numbers underflow, so that no formula gives their standard deviation.
moderate_numbers = st.floats(-1e100, 1e100).filter(lambda number: number == 0 or abs(number) > 1e-100)


# The clock ---------------------------------------------------------------------------------------------------


def test_a_clock_aligns_its_windows_to_multiples_of_their_length() -> None:
    clock = WindowClock(10.0, wall=1_003.0, monotonic=50.0)

    assert (clock.start, clock.end, clock.due_monotonic) == (1_003.0, 1_010.0, 57.0)
    assert clock.overdue_seconds(wall=1_009.9, monotonic=56.9) is None
    assert clock.overdue_seconds(wall=1_010.2, monotonic=57.2) == pytest.approx(0.2)
    assert clock.advance(wall=1_010.2, monotonic=57.2) == (1_003.0, 1_010.0)
    assert (clock.start, clock.end) == (1_010.0, 1_020.0)


@given(st.floats(1.6e9, 2e9), st.floats(0.1, 3600), st.floats(0, 1e6))
def test_two_ranks_with_different_starts_close_windows_together(
    wall: float, seconds: float, offset: float
) -> None:
    first_clock = WindowClock(seconds, wall=wall, monotonic=5.0)
    second_clock = WindowClock(seconds, wall=wall + 0.3 * seconds, monotonic=offset)

    distance_windows = abs(first_clock.end - second_clock.end) / seconds

    assert distance_windows == pytest.approx(round(distance_windows), abs=1e-3)


@pytest.mark.parametrize("step", [-3600.0, -1.5, 1.5, 3600.0])
def test_a_step_of_the_wall_clock_closes_the_window_and_realigns(step: float) -> None:
    clock = WindowClock(10.0, wall=1_000.0, monotonic=0.0)
    wall = 1_004.0 + step

    assert clock.overdue_seconds(wall=wall, monotonic=4.0) == 0.0
    assert clock.advance(wall=wall, monotonic=4.0) == (1_000.0, min(wall, 1_010.0))
    assert clock.end % 10.0 == 0.0
    assert 0.0 < clock.end - wall <= 11.0
    assert clock.overdue_seconds(wall=wall, monotonic=4.0) is None


def test_a_slewed_clock_makes_no_window_of_a_few_milliseconds() -> None:
    clock = WindowClock(10.0, wall=1_000.0, monotonic=0.0)

    clock.advance(wall=1_009.97, monotonic=10.0)

    assert clock.end == 1_020.0


def test_after_a_suspension_the_current_window_starts_at_the_last_boundary() -> None:
    clock = WindowClock(10.0, wall=1_000.0, monotonic=0.0)

    assert clock.advance(wall=1_123.0, monotonic=123.0) == (1_000.0, 1_010.0)
    assert (clock.start, clock.end) == (1_120.0, 1_130.0)


# Sums of samples --------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.floats(-1e300, 1e300), max_size=20), max_size=20))
def test_a_sum_in_batches_is_the_exact_sum_within_a_rounding_error(batches: list[list[float]]) -> None:
    total = DoubleDoubleSum()
    for batch in batches:
        total.add_sum(DoubleDoubleSum(batch))
    samples = sum(batches, [0.0])
    exact_sum = float(sum(map(Fraction, samples)))

    assert total.value == pytest.approx(exact_sum, rel=1e-15, abs=1e-15 * max(map(abs, samples)))


@given(st.lists(st.lists(moderate_numbers, min_size=1, max_size=30), min_size=1, max_size=8))
def test_a_window_of_several_batches_has_the_aggregates_of_all_samples(batches: list[list[float]]) -> None:
    samples = [sample for batch in batches for sample in batch]
    window = Window(ALL_AGGREGATIONS)
    for batch in batches:
        window.add(batch, sorted(batch), DoubleDoubleSum(batch))
    aggregates = window.values()
    scale = max(map(abs, samples))

    assert window.samples == len(samples)
    assert aggregates[Aggregation.VALUE] == samples[-1]
    assert aggregates[Aggregation.COUNT] == len(samples)
    assert (aggregates[Aggregation.MIN], aggregates[Aggregation.MAX]) == (min(samples), max(samples))
    assert aggregates[Aggregation.SUM] == pytest.approx(math.fsum(samples), abs=1e-12 * scale)
    assert aggregates[Aggregation.MEAN] == pytest.approx(math.fsum(samples) / len(samples), abs=1e-12 * scale)
    assert aggregates[Aggregation.STDDEV] == pytest.approx(
        statistics.pstdev(samples), rel=1e-6, abs=1e-7 * scale
    )
    assert aggregates[Aggregation.P50] == pytest.approx(statistics.median(samples), abs=1e-12 * scale)
    assert Aggregation.HISTOGRAM not in aggregates


def test_a_value_beyond_the_range_of_floats_is_absent_not_infinite() -> None:
    window = Window(ALL_AGGREGATIONS)
    window.add([1e308] * 4, [1e308] * 4, DoubleDoubleSum([1e308] * 4))
    aggregates = window.values()

    assert aggregates[Aggregation.MAX] == 1e308
    assert aggregates.keys().isdisjoint({Aggregation.SUM, Aggregation.MEAN, Aggregation.STDDEV})


# Quantiles ---------------------------------------------------------------------------------------------------

RATIOS = (0.0, 0.01, 0.5, 0.9, 0.95, 0.99, 1.0)


def neighboring_samples(sorted_samples: list[float], ratio: float) -> tuple[float, float]:
    """Return the samples on both sides of a quantile."""
    position = ratio * (len(sorted_samples) - 1)
    return sorted_samples[math.floor(position)], sorted_samples[math.ceil(position)]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=60))
def test_quantiles_of_small_windows_are_interpolated_linearly(samples: list[float]) -> None:
    sorted_samples = sorted(samples)

    for ratio, quantile in zip(RATIOS, Quantiles(samples).quantiles(RATIOS), strict=True):
        low, high = neighboring_samples(sorted_samples, ratio)
        fraction = ratio * (len(sorted_samples) - 1) % 1
        assert quantile == (low * (1 - fraction) + high * fraction if fraction else low)


@given(
    st.lists(
        st.floats(1e-300, MAX_FLOAT) | st.floats(-MAX_FLOAT, -1e-300) | st.just(0.0),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 2**32),
)
def test_quantiles_of_large_windows_are_within_the_relative_error_of_the_neighboring_samples(
    distinct_samples: list[float], seed: int
) -> None:
    samples = random.Random(seed).choices(distinct_samples, k=EXACT_SAMPLES + 500)
    sorted_samples = sorted(samples)
    slack = RELATIVE_ERROR * 1.000001  # for the rounding of floats

    for ratio, quantile in zip(RATIOS, Quantiles(samples).quantiles(RATIOS), strict=True):
        low, high = neighboring_samples(sorted_samples, ratio)
        assert low - slack * abs(low) <= quantile <= high + slack * abs(high)


def test_memory_is_bounded_however_far_the_samples_spread() -> None:
    quantiles = Quantiles([5e-324, -5e-324])
    for exponent in range(-290, 300):
        quantiles.add(sorted(float(f"{mantissa}e{exponent}") for mantissa in range(1, 10)))

    assert len(pickle.dumps(quantiles)) < 100_000
    assert quantiles.count == 590 * 9 + 2
    assert abs(quantiles.quantiles((1.0,))[0] / 9e299 - 1) <= RELATIVE_ERROR


# Assignment of samples to windows, and rejected samples -------------------------------------------------------

SIMPLE = (Aggregation.MEAN, Aggregation.MIN, Aggregation.MAX, Aggregation.SUM)


def new_state(
    aggregations: Any = SIMPLE, *, wall: float = 0.0, samples: int = 1000, **fields: Any
) -> StatState:
    return StatState(check_definition("a", aggregations, **fields), wall=wall, max_samples=samples)


def drain_reading(state: StatState, *samples: object, wall: float = 100.0) -> StatReading:
    state.buffer.extend(samples)
    while state.drain(wall=wall):
        pass
    return state.reading()


class RaisingFloat(float):
    def __float__(self) -> float:
        raise RuntimeError("the user's code ran on the recording thread")


class RaisingNumber:
    def __float__(self) -> float:
        raise RuntimeError("the user's code ran on the recording thread")


def test_invalid_values_are_counted_by_reason_without_running_user_code() -> None:
    numpy = pytest.importorskip("numpy")
    valid_values = (1, 2.5, True, numpy.float32(1.5), numpy.int64(0), RaisingFloat(2.0))
    invalid_values = (math.nan, math.inf, -math.inf, "3", None, RaisingNumber(), 10**400)
    reading = drain_reading(new_state(), *valid_values, *invalid_values)

    assert (reading.count, reading.sum) == (6, 8.0)
    assert reading.rejected == {"nan": 1, "infinite": 2, "not_a_number": 3, "out_of_range": 1}


def test_a_negative_sample_ends_the_sum_but_not_the_count() -> None:
    state = new_state()

    assert drain_reading(state, 1.0).sum == 1.0
    assert drain_reading(state, -0.5, 2.0).sum is None
    assert drain_reading(state, 3.0).count == 4


def test_samples_beyond_a_full_buffer_are_dropped_and_one_overflow_is_counted() -> None:
    state = new_state(samples=8)

    assert drain_reading(state, *range(7)).overflows == 0
    reading = drain_reading(state, *range(50))
    assert (reading.count, reading.overflows) == (7 + 8, 1)


@given(st.lists(st.floats(0, 1e9), max_size=60), st.integers(1, 7), st.integers(1, 9))
def test_count_windows_close_at_their_nth_sample_and_the_next_sample_starts_a_window(
    samples: list[float], limit: int, batch_size: int
) -> None:
    state = new_state(window_seconds=None, window_samples=limit)
    for start in range(0, len(samples), batch_size):
        drain_reading(state, *samples[start : start + batch_size])
    reading = state.reading()
    closed_windows = len(samples) // limit

    assert reading.count == len(samples)
    assert reading.window is not None
    assert reading.window.samples == (limit if closed_windows else 0)
    if closed_windows:
        last_samples = samples[(closed_windows - 1) * limit : closed_windows * limit]
        assert reading.window.values[Aggregation.SUM] == pytest.approx(math.fsum(last_samples), rel=1e-15)
        assert reading.window.values[Aggregation.MAX] == max(last_samples)


def test_windows_of_both_kinds_close_by_whichever_comes_first() -> None:
    state = new_state(wall=100.0, window_seconds=60, window_samples=3)
    drain_reading(state, 1, 2, 3, 4, wall=110.0)
    window_closed_by_count = state.closed_window
    state.close_window(60.0, 120.0, is_late=False, wall=120.0)

    assert (
        window_closed_by_count.started,
        window_closed_by_count.ended,
        window_closed_by_count.samples,
    ) == (100.0, 110.0, 3)
    window_closed_by_time = state.closed_window
    assert (
        window_closed_by_time.started,
        window_closed_by_time.ended,
        window_closed_by_time.samples,
    ) == (110.0, 120.0, 1)


def test_empty_windows_and_windows_before_a_suspension_are_no_data() -> None:
    state = new_state(wall=100.0)
    windows = []
    for index, samples in enumerate([(5.0,), (), (5.0,)]):
        drain_reading(state, *samples)
        window_start = 60.0 * index
        state.close_window(window_start, window_start + 60.0, is_late=index == 2, wall=window_start + 60.0)
        windows.append((state.closed_window.samples, bool(state.closed_window.values)))

    assert windows == [(1, True), (0, False), (0, False)]


def test_a_window_with_too_few_samples_has_only_its_sample_count() -> None:
    state = new_state(min_samples=3)
    windows = []
    for samples in ((1.0, 2.0), (1.0, 2.0, 3.0)):
        drain_reading(state, *samples)
        state.close_window(0.0, 60.0, is_late=False, wall=60.0)
        windows.append((state.closed_window.samples, bool(state.closed_window.values)))

    assert windows == [(2, False), (3, True)]
    assert state.count == 5


def test_a_count_window_goes_stale_without_samples() -> None:
    state = new_state(window_seconds=None, window_samples=2, stale_seconds=30)
    drain_reading(state, 1.0, 2.0, wall=100.0)
    state.expire(wall=130.0)
    assert state.closed_window.samples == 2

    state.expire(wall=130.1)
    assert state.closed_window.samples == 0


@given(st.lists(st.floats(-10, 10), max_size=200))
def test_a_bucket_has_all_samples_of_the_process_up_to_its_bound(samples: list[float]) -> None:
    bounds = (-1, 0, 2.5)
    state = new_state(["histogram"], buckets=bounds)
    drain_reading(state, *samples[:50])
    state.close_window(0.0, 60.0, is_late=False, wall=60.0)
    reading = drain_reading(state, *samples[50:])

    assert reading.bucket_counts == tuple(sum(sample <= bound for sample in samples) for bound in bounds)


def test_an_override_takes_effect_at_the_next_window_and_buckets_only_before_the_first_sample() -> None:
    unused_state, used_state = (new_state(["mean", "histogram"], buckets=[1, 2]) for _ in range(2))
    definition = unused_state.definition
    override = definition.replace(
        aggregations=frozenset({Aggregation.MAX, Aggregation.HISTOGRAM}), buckets=(5.0,)
    )
    unused_state.override(override, enabled=True)
    drain_reading(used_state, 1.0)
    used_state.override(override, enabled=True)

    assert unused_state.effective == override
    assert used_state.effective == definition
    used_state.close_window(0.0, 60.0, is_late=False, wall=60.0)
    assert used_state.effective == override.replace(buckets=(1.0, 2.0))
    assert used_state.closed_window.values.keys() == {Aggregation.MEAN}


def test_a_disabled_stat_drops_new_samples_and_keeps_its_totals() -> None:
    state = new_state()
    for sample in (1.0, 2.0, 4.0):
        state.override(state.definition, enabled=sample != 2.0)
        drain_reading(state, sample)

    assert state.sum == 5.0
