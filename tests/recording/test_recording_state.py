from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.recording.definition import check_definition
from exporter.recording.state import StatState
from exporter.recording.values import Aggregation, StatReading

SIMPLE = (Aggregation.MEAN, Aggregation.MIN, Aggregation.MAX, Aggregation.SUM)


def drained(state: StatState, *samples: object, wall: float = 100.0) -> StatReading:
    state.buffer.extend(samples)
    while state.drain(wall=wall):
        pass
    return state.reading()


class Liar(float):
    def __float__(self) -> float:
        raise RuntimeError("the user's code ran on the recording thread")


class NumberLike:
    def __float__(self) -> float:
        raise RuntimeError("the user's code ran on the recording thread")


def test_what_is_no_finite_number_is_counted_by_reason_and_kept_out() -> None:
    numpy = pytest.importorskip("numpy")
    state = StatState(check_definition("a", SIMPLE), wall=0.0)

    reading = drained(
        state,
        1,
        2.5,
        True,
        numpy.float32(1.5),
        numpy.int64(0),
        math.nan,
        math.inf,
        -math.inf,
        "3",
        None,
        10**400,
    )

    assert (reading.count, reading.sum) == (5, 6.0)
    assert reading.rejected == {"nan": 1, "infinite": 2, "not_a_number": 2, "out_of_range": 1}


def test_numbers_of_the_users_own_classes_never_run_their_code() -> None:
    state = StatState(check_definition("a", SIMPLE), wall=0.0)

    reading = drained(state, Liar(2.0), NumberLike(), math.nan)

    assert (reading.count, reading.sum) == (1, 2.0)
    assert reading.rejected == {"nan": 1, "not_a_number": 1}


def test_a_negative_sample_ends_the_sum_but_not_the_count() -> None:
    state = StatState(check_definition("a", SIMPLE), wall=0.0)

    assert drained(state, 1.0).sum == 1.0
    assert drained(state, -0.5, 2.0).sum is None
    assert drained(state, 3.0).count == 4


def test_a_buffer_found_full_is_an_overflow_that_is_told() -> None:
    state = StatState(check_definition("a", SIMPLE), wall=0.0, samples=8)

    assert drained(state, *range(7)).overflows == 0
    reading = drained(state, *range(50))

    assert (reading.count, reading.overflows) == (7 + 8, 1)


@given(st.lists(st.floats(0, 1e9), max_size=60), st.integers(1, 7), st.integers(1, 9))
def test_count_windows_close_at_their_nth_sample_and_the_next_begins_at_once(
    samples: list[float], limit: int, portion: int
) -> None:
    state = StatState(check_definition("a", SIMPLE, window_seconds=None, window_samples=limit), wall=0.0)
    for start in range(0, len(samples), portion):
        drained(state, *samples[start : start + portion])
    reading = state.reading()
    closed = len(samples) // limit

    assert reading.count == len(samples)
    assert reading.window is not None
    assert reading.window.samples == (limit if closed else 0)
    if closed:
        last = samples[(closed - 1) * limit : closed * limit]
        assert reading.window.values[Aggregation.SUM] == math.fsum(last)
        assert reading.window.values[Aggregation.MAX] == max(last)


def test_windows_of_both_kinds_close_by_whichever_comes_first() -> None:
    state = StatState(check_definition("a", SIMPLE, window_seconds=60, window_samples=3), wall=100.0)

    drained(state, 1, 2, 3, 4, wall=110.0)
    by_count = state.closed
    state.close_window(60.0, 120.0, late_windows=False, wall=120.0)

    assert (by_count.started, by_count.ended, by_count.samples) == (100.0, 110.0, 3)
    assert (state.closed.started, state.closed.ended, state.closed.samples) == (110.0, 120.0, 1)


def test_an_empty_window_is_no_data_and_nor_is_one_before_a_suspension() -> None:
    state = StatState(check_definition("a", SIMPLE), wall=100.0)
    drained(state, 5.0)
    state.close_window(60.0, 120.0, late_windows=False, wall=120.0)
    assert state.closed.samples == 1

    state.close_window(120.0, 180.0, late_windows=False, wall=180.0)
    assert (state.closed.samples, dict(state.closed.values)) == (0, {})
    drained(state, 5.0)

    state.close_window(180.0, 240.0, late_windows=True, wall=900.0)

    assert state.closed.samples == 0


def test_a_window_of_too_few_samples_has_no_values_but_their_number() -> None:
    state = StatState(check_definition("a", SIMPLE, min_samples=3), wall=0.0)
    drained(state, 1.0, 2.0)
    state.close_window(0.0, 60.0, late_windows=False, wall=60.0)
    few = state.closed
    drained(state, 1.0, 2.0, 3.0)
    state.close_window(60.0, 120.0, late_windows=False, wall=120.0)

    assert (few.samples, few.values) == (2, {})
    assert (state.closed.samples, bool(state.closed.values)) == (3, True)
    assert state.count == 5


def test_a_count_window_goes_stale_without_samples() -> None:
    state = StatState(
        check_definition("a", SIMPLE, window_seconds=None, window_samples=2, stale_seconds=30), wall=0.0
    )
    drained(state, 1.0, 2.0, wall=100.0)
    state.expire(wall=130.0)
    assert state.closed.samples == 2

    state.expire(wall=130.1)

    assert state.reading().window is state.closed
    assert state.closed.samples == 0


@given(st.lists(st.floats(-10, 10), max_size=200))
def test_buckets_count_samples_at_or_below_their_bound_since_the_process_began(samples: list[float]) -> None:
    state = StatState(check_definition("a", ["histogram"], buckets=[-1, 0, 2.5]), wall=0.0)
    drained(state, *samples[:50])
    state.close_window(0.0, 60.0, late_windows=False, wall=60.0)

    reading = drained(state, *samples[50:])

    assert reading.bucket_counts == tuple(
        sum(sample <= bound for sample in samples) for bound in (-1, 0, 2.5)
    )


def test_an_override_takes_effect_at_the_next_window_and_buckets_only_before_the_first_sample() -> None:
    definition = check_definition("a", ["mean", "histogram"], buckets=[1, 2])
    wanted = definition.replace(
        aggregations=frozenset({Aggregation.MAX, Aggregation.HISTOGRAM}), buckets=(5.0,)
    )
    early, late = StatState(definition, wall=0.0), StatState(definition, wall=0.0)
    early.override(wanted, enabled=True)
    drained(late, 1.0)
    late.override(wanted, enabled=True)

    assert early.effective == wanted
    assert late.effective == definition
    late.close_window(0.0, 60.0, late_windows=False, wall=60.0)
    assert late.effective == wanted.replace(buckets=(1.0, 2.0))
    assert late.closed.values.keys() == {Aggregation.MEAN}


def test_a_disabled_stat_drops_what_is_added_and_keeps_what_was_counted() -> None:
    state = StatState(check_definition("a", SIMPLE), wall=0.0)
    drained(state, 1.0)
    state.override(state.definition, enabled=False)
    drained(state, 2.0)
    state.override(state.definition, enabled=True)

    assert drained(state, 4.0).sum == 5.0
