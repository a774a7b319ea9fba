"""The web server: binds, accepts, and stops without dropping an answer; one thread with an asyncio loop.

Connections are accepted one at a time, not by `asyncio.start_server`: that one takes the whole backlog at once, pauses
for a second at every lack of descriptors, and hides connections in their TLS handshake from any cap.
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
from exporter.web.connection import Connection, Guard, ServerState, State
from exporter.web.counts import CONNECTIONS, RELOAD_SUCCESSFUL
from exporter.web.http import Limits
from exporter.web.listen import bind, parse_address, url
from exporter.web.protection import WebConfigFile
from exporter.web.routes import Application, Routes

_log = logging.getLogger(__name__)

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server:
    """Serves one application on any number of addresses, as `web_config` says. Raises ConfigurationError."""

    def __init__(
        self,
        application: Application,
        *,
        lacks: Callable[[], str | None] = lambda: None,
        listen: Sequence[str],
        web_config: Path | None,
        enable_lifecycle: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.urls: tuple[str, ...] = ()  # in the order of `listen`, without a path; empty before the start
        self._listen = tuple(listen)
        self._limits = limits = limits or Limits()
        config = WebConfigFile(web_config, limits)
        routes = Routes(application, config, limits, lacks, enable_lifecycle)
        self._state = ServerState(Guard(limits), limits, config, routes)
        self._listeners: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._wake: Callable[[], object] = lambda: None
        self._failure: OSError | None = None

    def next_expected_scrape(self) -> float | None:
        """Give the monotonic time at which the next scrape of a regular scraper is due; see `Scrapers`."""
        return self._state.counts.scrapers.next_expected(time.monotonic())

    def start(self) -> None:
        """Bind every address and serve; raises StartError and ListenError, and then nothing is bound."""
        addresses = [parse_address(each) for each in self._listen]
        serving = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(serving,), name="exporter-web", daemon=True)
        try:
            for address in addresses:
                self._listeners.append(bind(address, self._limits.backlog))
            tls = self._state.config.tls
            self.urls = tuple(url(listener, tls=tls) for listener in self._listeners)
            for listener in self._listeners:
                place = url(listener, tls=tls, reachable=False)
                _log.info("listening on %s, TLS is %s", place, "enabled" if tls else "disabled")
            self._thread.start()
        except ListenError:
            self._close_listeners()
            raise
        except RuntimeError as error:
            self._close_listeners()
            message = "no thread can be started for the web server; raise the limit of processes or memory"
            raise StartError(message) from error
        serving.wait()
        if self._failure is not None:
            message = f"cannot serve on {self._listen[0]}: {self._failure}"
            raise ListenError(message, address=self._listen[0]) from self._failure

    def stop(self) -> None:
        """Refuse new connections, finish answers within `drain_seconds`, then end; may be called again, from any thread."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._wake()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(self._limits.drain_seconds + 2.0)

    def families(self) -> Sequence[Metric]:
        """The server's own numbers; from any thread."""
        guard, config, found = self._state.guard, self._state.config, self._state.counts.families()
        found.append(CONNECTIONS.family({(state.value,): len(guard.members(state)) for state in State}))
        if config.path is not None:
            found.append(RELOAD_SUCCESSFUL.family({(): 0 if config.failure else 1}))
        return found

    def _run(self, serving: threading.Event) -> None:
        try:
            # What the loop itself needs: with fewer, asyncio leaves half a loop behind, which cannot be closed.
            with contextlib.ExitStack() as spare:
                for _ in range(4):
                    spare.callback(os.close, os.dup(self._listeners[0].fileno()))
            asyncio.run(self._serve(serving))
        except OSError as error:
            self._failure = error
        finally:
            self._close_listeners()
            self._state.routes.stop()
            self._state.config.stop()
            serving.set()  # a start that failed must not wait forever

    async def _serve(self, serving: threading.Event) -> None:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(stopping.set)
        accepting = [loop.create_task(self._accept(listener)) for listener in self._listeners]
        stopped = loop.create_task(stopping.wait())
        serving.set()
        await asyncio.wait([stopped, *accepting], return_when=asyncio.FIRST_COMPLETED)
        self._state.closing = True
        for task in (stopped, *accepting):
            task.cancel()
        # The loop must have let go of the listeners before they are closed.
        ends = await asyncio.gather(*accepting, return_exceptions=True)
        self._close_listeners()
        await self._drain(State.INCOMPLETE, State.IDLE, seconds=self._limits.drain_seconds)
        await self._drain(seconds=1.0)
        for end in ends:
            if isinstance(end, Exception):  # a defect: a server that no longer accepts must not look alive
                raise end

    async def _accept(self, listener: socket.socket) -> None:
        loop, guard, errors = asyncio.get_running_loop(), self._state.guard, self._state.counts.errors
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue  # the peer went away before we came to it
            except OSError as error:
                errors["accept"] += 1
                made_room = error.errno in _EXHAUSTED and guard.evict()
                # A tenth where one went: the evicted are gone by then, and who waits behind a flood gets
                # through it sooner.
                pause = self._limits.accept_pause_seconds
                await asyncio.sleep(pause / 10 if made_room else pause)
                continue
            if not guard.make_room():
                errors["full"] += 1
                sock.close()
                continue
            with contextlib.suppress(OSError):  # the peer went away; reading will show it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Connection(sock, str(address[0]), self._state)
            del sock  # the last one is not to be kept until the next one comes
            await asyncio.sleep(0)  # let it begin before the next one is accepted

    async def _drain(self, *states: State, seconds: float) -> None:
        """End the connections in these states, of all when there are none, and wait for all."""
        guard = self._state.guard
        for connection in guard.members(*states):
            connection.end()
        tasks = [connection.task for connection in guard.members() if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []
