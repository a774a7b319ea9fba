"""The scheduler with real threads: intervals, deadlines, verdicts, what hangs, what goes stale."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from collectors_support import Board, text_of
from prometheus_client.core import CounterMetricFamily, Metric
from waiting import wait_until

from exporter.collectors.scheduler import Scheduler
from exporter.collectors.status import CollectorStatus
from exporter.errors import CollectError, StartError
from exporter.families import AnyCollector, Collected, FamilySpec

SPEC = FamilySpec("host_thing", "gauge", "A thing.")
OFTEN: dict[str, Any] = {"interval_seconds": 0.05, "deadline_seconds": 5.0}
SELDOM: dict[str, Any] = {"interval_seconds": 3600.0, "deadline_seconds": 5.0}
TIGHT: dict[str, Any] = {"interval_seconds": 3600.0, "deadline_seconds": 0.1}


def block(value: float = 1.0) -> Collected:
    collected = Collected()
    collected.add(SPEC, value)
    return collected


class Source:
    """A collector whose behaviour is a function that can be exchanged."""

    specs = (SPEC,)
    reasons = ("permission", "malformed")

    def __init__(self, name: str, act: Callable[[], Collected] = block) -> None:
        self.name = name
        self.act = act
        self.calls = 0
        self.inside = 0
        self.most_inside = 0

    def collect(self) -> Collected:
        self.calls += 1
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            return self.act()
        finally:
            self.inside -= 1


class Hanging(Source):
    """A collector that hangs until it is released."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self.hang)
        self.released = threading.Event()

    def hang(self) -> Collected:
        self.released.wait()
        return block(666)


@contextmanager
def running(
    board: Board, *sources: tuple[AnyCollector, dict[str, Any]], **options: object
) -> Iterator[Scheduler]:
    scheduler = Scheduler(publish=board.publish, withdraw=board.withdraw, **options)  # type: ignore[arg-type]  # options are passed through
    for source, times in sources:
        scheduler.add(source, **times)
    scheduler.start()
    try:
        yield scheduler
    finally:
        for source, _ in sources:
            if isinstance(source, Hanging):
                source.released.set()
        scheduler.stop()


def status_of(scheduler: Scheduler, name: str) -> CollectorStatus:
    return next(status for status in scheduler.statuses() if status.name == name)


def metric(scheduler: Scheduler, name: str) -> float | None:
    lines = text_of(scheduler.families()).splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), None)


def test_a_collector_that_hangs_costs_itself_alone_and_its_late_result_is_dropped() -> None:
    board, hanging, healthy = Board(), Hanging("nfs"), Source("healthy")
    hanging.act = block
    times = {"interval_seconds": 0.1, "deadline_seconds": 0.2}
    with running(board, (hanging, times), (healthy, OFTEN)) as scheduler:
        wait_until(lambda: "nfs" in board.blocks)
        hanging.act = hanging.hang
        wait_until(lambda: "nfs" not in board.blocks)
        calls, others = hanging.calls, healthy.calls
        wait_until(lambda: healthy.calls >= others + 8)
        status = status_of(scheduler, "nfs")

        assert (status.success, status.reason, status.running) == (False, "timeout", True)
        assert (status.age_seconds, status.last_success is None) == (None, False)
        assert hanging.calls == calls  # the hang is still the same one
        assert metric(scheduler, 'exporter_collector_timeouts_total{collector="nfs"}') == 1
        assert (metric(scheduler, 'exporter_collector_last_duration_seconds{collector="nfs"}') or 0) > 0.4

        hanging.act = block
        hanging.released.set()
        wait_until(lambda: status_of(scheduler, "nfs").success is True)

        assert board.blocks["nfs"] == tuple(block(1))
        assert (metric(scheduler, 'exporter_collector_duration_seconds_total{collector="nfs"}') or 0) >= 0.4


def test_stopping_waits_for_nothing_that_hangs_and_nothing_is_published_after_it() -> None:
    board, hanging = Board(), Hanging("stuck")
    with running(board, (hanging, SELDOM)) as scheduler:
        wait_until(lambda: hanging.calls == 1)
        began = time.monotonic()
        scheduler.stop(timeout_seconds=0.3)
        seconds = time.monotonic() - began
        hanging.released.set()
        wait_until(lambda: not any(t.name == "exporter-collect" for t in threading.enumerate()))

        assert seconds < 5
        assert board.events == []


