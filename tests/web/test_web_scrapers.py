"""Detection of regular scrapers and of the time of their next scrape."""

from __future__ import annotations

from exporter.web.counts import MAX_CLIENTS, Scrapers


def scrapers_after(*scrape_times: float) -> Scrapers:
    """Return the record of scrapes by a Prometheus at these monotonic times."""
    scrapers = Scrapers()
    for scraped_at in scrape_times:
        scrapers.record("10.0.0.1", "Prometheus/3", scraped_at)
    return scrapers


def test_two_scrapes_determine_when_the_next_is_expected() -> None:
    scrapers = scrapers_after(100.0, 115.0)
    scrapers.record("10.0.0.1", "curl/8", 115.5)  # another client at the same address

    assert scrapers_after(100.0).next_expected(101.0) is None
    assert scrapers.next_expected(116.0) == 130.0
    assert scrapers.next_expected(140.0) == 130.0  # late by less than an interval
    assert scrapers.next_expected(146.0) is None  # late by more than an interval


def test_differing_gaps_are_not_an_interval_until_two_gaps_agree() -> None:
    scrapers = scrapers_after(100.0, 103.0, 140.0)
    expected_after_differing_gaps = scrapers.next_expected(141.0)
    scrapers.record("10.0.0.1", "Prometheus/3", 176.0)  # the gaps of 37 s and 36 s agree within the tolerance

    assert expected_after_differing_gaps is None
    assert scrapers.next_expected(177.0) == 212.0


def test_many_clients_with_a_single_request_do_not_displace_a_scraper() -> None:
    scrapers = scrapers_after(100.0, 115.0)
    for number in range(10 * MAX_CLIENTS):
        scrapers.record("10.0.0.2", f"client {number}", 116.0)

    assert scrapers.next_expected(117.0) == 130.0


def test_a_new_scraper_displaces_only_the_least_recent_scraper() -> None:
    scrapers = scrapers_after(100.0, 115.0)
    for number in range(MAX_CLIENTS - 1):
        for scraped_at in (101.0, 116.0):
            scrapers.record("10.0.0.2", f"scraper {number}", scraped_at)
    expected_at_the_limit = scrapers.next_expected(117.0)
    for scraped_at in (200.0, 230.0):
        scrapers.record("10.0.0.3", "new scraper", scraped_at)

    assert expected_at_the_limit == 130.0
    assert scrapers.next_expected(117.0) == 131.0  # without the scraper that was expected at 130
    assert scrapers.next_expected(231.0) == 260.0
