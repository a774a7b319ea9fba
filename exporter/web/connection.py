"""Connections: TLS handshake, requests and answers, goodbye, each with a deadline; and the guard of all.

One task per connection on the web server's loop, ended by being cancelled. What peers do wrong is counted, never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from exporter.web.counts import Counts, Reason
from exporter.web.http import Answer, Exchanges, Limits, MalformedError, Request
from exporter.web.protection import WebConfigFile
from exporter.web.routes import Routes

_CHUNK_BYTES = 64 * 1024

_log = logging.getLogger(__name__)

T = TypeVar("T")


class State(enum.Enum):
    """What a connection is doing; the value is the label `state`."""

    INCOMPLETE = "incomplete"  # TLS handshake or head missing
    IDLE = "idle"  # between two requests, or saying goodbye
    RUNNING = "running"  # its answer is being made
    WRITING = "writing"


class Guard:
    """All connections of a server, and who must go when there is no room.

    The oldest incomplete one goes, else the oldest idle, else the oldest whose answer has been stuck in writing for a
    while; never a running one. So a flood only displaces itself: a real scrape sends its head at once, and is no
    longer incomplete by the time the flood has come round.
    """

    def __init__(self, limits: Limits) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = limits.connections if files == resource.RLIM_INFINITY else max(16, files - limits.spare_files)
        self.capacity = min(limits.connections, room)
        self._limits = limits
        # Of each state the oldest first, because a dict keeps the order of insertion; with the time of entry.
        self._members: dict[State, dict[Connection, float]] = {state: {} for state in State}

    def members(self, *states: State) -> list[Connection]:
        """The connections in these states, the oldest of each state first; from any thread."""
        return [connection for state in states or State for connection in self._members[state].copy()]

    def make_room(self) -> bool:
        """See that there is room for one more; False when all are being answered."""
        return sum(map(len, self._members.values())) < self.capacity or self.evict()

    def move(self, connection: Connection, state: State | None) -> None:
        """Note that a connection begins something else, or with None that it has ended."""
        if connection.state is not None:
            del self._members[connection.state][connection]
        connection.state, connection.body = state, b""
        if state is not None:
            self._members[state][connection] = time.monotonic()

    def begin_writing(self, connection: Connection, body: bytes) -> None:
        """Note that a connection sends an answer; the oldest that do are ended when all together are too much."""
        self.move(connection, State.WRITING)
        connection.body = body
        for oldest in self.members(State.WRITING):
            # A body that several send is one object and counts once.
            bodies = {id(each.body): len(each.body) for each in self._members[State.WRITING]}
            if oldest is connection or sum(bodies.values()) <= self._limits.bytes_in_flight:
                return
            self._end(oldest)

    def evict(self) -> bool:
        """End the connection that is missed least; False when all are being answered."""
        stuck = time.monotonic() - self._limits.stalled_seconds
        for state in (State.INCOMPLETE, State.IDLE, State.WRITING):
            for connection, since in self._members[state].items():
                if state is State.WRITING and since > stuck:
                    break
                self._end(connection)
                return True
        return False

    def _end(self, connection: Connection) -> None:
        self.move(connection, None)
        connection.end("evicted")


class Wire:
    """Bytes to and from one peer: a connected, non-blocking socket, closed by its owner.

    Nothing here has a time limit. `write` returns when the kernel has taken all bytes, so a peer that does not read is
    always seen, and an answer is never copied for it; asyncio's TLS transport instead takes an answer of any size into
    its inner buffer and calls it written, so that no write could be given a deadline.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self, size: int) -> bytes:
        """At most so many bytes, as soon as there are any; b"" when the peer has ended its side."""
        data = await self._loop.sock_recv(self._sock, size)
        await asyncio.sleep(0)  # who sends without end does not keep the loop from the others
        return data

    async def write(self, parts: Sequence[bytes]) -> None:
        """Send everything; returns when the kernel has it."""
        # One segment for a small answer; a large body is not copied to get its header into the same call.
        if sum(map(len, parts)) <= _CHUNK_BYTES:
            parts = (b"".join(parts),)
        for part in parts:
            await self._send(part)

    async def finish(self, most: int) -> None:
        """Say goodbye, then read until the peer ends its side or has sent `most` bytes: unread input resets the connection."""
        self._sock.shutdown(socket.SHUT_WR)
        while most > 0 and (data := await Wire.read(self, _CHUNK_BYTES)):
            most -= len(data)

    async def _send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)


