"""The guard by itself: it is never over its capacity, and who has to go is always the same."""

from __future__ import annotations

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "move", "forget"]), st.integers(0, 9), st.sampled_from([*State]))
    )
)
def test_the_guard_is_never_over_its_capacity_and_evicts_nobody_who_is_running(
    steps: list[tuple[str, int, State]],
) -> None:
    guard = Guard(Limits(connections=3, stalled_seconds=0.0))
    visitors: list[Visitor] = []
    for step, index, state in steps:
        running = guard.members(State.RUNNING)
        here = [visitor for visitor in visitors if visitor.state is not None]
        if step == "admit" and guard.make_room():
            visitors.append(Visitor())
            guard.move(visitors[-1], State.INCOMPLETE)
        elif step != "admit" and here:
            guard.move(here[index % len(here)], state if step == "move" else None)

        assert len(guard.members()) <= 3
        assert not any(
            visitor.evicted for visitor in [*running, *guard.members()] if type(visitor) is Visitor
        )


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


def test_the_capacity_leaves_descriptors_to_the_rest_of_the_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        found = []
        for files in (1024, 256, 70, 40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            found.append(Guard(Limits()).capacity)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert found == [512, 192, 16, 16]


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
