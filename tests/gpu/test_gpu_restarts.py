"""How soon there is another NVML child, and which GPUs it leaves out."""

from __future__ import annotations

from exporter.collectors.gpu.restarts import CRASHED, HANGS_AT_ONCE, RESTART_REASONS, Restarts, Timings

TIMINGS = Timings()


def test_a_child_that_fails_is_tried_ever_more_seldom() -> None:
    restarts = Restarts(TIMINGS)

    waits = [restarts.wait() for _ in range(9)]

    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_one_that_served_for_long_had_no_bad_start() -> None:
    restarts = Restarts(TIMINGS)
    for _ in range(5):
        restarts.wait()

    restarts.forgive(TIMINGS.steady - 1)
    assert restarts.wait() == 160
    restarts.forgive(TIMINGS.steady)
    assert restarts.wait() == 5


def test_an_orderly_end_costs_no_gap_unless_it_comes_again_and_again() -> None:
    restarts = Restarts(TIMINGS)

    assert [restarts.wait(at_once=1) for _ in range(3)] == [0, 10, 20]


def test_cards_that_hang_cost_the_others_no_gap_at_first() -> None:
    restarts = Restarts(TIMINGS)

    waits = [restarts.wait(at_once=HANGS_AT_ONCE) for _ in range(4)]

    assert waits == [0, 0, 0, 40]


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


def test_a_call_on_no_card_or_on_one_that_was_forgotten_takes_nothing_back() -> None:
    restarts = Restarts(TIMINGS)
    restarts.leave_out(3)
    restarts.forget_hangs()

    assert restarts.take_back(3, slow=True) == frozenset()
    assert restarts.take_back(None, slow=True) == frozenset()


def test_reasons_that_nobody_knows_share_one_label() -> None:
    restarts = Restarts(TIMINGS)
    restarts.count(CRASHED)
    restarts.count("a reason of the future")

    assert {reason: number for reason, number in restarts.counts.items() if number} == {
        CRASHED: 1,
        "unknown": 1,
    }
    assert set(restarts.counts) == set(RESTART_REASONS)
