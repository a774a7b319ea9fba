"""Scheduler of collectors with real threads: intervals, deadlines, success and failure, hangs, and withdrawn blocks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from collectors_support import BlockPublisher, text_of
from prometheus_client.core import CounterMetricFamily, Metric
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.collectors.scheduler import Scheduler
from exporter.collectors.status import CollectorStatus
from exporter.errors import CollectError, StartError
from exporter.families import AnyCollector, Collected, Family

SPEC = Family(name="host_thing", type="gauge", help="A thing.")
FREQUENT_SCHEDULE: dict[str, Any] = {"interval_seconds": 0.05, "deadline_seconds": 5.0}
SINGLE_PASS_SCHEDULE: dict[str, Any] = {"interval_seconds": 3600.0, "deadline_seconds": 5.0}
SHORT_DEADLINE_SCHEDULE: dict[str, Any] = {"interval_seconds": 0.1, "deadline_seconds": 0.2}


def block(value: float = 1.0) -> Collected:
    """Return the result of a pass with one series."""
    collected = Collected()
    collected.add(SPEC, value)
    return collected


class Source:
    """Collector whose function, `act`, tests replace."""

    specs = (SPEC,)

    def __init__(self, name: str, act: Callable[[], Collected] = block) -> None:
        self.name = name
        self.act = act
        self.calls = self.concurrent_calls = self.max_concurrent_calls = 0

    def collect(self) -> Collected:
        self.calls += 1
        self.concurrent_calls += 1
        self.max_concurrent_calls = max(self.max_concurrent_calls, self.concurrent_calls)
        try:
            return self.act()
        finally:
            self.concurrent_calls -= 1


class HangingSource(Source):
    """Collector that hangs until it is released."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self.hang)
        self.release = threading.Event()

    def hang(self) -> Collected:
        self.release.wait()
        return block(666)


def source_function(result: Any) -> Callable[[], Collected]:
    """Return a function that returns a result, or raises it if it is an exception."""

    def act() -> Collected:
        if isinstance(result, BaseException):
            raise result
        return result  # type: ignore[no-any-return]  # invalid on purpose

    return act


@contextmanager
def running_scheduler(
    publisher: BlockPublisher, *sources: tuple[AnyCollector, dict[str, Any]], **options: Any
) -> Iterator[Scheduler]:
    scheduler = Scheduler(**{"publish": publisher.publish, "withdraw": publisher.withdraw, **options})
    for source, schedule in sources:
        scheduler.add(source, **schedule)
    scheduler.start()
    try:
        yield scheduler
    finally:
        for source, _ in sources:
            if isinstance(source, HangingSource):
                source.release.set()
        scheduler.stop()


def status_of(scheduler: Scheduler, name: str) -> CollectorStatus:
    return next(status for status in scheduler.statuses() if status.name == name)


def status_value(scheduler: Scheduler, name: str, collector: str, **labels: str) -> float | None:
    """Return the value of the family `exporter_collector_NAME` of a collector, or None if absent."""
    expected_labels = {"collector": collector, **labels}
    samples = [sample for family in scheduler.families() for sample in family.samples]
    matches = [
        sample
        for sample in samples
        if sample.name == f"exporter_collector_{name}" and sample.labels == expected_labels
    ]
    return matches[0].value if matches else None


def test_a_collector_runs_at_once_and_again_after_its_interval() -> None:
    class Foreign:
        """A collector of prometheus_client's kind."""

        name = "foreign"

        def collect(self) -> Iterator[Metric]:
            yield CounterMetricFamily("foreign_things", "Things.", 3.0)

    publisher, slow, fast = BlockPublisher(), Source("slow"), Source("fast")
    with running_scheduler(
        publisher, (slow, SINGLE_PASS_SCHEDULE), (fast, FREQUENT_SCHEDULE), (Foreign(), SINGLE_PASS_SCHEDULE)
    ) as scheduler:
        wait_until(lambda: fast.calls >= 4 and len(publisher.blocks) == 3)
        with pytest.raises(ValueError, match="slow is already scheduled"):
            scheduler.add(slow, **SINGLE_PASS_SCHEDULE)

        assert slow.calls == 1
        assert publisher.blocks["slow"] == tuple(block())
        assert status_of(scheduler, "slow").success is True
        assert status_value(scheduler, "timeouts_total", "slow") == 0
        assert "foreign_things_total 3.0" in text_of(publisher.blocks["foreign"])


