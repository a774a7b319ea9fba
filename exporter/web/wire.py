"""Byte streams of the web server: a plain socket, and TLS over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

CHUNK_BYTES = 64 * 1024
"""Size of the chunks in which a large response is sent and input is discarded."""

T = TypeVar("T")


class Wire:
    """Byte stream over a connected, non-blocking socket. The owner closes the socket.

    The methods have no timeout; the owner cancels a call. `write` returns when the kernel has accepted all bytes. During a large
    response, it calls `progress` after each chunk, from which the guard detects a peer that does not read. asyncio's TLS transport is not
    used, because it buffers a response of any size and reports success at once: a write could not have a deadline.
    """

    def __init__(self, sock: socket.socket, progress: Callable[[], None] = lambda: None) -> None:
        self._sock = sock
        self._progress = progress
        self._loop = asyncio.get_running_loop()

    async def read(self, size: int) -> bytes:
        """Return received bytes, at most `size`; b"" after the peer has closed the connection."""
        data = await self._loop.sock_recv(self._sock, size)
        await asyncio.sleep(0)  # a peer that sends without end must not block other peers
        return data

    async def write(self, parts: Sequence[bytes]) -> None:
        """Send all parts. A small response is a single segment, and a large body is not copied."""
        if sum(map(len, parts)) <= CHUNK_BYTES:
            await self._send(b"".join(parts))
            return
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), CHUNK_BYTES):
                await self._send(view[start : start + CHUNK_BYTES])
                self._progress()

    async def finish(self, max_bytes: int) -> None:
        """Close the sending side, then discard input up to `max_bytes`: unread input would reset the connection."""
        self._sock.shutdown(socket.SHUT_WR)
        while max_bytes > 0 and (data := await Wire.read(self, CHUNK_BYTES)):
            max_bytes -= len(data)

    async def _send(self, data: bytes | memoryview) -> None:
        """Wait until the kernel has accepted all bytes."""
        await self._loop.sock_sendall(self._sock, data)


class TlsWire(Wire):
    """TLS byte stream over a connected, non-blocking socket."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, progress: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(sock, progress)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    async def handshake(self) -> frozenset[str] | None:
        """Perform the handshake and return the alternative names of the peer's verified certificate.

        Returns None if the peer sent no certificate. Raises SSLError.
        """
        await self._drive(self._tls.do_handshake)
        certificate = self._tls.getpeercert()
        if not certificate:
            return None
        names: Any = certificate.get("subjectAltName", ())  # typeshed also allows for fields of other shapes
        return frozenset(str(name) for _kind, name in names)

    async def read(self, size: int) -> bytes:
        """Return decrypted bytes, as `Wire.read`."""
        try:
            return await self._drive(lambda: self._tls.read(size))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""  # with or without close_notify: HTTP detects incomplete messages

    async def finish(self, max_bytes: int) -> None:
        """Send close_notify, then finish as `Wire.finish`."""
        with contextlib.suppress(ssl.SSLError):  # the peer's close_notify is discarded
            self._tls.unwrap()
        await self._flush()
        await super().finish(max_bytes)

    async def _send(self, data: bytes | memoryview) -> None:
        self._tls.write(data)
        await self._flush()

    async def _drive(self, operation: Callable[[], T]) -> T:
        """Repeat an operation of the TLS object until it succeeds or fails, and return its result.

        The TLS object works in memory. After each attempt, the bytes that it has produced are sent. If it needs input, received bytes are
        passed to it before the next attempt.
        """
        while True:
            try:
                result = operation()
            except ssl.SSLWantReadError:
                await self._flush()
            except ssl.SSLError:
                await self._flush()  # send the TLS alert to the peer
                raise
            else:
                await self._flush()
                return result
            if data := await super().read(CHUNK_BYTES):
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    async def _flush(self) -> None:
        """Send the encrypted bytes that the TLS object has produced."""
        if self._outgoing.pending:
            await super()._send(self._outgoing.read())
