"""Delivery of records to exporters: threads, queues, retries, dropped records, exits and forks.

A test whose name starts with a number, such as d29, shows that row of the table of defects in docs/one-logger.md.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from one_logger_support import InMemoryExporter
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.errors import ExportError, OneLoggerError
from exporter.ledger.families.bridges import SPAN_EXPORTERS
from exporter.ledger.family_owners import TRAINING_FAMILIES, matches
from exporter.one_logger import delivery as delivery_module
from exporter.one_logger.delivery import ATTEMPTS, WRITE_OUT_RECORDS, Delivery, SpanFilter, close_all
from exporter.one_logger.names import (
    DEFAULT_SPANS_EXPORT_BLACKLIST,
    ExportCustomizationMode,
    StandardTrainingJobSpanName,
)
from exporter.one_logger.recorders import DefaultRecorder
from exporter.recording.recorder import RECORDER
from exporter.recording.stat import REGISTRY
from exporter.training.spans import ErrorEvent, Event, Span, TelemetryDataError


@pytest.fixture
def deliveries() -> Iterator[list[Delivery]]:
    started_deliveries: list[Delivery] = []
    yield started_deliveries
    for delivery in started_deliveries:
        for queue in delivery.queues:
            getattr(queue.exporter, "gate", threading.Event()).set()
        delivery.close()


def start_delivery(deliveries: list[Delivery], *exporters: Any, **options: Any) -> Delivery:
    delivery = Delivery(exporters, **options)
    deliveries.append(delivery)
    delivery.start_exporters()
    return delivery


def total(name: str, **labels: str) -> float:
    """Return the total of a counter, read without waiting for any exporter, unlike `exporter.flush`."""
    RECORDER.flush(WAIT_LIMIT_SECONDS)
    return sum(
        state.sum
        for state in REGISTRY.states()
        if state.definition.name == name and state.definition.labels == tuple(sorted(labels.items()))
    )


def dropped_count(reason: str, exporter: str = "InMemoryExporter") -> float:
    return total("training.span.exporter.dropped", exporter=exporter, reason=reason)


def test_every_record_arrives_in_order_on_the_thread_of_the_exporter(deliveries: list[Delivery]) -> None:
    exporter = InMemoryExporter()
    delivery = start_delivery(deliveries, exporter)
    span = Span.create("work")

    delivery.telemetry_data_error("nothing yet")
    delivery.start(span)
    delivery.event(span, Event.create("update"))
    delivery.error(span, ErrorEvent.create("bad"))
    span.stop()
    delivery.stop(span)
    delivery.telemetry_data_error("a gap")

    assert delivery.flush(WAIT_LIMIT_SECONDS)
    assert exporter.named_records == [
        ("initialize", ""),
        ("telemetry_data_error", "nothing yet"),
        ("start", "work"),
        ("event", "update"),
        ("error", "bad"),
        ("stop", "work"),
        ("telemetry_data_error", "a gap"),
    ]
    error_types = [error.error_type.value for error in exporter.records_of("telemetry_data_error")]
    # The type depends on the records before the error: none, or some.
    assert error_types == ["no_telemetry_data", "incomplete_telemetry_data"]
    assert exporter.threads == {"exporter-spans-InMemoryExporter"}


def test_a_delivered_record_does_not_change(deliveries: list[Delivery]) -> None:
    exporter = InMemoryExporter()
    exporter.gate.clear()
    delivery = start_delivery(deliveries, exporter)
    span = Span.create("work")

    delivery.start(span)
    span.add_attribute("late", 1)
    span.stop()
    exporter.gate.set()

    assert delivery.flush(WAIT_LIMIT_SECONDS)
    (started_span,) = exporter.records_of("start")
    assert started_span.id == span.id
    assert started_span.active is True
    assert started_span.attributes.to_json() == {}


def test_d29_a_flaky_backend_loses_nothing(deliveries: list[Delivery]) -> None:
    calls = iter(range(10_000))
    exporter = InMemoryExporter(lambda *_: next(calls) % 3 == 1)
    delivery = start_delivery(deliveries, exporter, first_pause_seconds=0.001)
    initial_count = dropped_count("failed")
    for index in range(100):
        delivery.start(Span.create(f"span-{index}"))

    assert delivery.flush(WAIT_LIMIT_SECONDS)
    assert exporter.names() == [f"span-{index}" for index in range(100)]
    assert dropped_count("failed") == initial_count


class MuteError(Exception):
    """Error whose representation raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error", [ValueError("never"), SystemExit(1), MuteError()], ids=lambda error: type(error).__name__
)
def test_d29_a_repeatedly_refused_record_is_dropped_and_reported(
    deliveries: list[Delivery], error: BaseException
) -> None:
    def counts() -> list[float]:
        names = ("records", "errors")
        return [total(f"training.span.exporter.{name}", exporter="InMemoryExporter") for name in names]

    exporter = InMemoryExporter(lambda _, name: name == "poison", error)
    delivery = start_delivery(deliveries, exporter, first_pause_seconds=0.001)
    initial_counts, initial_dropped = counts(), dropped_count("failed")
    for span_name in ("good", "poison", "better"):
        delivery.start(Span.create(span_name))

    assert delivery.flush(WAIT_LIMIT_SECONDS)
    assert exporter.names() == ["good", "better"]
    (data_error,) = exporter.records_of("telemetry_data_error")
    assert data_error.error_message == "1 earlier records were dropped"
    assert data_error.error_type is TelemetryDataError.ErrorType.INCOMPLETE_TELEMETRY_DATA
    assert dropped_count("failed") == initial_dropped + 1
    assert counts() == [initial_counts[0] + 2, initial_counts[1] + ATTEMPTS]


def test_d24_an_exporter_that_cannot_connect_is_retried_without_loss(deliveries: list[Delivery]) -> None:
    is_down = threading.Event()
    is_down.set()
    exporter = InMemoryExporter(lambda method, _: method == "initialize" and is_down.is_set())
    delivery = start_delivery(deliveries, exporter, first_pause_seconds=0.001)
    delivery.start(Span.create("work"))
    assert not delivery.flush(0.2)

    is_down.clear()
    assert delivery.flush(WAIT_LIMIT_SECONDS)
    assert exporter.named_records == [("initialize", ""), ("start", "work")]


def test_a_hanging_exporter_loses_only_its_own_records_and_delays_no_other(
    deliveries: list[Delivery],
) -> None:
    hanging, working = InMemoryExporter(), InMemoryExporter()
    hanging.gate.clear()
    delivery = start_delivery(deliveries, hanging, working, bound=10)
    initial_count = dropped_count("queue_full")
    initial_count_of_working = dropped_count("queue_full", "InMemoryExporter-2")
    for index in range(100):
        delivery.start(Span.create(f"span-{index}"))
        assert delivery.queues[1].worker.drain(WAIT_LIMIT_SECONDS)

    assert len(working.named_records) == 101
    assert dropped_count("queue_full") - initial_count == 90
    assert dropped_count("queue_full", "InMemoryExporter-2") == initial_count_of_working

    hanging.gate.set()
    assert delivery.flush(WAIT_LIMIT_SECONDS)
    delivery.start(Span.create("after"))
    assert delivery.flush(WAIT_LIMIT_SECONDS)
    assert hanging.names("telemetry_data_error") == ["90 earlier records were dropped"]


def test_d34_the_shutdown_is_bounded_and_undelivered_records_are_counted() -> None:
    exporter = InMemoryExporter()
    exporter.gate.clear()
    delivery = Delivery([exporter])
    delivery.start_exporters()
    for index in range(5):
        delivery.start(Span.create(f"span-{index}"))
    initial_count = dropped_count("exit")
    delivery.close(0.2)  # the exporter hangs until the end of the test

    assert dropped_count("exit") - initial_count >= 5
    delivery.start(Span.create("too late"))
    assert dropped_count("exit") - initial_count >= 6
    exporter.gate.set()


def test_the_shutdown_skips_retry_pauses_of_an_unreachable_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "MAX_PAUSE_SECONDS", 1000.0)
    exporter = InMemoryExporter(lambda method, _: method == "start")
    delivery = Delivery([exporter], first_pause_seconds=1000.0)
    delivery.start_exporters()
    delivery.start(Span.create("work"))
    wait_until(lambda: "start" in exporter.calls)
    delivery.close(WAIT_LIMIT_SECONDS)

    assert exporter.named_records[-1] == ("close", "")


def test_pending_records_are_delivered_at_exit_without_a_reference_to_the_recorder() -> None:
    exporter = InMemoryExporter()
    exporter.gate.clear()
    DefaultRecorder([exporter]).start("work")
    gc.collect()
    exporter.gate.set()
    close_all(WAIT_LIMIT_SECONDS)

    assert exporter.named_records == [("initialize", ""), ("start", "work"), ("close", "")]


def test_the_counters_of_a_delivery_fit_their_families(deliveries: list[Delivery]) -> None:
    start_delivery(deliveries, InMemoryExporter())
    definitions = {
        f"{state.definition.name.replace('.', '_')}_total": state.definition
        for state in REGISTRY.states()
        if state.definition.name.startswith("training.span.exporter.")
    }

    assert set(definitions) == {spec.name for spec in SPAN_EXPORTERS}
    assert all(matches(definition, TRAINING_FAMILIES[name]) for name, definition in definitions.items())


def test_a_buffering_exporter_is_flushed_after_a_number_of_records_and_when_its_queue_is_empty(
    deliveries: list[Delivery],
) -> None:
    class BufferingExporter(InMemoryExporter):
        written_counts: tuple[int, ...] = ()

        def write_out(self) -> None:
            started_spans = len(self.names())
            self.written_counts = (*self.written_counts, started_spans)

    exporter = BufferingExporter()
    delivery = start_delivery(deliveries, exporter)
    for index in range(WRITE_OUT_RECORDS * 2 + 3):
        delivery.start(Span.create(f"span-{index}"))

    assert delivery.flush(WAIT_LIMIT_SECONDS)
    counts = exporter.written_counts
    assert counts[-1] == WRITE_OUT_RECORDS * 2 + 3
    assert max(count - previous for previous, count in pairwise((0, *counts))) <= WRITE_OUT_RECORDS


def test_a_failed_write_is_repeated_without_a_further_record(
    deliveries: list[Delivery], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingExporter(InMemoryExporter):
        attempts = 0

        def write_out(self) -> None:
            self.attempts += 1
            if self.attempts <= ATTEMPTS:
                raise ExportError("the backend is restarting")

    monkeypatch.setattr(delivery_module, "REWRITE_SECONDS", 0.1)
    exporter = FailingExporter()
    delivery = start_delivery(deliveries, exporter, first_pause_seconds=0.0)
    delivery.start(Span.create("span"))
    wait_until(lambda: exporter.attempts > ATTEMPTS)

    assert delivery.flush(WAIT_LIMIT_SECONDS)
    assert exporter.attempts == ATTEMPTS + 1


def test_spans_that_a_backend_rejects_are_counted_once_they_are_discarded(
    deliveries: list[Delivery], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from exporter.one_logger.otel.exporter import otel_exporter

    class RejectingBackend(SpanExporter):  # type: ignore[misc]  # mypy does not follow the imports of the SDK
        def export(self, _spans: Sequence[Any]) -> SpanExportResult:
            return SpanExportResult.FAILURE

    def rejected_count() -> float:
        return dropped_count("rejected", "OTelExporter")

    initial_count = rejected_count()
    exporter = otel_exporter.OTelExporter(RejectingBackend())
    monkeypatch.setattr(exporter, "_ended_spans", deque(maxlen=5))
    delivery = start_delivery(deliveries, exporter, first_pause_seconds=0.0)
    for index in range(8):
        span = Span.create(f"span-{index}")
        delivery.start(span)
        span.stop()
        delivery.stop(span)

    assert delivery.flush(WAIT_LIMIT_SECONDS)
    assert rejected_count() - initial_count == 3
    delivery.close(WAIT_LIMIT_SECONDS)
    assert rejected_count() - initial_count == 8


def test_the_parent_of_a_record_is_the_nearest_exported_span(deliveries: list[Delivery]) -> None:
    exporter = InMemoryExporter()
    delivery = start_delivery(deliveries, exporter, filter=SpanFilter.default())
    loop = Span.create(StandardTrainingJobSpanName.TRAINING_LOOP)
    iteration = Span.create(StandardTrainingJobSpanName.TRAINING_SINGLE_ITERATION, loop)
    save = Span.create(StandardTrainingJobSpanName.CHECKPOINT_SAVE_SYNC, iteration)
    for span in (loop, iteration, save):
        delivery.start(span)

    assert delivery.flush(WAIT_LIMIT_SECONDS)
    assert exporter.names() == ["training_loop", "checkpoint_save_sync"]
    exported_save = exporter.records_of("start")[1]
    assert exported_save.exported_parent.id == loop.id
    assert exported_save.parent_span.id == iteration.id


def test_a_name_filter_for_all_spans_and_an_unknown_mode_are_refused() -> None:
    with pytest.raises(OneLoggerError, match="without span_name_filter"):
        SpanFilter(ExportCustomizationMode.EXPORT_ALL_SPANS, ["a"])
    with pytest.raises(OneLoggerError, match="must be one of EXPORT_ALL_SPANS"):
        SpanFilter("NOTHING")  # type: ignore[arg-type]
    assert not any(SpanFilter.default().accepts(name) for name in DEFAULT_SPANS_EXPORT_BLACKLIST)


def test_d49_a_forked_child_exports_nothing_and_exits(deliveries: list[Delivery]) -> None:
    exporter = InMemoryExporter()
    delivery = start_delivery(deliveries, exporter)
    delivery.start(Span.create("parent"))
    assert delivery.flush(WAIT_LIMIT_SECONDS)
    child = os.fork()
    if child == 0:
        delivery.start(Span.create("child"))
        is_quiet = delivery.flush(0.1) and delivery.queues[0].worker._queue.empty()
        delivery.close()
        os._exit(0 if is_quiet and len(exporter.named_records) == 2 else 1)

    assert os.waitpid(child, 0)[1] == 0
    delivery.start(Span.create("again"))
    assert delivery.flush(WAIT_LIMIT_SECONDS)
    assert [name for _, name in exporter.named_records] == ["", "parent", "again"]