def test_a_partial_success_is_published_with_the_verdict_zero() -> None:
    part = block()
    part.problems += [("malformed", "line 3"), ("malformed", "line 9")]
    board = Board()
    with running(board, (Source("half", lambda: part), SELDOM)) as scheduler:
        wait_until(lambda: status_of(scheduler, "half").success is False)

        assert board.blocks["half"] == tuple(part)
        assert metric(scheduler, 'exporter_collector_success{collector="half"}') == 0
        assert (
            metric(scheduler, 'exporter_collector_last_success_timestamp_seconds{collector="half"}') is None
        )
        assert metric(scheduler, 'exporter_collector_errors_total{collector="half",reason="malformed"}') == 1


def test_a_block_without_successor_is_withdrawn_and_comes_back() -> None:
    def fail() -> Collected:
        raise CollectError("gone", reason="permission")

    board, source = Board(), Source("gpu")
    with running(board, (source, {"interval_seconds": 0.1, "deadline_seconds": 0.1})) as scheduler:
        wait_until(lambda: "gpu" in board.blocks)
        source.act = fail
        wait_until(lambda: "gpu" not in board.blocks)
        failed_calls = source.calls
        source.act = block
        wait_until(lambda: "gpu" in board.blocks)

        assert failed_calls >= 2  # the first failure alone withdraws nothing
        assert status_of(scheduler, "gpu").success is True


def test_a_removed_collector_takes_its_block_and_its_series_along() -> None:
    board, source = Board(), Source("gone")
    with running(board, (source, OFTEN), (Source("stays"), OFTEN)) as scheduler:
        wait_until(lambda: "gone" in board.blocks)
        scheduler.remove("gone")
        calls = source.calls
        time.sleep(0.2)

        assert "gone" not in board.blocks
        assert source.calls <= calls + 1
        assert "gone" not in text_of(scheduler.families())
        assert "stays" in board.blocks


def test_a_successor_waits_for_the_call_of_its_removed_predecessor() -> None:
    board, hanging, successor = Board(), Hanging("nfs"), Source("nfs")
    with running(board, (hanging, TIGHT)) as scheduler:
        wait_until(lambda: status_of(scheduler, "nfs").success is False)
        scheduler.remove("nfs")
        scheduler.add(successor, **SELDOM)
        time.sleep(0.2)
        assert successor.calls == 0
        assert status_of(scheduler, "nfs").reason == "timeout"
        hanging.released.set()

        wait_until(lambda: board.blocks.get("nfs") == tuple(block()))


def test_run_soon_during_a_pass_gives_one_more_pass_and_never_two_at_once() -> None:
    source = Hanging("busy")
    with running(Board(), (source, SELDOM)) as scheduler:
        wait_until(lambda: source.calls == 1)
        for _ in range(10):
            scheduler.run_soon("busy")
        source.released.set()
        wait_until(lambda: source.calls == 2)
        time.sleep(0.1)

        assert source.calls == 2
        assert source.most_inside == 1


def test_a_change_of_state_is_logged_once_and_not_every_pass(caplog: pytest.LogCaptureFixture) -> None:
    def fail(reason: str) -> Callable[[], Collected]:
        def act() -> Collected:
            raise CollectError("a detail", reason=reason)

        return act

    caplog.set_level(logging.INFO)
    source = Source("moody")
    with running(Board(), (source, OFTEN)):
        for act in (block, fail("permission"), fail("malformed"), block):
            source.act = act
            seen = source.calls
            wait_until(lambda seen=seen: source.calls >= seen + 4)  # type: ignore[misc]  # the value of this round

    lines = [record.getMessage() for record in caplog.records if "moody" in record.getMessage()]
    assert lines == [
        "collector moody fails: a detail (permission)",
        "collector moody fails: a detail (malformed)",
        "collector moody works again",
    ]


def test_what_the_machine_does_not_offer_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lacking = Collected()
    lacking.unsupported.append("no memory controllers")
    source = Source("edac", lambda: lacking)
    whole = Source("whole")
    with running(Board(), (source, OFTEN), (whole, OFTEN)) as scheduler:
        wait_until(lambda: min(source.calls, whole.calls) >= 4)

        assert metric(scheduler, 'exporter_collector_unsupported_sources{collector="edac"}') == 1
        assert metric(scheduler, 'exporter_collector_unsupported_sources{collector="whole"}') is None
        assert status_of(scheduler, "edac").success is True
    assert [r.getMessage() for r in caplog.records].count("collector edac: no memory controllers") == 1


