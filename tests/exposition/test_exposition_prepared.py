"""A page made ahead of the scrape: what `prepared` joins, what it leaves to others, and when nothing is written."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import pytest
from exposition_support import gauge, page_of, read, text_of
from hypothesis import given
from hypothesis import strategies as st

from exporter.collectors.family import Family, Sample
from exporter.exposition.negotiation import Format
from exporter.exposition.page import LOOKS_SECONDS, Page
from exporter.exposition.rhythm import AHEAD_SECONDS, WANTED_SECONDS, Rhythm

FORMS = [(form, compress) for form in Format for compress in (False, True)]


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Own:
    """A source of the exporter's own numbers that counts how often it is asked."""

    def __init__(self) -> None:
        self.number = 1.0
        self.asked = 0

    def __call__(self) -> Sequence[Family]:
        self.asked += 1
        return (gauge("own", {"0": self.number}),)


def scraped_every(seconds: float, clock: Clock) -> Page:
    """A page with a rhythm, just scraped."""
    page = Page(clock=clock)
    page.publish("block", [gauge("a", {"0": 1.0})])
    for _ in range(3):
        clock.now += seconds
        page.render(Format.TEXT, compress=False)
    return page


def shown(body: bytes | None) -> dict[str, float]:
    """Values by name; empty for no body."""
    return {name: value for (name, _), value in read(body or b"", Format.TEXT).items()}


@pytest.mark.parametrize(("form", "compress"), FORMS)
def test_a_form_is_prepared_once_it_was_rendered_and_is_the_same_then(form: Format, compress: bool) -> None:
    page = page_of(gauge("a", {"0": 1.0}))
    page.watch("own", Own())
    before = page.prepared(form, compress=compress)
    rendered = page.render(form, compress=compress)

    assert before is None
    assert page.prepared(form, compress=compress) == rendered


def test_a_prepared_page_asks_no_source() -> None:
    page, own = page_of(gauge("a", {"0": 1.0})), Own()
    page.watch("own", own)
    page.render(Format.TEXT, compress=False)
    asked = own.asked

    assert page.prepared(Format.TEXT, compress=False) is not None
    assert own.asked == asked


def test_what_is_published_is_prepared_at_once() -> None:
    page = page_of(gauge("a", {"0": 1.0}))
    page.render(Format.TEXT, compress=False)
    page.publish("block", [gauge("a", {"0": 2.0})])

    assert shown(page.prepared(Format.TEXT, compress=False)) == {"a": 2.0}


def test_what_a_refresh_announces_is_on_the_next_page() -> None:
    page, own = Page(), Own()
    page.watch("own", own)
    page.render(Format.TEXT, compress=False)
    own.number = 2.0
    page.refresh()

    assert shown(page.prepared(Format.TEXT, compress=False)) == {"own": 2.0}


def test_sources_that_were_asked_long_ago_are_asked_by_the_scrape() -> None:
    clock = Clock()
    page = Page(clock=clock)
    page.watch("own", Own())
    page.render(Format.TEXT, compress=False)
    clock.now += 5.0
    soon = page.prepared(Format.TEXT, compress=False)
    clock.now += 5.0

    assert soon is not None
    assert page.prepared(Format.TEXT, compress=False) is None


def test_a_withdrawn_or_replaced_source_is_not_on_a_prepared_page() -> None:
    page = Page()
    page.watch("own", Own())
    page.render(Format.TEXT, compress=False)
    page.withdraw("own")

    assert shown(page.prepared(Format.TEXT, compress=False)) == {}


def test_a_source_that_hangs_delays_neither_a_refresh_nor_a_prepared_page() -> None:
    page, asked, goes_on = Page(), threading.Event(), threading.Event()

    def hang() -> Sequence[Family]:
        asked.set()
        goes_on.wait(15)
        return ()

    page.watch("own", hang)
    rendering = threading.Thread(target=page.render, args=(Format.TEXT,), kwargs={"compress": False})
    rendering.start()
    asked.wait(15)
    page.refresh()
    body = page.prepared(Format.TEXT, compress=False)
    still_hangs = rendering.is_alive()
    goes_on.set()
    rendering.join()

    assert still_hangs
    assert body is None


def test_what_was_announced_is_on_every_later_page_however_many_scrapes_there_are() -> None:
    page, own, stop = Page(), Own(), threading.Event()
    page.watch("own", own)

    def scrape() -> None:
        while not stop.is_set():
            page.render(Format.TEXT, compress=False)

    scraping = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in scraping:
        thread.start()
    found = []
    for _ in range(300):
        own.number += 1.0
        page.refresh()
        body = page.prepared(Format.TEXT, compress=False) or page.render(Format.TEXT, compress=False)
        found.append(shown(body)["own"])
    stop.set()
    for thread in scraping:
        thread.join()

    assert found == [float(number) for number in range(2, 302)]


def test_while_the_next_scrape_is_far_nothing_is_written_and_nothing_is_lost() -> None:
    clock = Clock()
    page = scraped_every(15.0, clock)
    written = page._blocks
    for number in (2.0, 3.0):
        clock.now += 1.0
        page.publish("block", [gauge("a", {"0": number})])
    early = page.prepared(Format.TEXT, compress=False)

    assert page._blocks is written
    assert early is None
    assert shown(page.render(Format.TEXT, compress=False)) == {"a": 3.0}


