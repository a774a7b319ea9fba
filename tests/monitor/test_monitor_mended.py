"""Defects of torch.monitor 2.13 that the compatibility module corrects (rows D1 to D22 of docs/torch-monitor.md), and further
differences.
"""
# ruff: noqa: DTZ001, DTZ005, DTZ006 - torch's events have naive datetimes

from __future__ import annotations

import copy
import datetime as dt
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs.monitor
import pytest
from program_support import run_function, run_program, stat_state
from waiting import WAIT_LIMIT_SECONDS, wait_until

import exporter
from exporter import monitor
from exporter.monitor import Aggregation, Event, Stat, log_event
from exporter.recording.event_values import MAX_EVENT_NAME_CHARACTERS
from exporter.recording.events import EVENTS

HOUR = dt.timedelta(hours=1)


@pytest.fixture
def received_events() -> Iterator[list[Event]]:
    events: list[Event] = []
    handle = monitor.register_event_handler(events.append)
    yield events
    monitor.unregister_event_handler(handle)


def test_d1_two_threads_log_and_add_while_a_handler_in_python_writes(tmp_path: Path) -> None:
    event_file = tmp_path / "events"
    completed = run_function(
        tmp_path / "feed", programs.monitor.log_and_add_from_two_threads, str(event_file)
    )

    assert completed.stderr == ""
    assert event_file.read_text().count("e\n") > 0


def test_d3_value_is_the_last_sample(received_events: list[Event]) -> None:
    stat = Stat("d3", [Aggregation.VALUE], HOUR, 2)
    stat.add(1.0)
    stat.add(7.5)

    assert stat.get() == {Aggregation.VALUE: 7.5}
    assert received_events[-1].data == {"d3.value": 7.5}
    assert Aggregation(1) is Aggregation.VALUE
    with pytest.raises(ValueError):
        Aggregation(99)


@pytest.mark.parametrize(
    "window", [0.0, 0.0009, -5.0, dt.timedelta(microseconds=999), math.nan, math.inf, -1e306]
)
def test_d12_a_window_below_a_millisecond_or_of_no_length_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match="window_size must be"):
        Stat("d12", [], window)


def test_the_longest_window_of_a_float_is_accepted() -> None:
    stat = Stat("long", [Aggregation.COUNT], 1e306)
    stat.add(1.0)

    assert stat.count == 1


def test_d13_d15_d22_exceptions_of_a_handler_are_isolated_and_unregistering_twice_is_safe() -> None:
    def broken(_event: Event) -> None:
        raise SystemExit(3)

    handle = monitor.register_event_handler(broken)
    stat = Stat("d15", [Aggregation.SUM], HOUR)
    log_event(Event("d15", dt.datetime.now(), {}))
    stat.add(1.0)
    del stat
    for _ in range(2):  # the second call has no effect (D13)
        monitor.unregister_event_handler(handle)

    drop_reasons = [reason for handler, reason in EVENTS.reading().dropped if "broken" in handler]
    assert drop_reasons == ["error"]


def test_d16_a_handler_can_log_and_its_events_follow() -> None:
    stat = Stat("d16", [Aggregation.COUNT], HOUR, 1)
    log: list[str] = []

    def handler(event: Event) -> None:
        log.append(event.name)
        if event.name == "d16.first":
            stat.add(1.0)
            log_event(Event("d16.second", dt.datetime.now(), {}))
            monitor.unregister_event_handler(monitor.register_event_handler(lambda _event: None))
            log.append(f"{stat.get()[Aggregation.COUNT]:g}")
        if event.name == "d16.second":
            monitor.unregister_event_handler(handle)

    handle = monitor.register_event_handler(handler)
    log_event(Event("d16.first", dt.datetime.now(), {}))
    wait_until(lambda: not handle.is_registered)
    log_event(Event("d16.third", dt.datetime.now(), {}))

    assert log == ["d16.first", "1", monitor.STAT_EVENT, "d16.second"]


# Handlers that run before the call returns ------------------------------------------------


def test_two_threads_that_log_into_each_others_handlers_do_not_deadlock(tmp_path: Path) -> None:
    completed = run_function(tmp_path / "feed", programs.monitor.log_into_each_others_handlers)

    assert completed.stderr == ""
    assert completed.stdout == "1200\n"


@pytest.mark.timeout(90)
def test_a_hanging_handler_delays_one_call_and_receives_all_events_once_it_returns() -> None:
    gate, handled_names = threading.Event(), list[str]()

    def hanging(event: Event) -> None:
        gate.wait(WAIT_LIMIT_SECONDS)
        handled_names.append(event.name)

    handle = monitor.register_event_handler(hanging)
    start_time = time.monotonic()
    for index in range(50):
        log_event(Event(f"hangs.{index}", dt.datetime.now(), {}))
    logging_seconds = time.monotonic() - start_time
    gate.set()
    wait_until(lambda: len(handled_names) == 50)
    assert handle.drain(WAIT_LIMIT_SECONDS)
    log_event(Event("hangs.no.more", dt.datetime.now(), {}))

    assert handled_names == [*(f"hangs.{index}" for index in range(50)), "hangs.no.more"]
    # The first call waits for five seconds; fifty such waits would take four minutes.
    assert 4 <= logging_seconds < WAIT_LIMIT_SECONDS
    monitor.unregister_event_handler(handle)


def test_a_handler_is_called_from_a_signal_handler(tmp_path: Path) -> None:
    completed = run_function(tmp_path / "feed", programs.monitor.log_from_a_signal_handler)

    assert completed.stdout == "True\n"


def test_d17_without_a_length_every_window_of_max_samples_is_logged_and_nothing_discarded(
    received_events: list[Event],
) -> None:
    stat = Stat("d17.counted", [Aggregation.SUM, Aggregation.COUNT], None, 20)
    for sample in range(105):
        stat.add(float(sample))

    sums = [event.data["d17.counted.sum"] for event in received_events]
    assert sums == [sum(range(first, first + 20)) for first in range(0, 100, 20)]
    assert {event.data["d17.counted.count"] for event in received_events} == {20.0}
    assert stat.count == 5
    assert stat.discarded == 0
    with pytest.raises(ValueError, match="max_samples"):
        Stat("d17.endless", [Aggregation.SUM], None, 0)


def test_d17_discarded_samples_are_counted() -> None:
    stat = Stat("d17", [Aggregation.COUNT], HOUR, 3)
    for _ in range(10):
        stat.add(1.0)

    assert stat.get() == {Aggregation.COUNT: 3.0}
    assert stat.discarded == 7


def test_d18_a_window_closes_by_time_without_new_samples(received_events: list[Event]) -> None:
    stat = Stat("d18", [Aggregation.SUM], 0.2)
    stat.add(3.0)
    wait_until(lambda: any("d18.sum" in event.data for event in received_events))

    assert stat.count == 0
    assert stat.get() == {Aggregation.SUM: 3.0}
    assert [event.data for event in received_events if "d18.sum" in event.data] == [{"d18.sum": 3.0}]


def test_d19_the_open_window_stays_with_the_parent(tmp_path: Path) -> None:
    assert run_function(tmp_path / "feed", programs.monitor.fork_with_an_open_window).stderr == ""


def test_d2_d20_the_last_window_of_a_global_stat_is_logged_at_exit(tmp_path: Path) -> None:
    program = """
from exporter import monitor
monitor.register_event_handler(lambda event: print(event.data, flush=True))
STAT = monitor.Stat("d20", [monitor.Aggregation.SUM], 3600.0)
STAT.add(1.5)
"""
    completed = run_program(tmp_path / "feed", program)

    assert completed.stderr == ""
    assert completed.stdout == "{'d20.sum': 1.5}\n"


# Further differences -------------------------------------------------------------------------------------------


def test_a_bool_stays_a_bool_and_a_time_zone_is_kept() -> None:
    berlin = dt.timezone(dt.timedelta(hours=1))
    timestamp = dt.datetime(2026, 1, 1, tzinfo=berlin)
    event = Event("a", timestamp, {"ok": True})

    assert event.data["ok"] is True
    assert event.timestamp.utcoffset() == dt.timedelta(hours=1)


class TypedEvent(Event):
    """Event subclass with a constructor and an attribute."""

    def __init__(self, step: int) -> None:
        super().__init__("typed", dt.datetime(2026, 1, 1), {"step": step})
        self.step = step


