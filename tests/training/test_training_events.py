"""Events of training: the span of an event, and the events of spans, the application and loops."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from training_support import fresh_recorder, published_value

import exporter
from exporter import training
from exporter.recording.handlers import JsonLinesHandler
from exporter.training import kinds
from exporter.training.current_span import CurrentSpan
from exporter.training.kinds import BlockKind
from exporter.training.recorder import TRAINING


@pytest.fixture
def received_events() -> Iterator[list[exporter.Event]]:
    events: list[exporter.Event] = []
    handle = exporter.events.register(events.append, types="doc.*")
    yield events
    handle.unregister()


def test_an_event_has_the_innermost_open_span_unless_the_call_names_a_span(
    received_events: list[exporter.Event],
) -> None:
    initial_span = TRAINING.current_span_id()
    with exporter.span("doc.outer") as outer:
        exporter.log("doc.first")
        with exporter.span("doc.inner") as inner:
            exporter.log("doc.second")
        exporter.log("doc.third", span_id="5b8aa5a2d2c872e8")
        thread = threading.Thread(target=exporter.log, args=("doc.elsewhere",))
        thread.start()
        thread.join()
    exporter.log("doc.fourth")

    ids = [str(outer.id), str(inner.id), "5b8aa5a2d2c872e8", None, initial_span]
    assert [event.span_id for event in received_events] == ids


def test_concurrent_asyncio_tasks_have_separate_spans(received_events: list[exporter.Event]) -> None:
    ids = {}

    async def work(name: str) -> None:
        with exporter.span(f"doc.{name}") as span:
            ids[name] = str(span.id)
            await asyncio.sleep(0.01)
            exporter.log(f"doc.{name}")
            await asyncio.sleep(0.01)

    async def main() -> None:
        await asyncio.gather(work("a"), work("b"))

    asyncio.run(main())

    assert {event.type: event.span_id for event in received_events} == {"doc.a": ids["a"], "doc.b": ids["b"]}


class VariableWithFinalizer:
    """Stand-in for a ContextVar whose `set` starts a garbage collection, with a finalizer that enters a span."""

    def __init__(self, finalizer: Callable[[], None]) -> None:
        self._finalizer = finalizer
        self.values: list[object] = []

    def set(self, value: object) -> None:
        self._finalizer()
        self.values.append(value)


def test_a_finalizer_that_enters_a_span_does_not_set_the_variable_in_the_middle_of_a_call() -> None:
    outer, of_finalizer = object(), object()
    current: Any = CurrentSpan()
    current._current = variable = VariableWithFinalizer(lambda: current.enter(of_finalizer))

    current.enter(outer)
    current.enter(outer)

    # A nested `ContextVar.set` can crash the interpreter.
    assert variable.values == [outer, outer]


def test_a_forked_child_has_no_open_span_of_its_parent() -> None:
    read_descriptor, write_descriptor = os.pipe()
    with exporter.span("doc.outer"):
        child = os.fork()
        if child == 0:
            os.write(write_descriptor, str(TRAINING.current_span_id()).encode())
            os._exit(0)
        os.waitpid(child, 0)

    os.close(write_descriptor)
    with os.fdopen(read_descriptor, "rb") as pipe:
        assert pipe.read() == b"None"


def run_application() -> None:
    """Run an application with a loop of two iterations and a span that fails."""
    with training.application(), training.training_loop(5, None, 7):
        for _ in range(2):
            with training.training_iteration(), training.model_forward():
                pass
        with suppress(ValueError), exporter.span("evaluate", split="dev") as span:
            span.add_attribute("found", 3)
            raise ValueError


def trace(path: Path) -> list[tuple[str, str | None, dict[str, Any]]]:
    """Return the name, the parent's name and the data of the stop event of each span in a file, in the order of the starts."""
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    starts = {event["span_id"]: event["data"] for event in events if event["type"] == "span.start"}
    stops = {event["span_id"]: event["data"] for event in events if event["type"] == "span.stop"}
    names: dict[str | None, str] = {span_id: data["name"] for span_id, data in starts.items()}
    return [(data["name"], names.get(data.get("parent")), stops[span_id]) for span_id, data in starts.items()]


@pytest.mark.parametrize(("types", "has_hot_spans"), [("span.*", True), (None, False)])
def test_a_trace_can_be_rebuilt_from_json_lines(
    types: str | None, has_hot_spans: bool, tmp_path: Path
) -> None:
    with fresh_recorder():
        handle = exporter.events.register(JsonLinesHandler(tmp_path / "trace.jsonl"), types=types)
        run_application()
        exporter.flush()
        handle.unregister()

    events = trace(tmp_path / "trace.jsonl")
    step = [("training_single_iteration", "training_loop"), ("model_forward", "training_single_iteration")]
    assert [event[:2] for event in events] == [
        ("application", None),
        ("training_loop", "application"),
        *(step * 2 if has_hot_spans else ()),
        ("evaluate", "training_loop"),
    ]
    assert {name for name, _, data in events if not data["ok"]} == {"evaluate"}
    assert all(0 <= data["seconds"] < 60 for _, _, data in events)
    assert events[-1][2]["found"] == 3


def test_application_and_loop_events_have_start_end_and_outcome() -> None:
    events: list[exporter.Event] = []
    handle = exporter.events.register(events.append, types="training.*")
    with fresh_recorder():
        training.describe(model="tiny", flops_per_token=6.0, layers=12)
        run_application()
        exporter.flush()
        span_counts = {
            name: published_value("training.span_duration", span=name)
            for name in ("evaluate", "model_forward")
        }
    handle.unregister()

    assert span_counts == {"evaluate": 1, "model_forward": None}  # a phase has no span duration
    assert [(event.type, event.data["name"]) for event in events] == [
        ("training.begin", "application"),
        ("training.begin", "training_loop"),
        ("training.end", "training_loop"),
        ("training.end", "application"),
    ]
    begin, end = events[1:3]
    parameters = {
        "model": "tiny",
        "layers": 12,
        "flops_per_token": 6.0,
        "train_iterations_start": 5,
        "train_iterations_target": 7,
    }
    assert begin.data.items() >= parameters.items()
    assert begin.span_id == end.span_id
    assert (end.data["step"], end.data["steps"], end.data["ok"]) == (7, 2, True)


class IterationObserver:
    """Observer that requests the spans of iterations, and ignores every call."""

    def observes(self, kind: BlockKind) -> bool:
        return kind is kinds.TRAINING_ITERATION

    def allows(self, *_: object) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_: False


def test_a_handler_that_requests_spans_receives_short_spans_in_a_job_whose_iterations_are_observed() -> None:
    received_events: list[exporter.Event] = []
    observer: Any = IterationObserver()
    with fresh_recorder():
        TRAINING.observers.add(observer)
        with training.training_iteration():
            pass
        handle = exporter.events.register(received_events.append, types="span.*")
        with training.training_iteration():
            pass
        exporter.flush()
        with training.model_forward():
            pass
        exporter.flush()
        handle.unregister()

    started_spans = [event.data["name"] for event in received_events if event.type == "span.start"]
    assert started_spans == ["training_single_iteration", "model_forward"]
