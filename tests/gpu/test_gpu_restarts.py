"""How soon there is another NVML child, and which GPUs it leaves out."""

from __future__ import annotations

import pytest

from exporter.collectors.gpu.supervisor import CRASHED, HANGS_AT_ONCE, RESTART_REASONS, Restarts, Timings

TIMINGS = Timings()


def test_a_child_that_fails_is_tried_ever_more_seldom_until_one_has_served_for_long() -> None:
    restarts = Restarts(TIMINGS)

    assert [restarts.wait() for _ in range(9)] == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    restarts.forgive(TIMINGS.steady - 1)
    assert restarts.wait() == 300
    restarts.forgive(TIMINGS.steady)
    assert restarts.wait() == 5


@pytest.mark.parametrize(("at_once", "waits"), [(1, [0, 10, 20]), (HANGS_AT_ONCE, [0, 0, 0, 40])])
def test_what_is_replaced_at_once_costs_no_gap_unless_it_comes_again_and_again(
    at_once: int, waits: list[float]
) -> None:
    restarts = Restarts(TIMINGS)

    assert [restarts.wait(at_once=at_once) for _ in waits] == waits


def test_a_card_that_hung_gets_a_second_chance_and_no_third() -> None:
    restarts = Restarts(TIMINGS)

    restarts.leave_out(3)
    assert restarts.left_out == {3}
    assert restarts.take_back(3, slow=False) == {3}
    assert restarts.left_out == frozenset()

    restarts.leave_out(3)
    assert restarts.take_back(3, slow=False) == frozenset()
    assert restarts.left_out == {3}

    restarts.forget_hangs()
    assert restarts.left_out == frozenset()


def test_a_card_that_was_merely_slow_is_always_taken_back() -> None:
    restarts = Restarts(TIMINGS)

    for _ in range(5):
        restarts.leave_out(3)
        assert restarts.take_back(3, slow=True) == {3}


def test_reasons_that_nobody_knows_share_one_label() -> None:
    restarts = Restarts(TIMINGS)
    restarts.count(CRASHED)
    restarts.count("a reason of the future")

    assert {reason: number for reason, number in restarts.counts.items() if number} == {
        CRASHED: 1,
        "unknown": 1,
    }
    assert set(restarts.counts) == set(RESTART_REASONS)
