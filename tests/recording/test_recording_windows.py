from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.recording.values import Aggregation
from exporter.recording.windows import ExactSum, Window, WindowClock

EVERY = frozenset(Aggregation)
# squares of smaller numbers underflow, so that no formula could tell their deviation
moderate = st.floats(-1e100, 1e100).filter(lambda number: number == 0 or abs(number) > 1e-100)


def test_a_clock_aligns_its_windows_to_multiples_of_their_length() -> None:
    clock = WindowClock(10.0, wall=1_003.0, monotonic=50.0)

    assert (clock.started, clock.ended, clock.due) == (1_003.0, 1_010.0, 57.0)
    assert clock.late(wall=1_009.9, monotonic=56.9) is None
    assert clock.late(wall=1_010.2, monotonic=57.2) == pytest.approx(0.2)
    assert clock.advance(wall=1_010.2, monotonic=57.2) == (1_003.0, 1_010.0)
    assert (clock.started, clock.ended) == (1_010.0, 1_020.0)


@given(st.floats(1.6e9, 2e9), st.floats(0.1, 3600), st.floats(0, 1e6))
def test_two_ranks_that_begin_at_different_times_end_their_windows_together(
    wall: float, seconds: float, offset: float
) -> None:
    one = WindowClock(seconds, wall=wall, monotonic=5.0)
    two = WindowClock(seconds, wall=wall + 0.3 * seconds, monotonic=offset)

    apart = abs(one.ended - two.ended) / seconds

    assert apart == pytest.approx(round(apart), abs=1e-3)


@pytest.mark.parametrize("step", [-3600.0, -1.5, 1.5, 3600.0])
def test_a_step_of_the_wall_clock_closes_the_window_and_aligns_anew(step: float) -> None:
    clock = WindowClock(10.0, wall=1_000.0, monotonic=0.0)
    wall = 1_004.0 + step

    assert clock.late(wall=wall, monotonic=4.0) == 0.0
    started, ended = clock.advance(wall=wall, monotonic=4.0)

    assert (started, ended) == (1_000.0, min(wall, 1_010.0))
    assert clock.ended % 10.0 == 0.0
    assert 0.0 < clock.ended - wall <= 11.0
    assert clock.late(wall=wall, monotonic=4.0) is None


def test_a_slewed_clock_does_not_make_a_window_of_a_few_milliseconds() -> None:
    clock = WindowClock(10.0, wall=1_000.0, monotonic=0.0)

    clock.advance(wall=1_009.97, monotonic=10.0)

    assert clock.ended == 1_020.0


def test_after_a_suspension_the_present_window_begins_at_the_last_boundary() -> None:
    clock = WindowClock(10.0, wall=1_000.0, monotonic=0.0)

    assert clock.advance(wall=1_123.0, monotonic=123.0) == (1_000.0, 1_010.0)
    assert (clock.started, clock.ended) == (1_120.0, 1_130.0)


@given(st.lists(st.lists(st.floats(-1e300, 1e300), max_size=20), max_size=20))
def test_a_sum_in_batches_is_the_correctly_rounded_sum_of_all(batches: list[list[float]]) -> None:
    total = ExactSum()
    for batch in batches:
        total.add(batch)
    exact = sum((Fraction(sample) for batch in batches for sample in batch), Fraction(0))

    assert total.value == pytest.approx(
        float(exact), rel=1e-15, abs=1e-15 * max(map(abs, sum(batches, [0.0])))
    )


@given(st.lists(st.lists(moderate, min_size=1, max_size=30), min_size=1, max_size=8))
def test_a_window_equals_the_whole_of_its_parts(parts: list[list[float]]) -> None:
    samples = [sample for part in parts for sample in part]
    window = Window(EVERY)
    for part in parts:
        window.add(part, sorted(part))
    values = window.values()
    scale = max(map(abs, samples))

    assert window.samples == len(samples)
    assert values[Aggregation.VALUE] == samples[-1]
    assert values[Aggregation.COUNT] == len(samples)
    assert (values[Aggregation.MIN], values[Aggregation.MAX]) == (min(samples), max(samples))
    assert values[Aggregation.SUM] == pytest.approx(math.fsum(samples), abs=1e-12 * scale)
    assert values[Aggregation.MEAN] == pytest.approx(math.fsum(samples) / len(samples), abs=1e-12 * scale)
    assert values[Aggregation.STDDEV] == pytest.approx(statistics.pstdev(samples), rel=1e-6, abs=1e-7 * scale)
    assert values[Aggregation.P50] == pytest.approx(statistics.median(samples), abs=1e-12 * scale)
    assert Aggregation.HISTOGRAM not in values


def test_a_value_beyond_the_range_of_floats_is_absent_not_infinite() -> None:
    window = Window(EVERY)
    window.add([1e308] * 4, [1e308] * 4)
    values = window.values()

    assert values[Aggregation.MAX] == 1e308
    assert values.keys().isdisjoint({Aggregation.SUM, Aggregation.MEAN, Aggregation.STDDEV})