def test_a_hanging_collector_affects_only_itself_and_its_late_result_is_dropped() -> None:
    publisher, hanging, healthy = BlockPublisher(), HangingSource("nfs"), Source("healthy")
    hanging.act = block
    start_time = time.monotonic()
    with running_scheduler(
        publisher, (hanging, SHORT_DEADLINE_SCHEDULE), (healthy, FREQUENT_SCHEDULE)
    ) as scheduler:
        wait_until(lambda: "nfs" in publisher.blocks)
        hanging.act = hanging.hang
        wait_until(lambda: "nfs" not in publisher.blocks)
        hanging_calls, healthy_calls = hanging.calls, healthy.calls
        wait_until(lambda: healthy.calls >= healthy_calls + 8)
        status = status_of(scheduler, "nfs")

        assert status.success is False
        assert status.reason == "timeout"
        assert status.is_running is True
        assert status.age_seconds is None
        assert status.last_success is not None
        assert hanging.calls == hanging_calls  # still the same call
        assert status_value(scheduler, "timeouts_total", "nfs") == 1
        assert (status_value(scheduler, "last_duration_seconds", "nfs") or 0) > 0.4

        hanging.act = block
        hanging.release.set()
        wait_until(lambda: status_of(scheduler, "nfs").success is True)

        assert publisher.blocks["nfs"] == tuple(block(1))
        elapsed_seconds = time.monotonic() - start_time
        assert 0.4 <= (status_value(scheduler, "duration_seconds_total", "nfs") or 0) <= elapsed_seconds


def test_stopping_does_not_wait_for_hanging_collectors_and_ends_publication() -> None:
    publisher, hanging = BlockPublisher(), HangingSource("stuck")
    with running_scheduler(publisher, (hanging, SINGLE_PASS_SCHEDULE)) as scheduler:
        wait_until(lambda: hanging.calls == 1)
        start_time = time.monotonic()
        scheduler.stop(timeout_seconds=0.3)
        stop_seconds = time.monotonic() - start_time
        hanging.release.set()
        wait_until(lambda: not any(thread.name == "exporter-stuck" for thread in threading.enumerate()))

        assert stop_seconds < WAIT_LIMIT_SECONDS / 2  # the hang has no end
        assert publisher.events == []


def test_stopping_waits_for_a_pass_that_ends_within_the_timeout() -> None:
    source = HangingSource("slow")
    with running_scheduler(BlockPublisher(), (source, SINGLE_PASS_SCHEDULE)) as scheduler:
        wait_until(lambda: source.calls == 1)
        threading.Timer(0.3, source.release.set).start()
        scheduler.stop(timeout_seconds=WAIT_LIMIT_SECONDS)

        assert source.concurrent_calls == 0


def test_a_partial_success_is_published_and_counts_as_a_failure() -> None:
    partial_block = block()
    partial_block.problems += [("malformed", "line 3"), ("malformed", "line 9")]
    publisher = BlockPublisher()
    with running_scheduler(
        publisher, (Source("half", lambda: partial_block), SINGLE_PASS_SCHEDULE)
    ) as scheduler:
        wait_until(lambda: status_of(scheduler, "half").success is False)

        assert publisher.blocks["half"] == tuple(partial_block)
        assert status_value(scheduler, "success", "half") == 0
        assert status_value(scheduler, "last_success_timestamp_seconds", "half") is None
        assert status_value(scheduler, "errors_total", "half", reason="malformed") == 1


def test_a_block_without_a_successor_is_withdrawn_and_published_again() -> None:
    publisher, source = BlockPublisher(), Source("gpu")
    with running_scheduler(publisher, (source, SHORT_DEADLINE_SCHEDULE)) as scheduler:
        wait_until(lambda: "gpu" in publisher.blocks)
        source.act, previous_calls = source_function(CollectError("gone", reason="permission")), source.calls
        wait_until(lambda: "gpu" not in publisher.blocks)
        failed_calls = source.calls - previous_calls
        source.act = block
        wait_until(lambda: "gpu" in publisher.blocks)

        assert failed_calls >= 2  # a single failure withdraws no block
        assert status_of(scheduler, "gpu").success is True


def test_removing_a_collector_removes_its_block_and_series() -> None:
    publisher, source = BlockPublisher(), Source("gone")
    with running_scheduler(
        publisher, (source, FREQUENT_SCHEDULE), (Source("stays"), FREQUENT_SCHEDULE)
    ) as scheduler:
        wait_until(lambda: len(publisher.blocks) == 2)
        scheduler.remove("gone")
        calls = source.calls
        time.sleep(0.2)

        assert publisher.blocks.keys() == {"stays"}
        assert source.calls <= calls + 1  # a pass may have started before the removal
        assert status_value(scheduler, "timeouts_total", "gone") is None


def test_a_successor_waits_for_the_call_of_its_removed_predecessor() -> None:
    publisher, hanging, successor = BlockPublisher(), HangingSource("nfs"), Source("nfs")
    with running_scheduler(publisher, (hanging, SHORT_DEADLINE_SCHEDULE)) as scheduler:
        wait_until(lambda: status_of(scheduler, "nfs").success is False)
        scheduler.remove("nfs")
        scheduler.add(successor, **SINGLE_PASS_SCHEDULE)
        time.sleep(0.2)
        assert successor.calls == 0
        assert status_of(scheduler, "nfs").reason == "timeout"
        hanging.release.set()

        wait_until(lambda: publisher.blocks.get("nfs") == tuple(block()))


def test_run_soon_during_a_pass_gives_one_more_pass_and_never_two_at_once() -> None:
    source = HangingSource("busy")
    with running_scheduler(BlockPublisher(), (source, SINGLE_PASS_SCHEDULE)) as scheduler:
        wait_until(lambda: source.calls == 1)
        for _ in range(10):
            scheduler.run_soon("busy")
        scheduler.run_soon("not scheduled")  # is ignored
        source.release.set()
        wait_until(lambda: source.calls == 2)
        time.sleep(0.1)

        assert source.calls == 2
        assert source.max_concurrent_calls == 1


def test_a_change_of_state_is_logged_once_and_not_every_pass(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    block_with_message = block()
    block_with_message.unsupported.append("no thermometers")
    permission, malformed = (
        CollectError("a detail", reason=reason) for reason in ("permission", "malformed")
    )
    source = Source("moody")
    with running_scheduler(
        BlockPublisher(), (source, FREQUENT_SCHEDULE), (Source("whole"), FREQUENT_SCHEDULE)
    ) as scheduler:
        for act in (
            block,
            source_function(permission),
            source_function(malformed),
            source_function(block_with_message),
        ):
            source.act = act
            previous_calls = source.calls
            wait_until(lambda previous_calls=previous_calls: source.calls >= previous_calls + 4)  # type: ignore[misc]  # the value of this round

        assert status_value(scheduler, "unsupported_sources", "moody") == 1
        assert status_value(scheduler, "unsupported_sources", "whole") is None
        assert status_of(scheduler, "moody").success is True
    messages = [record.getMessage() for record in caplog.records if "moody" in record.getMessage()]
    assert sorted(messages) == [
        "collector moody fails: a detail (malformed)",
        "collector moody fails: a detail (permission)",
        "collector moody works again",
        "collector moody: no thermometers",
    ]


def test_a_hanging_publication_affects_only_its_collector() -> None:
    publisher, release = BlockPublisher(), threading.Event()

    def publish(name: str, families: Sequence[Metric]) -> None:
        if name == "slow":
            release.wait(60)
        publisher.publish(name, families)

    other_sources = [Source(f"other{index}") for index in range(3)]
    other_schedules = [(source, FREQUENT_SCHEDULE) for source in other_sources]
    with running_scheduler(
        publisher, (Source("slow"), SHORT_DEADLINE_SCHEDULE), *other_schedules, publish=publish
    ) as scheduler:
        wait_until(lambda: status_of(scheduler, "slow").reason == "timeout")
        initial_calls = [source.calls for source in other_sources]
        wait_until(
            lambda: all(
                source.calls >= previous_calls + 5
                for source, previous_calls in zip(other_sources, initial_calls, strict=True)
            )
        )
        successes = [status_of(scheduler, source.name).success for source in other_sources]
        scheduler.remove("slow")  # without waiting
        release.set()
        wait_until(lambda: ("withdraw", "slow") in publisher.events)

    assert successes == [True] * 3


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (CollectError("no right to read it", reason="permission"), "permission"),
        (ZeroDivisionError("division by zero"), "internal"),
        (SystemExit(3), "internal"),
        (["no family"], "internal"),
    ],
)
def test_a_failing_collector_publishes_nothing_and_continues_counting_when_added_again(
    result: Any, reason: str
) -> None:
    publisher, failing = BlockPublisher(), Source("bad", source_function(result))
    with running_scheduler(publisher, (failing, SINGLE_PASS_SCHEDULE)) as scheduler:
        wait_until(lambda: status_value(scheduler, "errors_total", "bad", reason=reason) == 1)
        scheduler.remove("bad")
        scheduler.add(failing, **SINGLE_PASS_SCHEDULE)
        wait_until(lambda: status_value(scheduler, "errors_total", "bad", reason=reason) == 2)

        assert publisher.events == []
        assert status_of(scheduler, "bad").reason == reason


