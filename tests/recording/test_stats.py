"""Stat: definition, families, timing, window handlers, and configuration."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import math
import pickle
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from program_support import run_with_imports, snapshots
from waiting import WAIT_LIMIT_SECONDS, wait_until

import exporter
from exporter import Aggregation, DefinitionError, Stat, WindowReading, registry
from exporter.recording.definition import DEFAULT_BUCKETS, apply_rules, check_definition, check_rules
from exporter.recording.stat_table import StatTable
from exporter.recording.values import families_of

numbers = itertools.count()


def new_name() -> str:
    return f"definition.test{next(numbers)}"


@pytest.mark.parametrize(
    ("field", "arguments", "message"),
    [
        ("name", {"name": "batch-latency"}, "'batch-latency'"),
        ("name", {"name": "a..b"}, "'a..b'"),
        ("name", {"name": 3}, "not 3"),
        ("name", {"name": "exporter.up"}, "reserved for the exporter"),
        ("name", {"name": "gpu_temperature"}, "reserved for the exporter"),
        ("name", {"name": "training.steps"}, "reserved for the exporter"),
        ("unit", {"unit": "ms"}, "seconds for ms"),
        ("aggregations", {"aggregations": ["mean", "median"]}, "not 'median'"),
        ("aggregations", {"aggregations": "mean"}, "a collection such as"),
        ("window_seconds", {"window_seconds": 0.05}, "at least 0.1, not 0.05"),
        ("window_seconds", {"window_seconds": math.nan}, "not nan"),
        ("window_seconds", {"window_seconds": None}, "not None"),
        ("window_samples", {"window_samples": 0}, "not 0"),
        ("buckets", {"buckets": [1, 2]}, "None without"),
        ("buckets", {"aggregations": ["histogram"], "buckets": [2, 1]}, "ascending"),
        ("buckets", {"aggregations": ["histogram"], "buckets": [1, math.inf]}, "finite"),
        ("labels", {"labels": {"rank": "0"}}, "none of"),
        ("labels", {"labels": {"a-b": "0"}}, "'a-b'"),
        ("labels", {"labels": {"split": "\ud800"}}, "the value of label split"),
        ("help", {"help": "two\nlines"}, "one printable line"),
        ("stale_seconds", {"stale_seconds": -1}, "not -1"),
        ("min_samples", {"min_samples": 3, "window_samples": 2}, "1 to 2, the window_samples"),
    ],
)
def test_an_invalid_definition_is_one_clear_error_that_names_the_value(
    field: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(DefinitionError) as caught:
        Stat(**{"name": new_name(), **arguments})

    assert message in str(caught.value)
    assert caught.value.field == field
    assert caught.value.allowed is not None


def test_the_same_definition_twice_is_the_same_stat_and_so_are_its_copies() -> None:
    name = new_name()
    stat = Stat(name, ["mean"], unit="seconds", labels={"b": "1", "a": "2"})

    assert Stat(name, {Aggregation.MEAN}, unit="seconds", labels={"a": "2", "b": "1"}) is stat
    assert Stat(name, ["mean"], unit="seconds", labels={"b": "1"}) is not stat
    assert copy.deepcopy({"model": [stat]})["model"][0] is stat
    assert pickle.loads(pickle.dumps(stat)) is stat


def test_a_conflicting_definition_names_the_place_of_the_first() -> None:
    name = new_name()
    Stat(name, ["mean"])

    with pytest.raises(DefinitionError, match=r"test_stats\.py:\d+ with a different definition: aggreg"):
        Stat(name, ["max"])
    with pytest.raises(DefinitionError, match="a different definition: unit None and now 'bytes'"):
        Stat(name, ["mean"], unit="bytes", labels={"split": "dev"})


@pytest.mark.parametrize("module_name", ["exporter_of_my_lab", None])
def test_a_conflict_names_the_line_of_the_first_construction_in_any_module(module_name: str | None) -> None:
    name = new_name()
    program = compile(f"Stat({name!r}, ['mean'])", "/job/train.py", "exec")
    exec(program, {"Stat": Stat, "__name__": module_name})

    with pytest.raises(DefinitionError, match=r"at /job/train\.py:1 with"):
        Stat(name, ["max"], unit="bytes")


def test_a_passive_stat_has_one_callback() -> None:
    def measure() -> float:
        return 1.0

    assert Stat.passive("passive.once", measure) is Stat.passive("passive.once", measure)
    with pytest.raises(DefinitionError, match=r"the callback already registered for 'passive\.once'"):
        Stat.passive("passive.once", lambda: 2.0)


@pytest.mark.parametrize(
    "second", ["collide_a", "collide.a.count", "collide.a.window.samples", "collide.a.bucket"]
)
def test_names_whose_families_collide_are_refused(second: str) -> None:
    Stat("collide.a")

    with pytest.raises(DefinitionError, match="already a family of the Stat"):
        Stat(second)


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
    unit_in_name = families_of(check_definition("step_seconds", ["p95"], unit="seconds"))
    assert unit_in_name.main == "step_seconds"
    assert dict(unit_in_name.windows) == {Aggregation.P95: "step_window_p95_seconds"}


# Timing; `elastic/test_elastic_metrics.py` tests coroutines and generators of the same decorator ------------


def test_blocks_and_functions_are_timed_also_when_they_raise() -> None:
    stat = Stat(new_name(), ["mean"], unit="seconds")

    @stat.time()
    def fail(number: int, *, divisor: int = 2) -> int:
        """Doc."""
        time.sleep(0.01)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail(3)
    with pytest.raises(ZeroDivisionError), stat.time():
        1 / 0  # noqa: B018  # the expression is evaluated for its exception
    exporter.flush()

    assert stat.count == 2
    assert 0.009 < stat.sum < 10
    assert (fail.__name__, fail.__doc__) == ("fail", "Doc.")
    assert str(inspect.signature(fail)) == "(number: 'int', *, divisor: 'int' = 2) -> 'int'"
    with pytest.raises(DefinitionError, match="not 'bytes'"):
        Stat(new_name(), unit="bytes").time()


def test_values_sent_and_errors_thrown_reach_a_timed_asynchronous_generator() -> None:
    stat = Stat(new_name(), ["mean"], unit="seconds")

    @stat.time()
    async def echo() -> AsyncGenerator[object, object]:
        value: object = "first"
        while True:
            try:
                value = yield value
            except KeyError:
                value = "thrown"

    async def use() -> list[object]:
        generator = echo()
        values = [
            await generator.__anext__(),
            await generator.asend("sent"),
            await generator.athrow(KeyError()),
        ]
        await generator.aclose()
        return values

    assert asyncio.run(use()) == ["first", "sent", "thrown"]
    exporter.flush()
    assert stat.count == 1


# The registry ------------------------------------------------------------------------------------------------


def test_an_invalid_pattern_of_windows_raises_at_the_call_and_not_at_the_next_stat() -> None:
    with pytest.raises(TypeError, match="match must be a pattern"):
        registry.on_window(print, match=None)  # type: ignore[arg-type]  # an invalid pattern

    assert Stat(new_name(), ["mean"]).count == 0


def test_stats_are_found_by_name_and_listed_and_disabled_by_pattern() -> None:
    name = new_name()
    stat = Stat(f"{name}.one", labels={"split": "dev"})
    registry.set_enabled(f"{name}.*", enabled=False)
    later = Stat(f"{name}.two")

    assert registry.find(f"{name}.one", {"split": "dev"}) is stat
    assert registry.find(f"{name}.one") is None
    assert registry.matching(f"{name}.*") == [stat, later]
    assert [instance.enabled for instance in (stat, later)] == [False, False]
    registry.set_enabled(f"{name}.*", enabled=True)
    assert [instance.enabled for instance in (stat, later, Stat(new_name()))] == [True, True, True]


def test_every_concurrently_created_stat_is_listed() -> None:
    table = StatTable()

    def make(thread_index: int) -> None:
        for number in range(100):
            table.get_or_create(check_definition(f"s{thread_index}.n{number}"))
            table.states()

    threads = [threading.Thread(target=make, args=(thread_index,)) for thread_index in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(table.states()) == 500


def test_stats_beyond_the_limit_are_reported_and_counted_in_the_feed(tmp_path: Path) -> None:
    program = """
        import exporter.recording.stat_table as registry
        registry.MAX_STATS = 3
        for index in range(5):
            Stat(f"s{index}").add(1.0)
        flush()
    """
    completed = run_with_imports(tmp_path / "feed", program)

    assert snapshots(tmp_path / "feed")[0].recording.stats_refused == 2
    assert completed.stderr.count("a process records at most 3 Stats") == 1


# Handlers of windows -----------------------------------------------------------------------------------------


def test_each_count_window_reaches_the_handlers_of_stat_and_registry() -> None:
    stat, other_stat = (
        Stat(f"handlers.{n}", ["sum"], window_seconds=None, window_samples=20) for n in ("a", "b")
    )
    stat_windows: list[WindowReading] = []
    stat_names: list[str] = []
    handles = [
        stat.on_window(lambda source, window: stat_windows.append(window) if source is stat else None),
        registry.on_window(lambda source, _window: stat_names.append(source.name), "handlers.*"),
    ]
    for sample in range(100):
        stat.add(float(sample))
    for _ in range(25):
        other_stat.add(1.0)
    assert exporter.flush(WAIT_LIMIT_SECONDS)
    for handle in handles:
        handle.unregister()
    for _ in range(20):
        stat.add(1.0)
    assert exporter.flush(WAIT_LIMIT_SECONDS)

    sums = [window.values[Aggregation.SUM] for window in stat_windows]
    assert sums == [float(sum(range(start, start + 20))) for start in range(0, 100, 20)]
    assert sorted(stat_names) == [*["handlers.a"] * 5, "handlers.b"]
    with pytest.raises(TypeError, match="a handler of windows must be"):
        registry.on_window(threading)  # type: ignore[arg-type]  # invalid on purpose


def test_each_time_window_with_samples_reaches_the_handlers() -> None:
    stat = Stat("handlers.timed", ["sum"], window_seconds=0.1)
    sums: list[float] = []
    handle = stat.on_window(lambda _, window: sums.append(window.values[Aggregation.SUM]))
    stat.add(2.0)
    wait_until(lambda: sums == [2.0])
    window_start = stat.window.started
    wait_until(lambda: stat.window.started > window_start)
    handle.unregister()

    assert sums == [2.0]


def test_windows_of_the_last_samples_before_exit_are_delivered(tmp_path: Path) -> None:
    program = """
        stat = Stat("train.loss", ["mean"], window_seconds=None, window_samples=20)
        stat.on_window(lambda stat, window: print(window.samples, flush=True))
        for _ in range(60):
            stat.add(1.0)
    """

    assert run_with_imports(tmp_path / "feed", program).stdout == "20\n20\n20\n"


# Rules of the configuration ----------------------------------------------------------------------------------


def test_the_later_rule_wins_per_field_and_an_invalid_rule_is_ignored() -> None:
    rules, errors = check_rules(
        [
            {"match": "train.*", "aggregations": ["mean", "p99"], "window_seconds": 10},
            {"match": "train.loss", "window_seconds": None, "window_samples": 5},
            {"match": "val.*", "enabled": False},
            {"match": "train.loss", "aggregations": ["median"]},
            {"match": "train.loss", "window_seconds": 0.01},
            {"match": 3},
            {"match": "train.loss", "enabled": "no"},
        ]
    )
    definition, is_enabled = apply_rules(check_definition("train.loss", ["histogram"], unit="seconds"), rules)

    assert definition.aggregations == {Aggregation.MEAN, Aggregation.P99}
    assert (definition.window_seconds, definition.window_samples, definition.buckets) == (None, 5, ())
    assert is_enabled
    assert not apply_rules(check_definition("val.loss"), rules)[1]
    assert len(errors) == 4
    assert "not 'median'" in errors[0]


@pytest.mark.parametrize(
    ("rule", "definition_fields", "field", "kept_value"),
    [
        ({"aggregations": ["histogram"]}, {"unit": "ratio"}, "buckets", DEFAULT_BUCKETS["ratio"]),
        ({"window_samples": 5}, {"window_samples": 20, "min_samples": 10}, "min_samples", 5),
        ({"window_seconds": None}, {"window_seconds": 5}, "window_seconds", 5),
    ],
)
def test_fields_missing_in_a_rule_are_adjusted_to_fit(
    rule: dict[str, object], definition_fields: dict[str, object], field: str, kept_value: object
) -> None:
    rules, _ = check_rules([{"match": "a", **rule}])

    assert (
        getattr(apply_rules(check_definition("a", ["mean"], **definition_fields), rules)[0], field)
        == kept_value
    )
