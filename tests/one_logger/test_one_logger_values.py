"""Attributes, events, spans and timers of one-logger, and corrected defects.

A test whose name starts with a number, such as d11, shows that row of the table of defects in docs/one-logger.md.
"""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import pytest
from training_support import collect_misuse

from exporter.errors import OneLoggerError
from exporter.one_logger import names, standard_attributes
from exporter.one_logger.config import TelemetryConfig
from exporter.one_logger.timers import MetricSummarizer, Timer
from exporter.recording.conversion import to_attribute
from exporter.training.attributes import Attribute, Attributes, TracingTimestamp
from exporter.training.spans import MAX_EVENTS, ErrorEvent, Event, Span, TelemetryDataError


class DeviceTensor:
    """Tensor on a GPU: a conversion to text would wait for the GPU, and raises here."""

    device = "cuda:0"

    def __str__(self) -> str:
        raise AssertionError("it was read")


class StrRaises:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_and_catch(error: Exception) -> Exception:
    try:
        raise error
    except type(error):
        return error


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", "a"),
        (True, True),
        (2**70, 2**70),
        (1.5, 1.5),
        (None, None),
        (names.CheckPointStrategy.SYNC, "sync"),
        (names.OneLoggerErrorHandlingStrategy.PROPAGATE_EXCEPTIONS, "propagate_exceptions"),
        ([1, 2], [1, 2]),
        ((1, 2.5), [1.0, 2.5]),
        ([1, "a", None], ["1", "a", "None"]),
        ({"a": 1, "b": [2]}, ["a:1", "b:[2]"]),
        (DeviceTensor(), "<DeviceTensor>"),
        ([DeviceTensor()], ["<DeviceTensor>"]),
        (StrRaises(), "<StrRaises>"),
    ],
)
def test_any_attribute_value_becomes_exportable(value: Any, expected: Any) -> None:
    converted = Attribute("name", value).value

    assert converted == expected
    assert type(converted) is type(expected)


def test_numpy_numbers_become_python_numbers() -> None:
    numpy = pytest.importorskip("numpy")

    converted = [to_attribute(number) for number in (numpy.int64(3), numpy.float32(0.5), numpy.bool_(True))]

    assert converted == [3, 0.5, True]
    assert [type(number) for number in converted] == [int, float, bool]


def test_attributes_keep_their_types() -> None:
    values = {"bool": True, "int": 3, "float": 0.5, "str": "a"}
    attributes = Attributes(values)

    assert {name: getattr(attributes, f"get_{name}_value")(name) for name in values} == values
    assert attributes.get_float_value("int") == 3
    assert attributes.get_int_value("missing") is None
    with pytest.raises(OneLoggerError, match="must be an integer"):
        attributes.get_int_value("str")


def test_merged_attributes_have_the_class_of_the_left_operand() -> None:
    first = standard_attributes.TestingMetricsUpdateAttributes.create(1, 2)

    merged = standard_attributes.TestingMetricsUpdateAttributes.merge(
        first, Attributes({"interval": 5, "more": "x"})
    )

    assert type(merged) is standard_attributes.TestingMetricsUpdateAttributes
    assert merged.current_iteration == 1
    assert merged.interval == 5
    assert merged.to_json() == {"current_iteration": 1, "interval": 5, "more": "x"}
    assert Attributes.from_json(merged.to_json()).to_json() == merged.to_json()


def test_required_attributes_of_standard_events_are_enforced() -> None:
    with pytest.raises(OneLoggerError, match="train_iterations_start is required"):
        standard_attributes.TrainingLoopAttributes.create(None, 1)
    with pytest.raises(OneLoggerError, match="rank is required"):
        _ = standard_attributes.OneLoggerInitializationAttributes().rank


def test_names_print_as_their_values() -> None:
    assert f"{names.StandardTrainingJobSpanName.DIST_INIT}" == "distributed_code_initialization"
    by_name: dict[str, int] = {names.StandardSpanName.APPLICATION: 1}
    assert by_name["application"] == 1
    assert [mode.value for mode in names.ExportCustomizationMode] == [1, 2, 3]


def test_an_event_owns_its_attributes() -> None:
    attributes = Attributes({"a": 1})
    first = Event.create("first", attributes, TracingTimestamp(10.0, 1.0))
    attributes.add("a", 2)
    second = Event.create("second", attributes, TracingTimestamp(20.0, 2.0))

    assert first.attributes.to_json() == {"a": 1, "timestamp_msec": 10_000}
    assert second.attributes.to_json() == {"a": 2, "timestamp_msec": 20_000}
    assert attributes.to_json() == {"a": 2}


class ErrorWithoutText(Exception):  # noqa: N818  # the type name is the expected message
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "message"),
    [(KeyError(), "KeyError()"), (ValueError("why"), "why"), (ErrorWithoutText(), "ErrorWithoutText")],
)
def test_an_error_names_its_exception_also_without_a_message(error: Exception, message: str) -> None:
    attributes = ErrorEvent.create("it failed", raise_and_catch(error)).attributes.to_json()

    assert attributes["exception_type"] == type(error).__name__
    assert attributes["exception_message"] == message
    assert "raise error" in attributes["exception_traceback"]


def test_a_span_with_events_of_every_kind_survives_json() -> None:
    timestamp, error_type = TracingTimestamp(1.5, 1.5), TelemetryDataError.ErrorType.NO_TELEMETRY_DATA
    span = Span.create("work", None, Attributes({"a": 1}), None, TracingTimestamp(1.0, 1.0))
    span.add_event(Event.create("inside", Attributes({"a": [1, 2]}), timestamp))
    span.add_event(ErrorEvent(timestamp, "bad", "ValueError", "text", "trace"))
    span.add_event(TelemetryDataError(timestamp, error_type, "nothing"))
    span.stop(None, TracingTimestamp(2.0, 3.5))

    decoded = Span.from_json(json.loads(json.dumps(span.to_json())))

    assert decoded.id == span.id
    assert decoded.name == "work"
    assert decoded.duration_msec() == 2500
    assert [(type(event), hash(event), event) for event in decoded.events] == [
        (type(event), hash(event), event) for event in span.events
    ]
    assert decoded.attributes.to_json() == span.attributes.to_json()


@pytest.mark.parametrize(
    ("seconds", "expected"), [(2.4999999999999996, 2500), (0.0004, 0), (0.0006, 1), (-1.0, 0)]
)
def test_d11_a_duration_is_rounded_and_never_negative(seconds: float, expected: int) -> None:
    span = Span.create("work", start_time=TracingTimestamp(100.0, 0.0))
    with pytest.raises(OneLoggerError, match="has not ended"):
        span.duration_msec()

    span.stop(stop_time=TracingTimestamp(50.0, seconds))  # the wall clock was set back

    assert span.duration_msec() == expected


def test_an_event_of_a_span_that_has_ended_is_a_misuse_and_raises_nothing() -> None:
    span = Span.create("work")
    span.stop()

    with collect_misuse() as reports:
        span.add_event(Event.create("late"))

    assert [(record.call, record.rule) for record in reports] == [("Span.add_event", "stopped_span")]
    assert [event.name for event in span.events] == ["span_start", "span_stop"]


def test_d42_d43_a_span_of_many_events_keeps_the_latest() -> None:
    span = Span.create("loop")
    for number in range(10_000):
        span.add_event(Event.create("update", Attributes({"number": number})))

    assert len(span.events) == MAX_EVENTS + 1
    assert span.events[-1].attributes.get_int_value("number") == 9_999
    assert span.active


def test_attributes_may_be_set_while_another_thread_reads_them() -> None:
    span = Span.create(
        "work", span_attributes=standard_attributes.TestingMetricsUpdateAttributes.create(1, 1)
    )
    stop = threading.Event()

    def write() -> None:
        for number in range(20_000):
            span.add_attribute(f"a{number % 997}", number)
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not stop.is_set():
        assert type(span.snapshot_copy(None).attributes) is standard_attributes.TestingMetricsUpdateAttributes
        reads += 1
    writer.join()

    assert reads
    assert len(span.updated_attributes) == 997


def test_a_past_time_is_accepted_and_a_far_future_time_becomes_now() -> None:
    now = TracingTimestamp.now()
    past = TracingTimestamp.for_timestamp(now.seconds_since_epoch - 90_000)

    near_future = TracingTimestamp.for_timestamp(now.seconds_since_epoch + 500)

    assert past.perf_counter_seconds == pytest.approx(now.perf_counter_seconds - 90_000, abs=5)
    assert near_future.seconds_since_epoch == now.seconds_since_epoch + 500
    for unix_seconds in (now.seconds_since_epoch + 1000, math.inf, math.nan):
        timestamp = TracingTimestamp.for_timestamp(unix_seconds)
        assert timestamp.seconds_since_epoch == pytest.approx(now.seconds_since_epoch, abs=5)
    assert TracingTimestamp.for_timestamp(2e10, 60.0, False) == TracingTimestamp(2e10, 60.0)


def test_a_timer_that_is_used_out_of_order_is_reported_and_goes_on() -> None:
    timer = Timer()
    with collect_misuse() as reports:
        timer.stop()
        timer.start()
        timer.start()

    assert timer.stop(reset=True) >= 0.0
    assert not timer.running
    assert [record.rule for record in reports] == ["not_running", "running"]


def test_classes_support_the_operations_of_the_original() -> None:
    fields = [names.CheckPointStrategy.SYNC, *range(8)]

    assert MetricSummarizer[float]() == MetricSummarizer()
    assert hash(MetricSummarizer()) == hash(MetricSummarizer())
    assert not isinstance(object(), TelemetryConfig)
    assert (
        "training_start_timestamp_sec"
        not in standard_attributes.SaveCheckpointSuccessEventAttributes.create(
            *fields, training_start_timestamp_sec=0
        )
    )
