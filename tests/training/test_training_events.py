"""Events that are logged inside spans belong to them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

import exporter
from exporter import training
from exporter.training import buffers


@pytest.fixture
def told() -> Iterator[list[exporter.Event]]:
    found: list[exporter.Event] = []
    handle = exporter.events.register(found.append)
    yield found
    handle.unregister()


def test_an_event_carries_the_innermost_open_span(told: list[exporter.Event]) -> None:
    before = buffers.current_span_id()
    with exporter.span("doc.outer") as outer:
        exporter.log("doc.first")
        with exporter.span("doc.inner") as inner:
            exporter.log("doc.second")
        exporter.log("doc.third")
    exporter.log("doc.fourth")

    assert [event.span_id for event in told] == [str(outer.id), str(inner.id), str(outer.id), before]


def test_a_span_that_is_named_goes_before_the_open_one(told: list[exporter.Event]) -> None:
    with exporter.span("doc.outer"):
        exporter.log("doc.named", span_id="5b8aa5a2d2c872e8")

    assert told[0].span_id == "5b8aa5a2d2c872e8"


def test_another_thread_has_spans_of_its_own(told: list[exporter.Event]) -> None:
    with exporter.span("doc.outer"):
        thread = threading.Thread(target=exporter.log, args=("doc.elsewhere",))
        thread.start()
        thread.join()

    assert [event.span_id for event in told] == [None]


def test_asyncio_tasks_are_told_apart(told: list[exporter.Event]) -> None:
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

    assert {event.type: event.span_id for event in told} == {"doc.a": ids["a"], "doc.b": ids["b"]}


def test_a_forked_child_has_nothing_open() -> None:
    reading, writing = os.pipe()
    with exporter.span("doc.outer"):
        child = os.fork()
        if child == 0:
            os.write(writing, str(buffers.current_span_id()).encode())
            os._exit(0)
        os.waitpid(child, 0)

    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"None"


def test_spans_that_are_never_ended_do_not_pile_up() -> None:
    before = len(buffers.here().opened)
    for _ in range(200):
        training.on_validation_start()

    assert len(buffers.here().opened) <= 64
    for _ in range(200):
        training.on_validation_end()
    assert len(buffers.here().opened) <= before