def test_before_anybody_asks_nothing_is_written_and_the_first_scrape_shows_what_there_is() -> None:
    page, own = Page(clock=Clock()), Own()
    page.watch("own", own)
    for number in (1.0, 2.0):
        page.publish("block", [gauge("a", {"0": number})])
        page.refresh()

    assert (page._blocks, own.asked) == ((), 0)
    assert shown(page.render(Format.TEXT, compress=False)) == {"a": 2.0, "own": 1.0}


def test_what_was_left_unwritten_is_written_before_the_scrape_that_is_expected() -> None:
    clock = Clock()
    page, own = scraped_every(15.0, clock), Own()
    page.publish("early", [gauge("b", {"0": 4.0})])
    page.watch("own", own)
    page.refresh()
    asked = own.asked
    clock.now += 15.0 - AHEAD_SECONDS
    page.publish("block", [gauge("a", {"0": 2.0})])
    page.refresh()
    clock.now += AHEAD_SECONDS

    assert asked == 0
    assert shown(page.prepared(Format.TEXT, compress=False)) == {"a": 2.0, "b": 4.0, "own": 1.0}


def test_a_block_withdrawn_while_the_next_scrape_is_far_is_gone() -> None:
    page = scraped_every(15.0, Clock())
    page.publish("block", [gauge("a", {"0": 2.0})])
    page.publish("other", [gauge("b", {"0": 2.0})])
    page.withdraw("block")

    assert shown(page.prepared(Format.TEXT, compress=False)) == {"b": 2.0}


def test_the_snapshot_has_what_was_not_written_yet() -> None:
    page = scraped_every(15.0, Clock())
    page.publish("block", [gauge("a", {"0": 2.0})])

    assert page.snapshot() == (gauge("a", {"0": 2.0}),)


def test_while_a_person_looks_the_page_is_wanted_whatever_the_rhythm_of_scrapes() -> None:
    clock = Clock()
    page = scraped_every(60.0, clock)
    far = page.seconds_until_wanted()
    page.snapshot()
    looked_at = page.seconds_until_wanted()
    clock.now += LOOKS_SECONDS
    gone = page.seconds_until_wanted()

    assert looked_at == 0.0
    assert gone == far - LOOKS_SECONDS > 0.0


def test_what_was_offered_is_told_without_being_written() -> None:
    page = scraped_every(15.0, Clock())
    written = page._blocks
    page.publish("block", [gauge("a", {"0": 2.0})])

    assert page.offered() == (gauge("a", {"0": 2.0}),)
    assert page._blocks is written


def test_for_how_long_nobody_looks_is_known_from_the_rhythm_of_scrapes() -> None:
    clock = Clock()
    page = Page(clock=clock)
    unknown = page.seconds_until_wanted()
    clock.now += WANTED_SECONDS
    never = page.seconds_until_wanted()
    page.render(Format.TEXT, compress=False)
    asked = page.seconds_until_wanted()
    page = scraped_every(15.0, clock)
    clock.now += 5.0
    rhythm = page.seconds_until_wanted()
    clock.now += 10.0 + WANTED_SECONDS
    forgotten = page.seconds_until_wanted()

    assert (unknown, never, asked) == (0.0, math.inf, 0.0)
    assert rhythm == pytest.approx(10.0 - AHEAD_SECONDS)
    assert forgotten == math.inf


def test_a_block_whose_text_stays_is_not_compressed_again() -> None:
    page = page_of(gauge("a", {"0": 1.0}))
    page.render(Format.TEXT, compress=False)
    before = page._blocks[0]
    page.publish("block", [gauge("a", {"0": 1.0})])
    same = page._blocks[0]
    page.publish("block", [gauge("a", {"0": 2.0})])

    assert same is before
    assert page._blocks[0] is not before


def test_a_family_that_is_published_again_shows_what_its_list_has_now() -> None:
    family = gauge("a", {"0": 1.0})
    listed = Family(family.spec, [*family.samples])  # type: ignore[arg-type]  # a publisher that keeps no promise
    page = page_of(listed)
    listed.samples[0] = Sample(("0",), 2.0)  # type: ignore[index]  # likewise
    page.publish("block", [listed])

    assert text_of(page).endswith('a{rank="0"} 2.0\n')


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=8), st.floats(0.0, 200.0))
def test_a_form_is_wanted_from_its_first_scrape_on_until_the_next_is_long_overdue(
    gaps: list[float], later: float
) -> None:
    clock = Clock()
    rhythm = Rhythm(clock)
    for gap in gaps:
        clock.now += gap
        rhythm.note((Format.TEXT, True))
    clock.now += later
    shortest = min(gaps[1:][-4:], default=0.0)

    if later < shortest + WANTED_SECONDS - 1e-6:
        assert rhythm.wanted() == [(Format.TEXT, True)]
    elif later > shortest + WANTED_SECONDS + 1e-6:
        assert rhythm.wanted() == []
    if later > shortest - AHEAD_SECONDS + 1e-6:
        assert rhythm.is_awaited() == bool(rhythm.wanted())
    elif later < shortest - AHEAD_SECONDS - 1e-6:
        assert not rhythm.is_awaited()


def test_the_scraper_that_is_expected_first_decides() -> None:
    clock = Clock()
    rhythm = Rhythm(clock)
    for _ in range(3):
        clock.now += 15.0
        rhythm.note((Format.OPENMETRICS, True))
    far = not rhythm.is_awaited()
    rhythm.note((Format.TEXT, False))

    assert far
    assert rhythm.is_awaited()
