"""One HTTP/1.1 exchange: bytes to a request, an answer to bytes. The grammar is h11's; the limits are ours.

Used in the sidecar, on the web server's loop only. No sockets, no clocks but the one for `Date`, no threads.
Whatever the bytes are, the outcome is a `Request`, None (more bytes are needed) or `MalformedError`. h11 reads
all that peers send; the header of an answer, of which every field is ours, is written here (3 instead of 43 us).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
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
_ORIGIN = re.compile(r"https?://[^/?#]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Request:
    """A request without a body.

    Attributes:
        method: As sent; methods are case-sensitive.
        path: Without the query, percent-decoded.
        headers: (lower-case name, value) in the order of arrival.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()

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


class Exchange:
    """One request and its answer.

    Args:
        head_bytes: Limit of the head's size.
        head_lines: Limit of its lines.
        received: What the previous exchange of this connection left unread.
        clock: Seconds since the epoch, for `Date`.
    """

    def __init__(
        self,
        *,
        head_bytes: int,
        head_lines: int,
        received: bytes = b"",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=head_bytes)
        self._limit = head_bytes
        self._lines = head_lines
        self._clock = clock
        self._size = 0
        self._begun = False
        self._method = b""
        self.feed(received)

    @property
    def room(self) -> int:
        """How many bytes may be read next: one more than the limit is enough to see it passed."""
        return max(1, self._limit + 1 - self._size)

    @property
    def begun(self) -> bool:
        """Whether a part of a request has arrived."""
        return self._begun

    @property
    def left_over(self) -> bytes:
        """What has arrived after the request."""
        data, _ = self._http.trailing_data
        return bytes(data)

    def feed(self, data: bytes) -> None:
        """Take bytes in."""
        self._size += len(data)
        if not self._begun:
            # RFC 9112 §2.2: empty lines before a request line are skipped; h11 refuses them.
            data = data.lstrip(b"\r\n")
        if data:
            self._begun = True
            self._http.receive_data(data)

    def request(self) -> Request | None:
        """The request, once its head is complete.

        Raises:
            MalformedError: It never will be one.
        """
        try:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                return self._checked(event)
        except h11.RemoteProtocolError as error:
            raise self._malformed(error) from None
        if self._size > self._limit:  # nothing but empty lines
            raise _too_large(self._limit)
        return None

    def answer(self, answer: Answer, *, close: bool) -> tuple[list[bytes], bool]:
        """The answer as bytes, in parts, and whether the connection may go on to another exchange."""
        fields = {
            "Date": formatdate(self._clock(), usegmt=True),
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
            "X-Content-Type-Options": "nosniff",
            **answer.headers,
        }
        if close or answer.close or self._http.their_state not in _GOING_ON:
            # The request was malformed, or its peer speaks HTTP/1.0 or wants to close.
            fields["Connection"] = "close"
        lines = [f"HTTP/1.1 {answer.status} {_PHRASES[answer.status]}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
        parts = [head] if self._method == b"HEAD" or not answer.body else [head, answer.body]
        return parts, "Connection" not in fields

    def _checked(self, event: h11.Request) -> Request:
        self._method = event.method
        if event.http_version not in (b"1.0", b"1.1"):
            raise MalformedError(400, "this server speaks HTTP/1.0 and HTTP/1.1")
        if len(event.headers) >= self._lines:  # the request line is one more
            raise MalformedError(431, f"more than {self._lines} lines of header")
        encoded = any(name == b"transfer-encoding" for name, _ in event.headers)
        # Without a body h11 has the end of the message at hand; with one it asks for more or hands out data.
        if encoded or not isinstance(self._http.next_event(), h11.EndOfMessage):
            raise _no_body()
        headers = tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers)
        return Request(event.method.decode("ascii"), _path(event.target.decode("latin-1")), headers)

    def _malformed(self, error: h11.RemoteProtocolError) -> MalformedError:
        if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            return _too_large(self._limit)
        if error.error_status_hint == HTTPStatus.NOT_IMPLEMENTED:  # a transfer encoding other than chunked
            return _no_body()
        return MalformedError(400, "this is not an HTTP request")


def _path(target: str) -> str:
    """The path of a request target: `/path?query` or, as sent to proxies, `http://host/path?query`."""
    path = _ORIGIN.sub("", target, count=1) if not target.startswith("/") else target
    return unquote(path.partition("?")[0]) or "/"


def _too_large(limit: int) -> MalformedError:
    return MalformedError(431, f"more than {limit} bytes of header")


def _no_body() -> MalformedError:
    return MalformedError(413, "a request must not have a body")