@pytest.mark.parametrize(
    "copy_event", [copy.copy, copy.deepcopy, lambda event: pickle.loads(pickle.dumps(event))]
)
def test_an_event_of_a_subclass_is_copied_completely(copy_event: Callable[[TypedEvent], TypedEvent]) -> None:
    event = TypedEvent(7)
    event_copy = copy_event(event)

    assert type(event_copy) is TypedEvent
    assert event_copy.step == 7
    assert event_copy.asdict() == event.asdict()
    timestamp = "datetime.datetime(2026, 1, 1, 0, 0)"
    assert repr(event_copy) == f"TypedEvent(name='typed', timestamp={timestamp}, data={{'step': 7}})"


def test_events_of_this_module_and_of_the_exporter_share_handlers(received_events: list[Event]) -> None:
    events: list[exporter.Event] = []
    handle = exporter.events.register(events.append, types="logged.*")
    log_event(Event("logged.event", dt.datetime.fromtimestamp(7.0), {"x": 1}))
    handle.unregister()
    exporter.log("ckpt.saved", "step 7", step=7, timestamp=5.0)
    event = received_events[-1]

    assert [(event.type, event.data, event.timestamp) for event in events] == [
        ("logged.event", {"x": 1}, 7.0)
    ]
    assert event.name == "ckpt.saved"
    assert event.timestamp.timestamp() == 5.0
    assert event.data == {"message": "step 7", "step": 7}


def test_the_recorded_type_of_an_event_is_cut_and_a_handler_of_torch_receives_the_full_name(
    received_events: list[Event],
) -> None:
    log_event(Event("n" * 2000, dt.datetime.now(), {}))

    assert exporter.events.recent()[-1].type == "n" * MAX_EVENT_NAME_CHARACTERS
    assert received_events[-1].name == "n" * 2000


def test_an_event_with_a_time_outside_the_range_of_datetime_is_delivered_with_the_current_time(
    received_events: list[Event],
) -> None:
    exporter.log("far.future", timestamp=1e300)

    (event,) = [event for event in received_events if event.name == "far.future"]
    assert abs(event.timestamp.timestamp() - time.time()) < 60


@pytest.mark.parametrize(
    ("name", "recorded_name"),
    [("shared.loss", "shared.loss"), ("shared lr/ms", "shared_lr_ms"), ("7 seas", "stat_7_seas")],
)
def test_stats_of_one_name_share_a_family(name: str, recorded_name: str) -> None:
    mean_stat, max_stat = Stat(name, [Aggregation.MEAN], HOUR, 2), Stat(name, [Aggregation.MAX], 60.0)
    for sample in (1.0, 2.0, 30.0):
        mean_stat.add(sample)
    max_stat.add(5.0)

    assert stat_state(recorded_name).count == 3
    assert stat_state(recorded_name).sum == 8.0
    assert mean_stat.get()[Aggregation.MEAN] == 1.5
    assert max_stat.count == 1


def test_a_stat_with_a_reserved_name_works_without_families() -> None:
    stat = Stat("training.events", [Aggregation.SUM], HOUR, 1)
    stat.add(2.0)

    assert stat.get() == {Aggregation.SUM: 2.0}


def test_the_windows_have_every_sample_that_four_threads_add() -> None:
    stat = Stat("four.threads", [Aggregation.COUNT, Aggregation.SUM], 0.005)
    received_events: list[Event] = []
    handle = monitor.register_event_handler(received_events.append)

    def work() -> None:
        for _ in range(20_000):
            stat.add(1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stat._close_if_due(at_end=True)
    monitor.unregister_event_handler(handle)
    windows = [event.data for event in received_events if "four.threads.count" in event.data]

    assert sum(float(window["four.threads.count"]) for window in windows) == 80_000
    assert sum(float(window["four.threads.sum"]) for window in windows) == 80_000
    assert len(windows) > 3


def test_a_signal_handler_can_add_to_the_interrupted_stat(tmp_path: Path) -> None:
    run_function(tmp_path / "feed", programs.monitor.add_from_a_signal_handler)


def test_a_window_closed_by_max_samples_stays_readable_until_the_next_one_closes() -> None:
    stat = Stat("mended.full", [Aggregation.SUM], 0.2, 2)
    stat.add(1.0)
    stat.add(2.0)
    time.sleep(0.3)
    stat.add(5.0)

    assert stat.get() == {Aggregation.SUM: 3.0}
