from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from exporter.recording.windows import EXACT_SAMPLES, RELATIVE_ERROR, SMALLEST_MAGNITUDE, Quantiles

RATIOS = (0.0, 0.01, 0.5, 0.9, 0.95, 0.99, 1.0)
finite = st.floats(allow_nan=False, allow_infinity=False)


def bracket(ordered: list[float], ratio: float) -> tuple[float, float]:
    position = ratio * (len(ordered) - 1)
    return ordered[math.floor(position)], ordered[math.ceil(position)]


@given(st.lists(finite, min_size=1, max_size=60))
def test_small_windows_answer_exactly_like_linear_interpolation(samples: list[float]) -> None:
    ordered = sorted(samples)

    for ratio, answer in zip(RATIOS, Quantiles(samples).quantiles(RATIOS), strict=True):
        low, high = bracket(ordered, ratio)
        fraction = ratio * (len(ordered) - 1) % 1
        assert answer == (low * (1 - fraction) + high * fraction if fraction else low)


@given(
    st.lists(st.floats(1e-150, 1e150) | st.floats(-1e150, -1e-150) | st.just(0.0), min_size=1, max_size=40),
    st.integers(0, 2**32),
)
def test_large_windows_answer_within_one_percent_of_the_neighbouring_samples(
    seeds: list[float], seed: int
) -> None:
    samples = random.Random(seed).choices(seeds, k=EXACT_SAMPLES + 500)
    ordered = sorted(samples)
    summary = Quantiles(samples)

    for ratio, answer in zip(RATIOS, summary.quantiles(RATIOS), strict=True):
        low, high = bracket(ordered, ratio)
        slack = RELATIVE_ERROR * 1.000001
        assert low - slack * abs(low) <= answer <= high + slack * abs(high)


def test_every_magnitude_that_a_float_can_have_is_answered() -> None:
    samples = [
        5e-324,
        SMALLEST_MAGNITUDE,
        1.0,
        1.7976931348623157e308,
        -1.7976931348623157e308,
    ] * EXACT_SAMPLES

    low, high = Quantiles(samples).quantiles((0.0, 1.0))

    assert abs(low / -1.7976931348623157e308 - 1) <= RELATIVE_ERROR
    assert abs(high / 1.7976931348623157e308 - 1) <= RELATIVE_ERROR


def test_memory_is_bounded_however_far_the_samples_spread() -> None:
    summary = Quantiles()
    for exponent in range(-290, 300):
        summary.add(sorted(float(f"{mantissa}e{exponent}") for mantissa in range(1, 10)))

    bins = len(summary._positive) + len(summary._negative)

    assert bins <= 4096
    assert summary.count == 590 * 9
    assert abs(summary.quantiles((1.0,))[0] / 9e299 - 1) <= RELATIVE_ERROR
