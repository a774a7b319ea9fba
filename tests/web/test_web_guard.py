"""The guard by itself: it is never over its capacity, and who has to go is always the same."""

from __future__ import annotations

import resource

from hypothesis import given
from hypothesis import strategies as st

from exporter.web.connection import Guard, State, capacity


class Visitor:
    def __init__(self) -> None:
        self.evicted = False

    def evict(self) -> None:
        self.evicted = True


def guard_of(*states: State, clock: float = 100.0) -> tuple[Guard[Visitor], list[Visitor]]:
    """A full guard whose visitors came in this order and are in these states."""
    guard: Guard[Visitor] = Guard(len(states), max_bytes=100, stalled_seconds=1.0, clock=lambda: clock)
    visitors = [Visitor() for _ in states]
    for visitor, state in zip(visitors, states, strict=True):
        guard.admit(visitor)
        guard.move(visitor, state)
    return guard, visitors


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "move", "forget"]), st.integers(0, 9), st.sampled_from(State))
    )
)
def test_the_guard_is_never_over_its_capacity_and_evicts_nobody_who_is_running(
    steps: list[tuple[str, int, State]],
) -> None:
    guard: Guard[Visitor] = Guard(3, max_bytes=100, stalled_seconds=0.0)
    visitors: list[Visitor] = []
    for step, index, state in steps:
        running = guard.members([State.RUNNING])
        if step == "admit":
            visitors.append(Visitor())
            guard.admit(visitors[-1])
        elif step == "move" and visitors:
            guard.move(visitors[index % len(visitors)], state)
        elif visitors:
            guard.forget(visitors[index % len(visitors)])

        assert len(guard) == sum(guard.counts().values()) <= 3
        assert not any(visitor.evicted for visitor in running)
        assert not any(visitor.evicted for visitor in guard.members())


def test_the_oldest_incomplete_goes_first() -> None:
    guard, (idle, old, new) = guard_of(State.IDLE, State.INCOMPLETE, State.INCOMPLETE)

    assert guard.admit(Visitor())
    assert [idle.evicted, old.evicted, new.evicted] == [False, True, False]


def test_the_oldest_idle_goes_when_none_is_incomplete() -> None:
    guard, (running, idle) = guard_of(State.RUNNING, State.IDLE)

    assert guard.admit(Visitor())
    assert [running.evicted, idle.evicted] == [False, True]


def test_nobody_is_let_in_while_all_are_running() -> None:
    guard, visitors = guard_of(State.RUNNING, State.RUNNING)

    assert not guard.admit(Visitor())
    assert not any(visitor.evicted for visitor in visitors)
    assert guard.evicted == 0


def test_an_answer_is_given_up_only_when_it_has_been_stuck_for_a_while() -> None:
    now = [100.0]
    guard: Guard[Visitor] = Guard(1, max_bytes=100, stalled_seconds=1.0, clock=lambda: now[0])
    visitor = Visitor()
    guard.admit(visitor)
    guard.move(visitor, State.WRITING)

    now[0] += 0.9
    assert not guard.admit(Visitor())
    now[0] += 0.2
    assert guard.admit(Visitor())
    assert visitor.evicted


def test_an_evicted_visitor_does_not_come_back_by_moving() -> None:
    guard, (visitor,) = guard_of(State.INCOMPLETE)
    guard.evict()

    guard.move(visitor, State.RUNNING)

    assert len(guard) == 0


def test_the_capacity_leaves_descriptors_to_the_rest_of_the_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        found = []
        for files in (1024, 256, 70, 40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            found.append(capacity(512, 64))
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
