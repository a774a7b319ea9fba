"""HTTP/1.1 requests and responses of a connection. h11 parses, and this module enforces the limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import unquote

import h11

PLAIN_TEXT = "text/plain; charset=utf-8"
READ_METHODS = ("GET", "HEAD")

_ORIGIN = re.compile(r"https?://[^/?#]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per peer and in total.

    Times are deadlines of a whole phase, not of a single read, so slow peers cannot extend a deadline.
    """

    head_seconds: float = 5.0  # TLS handshake and first head; for later heads from the first byte
    head_bytes: int = 16 * 1024
    head_lines: int = 64
    idle_seconds: float = 75.0  # from a response to the first byte of the next head
    render_seconds: float = 9.5  # from the end of a head to the response, including the password check
    scrape_timeout_offset_seconds: float = 0.5  # subtracted from Prometheus's scrape timeout
    write_seconds: float = 10.0  # until the kernel has accepted a whole response
    stalled_seconds: float = 0.3  # without progress, before a response can be evicted for a new connection
    room_seconds: float = 4.0  # wait of a new connection for room
    linger_seconds: float = 1.0  # for discarding a peer's input after the last response
    linger_bytes: int = 4 * 1024 * 1024
    drain_seconds: float = 8.0  # for running responses when the server stops
    connections: int = 512  # fewer if the limit of open files is below this number plus `spare_files`
    spare_files: int = 64  # descriptors left to the rest of the process
    backlog: int = 1024  # connections that wait in the kernel to be accepted
    accept_pause_seconds: float = 0.05  # after a failed accept, to prevent a busy loop
    file_check_seconds: float = 1.0  # interval of checks of web.config.yml and the referenced files
    passwords_waiting: int = 256  # password checks of all peers
    passwords_waiting_per_peer: int = 64  # password checks of an address
    # Distinct bodies that are being sent; above the limit, the oldest writers are closed.
    bytes_in_flight: int = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    """HTTP request without a body."""

    method: str  # as sent; methods are case-sensitive
    path: str  # without the query, percent-decoded
    headers: tuple[tuple[str, str], ...] = ()  # (lower-case name, value) in the order of arrival
    query: str = ""  # as sent, without the question mark

    def header(self, name: str) -> str | None:
        """Return a header's value, repetitions joined by commas, or None if the header is missing."""
        values = [value for key, value in self.headers if key == name]
        return ", ".join(values) if values else None


@dataclass(frozen=True, slots=True)
class Response:
    """Complete HTTP response."""

    status: int
    body: bytes = b""  # for HEAD, the length alone is sent
    content_type: str = PLAIN_TEXT
    headers: Mapping[str, str] = field(default_factory=dict)  # override the default headers
    close: bool = False  # True to close the connection afterwards
    route: str = "other"  # label of exporter_http_requests_total
    is_scrape: bool = False  # True if the response counts as a scrape


def text_response(
    status: int, message: str, headers: Mapping[str, str] | None = None, *, close: bool = False
) -> Response:
    """Return a plain-text response with the message as its body."""
    return Response(status, f"{message}\n".encode("utf-8", "replace"), headers=headers or {}, close=close)


class MalformedError(Exception):
    """Malformed request, after which the connection ends with `response`."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}")
        self.response = Response(status, f"{reason}\n".encode(), close=True, route="malformed")


class HttpConnection:
    """Parser of a connection's requests and writer of its responses."""

    def __init__(self, *, head_bytes: int, head_lines: int) -> None:
        self._head_bytes = head_bytes
        self._head_lines = head_lines
        self._method = b""
        self._parser = self._new_parser()

    def _new_parser(self) -> h11.Connection:
        return h11.Connection(h11.SERVER, max_incomplete_event_size=self._head_bytes)

    @property
    def has_partial_request(self) -> bool:
        """True if a part of the next request has arrived."""
        return bool(self._parser.trailing_data[0])

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        if not self.has_partial_request:
            # RFC 9112 section 2.2: empty lines before a request line are skipped; h11 refuses them.
            data = data.lstrip(b"\r\n")
        if data:  # h11 takes empty data for the end of the connection
            self._parser.receive_data(data)

    def request(self) -> Request | None:
        """Return the next request, or None until its head is complete. Raises MalformedError."""
        if not self.has_partial_request:
            return None
        try:
            event = self._parser.next_event()
            if not isinstance(event, h11.Request):
                return None
            is_encoded = any(name == b"transfer-encoding" for name, _ in event.headers)
            # For a request without a body, the next event of h11 is the end of the message.
            has_body = is_encoded or not isinstance(self._parser.next_event(), h11.EndOfMessage)
        except h11.RemoteProtocolError as error:
            # Without its traceback: the traceback's frame holds the error, a reference cycle through the whole call stack.
            raise self._malformed(error.with_traceback(None).error_status_hint) from None
        self._method = event.method
        if event.http_version not in (b"1.0", b"1.1"):
            raise MalformedError(400, "this server supports HTTP/1.0 and HTTP/1.1")
        if len(event.headers) >= self._head_lines:  # plus the request line
            raise MalformedError(431, f"the header has more than {self._head_lines} lines")
        if has_body:
            raise MalformedError(413, "a request must not have a body")
        headers = tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers)
        # `/path?query`, or `http://host/path?query` as sent to proxies.
        path, _, query = _ORIGIN.sub("", event.target.decode("latin-1"), count=1).partition("?")
        return Request(event.method.decode("ascii"), unquote(path) or "/", headers, query.partition("#")[0])

    def _malformed(self, status_hint: int) -> MalformedError:
        """Return the error for a status that h11 suggests."""
        if status_hint == 431:
            return MalformedError(431, f"the header has more than {self._head_bytes} bytes")
        if status_hint == 501:  # a transfer encoding other than chunked
            return MalformedError(413, "a request must not have a body")
        return MalformedError(400, "this is not an HTTP request")

    def respond(self, response: Response, *, close: bool) -> tuple[list[bytes], bool]:
        """Return the parts of the response, and True if the connection stays open for a further request.

        h11 does not write the head, because that would take as long as parsing the request.
        """
        is_persistent = not (close or response.close) and self._parser.their_state is h11.DONE
        fields = {
            "Date": formatdate(usegmt=True),
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            "X-Content-Type-Options": "nosniff",
            **response.headers,
        }
        if not is_persistent:
            fields["Connection"] = "close"
        lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        parts = ["\r\n".join([*lines, "", ""]).encode("latin-1")]
        if self._method != b"HEAD" and response.body:
            parts.append(response.body)
        if is_persistent:
            pipelined_data = self._parser.trailing_data[0]
            self._parser, self._method = self._new_parser(), b""
            self.feed(pipelined_data)
        return parts, is_persistent
