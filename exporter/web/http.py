"""One HTTP/1.1 exchange: bytes to a request, an answer to bytes. The grammar is h11's; the limits are ours.

Used in the sidecar, on the web server's loop only. No sockets, no clocks but the one for `Date`, no threads.
Whatever the bytes are, the outcome is a `Request`, None (more bytes are needed) or `MalformedError`. h11 reads
all that peers send; the header of an answer, of which every field is ours, is written here (3 instead of 43 us).
A scraper sends the same bytes each time, and the same bytes are the same request: they are not read twice in a
row (1 instead of 100 us).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import unquote

import h11

TEXT = "text/plain; charset=utf-8"

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
# An offer to switch protocols (`Upgrade: h2c`) is declined by an ordinary answer.
_GOING_ON = (
    h11.DONE,
    h11.MIGHT_SWITCH_PROTOCOL,  # type: ignore[attr-defined]  # documented, but missing in h11's __all__
)
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MEMORABLE_BYTES = 2048
"""A longer head is not remembered: every connection may have one."""
_ORIGIN = re.compile(r"https?://[^/?#]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Request:
    """A request without a body.

    Attributes:
        method: As sent; methods are case-sensitive.
        path: Without the query, percent-decoded.
        headers: (lower-case name, value) in the order of arrival.
        query: As sent, without the question mark.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    query: str = ""

    def header(self, name: str) -> str | None:
        """A field's value, its repetitions joined as in a list; None when it is not there."""
        values = [value for key, value in self.headers if key == name]
        return ", ".join(values) if values else None


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back.

    Attributes:
        status: The code.
        body: Complete; for HEAD its length is sent in its place.
        content_type: Of the body.
        headers: Further fields; they replace fields of the same name that are always sent.
        close: Whether the connection ends after it.
        route: For counting: the fixed path that was asked for, or a word for what was not one.
        scrape: Whether it is the metrics page.
    """

    status: int
    body: bytes = b""
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)
    close: bool = False
    route: str = "other"
    scrape: bool = False


class MalformedError(Exception):
    """A request that cannot be read; the connection ends with the answer.

    Attributes:
        answer: What to say.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}")
        self.answer = Answer(status, f"{reason}\n".encode(), close=True, route="malformed")


@dataclass(frozen=True, slots=True)
class Head:
    """A head as it was read.

    Attributes:
        data: All bytes of it; nothing has come after them.
        request: What they say.
        goes_on: Whether the peer lets the connection go on after the answer.
    """

    data: bytes
    request: Request
    goes_on: bool


