"""HTTP exchanges on an `HttpConnection` without sockets: the parser accepts any bytes, and a client parses the responses."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.web.http import HttpConnection, MalformedError, Request, Response


def connection_with(data: bytes = b"") -> HttpConnection:
    connection = HttpConnection(head_bytes=1024, head_lines=16)
    connection.feed(data)
    return connection


def parse(*received_parts: bytes) -> Request | int | None:
    """Return the request in bytes that arrive in parts, the status of the error response, or None if the request is incomplete."""
    connection = connection_with()
    for part in received_parts:
        connection.feed(part)
        try:
            request = connection.request()
        except MalformedError as error:
            return error.response.status
        if request is not None:
            return request
    return None


NOISE = st.lists(
    st.sampled_from(
        [b"GET / HTTP/1.1\r\n", b"Host: x\r\n", b"\r\n", b"\n", b" ", b":", b"\0", b"A: b\r\n", b"0"]
    )
    | st.binary(max_size=40)
).map(b"".join)


@given(NOISE)
def test_any_bytes_are_a_request_an_error_or_incomplete(received_bytes: bytes) -> None:
    request_or_status = parse(received_bytes)

    if isinstance(request_or_status, int):
        assert request_or_status in {400, 413, 431}


@given(NOISE, st.data())
def test_the_result_does_not_depend_on_a_split_of_the_received_bytes(
    noise: bytes, data: st.DataObject
) -> None:
    # At most 200 bytes of noise, so that most requests are below the limit of 1,024 bytes.
    sent_bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + noise[:200] + b"\r\n\r\n"
    split = data.draw(st.integers(0, len(sent_bytes)))

    assert parse(sent_bytes[:split], sent_bytes[split:]) == parse(sent_bytes)


@given(
    st.sampled_from([200, 401, 404, 405, 413, 429, 500, 503]),
    st.binary(max_size=300),
    st.sampled_from([b"GET", b"HEAD", b"POST"]),
)
def test_a_client_parses_two_responses_on_one_connection(status: int, body: bytes, method: bytes) -> None:
    connection, client = connection_with(), h11.Connection(h11.CLIENT)
    for _ in range(2):
        connection.feed(
            client.send(h11.Request(method=method, target="/a%20b?c", headers=[("Host", "x")])) or b""
        )
        client.send(h11.EndOfMessage())
        request = connection.request()
        parts, stays_open = connection.respond(
            Response(status, body, headers={"X-Frame-Options": "deny"}), close=False
        )
        client.receive_data(b"".join(parts))
        response, received_body = client.next_event(), b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            assert isinstance(event, h11.Data)
            received_body += bytes(event.data)
        client.start_next_cycle()

        assert request is not None
        assert request.method == method.decode()
        assert request.path == "/a b"
        assert request.query == "c"
        assert isinstance(response, h11.Response)
        assert response.status_code == status
        assert dict(response.headers)[b"content-length"] == str(len(body)).encode()
        assert dict(response.headers)[b"x-frame-options"] == b"deny"
        assert received_body == (b"" if method == b"HEAD" else body)
        assert stays_open


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/%6detrics", "/metrics"),
        (b"http://host:20909/metrics?a=b", "/metrics"),
        (b"http://host", "/"),
        (b"*", "*"),
        (b"//metrics", "//metrics"),
    ],
)
def test_the_path_is_parsed_from_every_form_of_target(target: bytes, path: str) -> None:
    # Empty lines before a request are ignored.
    request = connection_with(b"\r\n\r\nGET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n").request()

    assert request is not None
    assert request.path == path
