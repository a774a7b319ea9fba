"""Connections of the web server. The handshake, each request, each response and the close have deadlines.

Each connection is a task on the server's event loop. A missed deadline or an eviction cancels the task. Errors of peers are
counted and not logged.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from dataclasses import dataclass, field

from exporter.web.counts import Counts, Reason
from exporter.web.guard import ConnectionGuard, ConnectionState
from exporter.web.http import HttpConnection, Limits, MalformedError, Request, Response
from exporter.web.protection import WebConfigFile
from exporter.web.routes import Router
from exporter.web.wire import TlsWire, Wire

_log = logging.getLogger(__name__)

_NOT_TLS = Response(400, b"this port requires HTTPS\n", close=True, route="malformed")


@dataclass(slots=True)
class ServerState:
    """State shared by all connections of a server."""

    guard: ConnectionGuard
    limits: Limits
    config_file: WebConfigFile
    router: Router
    counts: Counts = field(default_factory=Counts)
    is_closing: bool = False  # True while the server stops; every response then closes the connection
    has_logged_error: bool = False  # True after the first internal error; later ones are not logged


class Connection:
    """Connection over an accepted, non-blocking socket, which is closed at the end of the connection."""

    state: ConnectionState | None = None  # written by the guard; None after the end
    body = b""  # the response body being sent

    def __init__(self, sock: socket.socket, peer: str, server: ServerState) -> None:
        self._sock = sock
        self._peer = peer
        self._server = server
        self._http = HttpConnection(head_bytes=server.limits.head_bytes, head_lines=server.limits.head_lines)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._enter(ConnectionState.INCOMPLETE, server.limits.head_seconds, "head_timeout")
        self.task: asyncio.Task[None] | None = self._loop.create_task(self._serve())
        # A callback instead of `finally`: a task that is cancelled before its first step never enters the `try` block.
        self.task.add_done_callback(self._on_task_done)

    def end(self, reason: Reason | None = None) -> None:
        """Cancel the connection's task, and count the reason, if any."""
        if reason is not None:
            self._server.counts.errors[reason] += 1
        if self.task is not None:
            self.task.cancel()

    def evict(self) -> None:
        """Close the connection to make room for a new connection."""
        self.end("evicted")

    def _enter(
        self, state: ConnectionState, seconds: float | None = None, reason: Reason | None = None
    ) -> None:
        """Change the state. After *seconds*, the connection ends for the reason, which is counted unless it is None."""
        self._server.guard.set_state(self, state)
        self._set_deadline(seconds, reason)

    def _set_deadline(self, seconds: float | None, reason: Reason | None = None) -> None:
        """Replace the deadline after which the connection ends for the reason. Without *seconds*, there is no deadline."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self.end, reason)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Close the socket, leave the guard, and count the error that ended the task, if any."""
        server = self._server
        self._set_deadline(None)
        server.guard.set_state(self, None)
        self._sock.close()
        # Reference cycles are broken, because the garbage collector may run minutes later.
        self.task = None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ssl.SSLError):
            server.counts.errors["tls"] += 1
        elif isinstance(error, OSError):
            server.counts.errors["reset"] += 1
        elif error is not None and not server.has_logged_error:
            server.has_logged_error = True
            _log.error("internal error in a web connection", exc_info=error)
        # The future holds the error, and the error's traceback holds the frame that holds the future.
        while error is not None:
            error.__traceback__ = None
            error = error.__context__

    async def _serve(self) -> None:
        """Respond to the requests of the peer until the peer or a response closes the connection."""
        limits = self._server.limits
        wire = await self._open()
        while wire is not None:
            try:
                request = await self._read(wire)
            except MalformedError as malformed:
                await self._send(wire, malformed.response)
                break
            if request is None:  # the peer has closed the connection
                return
            if not await self._exchange(wire, request):
                break
            if self._http.has_partial_request:
                self._enter(ConnectionState.INCOMPLETE, limits.head_seconds, "head_timeout")
                await asyncio.sleep(0)  # a peer that pipelines requests must not block other peers
            else:
                self._enter(ConnectionState.IDLE, limits.idle_seconds)
        if wire is not None:
            await self._close(wire)

    async def _open(self) -> Wire | None:
        """Return the byte stream of the peer, after the TLS handshake if TLS is enabled, or None if the peer is refused."""
        tls = (await self._server.config_file.current()).tls
        if tls is None:
            return Wire(self._sock, self._progress)
        wire = TlsWire(self._sock, tls.context, self._progress)
        try:
            names = await wire.handshake()
        except ssl.SSLError as error:
            if error.reason != "HTTP_REQUEST":
                raise
            plain_wire = Wire(self._sock)
            await self._send(plain_wire, _NOT_TLS)
            await self._close(plain_wire)
            return None
        # A peer without a certificate passes: where one is required, the handshake has failed.
        if names is not None and not tls.admits(names):
            self._server.counts.errors["certificate"] += 1
            return None
        return wire

    def _progress(self) -> None:
        """Record that the kernel has accepted a part of the response."""
        self._server.guard.record_progress(self)

    async def _read(self, wire: Wire) -> Request | None:
        """Return the next request, or None if the peer has closed the connection."""
        while (request := self._http.request()) is None:
            data = await wire.read(self._server.limits.head_bytes)
            if not data:
                if self._http.has_partial_request:
                    self._server.counts.errors["truncated"] += 1
                return None
            if self.state is ConnectionState.IDLE:  # the first bytes of a request start its deadline
                self._enter(ConnectionState.INCOMPLETE, self._server.limits.head_seconds, "head_timeout")
            self._http.feed(data)
        return request

    async def _exchange(self, wire: Wire, request: Request) -> bool:
        """Respond to a request. Return False if the connection must be closed."""
        start = self._loop.time()
        self._enter(ConnectionState.RUNNING)
        response = await self._server.router.respond(request, self._peer)
        is_persistent = await self._send(wire, response)
        if response.is_scrape:
            counts = self._server.counts
            counts.scrapes += 1
            counts.scrape_seconds += self._loop.time() - start
            counts.scrapers.record(self._peer, request.header("user-agent") or "", time.monotonic())
        return is_persistent

    async def _send(self, wire: Wire, response: Response) -> bool:
        """Hand a response to the kernel. Return False if the connection must be closed."""
        self._server.counts.requests[response.route, response.status] += 1
        parts, is_persistent = self._http.respond(response, close=self._server.is_closing)
        self._server.guard.begin_writing(self, response.body)
        self._set_deadline(self._server.limits.write_seconds, "write_timeout")
        await wire.write(parts)
        return is_persistent

    async def _close(self, wire: Wire) -> None:
        """End the response and discard input, within `linger_seconds`. The socket is closed when the task ends."""
        self._enter(ConnectionState.IDLE, self._server.limits.linger_seconds)
        await wire.finish(self._server.limits.linger_bytes)
