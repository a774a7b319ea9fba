"""Who is a regular scraper, and when the next scrape is due."""

from __future__ import annotations

import time

from web_support import eventually, fetch, port_of, serving

from exporter.web.counts import MAX_CLIENTS, Scrapers


def noted(*times: float, peer: str = "10.0.0.1", agent: str = "Prometheus/3") -> Scrapers:
    scrapers = Scrapers()
    for at in times:
        scrapers.note(peer, agent, at)
    return scrapers


def test_a_client_that_came_twice_is_expected_after_the_same_gap() -> None:
    scrapers = noted(100.0, 115.0)
    scrapers.note("10.0.0.1", "curl/8", 115.5)  # a person

    assert noted(100.0).next_expected(101.0) is None
    assert scrapers.next_expected(116.0) == 130.0
    assert scrapers.next_expected(140.0) == 130.0  # late
    assert scrapers.next_expected(146.0) is None  # gone


def test_gaps_that_differ_are_no_interval_until_they_agree() -> None:
    scrapers = noted(100.0, 103.0, 140.0)
    irregular = scrapers.next_expected(141.0)
    scrapers.note("10.0.0.1", "Prometheus/3", 176.0)

    assert irregular is None
    assert scrapers.next_expected(177.0) == 212.0


def test_many_clients_that_come_once_do_not_push_a_scraper_out() -> None:
    scrapers = noted(100.0, 115.0)
    for place in range(10 * MAX_CLIENTS):
        scrapers.note("10.0.0.2", f"made up {place}", 116.0)

    assert scrapers.next_expected(117.0) == 130.0


def test_a_server_expects_who_scraped_it_twice_and_not_who_looked_at_its_page() -> None:
    agent = {"User-Agent": "Prometheus/3"}
    with serving() as server:
        port = port_of(server)
        fetch(port, "/")
        fetch(port, "/")
        fetch(port, headers=agent)
        once = server.next_expected_scrape()
        time.sleep(0.3)
        fetch(port, headers=agent)
        assert eventually(lambda: server.next_expected_scrape() is not None)  # counted once it is sent
        expected = server.next_expected_scrape()

    assert once is None
    assert expected is not None
    assert 0 < expected - time.monotonic() + 0.3 < 5
