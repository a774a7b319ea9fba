from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from exporter import Aggregation, DefinitionError, Stat, registry
from exporter.recording.definition import check_definition
from exporter.recording.values import families_of

numbers = itertools.count()


def fresh() -> str:
    return f"definition.test{next(numbers)}"


@pytest.mark.parametrize(
    ("field", "arguments", "told"),
    [
        ("name", {"name": "batch-latency"}, "'batch-latency'"),
        ("name", {"name": "a..b"}, "'a..b'"),
        ("name", {"name": 3}, "not 3"),
        ("unit", {"unit": "ms"}, "seconds for ms"),
        ("aggregations", {"aggregations": ["mean", "median"]}, "unknown aggregation 'median'"),
        ("aggregations", {"aggregations": "mean"}, "must be a collection"),
        ("window_seconds", {"window_seconds": 0.05}, "at least 0.1, not 0.05"),
        ("window_seconds", {"window_seconds": math.nan}, "not nan"),
        ("window_seconds", {"window_seconds": True}, "not True"),
        ("window_seconds", {"window_seconds": None}, "not None for both"),
        ("window_samples", {"window_samples": 0}, "not 0"),
        ("buckets", {"buckets": [1, 2]}, "HISTOGRAM is not among"),
        ("buckets", {"aggregations": ["histogram"], "buckets": [2, 1]}, "ascending"),
        ("buckets", {"aggregations": ["histogram"], "buckets": [1, math.inf]}, "finite"),
        ("labels", {"labels": {"rank": "0"}}, "is taken"),
        ("labels", {"labels": {"a-b": "0"}}, "'a-b'"),
        ("labels", {"labels": {"split": 3}}, "the value of label split"),
        ("labels", {"labels": {"split": "\ud800"}}, "the value of label split"),
        ("help", {"help": "two\nlines"}, "one printable line"),
        ("stale_seconds", {"stale_seconds": -1}, "not -1"),
        ("min_samples", {"min_samples": 0}, "not 0"),
        ("min_samples", {"min_samples": 3, "window_samples": 2}, "1 to 2, the window_samples"),
    ],
)
def test_a_wrong_definition_is_one_clear_error_that_names_the_value(
    field: str, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(DefinitionError) as caught:
        Stat(**{"name": fresh(), **arguments})

    assert told in str(caught.value)
    assert caught.value.field == field
    assert caught.value.allowed is not None


def test_the_same_definition_twice_is_the_same_stat() -> None:
    name = fresh()

    assert Stat(name, ["mean"], unit="seconds", labels={"b": "1", "a": "2"}) is Stat(
        name, {Aggregation.MEAN}, unit="seconds", labels={"a": "2", "b": "1"}
    )
    assert Stat(name, ["mean"], unit="seconds") is not Stat(name, ["mean"], unit="seconds", labels={"b": "1"})


def test_another_definition_of_a_name_tells_where_the_first_was_made() -> None:
    name = fresh()
    Stat(name, ["mean"])

    with pytest.raises(
        DefinitionError, match=r"test_recording_definition\.py:\d+ with another definition: aggreg"
    ):
        Stat(name, ["max"])
    with pytest.raises(DefinitionError, match="another definition: unit None and now 'bytes'"):
        Stat(name, ["mean"], unit="bytes", labels={"split": "dev"})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("collide.a", "collide_a"),
        ("collide.b", "collide.b.count"),
        ("collide.c", "collide.c.window.samples"),
        ("collide.d", "collide.d.bucket"),
    ],
)
def test_names_whose_families_collide_are_refused(first: str, second: str) -> None:
    Stat(first)

    with pytest.raises(DefinitionError, match="already a family of the Stat"):
        Stat(second)


@pytest.mark.parametrize("name", ["exporter.up", "host.cpu", "gpu_temperature", "cgroup.x", "process.cpu"])
def test_names_of_the_exporter_itself_are_reserved(name: str) -> None:
    with pytest.raises(DefinitionError, match="reserved for the exporter"):
        Stat(name)


def test_names_become_families_with_the_unit_last_and_once() -> None:
    families = families_of(
        check_definition("training.batch.latency", ["mean", "value", "sum"], unit="seconds")
    )

    assert families.main == "training_batch_latency_seconds"
    assert dict(families.windows) == {
        Aggregation.MEAN: "training_batch_latency_window_mean_seconds",
        Aggregation.SUM: "training_batch_latency_window_added_seconds",
        Aggregation.VALUE: "training_batch_latency_window_last_seconds",
    }
    assert families.samples == "training_batch_latency_window_samples"
    assert families.last_sample == "training_batch_latency_last_sample_timestamp_seconds"
    carried = families_of(check_definition("step_seconds", ["p95"], unit="seconds"))
    assert (carried.main, dict(carried.windows)) == (
        "step_seconds",
        {Aggregation.P95: "step_window_p95_seconds"},
    )


def test_stats_are_listed_looked_up_and_switched_off_by_pattern() -> None:
    name = fresh()
    stat = Stat(f"{name}.one", labels={"split": "dev"})
    registry.switch(f"{name}.*", enabled=False)
    later = Stat(f"{name}.two")

    assert registry.find(f"{name}.one", {"split": "dev"}) is stat
    assert registry.find(f"{name}.one") is None
    assert registry.matching(f"{name}.*") == [stat, later]
    assert [each.enabled for each in (stat, later)] == [False, False]
    registry.switch(f"{name}.*", enabled=True)
    assert [each.enabled for each in (stat, later, Stat(fresh()))] == [True, True, True]
