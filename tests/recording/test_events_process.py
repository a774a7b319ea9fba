"""What becomes of a process's events, however it ends: real children, real files, real signals."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from test_recording_process import run, snapshots

from exporter.recording.values import EventsReading


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    return tmp_path / "feed"


def only(feed: Path) -> EventsReading:
    (snapshot,) = snapshots(feed)
    return snapshot.recording.events


WRITES = """
        import os, signal, sys, time
        import exporter
        from exporter import log
        from exporter.recording.handlers import JsonLinesHandler
        FILE = os.environ["EXPORTER_FEED_DIR"] + "/../events.jsonl"
        exporter.events.register(JsonLinesHandler(FILE), name="file", queue=100_000)
"""


def written(feed: Path) -> list[int]:
    text = (feed.parent / "events.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["data"]["n"] for line in text.splitlines()]


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "raise RuntimeError('mine')",
        "sys.exit(3)",
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); os.kill(os.getpid(), signal.SIGTERM)",
    ],
)
def test_an_orderly_end_loses_no_event_and_tells_every_handler(feed: Path, ending: str) -> None:
    program = f"""{WRITES}
        for n in range(2000):
            log("a", n=n)
        {ending}
    """
    run(feed, program, check=False)
    events = only(feed)

    assert events.counts == {("a", "info"): 2000}
    assert (events.delivered, events.dropped) == ({"file": 2000}, {})
    assert written(feed) == list(range(2000))


def test_a_handler_that_hangs_holds_up_the_exit_for_two_seconds_at_most(feed: Path) -> None:
    program = """
        import time, exporter
        exporter.events.register(lambda event: time.sleep(1000), name="hanging")
        for _ in range(10):
            exporter.log("a")
    """
    began = time.monotonic()
    run(feed, program)

    assert time.monotonic() - began < 12
    assert only(feed).dropped == {("hanging", "exit"): 10}


def test_an_event_logged_by_an_exit_handler_is_counted_and_told(feed: Path) -> None:
    program = f"""{WRITES}
        import atexit
        atexit.register(log, "end", n=1)
    """
    run(feed, program)

    assert only(feed).counts == {("end", "info"): 1}
    assert written(feed) == [1]


def test_a_forked_child_counts_its_own_events_and_tells_its_own_handlers(feed: Path) -> None:
    program = f"""{WRITES}
        for n in range(10):
            log("a", n=n)
        ids = [event.id for event in exporter.events.recent()]
        if os.fork() == 0:
            log("a", n=100)
            log("child", n=101)
            assert not set(ids) & {{event.id for event in exporter.events.recent()}}
            assert len(exporter.events.recent()) == 2
            sys.exit(0)
        os.wait()
        log("a", n=10)
    """
    run(feed, program, RANK="3")
    parent, child = (snapshot.recording.events for snapshot in snapshots(feed))

    assert parent.counts == {("a", "info"): 11}
    assert child.counts == {("a", "info"): 1, ("child", "info"): 1}
    assert (parent.delivered, child.delivered) == ({"file": 11}, {"file": 2})
    assert sorted(written(feed)) == [*range(11), 100, 101]


def test_a_fork_while_others_log_never_hangs(feed: Path) -> None:
    program = """
        import os, threading, exporter
        stop = False
        exporter.events.register(lambda event: None)
        def work():
            n = 0
            while not stop:
                n += 1
                exporter.log(f"a{n % 300}")
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            if os.fork() == 0:
                exporter.log("child")
                exporter.flush()
                counts = exporter.events.EVENTS.reading().counts
                os._exit(0 if sum(counts.values()) == 1 else 1)
            assert os.wait()[1] == 0
        stop = True
    """
    run(feed, program)

    assert len(snapshots(feed)) == 21


def test_a_process_of_events_alone_leaves_a_file_and_one_without_any_does_not(feed: Path) -> None:
    run(feed, "import exporter\n")
    assert snapshots(feed) == []
    run(feed, "import exporter\nexporter.log('a')\n")

    assert only(feed).counts == {("a", "info"): 1}


def test_another_identity_begins_to_count_anew(feed: Path) -> None:
    program = f"""{WRITES}
        log("a", n=0)
        exporter.flush()
        exporter.configure(run="second", rank=7)
        log("a", n=1)
        log("a", n=2)
        assert exporter.events.recent()[-1].run == "second"
    """
    run(feed, program)
    first, second = (snapshot.recording.events for snapshot in snapshots(feed))

    assert (first.counts, second.counts) == ({("a", "info"): 1}, {("a", "info"): 2})
    assert (first.delivered, second.delivered) == ({"file": 1}, {"file": 2})


def test_a_flood_takes_no_memory_and_what_is_dropped_is_counted(feed: Path) -> None:
    program = """
        import os, resource, time, exporter
        exporter.events.register(lambda event: time.sleep(0.01), name="slow")
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        exporter.log("flood", "x" * 1000, n=0)
        before = resident()
        for n in range(100_000):
            exporter.log("flood", "x" * 1000 + str(n), n=n)
        assert resident() - before < 16 << 20, resident() - before
    """
    run(feed, program)
    events = only(feed)

    assert events.counts == {("flood", "info"): 100_001}
    kept_back = sum(events.suppressed.values()) + sum(events.dropped.values())
    assert events.suppressed.get(("flood", "rate_limit"), 0) > 0
    assert abs(events.delivered["slow"] + kept_back - 100_001) <= 1
