"""Listen addresses: notation and binding."""

from __future__ import annotations

import logging
import re
import socket

import pytest
from run_support import fetch
from web_support import serving

from exporter.errors import ListenError
from exporter.web.listen import bind, parse_address


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def is_healthy(base_url: str) -> bool:
    return fetch(f"{base_url}/-/healthy") == "healthy\n"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":20909", "", 20909),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::1]:9100", "::1", 9100),
        ("[::]:1", "::", 1),
        ("node-7.cluster:65535", "node-7.cluster", 65535),
    ],
)
def test_host_and_port_of_an_address_are_parsed(text: str, host: str, port: int) -> None:
    address = parse_address(text)

    assert address.text == text
    assert address.host == host
    assert address.port == port


@pytest.mark.parametrize(
    "text",
    ["", "20909", "localhost", "::1:9100", "[::1]", ":65536", ":-1", ":http", "a b:c", "http://x:1", ":1 "],
)
def test_an_invalid_address_is_named_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_address(text)


def test_several_addresses_are_served_and_the_wildcard_address_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listen = ["127.0.0.1:0", "localhost:0", ":0", *(["[::1]:0"] if has_ipv6() else [])]
    with caplog.at_level(logging.INFO, "exporter"), serving(listen=listen) as server:
        wildcard_index = listen.index(":0")
        wildcard_port = server.urls[wildcard_index].rpartition(":")[2]

        assert len(set(server.urls)) == len(listen)
        assert all(is_healthy(base_url) for base_url in server.urls)
        assert re.match(r"listening on http://(\[::\]|0\.0\.0\.0):", caplog.messages[wildcard_index])
        assert not has_ipv6() or is_healthy(f"http://[::1]:{wildcard_port}")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("203.0.113.7:0", id="address-of-no-interface"),
        pytest.param("no-such-host.invalid:0", id="unknown-host"),
        pytest.param("a" * 70 + ".x:0", id="label-too-long"),
    ],
)
def test_an_address_that_cannot_be_bound_raises_an_error_that_names_the_option(text: str) -> None:
    with pytest.raises(ListenError, match=r"choose another with --web\.listen-address"):
        bind(parse_address(text), 1)


def test_ipv4_is_preferred_for_a_host_name_with_addresses_of_both_families(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_options: addresses)
    with bind(parse_address("trainer:0"), 1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
