"""Connections: one's talk (TLS handshake, requests and answers, goodbye; each with a deadline), and the guard of all.

Used in the sidecar, on the web server's loop: one task per connection. A deadline, an eviction and the end of the drain
all end it in one way, by cancelling the task; whatever it was doing, its socket is closed after it. What a peer does
wrong is counted by reason and never logged: it would let anybody fill the log.

The guard knows how many connections there are and in which state: *incomplete* (TLS handshake or head missing), *idle*
(between two requests, or saying goodbye), *running* (its answer is being made) or *writing*. When there is no room the
oldest incomplete one goes, else the oldest idle, else the oldest whose answer has been stuck in writing for a while;
never a running one. So a flood only displaces itself: a real scrape sends its head at once, and is no longer incomplete
by the time the flood has come round.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from exporter.web.counts import Counts, PeerError
from exporter.web.http import Answer, Exchange, MalformedError, Request
from exporter.web.limits import Limits
from exporter.web.protection import Protection
from exporter.web.routes import Routes
from exporter.web.wire import PlainWire, TlsWire, Wire


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


_NOT_TLS = Answer(400, b"this port speaks HTTPS\n", close=True, route="malformed")


@dataclass(slots=True)
class House:
    """What all connections of a server share.

    Attributes:
        guard: Who is here.
        limits: How long things may take.
        counts: What has happened.
        protection: The settings in force.
        routes: The answers.
        log: For defects of ours, once.
        closing: Whether the server is stopping, so that every answer is its connection's last.
        defects: Connections that ended by a defect of ours.
    """

    guard: Guard[Connection]
    limits: Limits
    counts: Counts
    protection: Protection
    routes: Routes
    log: logging.Logger
    closing: bool = False
    defects: int = 0


class Connection:
    """One accepted socket, which it closes in the end.

    Args:
        sock: Connected and non-blocking.
        peer: Its other end's address.
        house: What it shares with the others.
    """

    def __init__(self, sock: socket.socket, peer: str, house: House) -> None:
        self._sock = sock
        self._peer = peer
        self._house = house
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = math.inf
        self._lateness: PeerError | None = None
        self._plain = PlainWire(sock, self._first_bytes, self._start_timer)
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to talk."""
        self.task = self._loop.create_task(self._talk())
        # Not a `finally` of the task: one that is cancelled before its first step never enters it.
        self.task.add_done_callback(self._ended)

    def evict(self) -> None:
        """End at once, to make room or because the server stops."""
        if self.task is not None:
            self.task.cancel()

    # Deadlines ---------------------------------------------------------------------------------------------

    def _expire_after(self, seconds: float, error: PeerError | None) -> None:
        """Give the next phase its time."""
        self._deadline, self._lateness = self._loop.time() + seconds, error

    def _unhurried(self) -> None:
        self._deadline = math.inf

    def _start_timer(self) -> None:
        """Watch over the deadline, as there is something to wait for; a timer that comes too early stays."""
        if self._deadline < (math.inf if self._timer is None else self._timer.when()):
            self._stop_timer()
            self._timer = self._loop.call_at(self._deadline, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._loop.time() < self._deadline:  # it was moved since the timer was set
            self._start_timer()
            return
        if self._lateness is not None:
            self._house.counts.peer_errors[self._lateness] += 1
        self.evict()

    def _first_bytes(self) -> None:
        """Bytes have come; the first of a new head limit the time for the rest of it."""
        if self._house.guard.state(self) is State.IDLE:
            self._begin_head()

    def _begin_head(self) -> None:
        self._house.guard.move(self, State.INCOMPLETE)
        self._expire_after(self._house.limits.head_seconds, "head_timeout")

    # The talk ----------------------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._stop_timer()
        self._house.guard.forget(self)
        self._plain.stop()
        self._sock.close()
        # Without cycles it is gone at once: the garbage collector may look for them minutes later.
        self.task = None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ssl.SSLError):
            self._house.counts.peer_errors["tls"] += 1
        elif isinstance(error, OSError):
            self._house.counts.peer_errors["reset"] += 1
        elif error is not None:
            self._house.defects += 1
            if self._house.defects == 1:
                self._house.log.error("a connection ended by a defect of the exporter", exc_info=error)
        while error is not None:  # asyncio's future holds it, and it the frame that holds the future
            error.__traceback__ = None
            error = error.__context__

    async def _talk(self) -> None:
        self._begin_head()
        wire = await self._open()
        received, familiar, limits = b"", None, self._house.limits
        while wire is not None:
            exchange = Exchange(
                head_bytes=limits.head_bytes,
                head_lines=limits.head_lines,
                received=received,
                familiar=familiar,
            )
            try:
                request = await self._read(wire, exchange)
            except MalformedError as malformed:
                await self._send(wire, exchange, malformed.answer)
                await self._say_goodbye(wire)
                return
            if request is None:
                return
            if not await self._exchange(wire, exchange, request):
                return
            received, familiar = exchange.left_over, exchange.head
            if received:
                self._begin_head()
                await asyncio.sleep(0)  # who sends request upon request waits for the others too
            else:
                self._house.guard.move(self, State.IDLE)
                self._expire_after(limits.idle_seconds, None)

    async def _open(self) -> Wire | None:
        """The peer's wire, after the handshake where there is one; None for a peer that may not come in."""
        if not self._house.protection.tls:
            return self._plain
        settings = await self._house.protection.current()
        if settings.tls is None:  # never: TLS is not switched off while the server runs
            return None
        wire = TlsWire(self._plain, settings.tls.context)
        try:
            await wire.handshake()
        except ssl.SSLError as error:
            if error.reason != "HTTP_REQUEST":
                raise
            limits = self._house.limits
            exchange = Exchange(head_bytes=limits.head_bytes, head_lines=limits.head_lines)
            await self._send(self._plain, exchange, _NOT_TLS)
            await self._say_goodbye(self._plain)
            return None
        if wire.verified and not settings.tls.admits(wire.alternative_names()):
            self._house.counts.peer_errors["certificate"] += 1
            return None
        return wire

    async def _read(self, wire: Wire, exchange: Exchange) -> Request | None:
        """The next request; None when the peer has ended its side."""
        while (request := exchange.request()) is None:
            data = await wire.read(exchange.room)
            if not data:
                if exchange.begun:
                    self._house.counts.peer_errors["truncated"] += 1
                return None
            exchange.feed(data)
        return request

    async def _exchange(self, wire: Wire, exchange: Exchange, request: Request) -> bool:
        """Answer one request; whether the connection goes on."""
        began = self._loop.time()
        self._unhurried()
        self._house.guard.move(self, State.RUNNING)
        answer = await self._house.routes.answer(request, self._peer)
        goes_on = await self._send(wire, exchange, answer)
        if answer.scrape:
            self._house.counts.scraped(self._loop.time() - began, len(answer.body))
            agent = request.header("user-agent") or ""
            self._house.counts.scrapers.note(self._peer, agent, time.monotonic())
        if not goes_on:
            await self._say_goodbye(wire)
        return goes_on

    async def _send(self, wire: Wire, exchange: Exchange, answer: Answer) -> bool:
        """Hand an answer to the kernel; whether the connection may go on."""
        self._house.counts.requests[answer.route, answer.status] += 1
        parts, goes_on = exchange.answer(answer, close=self._house.closing)
        self._house.guard.begin_writing(self, answer.body)
        self._expire_after(self._house.limits.write_seconds, "write_timeout")
        await wire.write(parts)
        return goes_on

    async def _say_goodbye(self, wire: Wire) -> None:
        self._house.guard.move(self, State.IDLE)
        self._expire_after(self._house.limits.farewell_seconds, None)
        await wire.finish(self._house.limits.farewell_bytes)
