"""The guard by itself: it is never over its capacity, and who has to go is always the same."""

from __future__ import annotations

import pytest

from exporter.web.connection import Connection, Guard, State
from exporter.web.counts import Reason
from exporter.web.http import Limits


class Visitor(Connection):
    """A connection without a socket."""

    def __init__(self) -> None:
        self.evicted = False

    def end(self, reason: Reason | None = None) -> None:
        self.evicted = True


def guard_of(*states: State, now: list[float] | None = None) -> tuple[Guard, list[Visitor]]:
    """A full guard whose visitors came in this order and are in these states."""
    clock = [100.0] if now is None else now
    guard = Guard(Limits(connections=len(states), bytes_in_flight=100), lambda: clock[0])
    visitors = [Visitor() for _ in states]
    for visitor, state in zip(visitors, states, strict=True):
        guard.move(visitor, State.INCOMPLETE)
        guard.move(visitor, state)
    return guard, visitors


@pytest.mark.parametrize(
    ("states", "goes"),
    [
        ((State.IDLE, State.INCOMPLETE, State.INCOMPLETE), 1),
        ((State.RUNNING, State.IDLE, State.IDLE), 1),
        ((State.RUNNING, State.RUNNING), None),
    ],
)
def test_the_oldest_incomplete_goes_else_the_oldest_idle_and_never_a_running_one(
    states: tuple[State, ...], goes: int | None
) -> None:
    guard, visitors = guard_of(*states)

    assert guard.make_room() is (goes is not None)
    assert [place for place, visitor in enumerate(visitors) if visitor.evicted] == [*({goes} - {None})]


def test_an_answer_is_given_up_only_when_it_has_been_stuck_for_a_while() -> None:
    now = [100.0]
    guard, (visitor,) = guard_of(State.WRITING, now=now)

    now[0] += 0.9
    assert not guard.make_room()
    now[0] += 0.2
    assert guard.make_room()
    assert visitor.evicted


def test_bodies_in_flight_are_bounded_and_one_that_many_send_counts_once() -> None:
    guard, visitors = guard_of(*[State.RUNNING] * 6)
    shared = b"s" * 60
    for visitor in visitors[:4]:
        guard.begin_writing(visitor, shared)
    all_of_one = [visitor.evicted for visitor in visitors]
    guard.begin_writing(visitors[4], b"x" * 60)
    guard.begin_writing(visitors[5], b"larger than all that may be" * 10)

    assert not any(all_of_one)
    assert [visitor.evicted for visitor in visitors] == [True] * 5 + [False]
