"""The web server: binds, accepts, and stops without dropping an answer.

Used in the sidecar. It owns one thread with an asyncio loop, which accepts, parses and writes, and a few
daemon threads for what may take time (`flights`). The loop never waits for a device, a file or a password.

Connections are accepted one at a time by our own loop over `sock_accept`, not by `asyncio.start_server`: that
one accepts a burst of the whole backlog before any of them is looked at, pauses for a second at every lack of
descriptors, and hides connections that are still in their TLS handshake from any cap.
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
from exporter.web.connection import Connection, Guard, House, State, capacity
from exporter.web.counts import CONNECTIONS, EVICTED, Counts, number
from exporter.web.limits import DEFAULT_LIMITS, Limits
from exporter.web.listen import bind, parse_addresses, shown, url
from exporter.web.protection import Protection
from exporter.web.routes import Application, Routes

__all__ = ["DEFAULT_LIMITS", "Application", "Limits", "Server"]

_LOG = logging.getLogger("exporter.web")

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server:
    """Serves one application on any number of addresses.

    Args:
        application: What is served.
        lacks: What the exporter is still without, though a scrape is right: `/-/ready` says so. Called on the
            server's loop.
        listen: Addresses as on the command line.
        web_config: `web.config.yml`; None serves plain HTTP to everybody.
        enable_lifecycle: Whether `/-/reload` may be used.
        telemetry_path: Where the metrics are.
        log: For the start, for changes of the settings and for defects; never for what peers do.
        limits: What one peer may cost.
    """

    def __init__(
        self,
        application: Application,
        *,
        lacks: Callable[[], str | None] = lambda: None,
        listen: Sequence[str],
        web_config: Path | None,
        enable_lifecycle: bool = False,
        telemetry_path: str = "/metrics",
        log: logging.Logger = _LOG,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._application = application
        self._lacks = lacks
        self._listen = tuple(listen)
        self._web_config = web_config
        self._enable_lifecycle = enable_lifecycle
        self._telemetry_path = telemetry_path
        self._log = log
        self._limits = limits
        self._counts = Counts()
        self._guard: Guard[Connection] = Guard(
            capacity(limits.connections, limits.spare_files),
            max_bytes=limits.bytes_in_flight,
            stalled_seconds=limits.stalled_seconds,
        )
        self._house: House | None = None
        self._listeners: list[socket.socket] = []
        self._urls: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._failure: OSError | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the server is, in the order of `listen`, without a path; empty before it has started."""
        return self._urls

    @property
    def scrapes(self) -> int:
        """Metrics pages that were sent completely."""
        return self._counts.scrapes

    def next_expected_scrape(self) -> float | None:
        """Give the monotonic time at which the next scrape of a regular scraper is due; None without one.

        It may be past by up to an interval: the scraper is late. A client that came once is no scraper.
        """
        return self._counts.scrapers.next_expected(time.monotonic())

    def start(self) -> None:
        """Bind every address and serve; returns when connections are accepted.

        Raises:
            ConfigurationError: An address, the telemetry path or web.config.yml is wrong.
            StartError: The system gives no thread.
            ListenError: An address cannot be listened on, or served for want of descriptors; nothing is left
                bound.
        """
        addresses = parse_addresses(self._listen)
        protection = Protection(self._web_config, self._limits, self._log)
        routes = Routes(
            self._application,
            lacks=self._lacks,
            protection=protection,
            counts=self._counts,
            limits=self._limits,
            telemetry_path=self._telemetry_path,
            enable_lifecycle=self._enable_lifecycle,
            log=self._log,
        )
        self._house = House(self._guard, self._limits, self._counts, protection, routes, self._log)
        try:
            for address in addresses:
                self._listeners.append(bind(address, self._limits.backlog))
        except ListenError:
            self._close_listeners()
            raise
        self._urls = tuple(url(listener, tls=protection.tls) for listener in self._listeners)
        for listener in self._listeners:
            place, state = shown(listener, tls=protection.tls), "enabled" if protection.tls else "disabled"
            self._log.info("listening on %s, TLS is %s", place, state)
        serving = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._house, serving), name="exporter-web", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            self._close_listeners()
            raise StartError(
                "no thread can be started for the web server; raise the limit of processes or memory"
            ) from error
        serving.wait()
        if self._failure is not None:
            message = f"cannot serve on {self._listen[0]}: {self._failure}"
            raise ListenError(message, address=self._listen[0]) from self._failure

    def stop(self) -> None:
        """Refuse new connections at once, finish the answers in the making, then end; may be called again.

        Takes at most `drain_seconds` and a little; from any thread but the server's own.
        """
        thread, loop, stopping = self._thread, self._loop, self._stopping
        if thread is None or loop is None or stopping is None:
            return
        try:
            loop.call_soon_threadsafe(stopping.set)
        except RuntimeError:
            return  # it has ended
        thread.join(self._limits.drain_seconds + 2.0)

    def families(self) -> Sequence[Metric]:
        """The server's own numbers; from any thread."""
        places = self._guard.counts()
        settings = [] if self._house is None else self._house.protection.families()
        return [
            *self._counts.families(),
            CONNECTIONS.family({(state.value,): places[state] for state in State}),
            number(EVICTED, self._guard.evicted),
            *settings,
        ]

    def _run(self, house: House, serving: threading.Event) -> None:
        try:
            # What the loop itself needs: with fewer, asyncio leaves half a loop behind, which cannot be closed.
            with contextlib.ExitStack() as spare:
                for _ in range(4):
                    spare.callback(os.close, os.dup(self._listeners[0].fileno()))
            asyncio.run(self._serve(house, serving))
        except OSError as error:
            self._failure = error
        finally:
            self._close_listeners()
            house.routes.stop()
            house.protection.stop()
            serving.set()  # a start that failed must not wait for ever

    async def _serve(self, house: House, serving: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        accepting = [self._loop.create_task(self._accept(listener, house)) for listener in self._listeners]
        stopped = self._loop.create_task(self._stopping.wait())
        serving.set()
        await asyncio.wait([stopped, *accepting], return_when=asyncio.FIRST_COMPLETED)
        house.closing = True
        stopped.cancel()
        for task in accepting:
            task.cancel()
        # The loop must have let go of the listeners before they are closed.
        ends = await asyncio.gather(*accepting, return_exceptions=True)
        self._close_listeners()
        await self._drain()
        for end in ends:
            if isinstance(end, Exception):  # a defect: a server that no longer accepts must not look alive
                raise end

    async def _accept(self, listener: socket.socket, house: House) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue  # the peer went away before we came to it
            except OSError as error:
                self._counts.accept_errors += 1
                made_room = error.errno in _EXHAUSTED and self._guard.evict()
                # A tenth where one went: the evicted are gone by then, and who waits behind a flood gets
                # through it sooner.
                pause = self._limits.accept_pause_seconds
                await asyncio.sleep(pause / 10 if made_room else pause)
                continue
            connection = Connection(sock, str(address[0]), house)
            if not self._guard.admit(connection):
                self._counts.refused += 1
                sock.close()
                continue
            connection.start()
            with contextlib.suppress(OSError):  # the peer went away; reading will show it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            del connection, sock  # the last one is not to be kept until the next one comes
            await asyncio.sleep(0)  # let it begin before the next one is accepted

    async def _drain(self) -> None:
        """End what is idle, wait for what is being answered, end the rest."""
        for connection in self._guard.members((State.INCOMPLETE, State.IDLE)):
            connection.evict()
        await self._wait_for_the_end(self._limits.drain_seconds)
        for connection in self._guard.members():
            connection.evict()
        await self._wait_for_the_end(1.0)

    async def _wait_for_the_end(self, seconds: float) -> None:
        tasks = [connection.task for connection in self._guard.members() if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []
