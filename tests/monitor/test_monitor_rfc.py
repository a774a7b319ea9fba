"""The API of the RFC (`exporter.monitor.rfc`): the examples of the RFC with changed imports, collectors, and invalid calls."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import programs.monitor
import pytest
from program_support import run_function
from waiting import WAIT_LIMIT_SECONDS, wait_until

import exporter
from exporter import monitor
from exporter.elastic.metrics import put_metric
from exporter.monitor.rfc import (
    AggregatingStatCollector,
    Event,
    EventHandler,
    Stat,
    StatCollector,
    StatType,
    log,
    register,
    register_stat_collector,
    unregister,
)
from exporter.recording.events import EVENTS

pytestmark = pytest.mark.timeout(120)  # one test imports torch


@pytest.fixture
def delivered_events() -> Iterator[list[Event]]:
    events: list[Event] = []
    handle = register(events.append)
    yield events
    unregister(handle)


class RdzvEvent(Event):
    """Event of the RFC's example, with a constructor."""

    def __init__(self, run_id: str, rank: int, message: str | None = None) -> None:
        super().__init__(
            type="torch.elastic.RdzvEvent", message=message, metadata={"run_id": run_id, "rank": rank}
        )


@dataclass
class SavedEvent(Event):
    """Event of a dataclass with an attribute."""

    type: str = "ckpt.saved"
    step: int = 0


def test_the_example_of_a_typed_event(delivered_events: list[Event]) -> None:
    event = RdzvEvent(run_id="1234", rank=0, message="rendezvous started")
    log(event)

    assert [(type(event), event.type, event.message) for event in delivered_events] == [
        (RdzvEvent, event.type, "rendezvous started")
    ]
    assert delivered_events[0].metadata == event.metadata
    assert event.timestamp is None
    assert event.type == "torch.elastic.RdzvEvent"
    assert event.metadata == {"run_id": "1234", "rank": 0}


def test_the_example_of_a_handler_that_writes_lines(tmp_path: Path) -> None:
    class JsonHandler(EventHandler):
        def handle(self, event: Event) -> None:
            with (tmp_path / "events.jsonl").open("a") as file:
                file.write(json.dumps(event.asdict()) + "\n")

    handle = register(JsonHandler())
    log(SavedEvent(message="m", step=7))
    log("plain", "said", x=1)
    unregister(handle)
    unregister(handle)  # has no effect
    saved, plain = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())

    assert saved["type"] == "ckpt.saved"
    assert saved["step"] == 7
    assert saved["message"] == "m"
    assert plain["type"] == "plain"
    assert plain["metadata"] == {"x": 1}


def test_the_example_of_a_reporting_loop() -> None:
    latency = Stat("rfc.batch.latency", {StatType.MEAN, StatType.HISTOGRAM, StatType.COUNT}, unit="seconds")
    epoch = Stat("rfc.epoch.latency", {StatType.MEAN, StatType.STDDEV, StatType.P95})
    collector = AggregatingStatCollector()
    handle = register_stat_collector(collector)
    for value in range(101):
        latency.add(float(value))
    epoch.add(3.0)
    stats = collector.report()
    collector.reset()
    report_after_reset = collector.report()
    unregister(handle)

    assert stats["rfc.batch.latency.mean"] == 50.0
    assert stats["rfc.batch.latency.count"] == 101
    assert stats["rfc.batch.latency.p50"] == 50.0
    assert stats["rfc.batch.latency.p95"] == 95.0
    assert stats["rfc.epoch.latency.mean"] == 3.0
    assert stats["rfc.epoch.latency.stddev"] == 0.0
    assert report_after_reset == {"rfc.batch.latency.count": 0.0}


class CollectorInMemory(StatCollector):
    """Collector that stores the received samples once its gate is open."""

    def __init__(self) -> None:
        self.samples: list[tuple[str, float]] = []
        self.gate = threading.Event()

    def handle(self, stat: Stat, v: float) -> None:
        self.gate.wait(WAIT_LIMIT_SECONDS)
        self.samples.append((stat.key, v))


def test_a_collector_receives_every_raw_sample_and_does_not_delay_the_adding_thread() -> None:
    collector = CollectorInMemory()
    exporter.Stat("others.before").add(1.0)
    handle = register_stat_collector(collector)
    stat = Stat("rfc.raw", [StatType.SUM])
    start_time = time.monotonic()
    for value in range(100):
        stat.add(float(value))
    exporter.Stat("others.plain").add(2.0)
    monitor.Stat("others.torch", [monitor.Aggregation.SUM], 60.0).add(3.0)
    put_metric("others", 4.0, "g")
    adding_seconds = time.monotonic() - start_time
    collector.gate.set()
    unregister(handle)
    stat.add(1000.0)

    assert adding_seconds < WAIT_LIMIT_SECONDS / 2
    other_samples = [("g.others", 4.0), ("others.plain", 2.0), ("others.torch", 3.0)]
    assert sorted(collector.samples) == [*other_samples, *(("rfc.raw", float(value)) for value in range(100))]


def test_a_raising_collector_loses_only_its_own_samples() -> None:
    class RaisingCollector(StatCollector):
        def handle(self, stat: Stat, v: float) -> None:
            raise ValueError

    aggregating = AggregatingStatCollector()
    handles = [register_stat_collector(RaisingCollector()), register_stat_collector(aggregating)]
    stat = Stat("rfc.broken", [StatType.SUM])
    stat.add(2.0)
    stat.add(float("nan"))
    stat.add("text")  # type: ignore[arg-type]  # invalid on purpose
    report = aggregating.report()
    for handle in handles:
        unregister(handle)

    assert report == {"rfc.broken.sum": 2.0}
    (dropped_count,) = [
        count for (name, _), count in EVENTS.reading().dropped.items() if name.endswith("RaisingCollector")
    ]
    assert dropped_count >= 1


def test_a_forked_child_reports_its_own_samples(tmp_path: Path) -> None:
    assert (
        run_function(tmp_path / "feed", programs.monitor.fork_while_a_collector_is_locked).stdout
        == "{'forked.sum': 5.0}\n"
    )


def test_a_handler_sees_time_id_and_parent_of_an_event(delivered_events: list[Event]) -> None:
    start_ns = time.monotonic_ns()
    with exporter.span("outer"):
        log("inside", x=1)
    inner_event = delivered_events[-1]
    log(Event("outside"))
    outer_event = delivered_events[-1]

    assert start_ns <= inner_event.monotonic_ns <= outer_event.monotonic_ns <= time.monotonic_ns()
    assert re.fullmatch("[0-9a-f]{16}", inner_event.id)
    assert inner_event.id != outer_event.id
    assert inner_event.span_id
    assert outer_event.span_id is None
    assert inner_event.asdict()["id"] == inner_event.id


def test_events_have_a_severity_a_timestamp_and_any_origin(
    delivered_events: list[Event],
) -> None:
    log("short", "m", severity="warning", x=1)
    log(Event("then", timestamp=5.0, severity="warning"))
    exporter.log("elsewhere", "m", severity="error", timestamp=5.0, x=1)
    with pytest.raises(TypeError):
        log(Event("long"), severity="warning")
    with pytest.raises(ValueError, match="loud"):
        log("short", severity="loud")

    assert [(event.severity, event.metadata) for event in delivered_events[:2]] == [
        ("warning", {"x": 1}),
        ("warning", {}),
    ]
    assert abs((delivered_events[0].timestamp or 0) - time.time()) < 60
    assert delivered_events[1].timestamp == 5.0
    assert delivered_events[2] == Event("elsewhere", "m", 5.0, {"x": 1}, "error")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((3,), TypeError),
        ((Event(""),), ValueError),
        ((Event(3),), TypeError),  # type: ignore[arg-type]  # invalid on purpose
        ((Event("a", 3),), TypeError),  # type: ignore[arg-type]  # invalid on purpose
        ((Event("a", severity="loud"),), ValueError),
        ((Event("a", timestamp="now"),), TypeError),  # type: ignore[arg-type]  # invalid on purpose
        ((Event("a", metadata={"x": None}),), TypeError),  # type: ignore[dict-item]  # invalid on purpose
        ((Event("a", metadata=[("x", 1)]),), TypeError),  # type: ignore[arg-type]  # invalid on purpose
        ((Event("a"), "message"), TypeError),
    ],
)
def test_an_invalid_event_raises_a_type_error_or_value_error(
    arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        log(*arguments)


@pytest.mark.parametrize("collector", [None, AggregatingStatCollector, print])
def test_an_invalid_collector_is_refused(collector: Any) -> None:
    with pytest.raises(TypeError, match="collector"):
        register_stat_collector(collector)


def test_a_timed_block_is_in_the_torch_profiler_and_a_coroutine_is_timed_to_its_end() -> None:
    torch = pytest.importorskip("torch")
    stat = Stat("rfc.profiled", [StatType.COUNT], unit="seconds")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with stat.add_time(profile=True):
            torch.ones(3).sum()

        assert stat.add_time(profile=True)(abs)(-8) == 8
    names = [event.name for event in profile.events()]

    @stat.add_time(profile=True)
    async def sleep() -> int:
        await asyncio.sleep(0.1)
        return 5

    assert asyncio.run(sleep()) == 5
    wait_until(lambda: exporter.flush() and stat.count == 3)
    assert names.count("rfc.profiled") == 2
    assert stat.sum >= 0.09