def test_a_refused_block_is_a_failure_of_its_collector() -> None:
    def refuse(name: str, families: object) -> None:
        raise ValueError(f"{name} does not fit")

    with running_scheduler(
        BlockPublisher(), (Source("big"), SINGLE_PASS_SCHEDULE), publish=refuse
    ) as scheduler:
        wait_until(lambda: status_of(scheduler, "big").success is False)
        status = status_of(scheduler, "big")

    assert "big does not fit" in status.message
    assert status.age_seconds is None


def test_local_collectors_share_one_thread() -> None:
    threads = {name: set[threading.Thread]() for name in ("cpu", "memory", "gpu")}

    def note_thread(name: str) -> Callable[[], Collected]:
        def act() -> Collected:
            threads[name].add(threading.current_thread())
            return block()

        return act

    sources = {name: Source(name, note_thread(name)) for name in threads}
    local = {**FREQUENT_SCHEDULE, "lane": "local"}
    with running_scheduler(
        BlockPublisher(),
        (sources["cpu"], local),
        (sources["memory"], local),
        (sources["gpu"], FREQUENT_SCHEDULE),
    ):
        wait_until(lambda: all(source.calls >= 3 for source in sources.values()))

    assert threads["cpu"] == threads["memory"]
    assert len(threads["cpu"]) == 1
    assert threads["gpu"].isdisjoint(threads["cpu"])


def test_a_collector_that_hangs_in_a_file_does_not_affect_others_of_its_lane(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stat")  # open waits for a writer

    def read() -> Collected:
        (tmp_path / "stat").read_text(encoding="utf-8")
        return block()

    publisher, healthy = BlockPublisher(), Source("healthy")
    stuck, second = Source("stuck", read), HangingSource("second")
    local = {**SHORT_DEADLINE_SCHEDULE, "lane": "local"}
    with running_scheduler(publisher, (stuck, local), (second, local), (healthy, local)) as scheduler:
        wait_until(lambda: {"timeout"} == {status_of(scheduler, name).reason for name in ("stuck", "second")})
        initial_calls = healthy.calls
        wait_until(lambda: healthy.calls >= initial_calls + 5)
        is_healthy = status_of(scheduler, "healthy").success
        # Before the file can be read, because the next call would wait for another writer.
        stuck.act = second.act = block
        (tmp_path / "stat").write_text("1")
        second.release.set()
        wait_until(lambda: {"stuck", "second"} <= publisher.blocks.keys())
        lanes = [thread for thread in threading.enumerate() if thread.name == "exporter-local"]

    assert is_healthy is True
    assert [source.max_concurrent_calls for source in (stuck, second, healthy)] == [1, 1, 1]
    assert len(lanes) == 1  # the abandoned threads have ended


def test_a_scheduler_without_threads_raises_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        if thread.name == "exporter-x":
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    start_thread = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)

    with (
        pytest.raises(StartError, match="2 threads are needed for the collectors and 1 could be started"),
        running_scheduler(BlockPublisher(), (Source("x"), SINGLE_PASS_SCHEDULE)),
    ):
        pass
