"""The guard: how many connections there are, in which state, and which of them goes when there is no room.

Used in the sidecar, on the web server's loop only. A connection is *incomplete* (TLS handshake or head
missing), *idle* (between two requests, or saying goodbye), *running* (its answer is being made) or *writing*.
When there is no room the oldest incomplete one goes, else the oldest idle, else the oldest whose answer has
been stuck in writing for a while; never a running one. So a flood only displaces itself: a real scrape sends
its head at once, and is no longer incomplete by the time the flood has come round.
"""

from __future__ import annotations

import enum
import resource
import time
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class State(enum.Enum):
    """What a connection is doing; the value is the label `state`."""

    INCOMPLETE = "incomplete"
    IDLE = "idle"
    RUNNING = "running"
    WRITING = "writing"

    __hash__ = object.__hash__  # an enumeration's own is written in Python, and each answer looks up a dozen


class Evictable(Protocol):
    """What the guard needs of a connection."""

    def evict(self) -> None:
        """End it soon, whatever it is doing; called on the loop, at most once."""
        ...


C = TypeVar("C", bound=Evictable)


class Guard(Generic[C]):
    """All connections of a server.

    Attributes:
        capacity: How many there may be.
        evicted: How many had to go to make room.

    Args:
        capacity: How many there may be.
        max_bytes: What they may be sending together.
        stalled_seconds: Since when a connection must be in writing before it may go.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        capacity: int,
        *,
        max_bytes: int,
        stalled_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self.evicted = 0
        self._max_bytes = max_bytes
        self._stalled_seconds = stalled_seconds
        self._bodies: dict[C, bytes] = {}
        self._clock = clock
        self._where: dict[C, State] = {}
        # Ordered by the time of entry, because a dict keeps the order of insertion.
        self._since: dict[State, dict[C, float]] = {state: {} for state in State}

    def __len__(self) -> int:
        return len(self._where)

    def counts(self) -> dict[State, int]:
        """How many connections are in each state; may be called from any thread."""
        return {state: len(members) for state, members in self._since.items()}

    def members(self, states: Iterable[State] = tuple(State)) -> list[C]:
        """The connections in these states, the oldest of each state first."""
        return [connection for state in states for connection in self._since[state]]

    def admit(self, connection: C) -> bool:
        """Take a new, incomplete connection in; False when there is no room and none can be made."""
        if len(self) >= self.capacity and not self.evict():
            return False
        self._enter(connection, State.INCOMPLETE)
        return True

    def move(self, connection: C, state: State) -> None:
        """Note that a connection begins something else; ignored for one that has been evicted."""
        if connection in self._where:
            self.forget(connection)
            self._enter(connection, state)

    def begin_writing(self, connection: C, body: bytes) -> None:
        """Note that a connection sends an answer; the oldest that do are ended when all together are too much.

        A body that several send is one object and counts once.
        """
        self.move(connection, State.WRITING)
        if connection not in self._where or not body:
            return
        self._bodies[connection] = body
        writers = self._since[State.WRITING]
        while sum(map(len, {id(each): each for each in self._bodies.values()}.values())) > self._max_bytes:
            oldest = next(iter(writers))
            if oldest is connection:
                return
            self._end(oldest)

    def state(self, connection: C) -> State | None:
        """What a connection is doing; None for one that is not, or no longer, known."""
        return self._where.get(connection)

    def forget(self, connection: C) -> None:
        """Note that a connection has ended; may be called again."""
        self._bodies.pop(connection, None)
        state = self._where.pop(connection, None)
        if state is not None:
            del self._since[state][connection]

    def evict(self) -> bool:
        """End the connection that is missed least; False when all are being answered."""
        for state in (State.INCOMPLETE, State.IDLE, State.WRITING):
            oldest = next(iter(self._since[state].items()), None)
            if oldest is None:
                continue
            connection, since = oldest
            if state is State.WRITING and self._clock() - since < self._stalled_seconds:
                continue
            self._end(connection)
            return True
        return False

    def _end(self, connection: C) -> None:
        self.forget(connection)
        self.evicted += 1
        connection.evict()

    def _enter(self, connection: C, state: State) -> None:
        self._where[connection] = state
        self._since[state][connection] = self._clock()


def capacity(most: int, spare_files: int) -> int:
    """How many connections this process can hold: `most`, or what its limit of open files leaves."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return most
    return min(most, max(16, files - spare_files))
