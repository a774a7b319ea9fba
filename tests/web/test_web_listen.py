"""Notation and binding of listen addresses, and recognition of regular scrapers."""

from __future__ import annotations

import logging
import re
import socket

import pytest
from run_support import fetch
from web_support import serving

from exporter.errors import ListenError
from exporter.web.counts import MAX_CLIENTS, Scrapers
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


def scrapers_after(*scrape_times: float, peer: str = "10.0.0.1", agent: str = "Prometheus/3") -> Scrapers:
    scrapers = Scrapers()
    for scraped_at in scrape_times:
        scrapers.record(peer, agent, scraped_at)
    return scrapers


def test_two_scrapes_determine_when_the_next_is_expected() -> None:
    scrapers = scrapers_after(100.0, 115.0)
    scrapers.record("10.0.0.1", "curl/8", 115.5)  # another client at the same address

    assert scrapers_after(100.0).next_expected(101.0) is None
    assert scrapers.next_expected(116.0) == 130.0
    assert scrapers.next_expected(140.0) == 130.0  # late
    assert scrapers.next_expected(146.0) is None  # gone


def test_differing_gaps_are_not_an_interval_until_two_gaps_agree() -> None:
    scrapers = scrapers_after(100.0, 103.0, 140.0)
    expected_after_differing_gaps = scrapers.next_expected(141.0)
    scrapers.record("10.0.0.1", "Prometheus/3", 176.0)

    assert expected_after_differing_gaps is None
    assert scrapers.next_expected(177.0) == 212.0


def test_many_clients_with_a_single_request_do_not_displace_a_scraper() -> None:
    scrapers = scrapers_after(100.0, 115.0)
    for number in range(10 * MAX_CLIENTS):
        scrapers.record("10.0.0.2", f"client {number}", 116.0)

    assert scrapers.next_expected(117.0) == 130.0
