"""Events in a process: counts, delivery to handlers, and invalid arguments."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import pickle
import queue
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from feed_support import new_identity
from waiting import WAIT_LIMIT_SECONDS, wait_until

import exporter
from exporter.recording.event_log import MAX_RECENT_EVENTS, EventLog
from exporter.recording.event_values import Event
from exporter.recording.handle import name_of
from exporter.recording.handlers import JsonLinesHandler
from exporter.recording.values import ProcessIdentity


@pytest.fixture
def events() -> Iterator[EventLog]:
    log = EventLog()
    yield log
    log.close(timeout_seconds=0.2)


def test_recent_returns_each_event_once_while_another_thread_logs() -> None:
    def identify() -> ProcessIdentity:
        """Log an event on another thread, while `recent` converts the first event."""
        thread = threading.Thread(target=event_log.log, args=("step", "late"))
        thread.start()
        thread.join(WAIT_LIMIT_SECONDS)
        return new_identity()

    event_log = EventLog(identify=identify)
    for index in range(MAX_RECENT_EVENTS):
        event_log.log("step", str(index))

    messages = [event.message for event in event_log.recent()]

    assert messages[: MAX_RECENT_EVENTS - 1] == [str(index) for index in range(MAX_RECENT_EVENTS - 1)]
    assert [event.message for event in event_log.recent()] == [*map(str, range(1, MAX_RECENT_EVENTS)), "late"]


def test_enabled_answers_for_a_type_that_cannot_be_hashed(events: EventLog) -> None:
    class Unhashable(str):
        __slots__ = ()

        def __hash__(self) -> int:
            raise RuntimeError("mine")

    assert events.enabled(Unhashable("checkpoint.saved"))


def test_an_event_has_its_data_and_times() -> None:
    received_events: list[Event] = []
    events = EventLog(identify=lambda: new_identity(run="night-run", rank=3))
    events.register(received_events.append)
    start_time = time.time()
    events.log(
        "checkpoint.saved",
        "step 100",
        severity="warning",
        span_id="s1",
        parent_ids=["a", "b"],
        step=100,
        ok=True,
        seconds=1.5,
    )

    (event,) = received_events
    assert (event.type, event.message, event.severity) == ("checkpoint.saved", "step 100", "warning")
    assert event.data == {"step": 100, "ok": True, "seconds": 1.5}
    assert start_time <= event.timestamp == event.logged_at <= time.time()
    assert abs(event.monotonic_ns - time.monotonic_ns()) < 5e9
    assert (event.span_id, event.parent_ids, event.run, event.rank) == ("s1", ("a", "b"), "night-run", 3)
    assert re.fullmatch("[0-9a-f]{16}", event.id)


def test_an_event_can_have_an_earlier_timestamp(events: EventLog) -> None:
    berlin = dt.timezone(dt.timedelta(hours=1))
    for timestamp in (1.5, 3, dt.datetime(1970, 1, 1, 1, 0, 9, tzinfo=berlin)):
        events.log("gpu.done", timestamp=timestamp)  # type: ignore[arg-type]  # a datetime is accepted

    assert [event.timestamp for event in events.recent()] == [1.5, 3.0, 9.0]
    assert all(event.logged_at > 1e9 for event in events.recent())
    assert events.reading().last == {("gpu.done", "info"): 9.0}


def test_types_beyond_the_first_hundred_are_other(events: EventLog) -> None:
    for index in range(1500):
        events.log(f"runaway.{index}")
    counts = events.reading().counts

    assert len(counts) == 101
    assert counts["other", "info"] == 1400


# Rules -------------------------------------------------------------------------------------------------------


def test_rules_disable_events_by_type_and_severity(events: EventLog) -> None:
    assert events.enabled("train.step")
    events.limit("train.*", severity="warning")
    events.limit("noise", enabled=False)

    assert not events.enabled("noise", "critical")
    assert not events.enabled("train.step")
    assert events.enabled("train.step", "error")
    for severity in ("debug", "error"):
        events.log("train.step", severity=severity)
        events.log("noise", severity=severity)
    assert events.reading().counts == {("train.step", "error"): 1}
    events.limit("noise")
    assert events.enabled("noise")


def test_a_check_of_a_type_does_not_take_longer_with_500_rules(events: EventLog) -> None:
    def checking_seconds() -> float:
        start_seconds = time.thread_time()
        assert all(events.enabled("step") for _ in range(10_000))
        return time.thread_time() - start_seconds

    events.limit("other.*", sample=0.5)
    seconds_with_a_rule = checking_seconds()
    for index in range(500):
        events.limit(f"x{index}.*", sample=0.5)

    assert checking_seconds() < 10 * seconds_with_a_rule


def test_sampling_keeps_every_nth_event_from_the_first_and_counts_the_others(events: EventLog) -> None:
    received_events: queue.Queue[Event] = queue.Queue()
    events.register(received_events.put)
    events.limit("step", sample=0.1)
    for number in range(100):
        events.log("step", number=number)
        events.reading()  # does not advance the sampling
    assert events.flush(WAIT_LIMIT_SECONDS)

    assert [received_events.get_nowait().data["number"] for _ in range(10)] == list(range(0, 100, 10))
    assert received_events.empty()
    reading = events.reading()
    assert reading.counts["step", "info"] == 100
    assert reading.suppressed == {("step", "sampled"): 90}


def test_a_rate_limit_drops_and_counts_a_flood(events: EventLog) -> None:
    received_types: list[str] = []
    events.register(lambda event: received_types.append(event.type))
    events.limit("flood", per_second=5)
    for _ in range(1000):
        events.log("flood")
    assert events.flush(WAIT_LIMIT_SECONDS)

    assert 5 <= len(received_types) <= 15
    reading = events.reading()
    assert reading.counts["flood", "info"] == 1000
    assert reading.suppressed["flood", "rate_limit"] == 1000 - len(received_types)


def test_an_event_counted_as_other_reaches_the_handlers_of_its_type(events: EventLog) -> None:
    received_types: list[str] = []
    events.register(lambda event: received_types.append(event.type), types=["alarm.*"])
    for index in range(1_100):
        events.log(f"kind.{index}")
    events.log("alarm.fire", timestamp=1e10)
    assert events.flush(WAIT_LIMIT_SECONDS)

    assert received_types == ["alarm.fire"]
    assert sum(events.reading().counts.values()) == 1_101
    assert events.reading().last["other", "info"] == 1e10


# Namespaces and payloads -------------------------------------------------------------------------------------


def test_namespaces_separate_the_events_of_two_libraries() -> None:
    first_library, second_library = (exporter.events.namespace(name) for name in ("first", "second"))
    first_library.log("loss", step=1)
    second_library.log("loss", "of the second", severity="warning")

    events = [(event.type, event.severity, event.message) for event in exporter.events.recent()[-2:]]
    assert events == [("first.loss", "info", None), ("second.loss", "warning", "of the second")]
    assert first_library.enabled("loss")
    with pytest.raises(exporter.DefinitionError):
        exporter.events.namespace("")


def test_a_payload_reaches_handlers_of_the_process_and_is_never_written(
    events: EventLog, tmp_path: Path
) -> None:
    class Model:
        def __call__(self) -> None:
            raise AssertionError("the model was called")

        def __reduce__(self) -> str:
            raise AssertionError("the model was written")

    model = Model()
    received_events: list[Event] = []
    events.register(received_events.append)
    events.register(JsonLinesHandler(tmp_path / "events.jsonl"))
    events.log("epoch", payload=model, epoch=1)
    assert events.flush(WAIT_LIMIT_SECONDS)

    (event,) = received_events
    assert event.payload is model
    assert copy.deepcopy(dataclasses.asdict(event)) == dataclasses.asdict(event)
    assert pickle.loads(pickle.dumps(event)).payload is None
    assert "payload" not in (tmp_path / "events.jsonl").read_text()
    assert events.recent()[-1].payload is None


def test_a_payload_is_built_only_for_a_handler_and_a_failure_drops_only_the_payload(
    events: EventLog,
) -> None:
    calls: list[int] = []

    def payload() -> dict[str, int]:
        calls.append(1)
        return {"answer": 42}

    events.log("quiet", payload=payload)
    received_events: list[Event] = []
    events.register(received_events.append, types="loud")
    events.log("quiet", payload=payload)
    events.log("loud", payload=payload, step=1)
    events.log("loud", payload=lambda: {"x": 1 // 0}, step=2)

    assert calls == [1]
    assert [event.data for event in received_events] == [{"answer": 42, "step": 1}, {"step": 2}]
    assert events.reading().suppressed == {("loud", "payload"): 1}


# Handlers ----------------------------------------------------------------------------------------------------


class RecordingHandler:
    """Handler that keeps its events and the names of the threads that called it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.threads: set[str] = set()

    def handle(self, event: Event) -> None:
        self.events.append(event)
        self.threads.add(threading.current_thread().name)


def test_a_handler_receives_events_in_order_on_its_own_thread(events: EventLog) -> None:
    recorder = RecordingHandler()
    events.register(recorder, queue=10_000)
    for number in range(5000):
        events.log("a", number=number)
    assert events.flush(WAIT_LIMIT_SECONDS)

    assert [event.data["number"] for event in recorder.events] == list(range(5000))
    assert recorder.threads == {"exporter-events-RecordingHandler"}
    assert events.reading().delivered == {"RecordingHandler": 5000}


def test_a_handler_receives_the_selected_events(events: EventLog) -> None:
    received_events: list[Event] = []
    events.register(received_events.append, types=["ckpt.*", "eval"], severity="warning")
    for event_type in ("ckpt.saved", "eval", "other"):
        for severity in ("info", "warning", "critical"):
            events.log(event_type, severity=severity)

    assert [(event.type, event.severity) for event in received_events] == [
        ("ckpt.saved", "warning"),
        ("ckpt.saved", "critical"),
        ("eval", "warning"),
        ("eval", "critical"),
    ]


@pytest.mark.parametrize("container", [[], deque(), queue.SimpleQueue()])
def test_a_synchronous_handler_is_called_before_log_returns(events: EventLog, container: Any) -> None:
    put_item = container.put if hasattr(container, "put") else container.append
    handle = events.register(put_item)
    events.log("a")

    stored_event = container.get_nowait() if hasattr(container, "get_nowait") else container[0]
    assert stored_event.type == "a"
    assert events.handlers[0].is_direct
    handle.unregister()
    assert list(events.reading().delivered.values()) == [1]


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_a_handler_that_raises_loses_its_own_events_only(events: EventLog, error: BaseException) -> None:
    def failing_handler(_event: Event) -> None:
        raise error

    recorder = RecordingHandler()
    events.register(failing_handler)
    events.register(recorder)
    for _ in range(10):
        events.log("a")
    assert events.flush(WAIT_LIMIT_SECONDS)

    assert len(recorder.events) == 10
    reading = events.reading()
    assert reading.dropped[name_of(failing_handler), "error"] == 10
    assert reading.delivered[name_of(failing_handler)] == 0