class TlsWire(Wire):
    """The same with TLS between."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(sock)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    async def handshake(self) -> frozenset[str] | None:
        """Agree on a session, or raise SSLError; gives the alternative names of the peer's verified certificate, if any."""
        await self._drive(self._tls.do_handshake)
        certificate = self._tls.getpeercert()
        if not certificate:
            return None
        # ((kind, name), ...); typeshed also allows for certificate fields of other shapes
        return frozenset(str(entry[1]) for entry in certificate.get("subjectAltName", ()))

    async def read(self, size: int) -> bytes:
        """See `Wire`."""
        try:
            return await self._drive(lambda: self._tls.read(size))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""  # with or without the goodbye of TLS: HTTP knows by itself whether a message is whole

    async def finish(self, most: int) -> None:
        """See `Wire`."""
        with contextlib.suppress(ssl.SSLError):  # the peer's goodbye is not waited for but discarded
            self._tls.unwrap()
        await self._flush()
        await super().finish(most)

    async def _send(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            self._tls.write(view[start : start + _CHUNK_BYTES])
            await self._flush()

    async def _drive(self, step: Callable[[], T]) -> T:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self._flush()
            except ssl.SSLError:
                await self._flush()  # the alert that tells the peer what is wrong
                raise
            else:
                await self._flush()
                return result
            if data := await super().read(_CHUNK_BYTES):
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await super()._send(self._outgoing.read())


_NOT_TLS = Answer(400, b"this port speaks HTTPS\n", close=True, route="malformed")


@dataclass(slots=True)
class ServerState:
    """What all connections of a server share."""

    guard: Guard
    limits: Limits
    config: WebConfigFile
    routes: Routes
    counts: Counts = field(default_factory=Counts)
    closing: bool = False  # the server is stopping, so that every answer is its connection's last
    defective: bool = False  # a connection has ended by a defect of ours, which was logged


class Connection:
    """One accepted, non-blocking socket, which it closes in the end."""

    state: State | None = None  # what it is doing, kept by the guard; None when it has ended
    body = b""  # what it sends, while it does

    def __init__(self, sock: socket.socket, peer: str, server: ServerState) -> None:
        self._sock = sock
        self._peer = peer
        self._server = server
        self._exchanges = Exchanges(head_bytes=server.limits.head_bytes, head_lines=server.limits.head_lines)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._enter(State.INCOMPLETE, server.limits.head_seconds, "head_timeout")
        self.task: asyncio.Task[None] | None = self._loop.create_task(self._talk())
        # Not a `finally` of the task: one that is cancelled before its first step never enters it.
        self.task.add_done_callback(self._ended)

    def end(self, reason: Reason | None = None) -> None:
        """End soon, whatever it is doing, and count why."""
        if reason is not None:
            self._server.counts.errors[reason] += 1
        if self.task is not None:
            self.task.cancel()

    def _enter(self, state: State, seconds: float | None = None, error: Reason | None = None) -> None:
        """Begin something else, which may take so long."""
        self._server.guard.move(self, state)
        self._limit(seconds, error)

    def _limit(self, seconds: float | None, error: Reason | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self.end, error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        server = self._server
        self._limit(None)
        server.guard.move(self, None)
        self._sock.close()
        # Without cycles it is gone at once: the garbage collector may look for them minutes later.
        self.task = None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ssl.SSLError):
            server.counts.errors["tls"] += 1
        elif isinstance(error, OSError):
            server.counts.errors["reset"] += 1
        elif error is not None and not server.defective:
            server.defective = True
            _log.error("a connection ended by a defect of the exporter", exc_info=error)
        while error is not None:  # asyncio's future holds it, and it the frame that holds the future
            error.__traceback__ = None
            error = error.__context__

    async def _talk(self) -> None:
        limits = self._server.limits
        wire = await self._open()
        while wire is not None:
            try:
                request = await self._read(wire)
            except MalformedError as malformed:
                await self._send(wire, malformed.answer)
                break
            if request is None:
                return
            if not await self._exchange(wire, request):
                break
            if self._exchanges.begun:
                self._enter(State.INCOMPLETE, limits.head_seconds, "head_timeout")
                await asyncio.sleep(0)  # who sends request upon request waits for the others too
            else:
                self._enter(State.IDLE, limits.idle_seconds)
        if wire is not None:
            await self._say_goodbye(wire)

    async def _open(self) -> Wire | None:
        """The peer's wire, after the handshake where there is one; None for a peer that may not come in."""
        tls = (await self._server.config.current()).tls
        if tls is None:
            return Wire(self._sock)
        wire = TlsWire(self._sock, tls.context)
        try:
            names = await wire.handshake()
        except ssl.SSLError as error:
            if error.reason != "HTTP_REQUEST":
                raise
            plain = Wire(self._sock)
            await self._send(plain, _NOT_TLS)
            await self._say_goodbye(plain)
            return None
        if names is not None and not tls.admits(names):
            self._server.counts.errors["certificate"] += 1
            return None
        return wire

    async def _read(self, wire: Wire) -> Request | None:
        """The next request; None when the peer has ended its side."""
        while (request := self._exchanges.request()) is None:
            data = await wire.read(self._server.limits.head_bytes)
            if not data:
                if self._exchanges.begun:
                    self._server.counts.errors["truncated"] += 1
                return None
            if self.state is State.IDLE:  # the first bytes of a new head limit the time for the rest of it
                self._enter(State.INCOMPLETE, self._server.limits.head_seconds, "head_timeout")
            self._exchanges.feed(data)
        return request

    async def _exchange(self, wire: Wire, request: Request) -> bool:
        """Answer one request; whether the connection goes on."""
        began = self._loop.time()
        self._enter(State.RUNNING)
        answer = await self._server.routes.answer(request, self._peer)
        goes_on = await self._send(wire, answer)
        if answer.scrape:
            counts = self._server.counts
            counts.scrapes += 1
            counts.scrape_seconds += self._loop.time() - began
            counts.scrapers.note(self._peer, request.header("user-agent") or "", time.monotonic())
        return goes_on

    async def _send(self, wire: Wire, answer: Answer) -> bool:
        """Hand an answer to the kernel; whether the connection may go on."""
        self._server.counts.requests[answer.route, answer.status] += 1
        parts, goes_on = self._exchanges.answer(answer, close=self._server.closing)
        self._server.guard.begin_writing(self, answer.body)
        self._limit(self._server.limits.write_seconds, "write_timeout")
        await wire.write(parts)
        return goes_on

    async def _say_goodbye(self, wire: Wire) -> None:
        self._enter(State.IDLE, self._server.limits.farewell_seconds)
        await wire.finish(self._server.limits.farewell_bytes)
