"""Runs: what is interpreted column by column is what mark by mark gives."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_support import ByHand, entered, left

from exporter.training import kinds
from exporter.training.kinds import NUMBERS
from exporter.training.runs import Plan, Runs

LOSS, GRAD_NORM, _, _, SAMPLES, TOKENS, _, EPOCH = range(NUMBERS, NUMBERS + 8)
SYNC = kinds.kind_named("grad_sync", phase=True)
SPAN = kinds.kind_named("something", phase=False)


def iteration(start: float, gaps: list[float], numbers: list[Any], *, after: bool) -> tuple[list[Any], float]:
    """Marks of one iteration, with a batch loaded before or after it, and its end."""
    times = []
    now = start
    for gap in gaps:
        now += gap
        times.append(now)
    it = iter(times)
    marks = entered(kinds.TRAINING_ITERATION, next(it))
    marks += entered(kinds.MODEL_FORWARD, next(it)) + left(kinds.MODEL_FORWARD, next(it))
    marks += [LOSS, numbers[0]]
    marks += entered(kinds.MODEL_BACKWARD, next(it)) + entered(SYNC, next(it)) + left(SYNC, next(it))
    marks += left(kinds.MODEL_BACKWARD, next(it)) + entered(SPAN, next(it)) + left(SPAN, next(it))
    marks += [TOKENS, numbers[1], SAMPLES, numbers[2], EPOCH, numbers[3]]
    marks += left(kinds.TRAINING_ITERATION, next(it))
    if after:
        marks += entered(kinds.DATA_LOADING, next(it)) + left(kinds.DATA_LOADING, next(it))
    return marks, now


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Any], float]:
    """Some hundred iterations, most alike, some not."""
    random = Random(draw(st.integers(0, 1 << 30)))  # drawing each duration would take ten times as long
    now, items = random.choice([0.0, 17.03, 1e6]), list[Any]()
    scale = draw(st.sampled_from([1e-6, 1e-4, 1e-3, 0.02, 0.3]))
    after, many_odd = draw(st.booleans()), draw(st.sampled_from([0.0, 0.02, 0.3]))
    for number in range(draw(st.integers(0, 120))):
        gaps = [scale * random.random() for _ in range(12)]
        odd = random.random() < many_odd
        loss = random.choice([float("nan"), float("inf"), None, 1]) if odd else 1.0 / (number + 1)
        marks, now = iteration(now, gaps, [loss, 100 + number, 4, number // 7], after=after)
        if odd and not after and random.random() < 0.5:
            marks[-2] += 1  # left by an exception
        items += marks
    return items, now + 1.0


def compare(found: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-7), key


@settings(max_examples=60, deadline=None)
@given(jobs(), st.sampled_from([1 << 30, 300, 37]))
def test_column_by_column_gives_what_mark_by_mark_gives(job: tuple[list[Any], float], pieces: int) -> None:
    items, end = job
    began = items[1] - 1.5 if items else 0.0
    one, other = ByHand(began), ByHand(began)

    one.take(items, pieces)
    with patch.object(Runs, "take", lambda *_: 0):
        other.take(items)

    slow = {"training.slow_step_excess"}  # judged when looked at, and that is not at the same steps
    compare(
        {key: value for key, value in one.values(end).items() if key[0] not in slow},
        {key: value for key, value in other.values(end).items() if key[0] not in slow},
    )
    left_, right = one.reading(), other.reading()
    assert left_.phases == pytest.approx(right.phases, abs=1e-7)
    assert left_.work_seconds == pytest.approx(right.work_seconds, abs=1e-7)
    assert [part[:3] for part in left_.segments] == [part[:3] for part in right.segments]
    assert (left_.step, left_.steps) == (right.step, right.steps)
    for (end_one, bin_one), (end_other, bin_other) in zip(left_.timeline, right.timeline, strict=True):
        assert end_one == end_other
        assert dict(bin_one) == pytest.approx(dict(bin_other), abs=1e-7)


def test_a_plan_is_used_for_an_ordinary_job() -> None:
    items: list[Any] = []
    now = 1.0
    for _ in range(500):
        marks, now = iteration(now, [1e-4] * 12, [0.5, 7, 1, 0], after=True)
        items += marks
    by_hand = ByHand(0.0)
    marks_alone = 0
    original = by_hand.interpreter.mark

    def counted(*arguments: Any) -> None:
        nonlocal marks_alone
        marks_alone += 1
        original(*arguments)

    by_hand.interpreter.mark = counted  # type: ignore[method-assign, assignment]  # it is counted
    by_hand.take(items)

    assert by_hand.job.progress.steps == 500
    assert marks_alone < len(items) / 2 / 5


def test_an_iteration_left_by_an_exception_has_no_plan() -> None:
    good = bytes((entered(kinds.TRAINING_ITERATION, 0) + left(kinds.TRAINING_ITERATION, 0))[::2])
    bad = bytes((entered(kinds.TRAINING_ITERATION, 0) + left(kinds.TRAINING_ITERATION, 0, failed=True))[::2])

    assert Plan.of(good) is not None
    assert Plan.of(bad) is None
