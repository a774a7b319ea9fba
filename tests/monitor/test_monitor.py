"""Behavior of torch.monitor: the same tests on the torch module, if installed, and on the compatibility module."""
# ruff: noqa: DTZ001, DTZ005 - torch's events have naive datetimes

from __future__ import annotations

import copy
import datetime as dt
import importlib
import math
import pickle
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HOUR = dt.timedelta(hours=1)
LONG_WINDOW = dt.timedelta(seconds=100)


def module_of(name: str) -> ModuleType:
    if name.startswith("torch"):
        pytest.importorskip("torch")
    return importlib.import_module(name)


@pytest.fixture(params=["exporter.monitor", "torch.monitor"])
def monitor(request: pytest.FixtureRequest) -> Any:
    return module_of(request.param)


@pytest.fixture
def compatibility_module() -> Any:
    return module_of("exporter.monitor")


@pytest.fixture
def events(monitor: Any) -> Iterator[list[Any]]:
    """Yield the list of the events that a registered handler receives."""
    events: list[Any] = []
    handle = monitor.register_event_handler(events.append)
    yield events
    monitor.unregister_event_handler(handle)


def events_of(events: list[Any], name: str) -> list[Any]:
    """Return the events of a Stat."""
    return [event for event in events if any(key.startswith(f"{name}.") for key in event.data)]


# Behavior checked by the tests of torch (B1 to B8) ----------------------------------------------------------


def test_b1_b4_a_full_window_closes_and_later_samples_are_discarded(monitor: Any) -> None:
    aggregations = monitor.Aggregation
    stat = monitor.Stat("b4", [aggregations.COUNT, aggregations.SUM, aggregations.MEAN], LONG_WINDOW, 3)
    counts = []
    for sample in (1, 2, 3, 4):
        stat.add(sample)
        counts.append(stat.count)

    assert counts == [1, 2, 0, 0]
    assert stat.get() == {aggregations.COUNT: 3, aggregations.SUM: 6, aggregations.MEAN: 2}


def test_b5_a_closed_window_is_an_event(monitor: Any, events: list[Any]) -> None:
    stat = monitor.Stat(
        "b5", (monitor.Aggregation.SUM, monitor.Aggregation.COUNT), dt.timedelta(milliseconds=1)
    )
    assert events_of(events, "b5") == []
    stat.add(1)
    time.sleep(0.002)
    stat.add(2)

    assert len(events_of(events, "b5")) in {1, 2}
    assert stat.count <= 1


def test_b6_deleting_a_stat_closes_its_window(monitor: Any, events: list[Any]) -> None:
    stat = monitor.Stat("b6", (monitor.Aggregation.SUM, monitor.Aggregation.COUNT), 10 * HOUR)
    stat.add(1)
    assert events_of(events, "b6") == []
    del stat

    (event,) = events_of(events, "b6")
    assert event.name == monitor.STAT_EVENT == "torch.monitor.Stat"
    assert event.timestamp.timestamp() > 0
    assert event.data == {"b6.sum": 1.0, "b6.count": 1.0}


def test_b8_an_event_has_its_arguments_and_needs_no_handler(monitor: Any) -> None:
    timestamp = dt.datetime(2026, 1, 2, 3, 4, 5, 678)
    data = {"str": "a string", "float": 1234.0, "int": 1234}
    event = monitor.Event(name="torch.monitor.TestEvent", timestamp=timestamp, data=data)
    monitor.log_event(event)

    assert event.name == "torch.monitor.TestEvent"
    assert event.timestamp == timestamp
    assert event.data == data


# Stat --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collection", [list, tuple, set, frozenset])
def test_aggregations_are_any_collection_and_duplicates_count_once(monitor: Any, collection: Any) -> None:
    low, high = monitor.Aggregation.MIN, monitor.Aggregation.MAX
    stat = monitor.Stat("c", collection([low, high, low]), LONG_WINDOW, 6)
    assert stat.get() == {high: 0.0, low: 0.0}
    for sample in (0, 5, -5, -6, 9, 2):
        stat.add(sample)

    assert stat.get() == {high: 9.0, low: -6.0}


@pytest.mark.parametrize("max_samples", [0, -1, 1])
def test_max_samples_of_one_or_less_closes_the_window_after_the_first_sample(
    monitor: Any, max_samples: int
) -> None:
    stat = monitor.Stat("c.room", [monitor.Aggregation.SUM], HOUR, max_samples=max_samples)
    stat.add(1.5)
    stat.add(2.5)

    assert stat.count == 0
    assert stat.get() == {monitor.Aggregation.SUM: 1.5}


@pytest.mark.parametrize(
    ("samples", "highest", "lowest"),
    [
        ([math.nan, 1.0, 2.0], None, None),
        ([1.0, math.nan, 2.0], 2.0, 1.0),
        ([math.inf, -math.inf, 0.0], math.inf, -math.inf),
    ],
)
def test_samples_that_are_not_finite_propagate_as_in_torch(
    monitor: Any, samples: list[float], highest: float | None, lowest: float | None
) -> None:
    aggregations = monitor.Aggregation
    stat = monitor.Stat(
        "c.nan",
        [aggregations.MAX, aggregations.MIN, aggregations.SUM, aggregations.MEAN, aggregations.COUNT],
        HOUR,
        3,
    )
    for sample in samples:
        stat.add(sample)
    aggregates = stat.get()

    assert math.isnan(aggregates[aggregations.SUM])
    assert math.isnan(aggregates[aggregations.MEAN])
    assert aggregates[aggregations.COUNT] == 3.0
    for aggregation, expected in ((aggregations.MAX, highest), (aggregations.MIN, lowest)):
        if expected is None:
            assert math.isnan(aggregates[aggregation])
        else:
            assert aggregates[aggregation] == expected


@pytest.mark.parametrize(
    ("value", "sample"), [(1, 1.0), (True, 1.0), (2**70, float(2**70)), (-0.0, 0.0), (2.5, 2.5)]
)
def test_plain_numbers_are_converted_when_they_are_added(monitor: Any, value: Any, sample: float) -> None:
    stat = monitor.Stat("c.number", [monitor.Aggregation.SUM], HOUR, 1)
    stat.add(v=value)

    assert stat.get() == {monitor.Aggregation.SUM: sample}


def test_a_tensor_of_one_element_is_read_when_it_is_added(monitor: Any) -> None:
    torch = pytest.importorskip("torch")
    stat = monitor.Stat("c.tensor", [monitor.Aggregation.SUM], HOUR, 2)
    tensor = torch.tensor(1.5)
    stat.add(tensor)
    tensor.fill_(100.0)
    stat.add(torch.tensor(1))

    assert stat.get() == {monitor.Aggregation.SUM: 2.5}
    with pytest.raises(TypeError):
        stat.add(torch.tensor([1.0, 2.0]))


class FloatRaises:
    """Object whose conversion to a float raises."""

    def __float__(self) -> float:
        raise ZeroDivisionError


@pytest.mark.parametrize("value", ["1", b"1", None, [1.0], 10**400, 1j, object(), FloatRaises()])
def test_a_value_that_is_not_a_number_is_a_type_error(monitor: Any, value: object) -> None:
    stat = monitor.Stat("c.bad", [monitor.Aggregation.SUM], HOUR)
    with pytest.raises(TypeError):
        stat.add(value)

    assert stat.count == 0


def test_a_stat_refuses_new_attributes_and_copies_and_can_be_subclassed(monitor: Any) -> None:
    stat = monitor.Stat("c.attributes", [], HOUR)
    for copy_function in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            copy_function(stat)
    for name in ("name", "count", "extra"):
        with pytest.raises(AttributeError):
            setattr(stat, name, 1)

    class DoublingStat(monitor.Stat):  # type: ignore[misc]  # the class depends on the module under test
        def add(self, v: float) -> None:
            super().add(2 * v)

    doubling_stat = DoublingStat("c.doubling", [monitor.Aggregation.SUM], HOUR, 1)
    doubling_stat.add(2.0)
    assert doubling_stat.get() == {monitor.Aggregation.SUM: 4.0}


def test_names_are_free_text_and_may_be_used_twice(monitor: Any, events: list[Any]) -> None:
    for name in ("", "tr\u00e4in loss/ms", "twice", "twice", "9 lives"):
        stat = monitor.Stat(name, [monitor.Aggregation.SUM], HOUR, 1)
        event_count = len(events)
        stat.add(1.0)
        assert [event.data for event in events[event_count:]] == [{f"{name}.sum": 1.0}]


def test_the_window_after_a_full_one_starts_with_zeros(monitor: Any) -> None:
    stat = monitor.Stat("c.zeros", [monitor.Aggregation.SUM], 0.1, 1)
    stat.add(5.0)
    first_window = stat.get()
    time.sleep(0.11)
    stat.add(7.0)
    time.sleep(0.11)
    stat.add(9.0)

    assert first_window == {monitor.Aggregation.SUM: 5.0}
    assert stat.get() in ({monitor.Aggregation.SUM: 9.0}, {monitor.Aggregation.SUM: 7.0})


# Event -------------------------------------------------------------------------------------------------------


def test_fields_of_an_event_can_be_assigned_with_the_right_type(monitor: Any) -> None:
    event = monitor.Event("a", dt.datetime(2026, 1, 1), {"x": 1})
    event.data["x"] = 2
    for name, invalid in (("name", 1), ("timestamp", 1.0), ("data", {"x": None})):
        with pytest.raises(TypeError):
            setattr(event, name, invalid)
    with pytest.raises(AttributeError):
        event.extra = 1
    assert event.name == "a"
    assert event.data == {"x": 1}
    event.data = {"y": "z"}
    event.name = "b"
    event.timestamp = dt.date(2026, 2, 1)

    assert event.name == "b"
    assert event.timestamp == dt.datetime(2026, 2, 1)
    assert event.data == {"y": "z"}


def test_bytes_become_text_and_whole_numbers_keep_64_bits(monitor: Any) -> None:
    data = {b"b": b"xy", "least": -(2**63), "most": 2**63 - 1, "nul": "a\0b"}
    event = monitor.Event(b"a", dt.datetime.now(), data)

    assert event.name == monitor.Stat(b"a", [monitor.Aggregation.SUM], HOUR).name == "a"
    assert event.data == {"b": "xy", "least": -(2**63), "most": 2**63 - 1, "nul": "a\0b"}
    with pytest.raises(ValueError):
        monitor.Event("a", dt.datetime.now(), {"x": 2**63})


def test_an_event_keeps_its_arguments_and_can_be_weakly_referenced(monitor: Any) -> None:
    data = {f"layer.{index}": 0.5 for index in range(1000)} | {"configuration": "x" * 100_000}
    event = monitor.Event("large", dt.datetime.now(), data)

    assert event.data == data
    assert weakref.ref(event)() is event


# Handlers ----------------------------------------------------------------------------------------------------


def test_handlers_are_called_before_the_call_returns_and_once_per_registration(
    monitor: Any,
) -> None:
    received_events: list[Any] = []
    event = monitor.Event("handled", dt.datetime.now(), {})

    def handler(received_event: Any) -> None:
        received_events.append(received_event)

    handles = [monitor.register_event_handler(handler) for _ in range(2)]
    monitor.log_event(event)
    count_while_registered = len(received_events)
    for handle in handles:
        monitor.unregister_event_handler(handle)
    monitor.log_event(event)

    assert count_while_registered == 2
    assert len(received_events) == 2
    assert received_events[0] is received_events[1] is event


def test_the_real_summary_writer_receives_only_windows_of_stats(monitor: Any, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    writer = tensorboard.SummaryWriter(str(tmp_path))
    handle = monitor.register_event_handler(monitor.TensorboardEventHandler(writer))
    stat = monitor.Stat("board", [monitor.Aggregation.SUM, monitor.Aggregation.COUNT], HOUR, 5)
    for sample in range(5):
        stat.add(sample)
    monitor.log_event(monitor.Event("other", dt.datetime.now(), {"other": 1.5}))
    writer.close()
    for sample in range(5):
        stat.add(sample)
    monitor.unregister_event_handler(handle)

    board = accumulator.EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag: [scalar.value for scalar in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert scalars == {"board.sum": [10.0], "board.count": [5.0]}


TIMESTAMP = dt.datetime(2026, 1, 1)
INVALID_DATA: list[Any] = [None, [("x", 1)], {"x": None}, {"x": [1]}, {"x": {}}, {1: 2}]


@pytest.mark.parametrize(
    ("name", "invalid_calls"),
    [
        ("Stat", [("c", argument, 5.0) for argument in ([1], ["sum"], "sum", [None], 3)]),
        ("Stat", [("c", [], argument) for argument in (5, "5", None)]),
        ("Stat", [("c", [], 5.0, 2.0), ("c", [], 5.0, None), ("c", []), (3, [], 5.0), (None, [], 5.0)]),
        (
            "Event",
            [
                ("a",),
                ("a", None, {}),
                ("a", 1.5, {}),
                ("a", "now", {}),
                (1, TIMESTAMP, {}),
                (None, TIMESTAMP, {}),
            ],
        ),
        ("Event", [("a", TIMESTAMP, data) for data in INVALID_DATA]),
        ("log_event", [(None,), (1,), ("a",), ({"name": "a"},)]),
        ("register_event_handler", [(1,), ("print",), ([],), (object(),)]),
        ("unregister_event_handler", [(1,), ("print",), (object(),)]),
    ],
)
def test_arguments_of_a_wrong_type_are_a_type_error(
    monitor: Any, name: str, invalid_calls: list[tuple[Any, ...]]
) -> None:
    for arguments in invalid_calls:
        with pytest.raises(TypeError):
            getattr(monitor, name)(*arguments)


def test_the_module_has_torchs_names(compatibility_module: Any) -> None:
    torch_monitor = module_of("torch.monitor")
    torch_names = {name for name in dir(torch_monitor) if not name.startswith("_")} - {"TYPE_CHECKING"}

    assert torch_names <= set(compatibility_module.__all__)
    assert set(torch_monitor.Aggregation.__members__) == set(compatibility_module.Aggregation.__members__)
    for name in ("MEAN", "COUNT", "SUM", "MAX", "MIN"):
        assert int(getattr(compatibility_module, name)) == int(getattr(torch_monitor, name))
    assert all(hasattr(compatibility_module, name) for name in compatibility_module.__all__)
