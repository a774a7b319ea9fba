"""One exchange without sockets: any bytes have one of three outcomes, and answers are what they should be."""

from __future__ import annotations

import h11
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from exporter.web.http import Answer, Exchange, MalformedError, Request


def exchange(received: bytes = b"") -> Exchange:
    return Exchange(head_bytes=1024, head_lines=16, received=received, clock=lambda: 0.0)


def outcome(pieces: list[bytes]) -> Request | int | None:
    """What a server makes of these bytes, read piece by piece."""
    talk = exchange()
    for piece in pieces:
        talk.feed(piece)
        try:
            request = talk.request()
        except MalformedError as error:
            return error.answer.status
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
def test_any_bytes_are_a_request_or_an_error_or_the_beginning_of_one(data: bytes) -> None:
    found = outcome([data])

    assert found is None or isinstance(found, Request) or found in (400, 413, 431)


@given(NOISE, st.data())
def test_the_outcome_does_not_depend_on_how_the_bytes_arrive(data: bytes, draw: st.DataObject) -> None:
    data = b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + data[:200] + b"\r\n\r\n"
    cut = draw.draw(st.integers(0, len(data)))

    assert outcome([data[:cut], data[cut:]]) == outcome([data])


@given(
    st.integers(200, 599).filter(lambda status: status in {200, 401, 404, 405, 413, 429, 500, 503}),
    st.binary(max_size=300),
    st.sampled_from([b"GET", b"HEAD", b"POST"]),
)
def test_an_answer_is_read_back_by_a_client(status: int, body: bytes, method: bytes) -> None:
    talk = exchange(method + b" / HTTP/1.1\r\nHost: x\r\n\r\n")
    talk.request()
    parts, goes_on = talk.answer(Answer(status, body), close=False)
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(b"".join(parts))
    response, content = client.next_event(), b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert isinstance(event, h11.Data)
        content += bytes(event.data)

    assert isinstance(response, h11.Response)
    assert response.status_code == status
    assert dict(response.headers)[b"content-length"] == str(len(body)).encode()
    assert content == (b"" if method == b"HEAD" else body)
    assert goes_on


def test_a_second_request_that_came_with_the_first_is_left_over() -> None:
    talk = exchange(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n\r\nGET /b HTTP/1.1\r\nHost: x\r\n\r\n")
    first = talk.request()
    talk.answer(Answer(200), close=False)
    second = exchange(talk.left_over).request()

    assert first is not None
    assert second is not None
    assert (first.path, second.path) == ("/a", "/b")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/metrics?name[]=up", "/metrics"),
        (b"/%6detrics", "/metrics"),
        (b"http://host:20909/metrics?a=b", "/metrics"),
        (b"http://host", "/"),
        (b"*", "*"),
        (b"//metrics", "//metrics"),
    ],
)
def test_the_path_is_taken_from_every_form_of_target(target: bytes, path: str) -> None:
    request = exchange(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n").request()

    assert request is not None
    assert request.path == path


@pytest.mark.parametrize(
    ("head", "goes_on"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Close\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", True),
        (b"GET / HTTP/1.0\r\n\r\n", False),
    ],
)
def test_a_connection_goes_on_as_its_version_and_header_say(head: bytes, goes_on: bool) -> None:
    talk = exchange(head)
    talk.request()
    parts, found = talk.answer(Answer(200, b"x"), close=False)

    assert found is goes_on
    assert (b"Connection: close" in b"".join(parts)) is not goes_on


def test_repeated_fields_are_joined_as_a_list() -> None:
    request = exchange(b"GET / HTTP/1.1\r\nHost: x\r\nAccept: a\r\naccept: b\r\n\r\n").request()

    assert request is not None
    assert request.header("accept") == "a, b"
    assert request.header("cookie") is None


def test_fields_of_an_answer_replace_those_that_are_always_sent() -> None:
    talk = exchange(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    talk.request()
    parts, _ = talk.answer(Answer(200, b"x", headers={"X-Content-Type-Options": "no"}), close=False)

    assert b"".join(parts) == (
        b"HTTP/1.1 200 OK\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\nContent-Type: text/plain; charset=utf-8\r\n"
        b"Content-Length: 1\r\nX-Content-Type-Options: no\r\n\r\nx"
    )


def after(head: bytes) -> Exchange:
    """The exchange that follows one with this head on its connection."""
    first = exchange(head)
    first.request()
    return Exchange(head_bytes=1024, head_lines=16, familiar=first.head, clock=lambda: 0.0)


def answered(talk: Exchange) -> tuple[Request | int | None, object, bytes]:
    """Outcome, answer and rest of an exchange that has all its bytes."""
    try:
        request = talk.request()
    except MalformedError as error:
        return error.answer.status, talk.answer(error.answer, close=False), b""
    return request, talk.answer(Answer(200, b"x"), close=False), talk.left_over


@given(NOISE, NOISE, st.booleans(), st.data())
def test_a_familiar_head_changes_no_outcome(
    noise: bytes, rest: bytes, same: bool, draw: st.DataObject
) -> None:
    known = b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + noise[:100] + b"\r\n\r\n"
    assume(isinstance(outcome([known]), Request))
    data = known if same else known + rest
    cut = draw.draw(st.integers(0, len(data)))
    talk, fresh = after(known), exchange(data)
    talk.feed(data[:cut])
    early = answered(talk) if 0 < cut < len(data) else None
    talk.feed(data[cut:])

    if early is None or early[0] is None:
        assert answered(talk) == answered(fresh)


def test_a_head_that_comes_again_is_not_read_again() -> None:
    head = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: a\r\n\r\n"
    first = exchange(head)
    request = first.request()
    talk = Exchange(head_bytes=1024, head_lines=16, familiar=first.head)
    talk.feed(b"\r\n" + head)

    assert talk.request() is request
    assert talk.left_over == b""
    assert talk.head is first.head


def test_a_head_that_comes_again_ends_the_connection_again_if_it_says_so() -> None:
    head = b"HEAD /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    talk = after(head)
    talk.feed(head)
    talk.request()
    parts, goes_on = talk.answer(Answer(200, b"body"), close=False)

    assert not goes_on
    assert b"Connection: close" in parts[0]
    assert b"body" not in b"".join(parts)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /a HTTP/1.1\r\nHost: x\r\n\r\nGET /b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nLong: " + b"a" * 3000 + b"\r\n\r\n",
    ],
    ids=["with another behind it", "long"],
)
def test_a_head_that_is_not_alone_or_long_is_not_remembered(head: bytes) -> None:
    talk = Exchange(head_bytes=16_384, head_lines=16, received=head)

    assert talk.request() is not None
    assert talk.head is None


def test_the_date_is_that_of_the_clock() -> None:
    talk = Exchange(
        head_bytes=1024, head_lines=16, received=b"GET / HTTP/1.0\r\n\r\n", clock=lambda: 784111777.9
    )
    talk.request()
    parts, _ = talk.answer(Answer(200), close=False)

    assert b"\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\n" in b"".join(parts)
