"""The driver's sample buffers: integrals of what came between two passes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.collectors.gpu.nvml.integrals import Ring


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
