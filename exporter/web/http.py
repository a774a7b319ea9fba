"""HTTP/1.1 on one connection: bytes to requests, answers to bytes. The grammar is h11's; the limits are ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import unquote

import h11

TEXT = "text/plain; charset=utf-8"

_ORIGIN = re.compile(r"https?://[^/?#]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one peer, and all peers together, may cost.

    Times are deadlines of a whole phase, never of one read: a peer that sends a byte a second gains nothing by it.
    """

    head_seconds: float = 5.0  # TLS handshake and first head; the rest of a later head from its first byte on
    head_bytes: int = 16 * 1024
    head_lines: int = 64
    idle_seconds: float = 75.0  # from an answer to the first byte of the next head
    render_seconds: float = 9.5  # from the end of a head until its answer is made, passwords included
    scrape_timeout_offset_seconds: float = 0.5  # how much earlier than Prometheus gives up
    write_seconds: float = 10.0  # until the kernel has taken a whole answer
    stalled_seconds: float = 1.0  # in writing, before an answer may be given up for a newcomer
    farewell_seconds: float = 1.0  # for reading what a peer still sends after the last answer
    farewell_bytes: int = 4 * 1024 * 1024
    drain_seconds: float = 8.0  # for answers in the making when the server stops
    connections: int = 512  # fewer where the limit of open files is low
    spare_files: int = 64  # descriptors left to the rest of the process
    backlog: int = 1024
    accept_pause_seconds: float = 0.05  # after a failure to accept, so that it cannot spin
    file_check_seconds: float = 1.0  # how often web.config.yml and its files are looked at
    passwords_waiting: int = 256  # checks, of all peers
    passwords_waiting_per_peer: int = 64
    bytes_in_flight: int = 32 * 1024 * 1024  # bodies being sent, each once; beyond it the oldest writers end


@dataclass(frozen=True, slots=True)
class Request:
    """A request without a body."""

    method: str  # as sent; methods are case-sensitive
    path: str  # without the query, percent-decoded
    headers: tuple[tuple[str, str], ...] = ()  # (lower-case name, value) in the order of arrival
    query: str = ""  # as sent, without the question mark

    def header(self, name: str) -> str | None:
        """A field's value, its repetitions joined as in a list; None when it is not there."""
        values = [value for key, value in self.headers if key == name]
        return ", ".join(values) if values else None


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back."""

    status: int
    body: bytes = b""  # complete; for HEAD its length is sent in its place
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)  # they replace those that are always sent
    close: bool = False  # whether the connection ends after it
    route: str = "other"  # for counting: the fixed path that was asked for, or a word for what was not one
    scrape: bool = False  # whether it is the metrics page


class MalformedError(Exception):
    """A request that cannot be read; the connection ends with the answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}")
        self.answer = Answer(status, f"{reason}\n".encode(), close=True, route="malformed")


class Exchanges:
    """One request and its answer after the other, with limits of a head's size and lines."""

    def __init__(self, *, head_bytes: int, head_lines: int) -> None:
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=head_bytes)
        self._bytes = head_bytes
        self._lines = head_lines
        self._method = b""

    @property
    def begun(self) -> bool:
        """Whether a part of the next request has arrived."""
        return bool(self._parser.trailing_data[0])

    def feed(self, data: bytes) -> None:
        """Take bytes in."""
        # RFC 9112 §2.2: empty lines before a request line are skipped; h11 refuses them.
        if data := data if self.begun else data.lstrip(b"\r\n"):
            self._parser.receive_data(data)

    def request(self) -> Request | None:
        """The request, once its head is complete; raises MalformedError where it never will be one."""
        if not self.begun:
            return None
        try:
            event = self._parser.next_event()
            if not isinstance(event, h11.Request):
                return None
            encoded = any(name == b"transfer-encoding" for name, _ in event.headers)
            # Without a body h11 has the end of the message at hand; with one it asks for more or hands out data.
            has_body = encoded or not isinstance(self._parser.next_event(), h11.EndOfMessage)
        except h11.RemoteProtocolError as error:
            # h11 raises from a frame that holds the error: a cycle, with everything that called it.
            status = error.with_traceback(None).error_status_hint
            told = {
                431: (431, f"more than {self._bytes} bytes of header"),
                501: (413, "a request must not have a body"),  # a transfer encoding other than chunked
            }
            raise MalformedError(*told.get(status, (400, "this is not an HTTP request"))) from None
        self._method = event.method
        if event.http_version not in (b"1.0", b"1.1"):
            raise MalformedError(400, "this server speaks HTTP/1.0 and HTTP/1.1")
        if len(event.headers) >= self._lines:  # the request line is one more
            raise MalformedError(431, f"more than {self._lines} lines of header")
        if has_body:
            raise MalformedError(413, "a request must not have a body")
        headers = tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers)
        # `/path?query` or, as sent to proxies, `http://host/path?query`.
        path, _, query = _ORIGIN.sub("", event.target.decode("latin-1"), count=1).partition("?")
        return Request(event.method.decode("ascii"), unquote(path) or "/", headers, query.partition("#")[0])

    def answer(self, answer: Answer, *, close: bool) -> tuple[list[bytes], bool]:
        """The answer as bytes, in parts, and whether the connection may go on to another exchange."""
        fields = {
            "Date": formatdate(usegmt=True),
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
            "X-Content-Type-Options": "nosniff",
            **answer.headers,
        }
        if close or answer.close:
            fields["Connection"] = "close"
        parser, reason = self._parser, HTTPStatus(answer.status).phrase.encode()
        head = h11.Response(status_code=answer.status, headers=[*fields.items()], reason=reason)
        parts = [parser.send(head)]
        if self._method != b"HEAD":
            parts.append(parser.send(h11.Data(data=answer.body)))
        parser.send(h11.EndOfMessage())
        goes_on = parser.our_state is h11.DONE and parser.their_state is h11.DONE
        if goes_on:
            parser.start_next_cycle()
            self._method = b""
        return [part for part in parts if part], goes_on
