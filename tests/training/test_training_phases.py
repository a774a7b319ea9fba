"""Phases: each moment of the main thread counts for one, whatever is nested in what."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_support import ByHand, begun_anew, entered, left, misuses, of, stretch

from exporter import training
from exporter.training import span_kinds as kinds
from exporter.training.phases import PHASES
from exporter.training.span_kinds import Kind

SHORT = [
    kinds.TRAINING_ITERATION,
    kinds.VALIDATION_ITERATION,
    kinds.DATA_LOADING,
    kinds.MODEL_FORWARD,
    kinds.MODEL_BACKWARD,
    kinds.ZERO_GRAD,
    kinds.OPTIMIZER_UPDATE,
    kinds.kind_named("grad_sync", phase=True),
    kinds.kind_named("something of the job's own", phase=False),
]
steps = st.floats(min_value=0, max_value=3, allow_nan=False)


@st.composite
def nestings(draw: st.DrawFn) -> tuple[list[Any], float]:
    """Marks of blocks within blocks, and when all is over."""
    now, items = 5.0, list[Any]()
    opened: list[Kind] = []
    for _ in range(draw(st.integers(0, 60))):
        now += draw(steps)
        usable = [kind for kind in SHORT if kind not in opened or not kind.single]
        if opened and (len(opened) > 5 or draw(st.booleans())):
            items += left(opened.pop(), now, failed=draw(st.integers(0, 9)) == 0)
        else:
            opened.append(draw(st.sampled_from(usable)))
            items += entered(opened[-1], now)
    return items, now + draw(steps)


def seconds_by_phase(values: dict[Any, Any]) -> dict[str, float]:
    return {
        dict(labels)["phase"]: value for (name, labels), value in values.items() if name == "training.phase"
    }


@settings(max_examples=200, deadline=None)
@given(nestings(), st.integers(1, 7))
def test_the_seconds_of_all_phases_sum_to_wall_time_and_counters_never_fall_however_often_one_looks(
    job: tuple[list[Any], float], pieces: int
) -> None:
    items, end = job
    by_hand, before = ByHand(began=2.0), dict[Any, Any]()

    for start in range(0, len(items), 2 * pieces):
        part = items[start : start + 2 * pieces]
        by_hand.take(part)
        now = by_hand.values(part[-1], gauges=False)
        falling = [key for key, value in before.items() if now[key] < value]
        assert not falling
        before = now
    seconds = seconds_by_phase(by_hand.values(end))
    assert sum(seconds.values()) == pytest.approx(end - 2.0)
    assert all(value >= 0 for value in seconds.values())
    assert set(seconds) <= set(PHASES)


def test_time_before_the_first_loop_is_init_and_afterwards_other() -> None:
    by_hand = ByHand(began=0.0)

    by_hand.take(
        entered(kinds.TRAINING_ITERATION, 3.0)
        + stretch(kinds.DATA_LOADING, 3.0, 4.0)
        + stretch(kinds.MODEL_FORWARD, 4.5, 6.0)
        + left(kinds.TRAINING_ITERATION, 7.0)
    )

    assert seconds_by_phase(by_hand.values(10.0)) == pytest.approx(
        {"init": 3.0, "data_loading": 1.0, "iteration": 1.5, "forward": 1.5, "other": 3.0}
    )


def test_the_active_phase_is_the_innermost_and_tells_since_when() -> None:
    by_hand = ByHand(began=0.0)
    by_hand.take(entered(kinds.TRAINING_ITERATION, 3.0) + entered(kinds.DATA_LOADING, 4.0))
    inside = by_hand.values(5.0)
    reading = by_hand.reading()
    by_hand.take(left(kinds.DATA_LOADING, 6.0))
    outside = by_hand.values(7.0)

    for values, phase, since in ((inside, "data_loading", 4.0), (outside, "iteration", 6.0)):
        active = [
            labels for (name, labels), value in values.items() if name == "training.phase_active" and value
        ]
        assert active == [(("phase", phase),)]
        assert values["training.phase_active_since_timestamp", ()] == since
    assert (reading.phase, reading.phase_since) == ("data_loading", 4.0)


def test_a_phase_inside_the_same_phase_is_one_phase() -> None:
    by_hand = ByHand(began=0.0)

    outer = kinds.kind_named("validation", phase=True)
    by_hand.take(entered(outer, 1.0) + stretch(kinds.VALIDATION_ITERATION, 2.0, 3.0) + left(outer, 5.0))

    values = by_hand.values(6.0)
    assert values["training.phase_entries", (("phase", "validation"),)] == 1
    assert values["training.phase_duration", (("phase", "validation"),)][:2] == (1, 4.0)


def test_the_history_tells_each_stay_of_the_last_seconds() -> None:
    by_hand = ByHand(began=0.0)
    by_hand.take(entered(kinds.TRAINING_ITERATION, 10.0) + stretch(kinds.MODEL_FORWARD, 10.25, 10.32))
    by_hand.values(17.25)

    assert history(by_hand) == [
        (10.0, 10.25, "iteration"),
        (10.25, 10.32, "forward"),
        (10.32, 17.24, "iteration"),
    ]


def test_the_history_of_a_thousand_changes_a_second_has_what_each_phase_had_of_a_sample() -> None:
    by_hand = ByHand(began=0.0)
    for step in range(200):
        at = step / 100
        by_hand.take(stretch(kinds.MODEL_FORWARD, at, at + 0.002))
        by_hand.take(stretch(kinds.MODEL_BACKWARD, at + 0.002, at + 0.008))
    by_hand.values(2.0)
    stays = history(by_hand)

    assert len(stays) == 50 * 2 * 3
    first = [(phase, round(until - began, 6)) for began, until, phase in stays[:3]]
    assert first == [("forward", 0.004), ("backward", 0.012), ("init", 0.004)]
    assert [each[2] for each in stays[3:6]] == ["forward", "backward", "init"]


def history(by_hand: ByHand) -> list[tuple[float, float, str]]:
    """Begin, end and phase of every stay that the feed carries."""
    reading = by_hand.reading()
    at = reading.history_until - sum(reading.history[1::2]) / 1e6
    found = []
    for place, microseconds in zip(reading.history[::2], reading.history[1::2], strict=True):
        found.append((round(at, 6), round(at + microseconds / 1e6, 6), reading.history_phases[place]))
        at += microseconds / 1e6
    return found


def test_a_phase_that_is_none_is_said_once() -> None:
    with begun_anew():
        for _ in range(3):
            with training.phase("fordward"):
                pass

        assert misuses() == {("phase", "unknown_phase"): 1}
        assert of("training.phase_entries", phase="fordward") is None
        assert kinds.kind_named("two\nlines" * 99, phase=False).name == ("two?lines" * 99)[:256]
