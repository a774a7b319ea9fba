"""Events over restarts: totals go on, never fall, and stay bounded."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from ledger_support import Sidecar, a_process, a_snapshot

from exporter.feed.snapshot import ProcessIdentity
from exporter.ledger.totals import added_events
from exporter.recording.values import EventsReading, Recording

WHO = {"run": "r", "rank": "0"}


def put(sidecar: Sidecar, process: ProcessIdentity, sequence: int, events: EventsReading) -> None:
    snapshot = a_snapshot(process, sequence=sequence)
    sidecar.feed.put(snapshot.replace(recording=Recording((), events=events)))


def saved(count: int, when: float = 5.0) -> EventsReading:
    return EventsReading({("ckpt", "info"): count}, {("ckpt", "info"): when})


def test_events_become_families_with_their_labels(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path)
    events = EventsReading(
        {("ckpt", "info"): 3, ("oom", "error"): 1},
        {("ckpt", "info"): 5.5},
        {("ckpt", "rate_limit"): 2},
        {"file": 4},
        {("file", "write"): 7},
    )
    put(sidecar, a_process(), 1, events)
    page = sidecar.collect()

    assert page.get("training_events_total", type="ckpt", severity="info", **WHO) == 3
    assert page.get("training_events_total", type="oom", severity="error", **WHO) == 1
    last = "training_event_last_timestamp_seconds"
    assert page.get(last, type="ckpt", severity="info", **WHO) == 5.5
    assert page.get(last, type="oom", severity="error", **WHO) is None
    suppressed = "training_events_suppressed_total"
    assert page.get(suppressed, type="ckpt", reason="rate_limit", **WHO) == 2
    assert page.get("training_event_handler_events_total", handler="file", **WHO) == 4
    dropped = "training_event_handler_dropped_total"
    assert page.get(dropped, handler="file", reason="write", **WHO) == 7
    assert page.get(dropped, handler="file", reason="queue_full", **WHO) == 0


def test_totals_go_on_over_a_restart_of_the_rank_and_of_the_sidecar(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path)
    first, second = a_process(), a_process()
    put(sidecar, first, 1, saved(3))
    sidecar.collect()
    sidecar.feed.kill(first)
    sidecar.after(1)
    put(sidecar, second, 1, saved(2, when=9.0))
    sidecar.after(1)
    sidecar.restart()
    page = sidecar.after(1)

    assert page.get("training_events_total", type="ckpt", severity="info", **WHO) == 5
    assert page.get("training_event_last_timestamp_seconds", type="ckpt", severity="info", **WHO) == 9.0


pairs = st.tuples(st.sampled_from("abc"), st.sampled_from(["info", "error"]))
triples = st.dictionaries(pairs, st.integers(1, 9))


@st.composite
def readings(draw: st.DrawFn) -> EventsReading:
    counts = draw(triples)
    last = {pair: draw(st.floats(0, 9)) for pair in counts}
    delivered = draw(st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9)))
    return EventsReading(counts, last, draw(triples), delivered, draw(triples))


@given(readings(), readings(), readings())
def test_adding_is_associative_and_adds_up(a: EventsReading, b: EventsReading, c: EventsReading) -> None:
    total = added_events(added_events(a, b), c)

    assert total == added_events(a, added_events(b, c))
    for name in ("counts", "suppressed", "delivered", "dropped"):
        parts = [sum(getattr(part, name).values()) for part in (a, b, c)]
        assert sum(getattr(total, name).values()) == sum(parts)