def test_a_hanging_handler_loses_only_its_own_events_and_delays_nothing(events: EventLog) -> None:
    release = threading.Event()
    recorder = RecordingHandler()
    events.register(lambda _event: release.wait(WAIT_LIMIT_SECONDS), queue=5, name="hanging")
    events.register(recorder, queue=10_000)
    events.log("a")
    wait_until(lambda: events.handlers[0].busy_since is not None)
    start_time = time.monotonic()
    for _ in range(1000):
        events.log("a")
    logging_seconds = time.monotonic() - start_time
    events.handlers[1].drain(WAIT_LIMIT_SECONDS)

    assert logging_seconds < WAIT_LIMIT_SECONDS / 2
    assert len(recorder.events) == 1001
    assert events.reading().dropped == {("hanging", "queue_full"): 995}
    events.close(timeout_seconds=0.2)
    assert events.reading().dropped == {("hanging", "queue_full"): 995, ("hanging", "exit"): 6}
    release.set()


def test_unregistering_waits_for_pending_events_but_not_for_a_hanging_handler(events: EventLog) -> None:
    release = threading.Event()
    hanging = events.register(lambda _event: release.wait(WAIT_LIMIT_SECONDS), name="hanging", types="b")
    recorder = RecordingHandler()
    handle = events.register(recorder)
    for _ in range(500):
        events.log("a")
    events.unregister(handle)
    events.unregister(handle)
    handle.unregister()
    events.log("a")
    for _ in range(3):
        events.log("b")
    events.unregister(hanging, timeout_seconds=0.1)
    release.set()

    assert len(recorder.events) == 500
    assert events.reading().delivered["RecordingHandler"] == 500
    assert events.reading().dropped == {("hanging", "unregistered"): 3}


def test_a_signal_handler_can_log_while_a_handler_thread_starts(
    events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, start_thread, signals = RecordingHandler(), threading.Thread.start, [signal.SIGUSR1]

    def start_after_signal(thread: threading.Thread) -> None:
        if signals:
            signal.raise_signal(signals.pop())
        start_thread(thread)

    monkeypatch.setattr(threading.Thread, "start", start_after_signal)
    old_handler = signal.signal(signal.SIGUSR1, lambda *_: events.log("within"))
    try:
        events.register(recorder)
        events.log("first")
    finally:
        signal.signal(signal.SIGUSR1, old_handler)
    events.flush(WAIT_LIMIT_SECONDS)

    assert [event.type for event in recorder.events] == ["within", "first"]


@pytest.mark.parametrize(
    ("call", "arguments", "error"),
    [
        ("limit", {"sample": 1.5}, ValueError),
        ("limit", {"sample": "half"}, TypeError),
        ("limit", {"per_second": -1}, ValueError),
        ("limit", {"severity": "bad"}, ValueError),
        ("limit", {"match": 3}, TypeError),
        ("register", {"handler": None}, TypeError),
        ("register", {"handler": RecordingHandler}, TypeError),
        ("register", {"handler": print, "queue": 0}, ValueError),
        ("register", {"handler": print, "types": [3]}, TypeError),
        ("register", {"handler": print, "name": 3}, TypeError),
        ("unregister", {"handle": 3}, TypeError),
    ],
)
def test_registration_refuses_invalid_arguments(
    events: EventLog, call: str, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        getattr(events, call)(**arguments)


def test_the_latest_events_are_kept_and_keep_their_ids(events: EventLog) -> None:
    for number in range(MAX_RECENT_EVENTS + 44):
        events.log("a", number=number)
    kept_events, same_events = events.recent(), events.recent()

    assert [event.data["number"] for event in kept_events] == list(range(44, MAX_RECENT_EVENTS + 44))
    assert [event.id for event in kept_events] == [event.id for event in same_events]