def test_a_publication_that_hangs_costs_its_own_collector_only() -> None:
    board, release = Board(), threading.Event()

    def publish(name: str, families: Sequence[Metric]) -> None:
        if name == "slow":
            release.wait(60)
        board.publish(name, families)

    scheduler = Scheduler(publish=publish, withdraw=board.withdraw)
    others = [Source(f"other{number}") for number in range(3)]
    scheduler.add(Source("slow"), interval_seconds=0.05, deadline_seconds=0.2)
    for each in others:
        scheduler.add(each, interval_seconds=0.05, deadline_seconds=0.2)
    scheduler.start()
    wait_until(lambda: status_of(scheduler, "slow").reason == "timeout")
    calls = [each.calls for each in others]
    wait_until(lambda: all(each.calls >= before + 5 for each, before in zip(others, calls, strict=True)))
    verdicts = [status_of(scheduler, each.name).success for each in others]
    scheduler.remove("slow")  # does not wait either
    release.set()
    wait_until(lambda: ("withdraw", "slow") in board.events)
    scheduler.stop()

    assert verdicts == [True] * 3


class Foreign:
    """A collector of prometheus_client's kind."""

    name = "foreign"

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("foreign_things", "Things.", 3.0)


def test_any_collector_begins_at_once_and_goes_on_after_its_interval() -> None:
    board, slow, fast = Board(), Source("slow"), Source("fast")
    with running(board, (slow, SELDOM), (fast, OFTEN), (Foreign(), SELDOM)) as scheduler:
        before = text_of(scheduler.families())
        wait_until(lambda: fast.calls >= 4 and len(board.blocks) == 3)
        with pytest.raises(ValueError, match="slow is already scheduled"):
            scheduler.add(slow, **SELDOM)

        assert slow.calls == 1
        assert board.blocks["slow"] == tuple(block())
        assert status_of(scheduler, "slow").success is True
        assert "foreign_things_total 3.0" in text_of(board.blocks["foreign"])
        assert 'exporter_collector_timeouts_total{collector="slow"} 0' in before


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (CollectError("no right to read it", reason="permission"), "permission"),
        (ZeroDivisionError("division by zero"), "unexpected"),
        (SystemExit(3), "unexpected"),
        (["no family"], "unexpected"),
    ],
)
def test_a_collector_that_fails_publishes_nothing_and_counts_on_when_it_is_added_again(
    answer: Any, reason: str
) -> None:
    def fail() -> Collected:
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]  # nonsense

    board, name = Board(), f'exporter_collector_errors_total{{collector="bad",reason="{reason}"}}'
    with running(board, (Source("bad", fail), SELDOM)) as scheduler:
        wait_until(lambda: status_of(scheduler, "bad").success is False)
        first = metric(scheduler, name)
        scheduler.remove("bad")
        scheduler.add(Source("bad", fail), **SELDOM)
        wait_until(lambda: metric(scheduler, name) == 2)

        assert (board.events, first) == ([], 1)
        assert status_of(scheduler, "bad").reason == reason


def test_a_page_that_refuses_a_block_is_the_failure_of_its_collector() -> None:
    def refuse(name: str, families: object) -> None:
        raise ValueError(f"{name} does not fit")

    scheduler = Scheduler(publish=refuse, withdraw=Board().withdraw)
    scheduler.add(Source("big"), **OFTEN)
    scheduler.start()
    wait_until(lambda: status_of(scheduler, "big").success is False)
    scheduler.stop()

    assert "big does not fit" in status_of(scheduler, "big").message
    assert status_of(scheduler, "big").age_seconds is None


@pytest.mark.parametrize("unwatched", [0.0, 60.0])
def test_a_collector_that_eases_is_left_alone_while_nobody_looks(unwatched: float) -> None:
    board, easy, other = Board(), Source("easy"), Source("other")
    times = {"interval_seconds": 0.05, "deadline_seconds": 0.5, "eases": True}
    with running(board, (easy, times), (other, OFTEN), unwatched=lambda: unwatched):
        wait_until(lambda: other.calls >= 20)

        assert (easy.calls == 1) == (unwatched > 0)
        assert "easy" in board.blocks


def test_a_scheduler_without_threads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        if thread.name == "exporter-collect":
            raise RuntimeError("can't start new thread")
        start(thread)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    scheduler = Scheduler(publish=Board().publish, withdraw=Board().withdraw)
    scheduler.add(Source("x"), **SELDOM)

    with pytest.raises(StartError, match="1 threads are needed for the collectors and 0 could be started"):
        scheduler.start()