class Exchange:
    """One request and its answer.

    Attributes:
        head: The request as it was read, for the next exchange to compare; None before, and for a long one.

    Args:
        head_bytes: Limit of the head's size.
        head_lines: Limit of its lines.
        received: What the previous exchange of this connection left unread.
        familiar: The head of that exchange, read under the same limits.
        clock: Seconds since the epoch, for `Date`.
    """

    def __init__(
        self,
        *,
        head_bytes: int,
        head_lines: int,
        received: bytes = b"",
        familiar: Head | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.head: Head | None = None
        self._familiar = familiar
        self._limit = head_bytes
        self._lines = head_lines
        self._clock = clock
        self._size = 0
        self._data = b""
        self._unread = b""
        self._parser: h11.Connection | None = None
        self._method = ""
        self._goes_on = False
        self.feed(received)

    @property
    def room(self) -> int:
        """How many bytes may be read next: one more than the limit is enough to see it passed."""
        return max(1, self._limit + 1 - self._size)

    @property
    def begun(self) -> bool:
        """Whether a part of a request has arrived."""
        return self._data != b""

    @property
    def left_over(self) -> bytes:
        """What has arrived after the request."""
        if self._parser is None:
            return self._unread
        data, _ = self._parser.trailing_data
        return bytes(data)

    def feed(self, data: bytes) -> None:
        """Take bytes in."""
        self._size += len(data)
        if not self._data:
            # RFC 9112 §2.2: empty lines before a request line are skipped; h11 refuses them.
            data = data.lstrip(b"\r\n")
        self._data += data
        self._unread += data

    def request(self) -> Request | None:
        """The request, once its head is complete.

        Raises:
            MalformedError: It never will be one.
        """
        known = self._familiar
        if known is not None and self._data == known.data:
            self._parser, self._unread = None, b""
            self.head, self._method, self._goes_on = known, known.request.method, known.goes_on
            return known.request
        if not self._data:
            if self._size > self._limit:  # nothing but empty lines
                raise _too_large(self._limit)
            return None
        if self._parser is None:
            self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limit)
        try:
            if self._unread:
                self._parser.receive_data(self._unread)
                self._unread = b""
            event = self._parser.next_event()
            if isinstance(event, h11.Request):
                return self._checked(self._parser, event)
        except h11.RemoteProtocolError as error:
            # h11 raises from a frame that holds the error: a cycle, with everything that called it.
            raise self._malformed(error.with_traceback(None)) from None
        return None

    def answer(self, answer: Answer, *, close: bool) -> tuple[list[bytes], bool]:
        """The answer as bytes, in parts, and whether the connection may go on to another exchange."""
        fields = {
            "Date": _date(self._clock()),
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
            "X-Content-Type-Options": "nosniff",
            **answer.headers,
        }
        if close or answer.close or not self._goes_on:
            # The request was malformed, or its peer speaks HTTP/1.0 or wants to close.
            fields["Connection"] = "close"
        lines = [f"HTTP/1.1 {answer.status} {_PHRASES[answer.status]}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
        parts = [head] if self._method == "HEAD" or not answer.body else [head, answer.body]
        return parts, "Connection" not in fields

    def _checked(self, parser: h11.Connection, event: h11.Request) -> Request:
        self._method = event.method.decode("ascii")
        if event.http_version not in (b"1.0", b"1.1"):
            raise MalformedError(400, "this server speaks HTTP/1.0 and HTTP/1.1")
        if len(event.headers) >= self._lines:  # the request line is one more
            raise MalformedError(431, f"more than {self._lines} lines of header")
        encoded = any(name == b"transfer-encoding" for name, _ in event.headers)
        # Without a body h11 has the end of the message at hand; with one it asks for more or hands out data.
        if encoded or not isinstance(parser.next_event(), h11.EndOfMessage):
            raise _no_body()
        self._goes_on = parser.their_state in _GOING_ON
        headers = tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers)
        target = event.target.decode("latin-1")
        request = Request(self._method, _path(target), headers, target.partition("?")[2].partition("#")[0])
        if len(self._data) <= _MEMORABLE_BYTES and not self.left_over:
            self.head = Head(self._data, request, self._goes_on)
        return request

    def _malformed(self, error: h11.RemoteProtocolError) -> MalformedError:
        if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            return _too_large(self._limit)
        if error.error_status_hint == HTTPStatus.NOT_IMPLEMENTED:  # a transfer encoding other than chunked
            return _no_body()
        return MalformedError(400, "this is not an HTTP request")


def _date(seconds: float) -> str:
    """A time as HTTP writes it, whatever the locale."""
    moment = time.gmtime(seconds)
    return (
        f"{_DAYS[moment.tm_wday]}, {moment.tm_mday:02d} {_MONTHS[moment.tm_mon - 1]} {moment.tm_year:04d} "
        f"{moment.tm_hour:02d}:{moment.tm_min:02d}:{moment.tm_sec:02d} GMT"
    )


def _path(target: str) -> str:
    """The path of a request target: `/path?query` or, as sent to proxies, `http://host/path?query`."""
    path = _ORIGIN.sub("", target, count=1) if not target.startswith("/") else target
    return unquote(path.partition("?")[0]) or "/"


def _too_large(limit: int) -> MalformedError:
    return MalformedError(431, f"more than {limit} bytes of header")


def _no_body() -> MalformedError:
    return MalformedError(413, "a request must not have a body")
