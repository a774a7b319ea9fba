"""Bytes to and from one peer: a plain socket, or TLS over it.

Used in the sidecar, on the web server's loop only. Nothing here has a time limit: the connection that uses a
wire is ended by cancelling its task. A wire keeps no unsent bytes: `write` returns when the kernel has taken
all of them, so a peer that does not read is always seen, and an answer is never copied for it.

That is why these are sockets and an `ssl.SSLObject` rather than asyncio's transports: a TLS transport takes an
answer of any size into its inner buffer and calls it written (10 MB to a peer that reads nothing: `drain()`
returned at once, whatever the limits of the write buffer), so no write could be given a deadline, and closing
one waits for the peer without limit before Python 3.11.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

_CHUNK_BYTES = 64 * 1024

T = TypeVar("T")


class Wire(Protocol):
    """What a connection needs of either kind."""

    async def read(self, size: int) -> bytes:
        """At most so many bytes, as soon as there are any; b"" when the peer has ended its side."""
        ...

    async def write(self, parts: Sequence[bytes]) -> None:
        """Send everything; returns when the kernel has it."""
        ...

    async def finish(self, most: int) -> None:
        """Say goodbye, then read and forget until the peer ends its side or has sent `most` bytes.

        A socket closed with unread input resets the connection, and a reset can destroy an answer that the
        peer has not read yet.
        """
        ...


class PlainWire:
    """A socket.

    A read first waits for the loop to see bytes: nobody who sends without end keeps the loop from the others. The
    loop goes on watching the socket from one read to the next.

    Args:
        sock: Connected and non-blocking; closed by its owner.
        received: Called whenever bytes have arrived.
        waiting: Called whenever the peer must be waited for.
    """

    def __init__(
        self, sock: socket.socket, received: Callable[[], None], waiting: Callable[[], None]
    ) -> None:
        self._sock = sock
        self._received = received
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._watching = False
        self._reader: asyncio.Future[None] | None = None

    async def read(self, size: int) -> bytes:
        """See `Wire`."""
        data = await self._receive(size)
        if data:
            self._received()
        return data

    async def write(self, parts: Sequence[bytes]) -> None:
        """See `Wire`."""
        # One segment for a small answer; a large body is not copied to get its header into the same call.
        if sum(map(len, parts)) <= _CHUNK_BYTES:
            parts = (b"".join(parts),)
        for part in parts:
            try:
                sent = self._sock.send(part)
            except BlockingIOError:
                sent = 0
            if sent < len(part):
                self._waiting()
                await self._loop.sock_sendall(self._sock, memoryview(part)[sent:])

    async def finish(self, most: int) -> None:
        """See `Wire`."""
        self._sock.shutdown(socket.SHUT_WR)
        while most > 0:
            data = await self._receive(_CHUNK_BYTES)
            if not data:
                return
            most -= len(data)

    def stop(self) -> None:
        """Forget the socket, which is closed next, and whom to tell."""
        self._unwatch()
        self._received = self._waiting = _nobody

    def _unwatch(self) -> None:
        if self._watching:
            self._loop.remove_reader(self._sock)
            self._watching = False

    async def _receive(self, size: int) -> bytes:
        while True:
            self._waiting()
            self._reader = self._loop.create_future()
            if not self._watching:
                self._loop.add_reader(self._sock, self._readable)
                self._watching = True
            try:
                await self._reader
            finally:
                self._reader = None
            try:
                return self._sock.recv(size)
            except BlockingIOError:
                continue  # the kernel had woken us for nothing

    def _readable(self) -> None:
        if self._reader is None:
            self._unwatch()  # nobody reads now: the loop would tell it again and again
        elif not self._reader.done():
            self._reader.set_result(None)


def _nobody() -> None:
    """Nobody is told."""


class TlsWire:
    """TLS over a plain wire.

    Args:
        plain: The peer's bytes.
        context: Certificate and rules.
    """

    def __init__(self, plain: PlainWire, context: ssl.SSLContext) -> None:
        self._plain = plain
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    async def handshake(self) -> None:
        """Agree on a session.

        Raises:
            ssl.SSLError: There is none; the peer has been told why.
        """
        await self._drive(self._tls.do_handshake)

    def alternative_names(self) -> frozenset[str]:
        """The subject alternative names of the peer's verified certificate; empty without one."""
        certificate = self._tls.getpeercert() or {}
        # ((kind, name), ...); typeshed also allows for certificate fields of other shapes
        return frozenset(str(entry[1]) for entry in certificate.get("subjectAltName", ()))

    @property
    def verified(self) -> bool:
        """Whether the peer has shown a certificate (which then is a valid one)."""
        return bool(self._tls.getpeercert())

    async def read(self, size: int) -> bytes:
        """See `Wire`."""
        try:
            return await self._drive(lambda: self._tls.read(size))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""  # with or without the goodbye of TLS: HTTP knows by itself whether a message is whole

    async def write(self, parts: Sequence[bytes]) -> None:
        """See `Wire`."""
        if sum(map(len, parts)) <= _CHUNK_BYTES:
            parts = (b"".join(parts),)
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _CHUNK_BYTES):
                self._tls.write(view[start : start + _CHUNK_BYTES])
                await self._flush()

    async def finish(self, most: int) -> None:
        """See `Wire`."""
        with contextlib.suppress(ssl.SSLError):  # the peer's goodbye is not waited for but discarded
            self._tls.unwrap()
        await self._flush()
        await self._plain.finish(most)

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
            data = await self._plain.read(_CHUNK_BYTES)
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._plain.write((self._outgoing.read(),))
