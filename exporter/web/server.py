"""Web server on a thread with an asyncio event loop.

Before the server stops, it finishes running responses within `drain_seconds`. The server does not use `asyncio.start_server`.
That function accepts the whole backlog at once, and pauses for a second whenever descriptors run out. During the TLS handshake,
its connections would not count against the limits of this server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prometheus_client.core import Metric

from exporter.errors import ListenError, StartError
from exporter.web.connection import Connection, ServerState
from exporter.web.counts import CONNECTIONS, RELOAD_SUCCESSFUL
from exporter.web.endpoints import Endpoint
from exporter.web.guard import ConnectionGuard, ConnectionState
from exporter.web.http import Limits
from exporter.web.listen import bind, parse_address, url
from exporter.web.protection import WebConfigFile
from exporter.web.routes import Router

_log = logging.getLogger(__name__)

_EXHAUSTION_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of an accept that the eviction of a connection may resolve."""


class Server:
    """Server of endpoints on one or more addresses, with the TLS and password settings of `web_config`.

    Raises ConfigurationError if `web_config` is invalid.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        listen: Sequence[str],
        web_config: Path | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.urls: tuple[str, ...] = ()  # in the order of `listen`, without a path; empty before the start
        self._listen = tuple(listen)
        self._limits = limits = limits or Limits()
        config_file = WebConfigFile(web_config, limits)
        self._state = ServerState(
            ConnectionGuard(limits), limits, config_file, Router(endpoints, config_file, limits)
        )
        self._listeners: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._wake: Callable[[], object] = lambda: None
        self._failure: OSError | None = None

    def next_expected_scrape(self) -> float | None:
        """Return the expected monotonic time of a regular scraper's next scrape, or None; see `Scrapers`."""
        return self._state.counts.scrapers.next_expected(time.monotonic())

    def start(self) -> None:
        """Bind every address and serve.

        Raises StartError or ListenError; no address is bound after an error.
        """
        addresses = [parse_address(text) for text in self._listen]
        start_done = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(start_done,), name="exporter-web", daemon=True
        )
        try:
            for address in addresses:
                self._listeners.append(bind(address, self._limits.backlog))
            tls = self._state.config_file.uses_tls
            self.urls = tuple(url(listener, tls=tls) for listener in self._listeners)
            for listener in self._listeners:
                address_url = url(listener, tls=tls, is_destination=False)
                _log.info("listening on %s, TLS is %s", address_url, "enabled" if tls else "disabled")
            self._thread.start()
        except ListenError:
            self._close_listeners()
            raise
        except RuntimeError as error:
            self._close_listeners()
            message = "cannot start a thread for the web server; raise the limit of processes (ulimit -u) or of memory"
            raise StartError(message) from error
        start_done.wait()
        if self._failure is not None:
            message = f"cannot serve on {self._listen[0]}: {self._failure}"
            raise ListenError(message, address=self._listen[0]) from self._failure

    def stop(self) -> None:
        """Refuse new connections and finish responses within `drain_seconds`. Idempotent and thread-safe."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._wake()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(self._limits.drain_seconds + 2.0)

    def families(self) -> Sequence[Metric]:
        """Return the server's own metrics. Thread-safe."""
        guard = self._state.guard
        connections = CONNECTIONS.family(
            {(state.value,): len(guard.members(state)) for state in ConnectionState}
        )
        families = [*self._state.counts.families(), connections]
        if self._state.config_file.path is not None:
            families.append(RELOAD_SUCCESSFUL.family({(): int(not self._state.config_file.failure)}))
        return families

    def _run(self, start_done: threading.Event) -> None:
        """Run the event loop until `stop`, then release all resources. Runs on the server's thread."""
        try:
            # Fails early if there are no descriptors for the event loop: asyncio would leave a half-initialized loop that cannot
            # be closed.
            with contextlib.ExitStack() as spare_descriptors:
                for _ in range(4):
                    spare_descriptors.callback(os.close, os.dup(self._listeners[0].fileno()))
            asyncio.run(self._serve(start_done))
        except OSError as error:
            self._failure = error
        finally:
            self._close_listeners()
            self._state.router.stop()
            self._state.config_file.stop()
            start_done.set()  # a failed start must not wait forever

    async def _serve(self, start_done: threading.Event) -> None:
        """Accept connections until `stop` or an internal error, then finish the responses. Raises the internal error."""
        loop, stop_event = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(stop_event.set)
        accept_tasks = [loop.create_task(self._accept(listener)) for listener in self._listeners]
        stop_task = loop.create_task(stop_event.wait())
        start_done.set()
        await asyncio.wait([stop_task, *accept_tasks], return_when=asyncio.FIRST_COMPLETED)
        self._state.is_closing = True
        for task in (stop_task, *accept_tasks):
            task.cancel()
        # The event loop must release the listeners before they are closed.
        results = await asyncio.gather(*accept_tasks, return_exceptions=True)
        self._close_listeners()
        await self._drain(
            ConnectionState.INCOMPLETE, ConnectionState.IDLE, seconds=self._limits.drain_seconds
        )
        await self._drain(seconds=1.0)
        for result in results:
            if isinstance(result, Exception):  # a server that no longer accepts must not look alive
                raise result

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections until the task is cancelled. After an error or without room, no connection is accepted for a moment."""
        loop, guard, errors = asyncio.get_running_loop(), self._state.guard, self._state.counts.errors
        pause_seconds = self._limits.accept_pause_seconds
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue  # the peer closed before the accept
            except OSError as error:
                errors["accept"] += 1
                has_evicted = error.errno in _EXHAUSTION_ERRORS and guard.evict_one()
                # An eviction frees a descriptor soon: after a tenth of the pause, the next peer can be accepted.
                await asyncio.sleep(pause_seconds / 10 if has_evicted else pause_seconds)
                continue
            if not guard.make_room() and not await self._wait_for_room():
                errors["full"] += 1
                sock.close()
                continue
            # If the peer has closed the connection, the option cannot be set, and the first read ends the connection.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Connection(sock, str(address[0]), self._state)
            del sock  # otherwise the socket would stay open until the next accept
            await asyncio.sleep(0)  # start the connection before the next accept

    async def _wait_for_room(self) -> bool:
        """Wait until there is room for an accepted connection. Return False after `room_seconds`.

        Meanwhile, further connections wait in the kernel's backlog.
        """
        deadline = time.monotonic() + self._limits.room_seconds
        while time.monotonic() < deadline:
            await asyncio.sleep(self._limits.accept_pause_seconds / 5)
            if self._state.guard.make_room():
                return True
        return False

    async def _drain(self, *states: ConnectionState, seconds: float) -> None:
        """Close the connections in these states (default: all), and wait up to *seconds* until all connections are closed."""
        connections = [member for member in self._state.guard.members() if isinstance(member, Connection)]
        for connection in connections:
            if not states or connection.state in states:
                connection.end()
        tasks = [connection.task for connection in connections if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []
