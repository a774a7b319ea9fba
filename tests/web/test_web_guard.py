"""Connection guard: the order in which connections are closed, and the limit on the bytes of their responses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from exporter.web import guard as guard_module
from exporter.web.guard import ConnectionGuard, ConnectionState
from exporter.web.http import Limits


class FakeConnection:
    """Connection that only records whether the guard has closed it."""

    def __init__(self) -> None:
        self.state: ConnectionState | None = None
        self.body = b""
        self.is_closed = False

    def evict(self) -> None:
        self.is_closed = True


class Clock:
    """Monotonic clock of the guard, which advances only on request."""

    seconds = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(guard_module, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    return clock


def connect(guard: ConnectionGuard, state: ConnectionState) -> FakeConnection:
    connection = FakeConnection()
    guard.set_state(connection, state)
    return connection


def send(guard: ConnectionGuard, body: bytes) -> FakeConnection:
    connection = FakeConnection()
    guard.begin_writing(connection, body)
    return connection


def test_stalled_responses_then_incomplete_and_idle_connections_are_closed_oldest_first(clock: Clock) -> None:
    guard = ConnectionGuard(Limits(stalled_seconds=0.3))
    running = connect(guard, ConnectionState.RUNNING)
    idle = [connect(guard, ConnectionState.IDLE) for _ in range(2)]
    incomplete = [connect(guard, ConnectionState.INCOMPLETE) for _ in range(2)]
    stalled = [send(guard, b"body") for _ in range(2)]
    clock.seconds += 1.0
    read_response = send(guard, b"body")
    order = [*stalled, *incomplete, *idle]

    for number in range(1, len(order) + 1):
        assert guard.evict_one()
        assert [connection.is_closed for connection in order] == [index < number for index in range(6)]
    assert not guard.evict_one()
    assert [running.is_closed, read_response.is_closed] == [False, False]


def test_a_response_is_stalled_once_its_peer_has_not_read_for_a_time(clock: Clock) -> None:
    guard = ConnectionGuard(Limits(stalled_seconds=0.3))
    read_response, stalled = send(guard, b"body"), send(guard, b"body")
    clock.seconds += 1.0
    guard.record_progress(read_response)

    assert guard.evict_one()
    assert (read_response.is_closed, stalled.is_closed) == (False, True)
    assert not guard.evict_one()
    clock.seconds += 1.0
    assert guard.evict_one()
    assert read_response.is_closed


def test_a_full_guard_has_room_for_a_new_connection_only_after_closing_another(clock: Clock) -> None:
    guard = ConnectionGuard(Limits(connections=2))
    connect(guard, ConnectionState.RUNNING)
    has_room_for_second = guard.make_room()
    idle = connect(guard, ConnectionState.IDLE)
    has_room_for_third = guard.make_room()
    connect(guard, ConnectionState.RUNNING)

    assert (has_room_for_second, has_room_for_third, idle.is_closed) == (True, True, True)
    assert not guard.make_room()


def test_responses_above_the_limit_of_bytes_close_the_writers_that_wait_longest(clock: Clock) -> None:
    guard = ConnectionGuard(Limits(bytes_in_flight=100))
    first, second = send(guard, bytes(40)), send(guard, bytes(50))
    guard.record_progress(first)
    third = send(guard, bytes(60))

    assert [connection.is_closed for connection in (first, second, third)] == [False, True, False]


def test_a_body_that_several_connections_send_counts_once_and_a_large_body_is_sent(clock: Clock) -> None:
    guard = ConnectionGuard(Limits(bytes_in_flight=100))
    body = bytes(90)
    sharing = [send(guard, body) for _ in range(3)]
    are_open = [not connection.is_closed for connection in sharing]
    large = send(guard, bytes(200))

    assert are_open == [True] * 3
    assert [connection.is_closed for connection in (*sharing, large)] == [True, True, True, False]
