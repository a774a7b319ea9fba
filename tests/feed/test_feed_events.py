"""Events in the feed: what is written is read back, and nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_feed_codec import changed as changed_example
from test_feed_codec import example, reason_of

from exporter.feed.decoder import SLUG, decode
from exporter.feed.encoder import Encoder, encode
from exporter.recording.values import EventsReading, Recording

labels = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.isprintable)
slugs = st.from_regex(SLUG, fullmatch=True)
counts = st.integers(1, 2**63 - 1)
triples = st.dictionaries(st.tuples(labels, slugs), counts, max_size=3)


@st.composite
def events_readings(draw: st.DrawFn) -> EventsReading:
    counted = draw(triples)
    times = st.floats(allow_nan=False, allow_infinity=False)
    last = {pair: draw(times) for pair in counted if draw(st.booleans())}
    delivered = draw(st.dictionaries(labels, st.integers(0, 2**63 - 1), max_size=3))
    return EventsReading(counted, last, draw(triples), delivered, draw(triples))


@given(events_readings())
def test_events_that_are_decoded_are_those_that_were_encoded(events: EventsReading) -> None:
    snapshot = example().replace(recording=Recording((), events=events))

    assert decode(encode(snapshot)) == snapshot


@given(st.lists(events_readings(), min_size=2, max_size=3))
def test_an_encoder_that_remembers_writes_what_a_new_one_writes(several: list[EventsReading]) -> None:
    encoder = Encoder()
    for events in [*several, several[-1], EventsReading(), several[0]]:
        snapshot = example().replace(recording=Recording((), events=events))

        assert encoder.encode(snapshot) == encode(snapshot)


ROWS = {"counts": [["a", "info", 1, 2.5]], "suppressed": [], "delivered": [["h", 0]], "dropped": []}


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    def put(_what: Any, _when: Any, totals: dict[str, Any]) -> None:
        totals["events"] = {key: list(rows) for key, rows in ROWS.items()}
        change(totals["events"])

    return changed_example(put)


def test_the_unchanged_rows_are_read() -> None:
    assert decode(changed(lambda events: None)).recording.events.last == {("a", "info"): 2.5}


@pytest.mark.parametrize(
    "change",
    [
        lambda events: events.pop("counts"),
        lambda events: events.update(counts={}),
        lambda events: events.update(counts=[["a", "info", 1]]),
        lambda events: events.update(counts=[["a", "info", 1, None, 0]]),
        lambda events: events.update(counts=[["a", "info", 0, None]]),
        lambda events: events.update(counts=[["a", "info", -1, None]]),
        lambda events: events.update(counts=[["a", "info", 1.5, None]]),
        lambda events: events.update(counts=[["a", "info", True, None]]),
        lambda events: events.update(counts=[["a", "info", 1, "x"]]),
        lambda events: events.update(counts=[["a", "Info!", 1, None]]),
        lambda events: events.update(counts=[["", "info", 1, None]]),
        lambda events: events.update(counts=[["a\n", "info", 1, None]]),
        lambda events: events.update(counts=[["a" * 513, "info", 1, None]]),
        lambda events: events.update(counts=[["\ud800", "info", 1, None]]),
        lambda events: events.update(counts=[[["a"], "info", 1, None]]),
        lambda events: events.update(counts=[["a", "info", 1, None]] * 2),
        lambda events: events.update(counts=[[f"a{n}", "info", 1, None] for n in range(4097)]),
        lambda events: events.update(suppressed=[["a", "rate_limit", 0]]),
        lambda events: events.update(suppressed=[["a", "rate_limit", 1]] * 2),
        lambda events: events.update(delivered=[["h", 1], ["h", 2]]),
        lambda events: events.update(delivered=[[["h"], 1]]),
        lambda events: events.update(dropped=[["h", "error"]]),
        lambda events: events.update(dropped="x"),
    ],
)
def test_events_against_the_contract_are_refused(change: Callable[[dict[str, Any]], object]) -> None:
    assert reason_of(changed(change)) == "content"
