"""Metrics of torchelastic: equal calls on the torch module and the compatibility module, and corrected defects."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_support import page_of_feed, run_program, stat_state, sum_by_labels, total
from rules_support import needs_promtool

from exporter import registry
from exporter.elastic import bridge, families, metrics
from exporter.recording.values import Aggregation

pytestmark = pytest.mark.timeout(120)  # includes the import of torch

TORCH_MODULE = "torch.distributed.elastic.metrics"
_name_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # With this value, the compatibility module does not change the torch module.
    monkeypatch.setattr(bridge.CompatibilityHandlers, "is_installed", True)
    yield
    for group in (None, "torchelastic", "my_app", "g"):
        metrics.unconfigure(group)


@pytest.fixture(params=["torch", "exporter"])
def module(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Return the torch module or the compatibility module."""
    if request.param == "exporter":
        yield metrics
        return
    pytest.importorskip("torch", reason="torch is not installed")
    torch_metrics = importlib.import_module(TORCH_MODULE)
    yield torch_metrics
    api: Any = torch_metrics.api
    api._metrics_map.clear()
    api._default_metrics_handler = torch_metrics.NullMetricHandler()


class MetricsInMemory(metrics.MetricHandler):
    """Handler that stores the received values."""

    def __init__(self) -> None:
        self.data: list[Any] = []

    def emit(self, metric_data: Any) -> None:
        self.data.append(metric_data)

    def names(self) -> list[str]:
        return [entry.name for entry in self.data]


def new_name(prefix: str = "value") -> str:
    return f"{prefix}{next(_name_numbers)}"


# Equal behavior of both modules -----------------------------------------------------------------------------


def test_every_public_name_of_the_torch_module_exists() -> None:
    torch_module = pytest.importorskip(TORCH_MODULE, reason="torch is not installed")

    public_names = {name for name in dir(torch_module) if not name.startswith("_") and name != "Optional"}
    api_names = set(importlib.import_module(f"{TORCH_MODULE}.api").__all__)

    assert public_names <= set(dir(metrics)) | {"api", "static_init"}
    assert api_names <= set(dir(importlib.import_module("exporter.elastic.metrics.api")))


def test_signatures_name_the_same_arguments_in_the_same_order() -> None:
    torch_module = pytest.importorskip(TORCH_MODULE, reason="torch is not installed")

    for name in ("configure", "getStream", "put_metric", "publish_metric", "prof", "get_elapsed_time_ms"):
        arguments, torch_arguments = (
            list(inspect.signature(getattr(module, name)).parameters) for module in (metrics, torch_module)
        )
        assert arguments == torch_arguments, name


def test_prof_records_success_and_duration_under_the_class_of_the_method(
    module: ModuleType,
) -> None:
    class Base:
        def call(self) -> Any:
            return self.func()  # type: ignore[attr-defined]  # the subclass's

    class Child(Base):
        @module.prof  # type: ignore[untyped-decorator]  # either module's
        def func(self) -> str:
            return "result"

    handler = MetricsInMemory()
    module.configure(handler)

    assert Child().call() == "result"
    success, duration = handler.data
    assert success.name == f"{Child.__qualname__}.func.success"
    assert success.value == 1
    assert duration.name == f"{Child.__qualname__}.func.duration.ms"
    assert duration.group_name == "torchelastic"
    assert duration.value >= 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_prof_records_a_failure_and_reraises(module: ModuleType, error: type[BaseException]) -> None:
    if module is not metrics and not issubclass(error, Exception):
        pytest.skip("torch records a success")

    @module.prof(group="g")  # type: ignore[untyped-decorator]  # either module's
    def broken() -> None:
        raise error

    handler = MetricsInMemory()
    module.configure(handler, "g")

    with pytest.raises(error):
        broken()
    name = broken.__qualname__
    assert handler.names() == [f"{name}.failure", f"{name}.duration.ms"]
    assert handler.data[0].group_name == "g"


def free_function() -> None: ...


def test_a_handler_receives_the_metric_and_a_group_handler_precedes_the_default(
    module: ModuleType,
) -> None:
    default_handler, replaced_handler, group_handler = (MetricsInMemory() for _ in range(3))
    module.configure(default_handler)
    module.configure(replaced_handler, "g")
    module.configure(group_handler, "g")
    module.put_metric("a.b", 7, "g")

    (metric,) = group_handler.data
    assert metric.group_name == "g"
    assert metric.name == "a.b"
    assert metric.value == 7
    assert metric.timestamp > 1_600_000_000
    assert default_handler.data == []
    assert replaced_handler.data == []


def test_a_replaced_get_stream_is_used(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = MetricsInMemory()
    stream = module.api.MetricStream("torchelastic", handler)
    monkeypatch.setattr(module.api, "getStream", lambda group: stream)

    module.prof(free_function)()

    assert handler.names()[0] == "test_elastic_metrics.free_function.success"


def test_the_console_handler_prints_one_line(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    module.configure(module.ConsoleMetricHandler(), group="my_app")
    module.getStream(group="my_app").add_value("x", 3)

    assert capsys.readouterr().out.strip().endswith("][my_app]: x=3")


def test_deprecated_names_warn_and_work(module: ModuleType) -> None:
    handler = MetricsInMemory()
    module.configure(handler, "g")
    with pytest.warns(FutureWarning):
        module.publish_metric("g", "x", 3)
    with pytest.warns(FutureWarning):
        module.profile("g")(free_function)()

    assert handler.names() == ["x", "free_function.success", "free_function.duration.ms"]


# Values in Prometheus ----------------------------------------------------------------------------------------


def test_a_metric_is_a_stat_of_its_group_and_name() -> None:
    name = new_name("loss")
    metrics.put_metric(name, 0.5, "my_app")
    metrics.put_metric(name, 1, "my_app")

    state = stat_state(f"my_app.{name}")
    assert state.count == 2
    assert state.sum == 1.5


@pytest.mark.parametrize(
    ("name", "value", "stat", "unit", "sample"),
    [
        ("step_ms", 12, "step", "seconds", 0.012),
        ("step.duration.ms", 1500, "step.duration", "seconds", 1.5),
        ("lag_us", 3, "lag", "seconds", 3e-6),
        ("wait.s", 2, "wait", "seconds", 2.0),
        ("memory_mib", 3, "memory", "bytes", 3.0 * (1 << 20)),
        ("memory_mb", 3, "memory_mb", None, 3.0),
        ("busy_percent", 50, "busy", "ratio", 0.5),
        ("ms", 4, "", "seconds", 0.004),
        ("min", 4, "min", None, 4.0),
    ],
)
def test_units_become_part_of_the_name_and_milliseconds_become_seconds(
    name: str, value: float, stat: str, unit: str | None, sample: float
) -> None:
    group = new_name("units")
    metrics.put_metric(name, value, group)

    state = stat_state(f"{group}.{stat}".rstrip("."))
    assert state.definition.unit == unit
    assert state.sum == pytest.approx(sample, rel=1e-12)


def test_a_duration_has_a_histogram_and_another_metric_its_last_value() -> None:
    group = new_name("windows")
    metrics.put_metric("step_ms", 12, group)
    metrics.put_metric("loss", 0.5, group)

    duration, number = stat_state(f"{group}.step").definition, stat_state(f"{group}.loss").definition
    assert duration.aggregations == {Aggregation.HISTOGRAM, Aggregation.MEAN, Aggregation.MAX}
    assert number.aggregations == {Aggregation.VALUE, Aggregation.MEAN, Aggregation.MAX}


@needs_promtool
def test_names_with_reserved_prometheus_suffixes_pass_its_lint(tmp_path: Path) -> None:
    run_program(
        tmp_path / "feed",
        """
        from exporter.elastic import metrics
        for name in ("steps_total", "requests.total", "retries_bucket", "bucket", "total_ms", "total"):
            metrics.put_metric(name, 2.0, "my_app")
        """,
    )
    page = page_of_feed(tmp_path / "feed")
    app_lines = [line for line in page.splitlines(keepends=True) if "my_app_" in line]
    completed = subprocess.run(
        ["promtool", "check", "metrics"],
        input="".join(app_lines),
        capture_output=True,
        text=True,
        check=False,
    )

    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
    assert sum_by_labels(page, "my_app_steps_total_value_sum") == 2.0
    assert sum_by_labels(page, "my_app_total_seconds_sum") == 0.002


def test_metrics_that_map_to_one_family_are_distinguished_by_group() -> None:
    group, initial_total = new_name("twin"), total("training.elastic.refused", reason="collision")
    names_and_groups = [
        ("b_c", group),
        ("c", f"{group}_b"),
        ("x", f"{group}-q"),
        ("x", f"{group}_q"),
        ("b-c", group),
    ]
    for value, (name, metric_group) in enumerate(names_and_groups, 1):
        metrics.put_metric(name, value, metric_group)
        metrics.put_metric(name, value, metric_group)

    assert stat_state(f"{group}.b_c").sum == 2
    assert stat_state(f"{group}.b_c", metric_group=f"{group}_b").sum == 4
    assert stat_state(f"{group}_q.x").sum == 6
    assert stat_state(f"{group}_q.x", metric_group=f"{group}_q").sum == 8
    assert stat_state(f"{group}.b_c", metric_group=group, metric_name="b-c").sum == 10
    assert total("training.elastic.refused", reason="collision") == initial_total


def test_a_metric_that_is_resolved_twice_is_recorded_in_one_series() -> None:
    # Two threads that record the first value of a metric may both resolve the metric.
    stats, group = families.MetricStats(), new_name("group")
    for record in [stats._resolve((group, "x")), stats._resolve((group, "x"))]:
        record(1.0)

    assert stat_state(f"{group}.x").sum == 2


def test_reserved_names_are_refused_and_counted() -> None:
    initial_total = total("training.elastic.refused", reason="collision")
    metrics.put_metric("utilization", 1, "gpu")

    assert total("training.elastic.refused", reason="collision") == initial_total + 1


def test_names_beyond_the_limit_are_refused_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = families.MetricStats()
    monkeypatch.setattr(families, "MAX_METRICS", 10)
    initial_total = total("training.elastic.refused", reason="too_many")
    group = new_name("runaway")
    for index in range(100):
        stats.record(group, f"name{index}", 1)

    assert len(registry.matching(f"{group}.*")) == 10
    assert total("training.elastic.refused", reason="too_many") == initial_total + 90


ANY_ARGUMENT = st.text(max_size=200) | st.none() | st.integers() | st.floats() | st.lists(st.integers())


@given(name=ANY_ARGUMENT, group=ANY_ARGUMENT, value=ANY_ARGUMENT)
def test_no_name_group_or_value_raises(name: Any, group: Any, value: Any) -> None:
    metrics.put_metric(name, value, group)
    metrics.getStream(group).add_value(name, value)


@pytest.mark.parametrize("value", ["12", None, [1], float("nan"), 10**400, object(), 1 + 2j])
@pytest.mark.parametrize("name", ["plain", "scaled_ms"])
def test_a_value_that_is_not_a_number_is_counted_and_excluded(value: Any, name: str) -> None:
    group = new_name("strange")
    metrics.put_metric(name, value, group)
    metrics.put_metric(name, 1000, group)

    state = stat_state(f"{group}.{name.removesuffix('_ms')}")
    assert state.count == 1
    assert sum(state.reading().rejected.values()) == 1


def test_a_tensor_is_read_when_it_is_recorded() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    group, loss = new_name("tensors"), torch.tensor(0.5)
    metrics.put_metric("loss", loss, group)
    metrics.put_metric("loss_ms", loss * 4, group + "x")
    loss += 1

    assert stat_state(f"{group}.loss").sum == 0.5
    assert stat_state(f"{group}x.loss").sum == pytest.approx(0.002)


# Corrected defects -------------------------------------------------------------------------------------------


def test_a_stream_uses_the_currently_configured_handlers() -> None:
    stream = metrics.getStream("g")
    removed_handler, kept_handler = MetricsInMemory(), MetricsInMemory()
    stream.add_value("before", 1)
    metrics.configure([removed_handler, kept_handler], "g")
    stream.add_value("meanwhile", 1)
    metrics.configure(kept_handler, "g")
    stream.add_value("replaced", 1)
    metrics.configure(None, "g")
    stream.add_value("after", 1)

    assert removed_handler.names() == ["meanwhile"]
    assert kept_handler.names() == ["meanwhile", "replaced"]


@pytest.mark.parametrize("handler", [5, "console", object(), MetricsInMemory, [MetricsInMemory(), 5]])
def test_an_invalid_handler_is_refused_at_the_call(handler: Any) -> None:
    with pytest.raises(TypeError, match="emit"):
        metrics.configure(handler)


@pytest.mark.parametrize("error", [RuntimeError("broken sink"), SystemExit(3), RecursionError()])
def test_a_handler_that_raises_reaches_neither_the_caller_nor_the_next_handler(error: BaseException) -> None:
    class Raising(metrics.MetricHandler):
        def emit(self, metric_data: Any) -> None:
            raise error

    next_handler, initial_total = MetricsInMemory(), total("training.elastic.refused", reason="handler")
    metrics.configure([Raising(), next_handler], "g")

    @metrics.prof(group="g")
    def function() -> str:
        return "kept"

    assert function() == "kept"
    assert [name.rpartition(".")[2] for name in next_handler.names()] == ["success", "ms"]
    assert total("training.elastic.refused", reason="handler") == initial_total + 2


def test_a_handler_that_emits_does_not_receive_its_own_metrics() -> None:
    class Counting(MetricsInMemory):
        def emit(self, metric_data: Any) -> None:
            super().emit(metric_data)
            metrics.put_metric("emitted", len(self.data), "g")

    handler = Counting()
    metrics.configure([handler, Counting()], "g")
    metrics.put_metric("x", 1, "g")

    assert handler.names() == ["x", "emitted"]


def test_the_prometheus_handler_works_in_torchs_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_metrics = pytest.importorskip(TORCH_MODULE, reason="torch is not installed")
    # With the bridge installed, its hook would record the metric too.
    monkeypatch.setattr(bridge.CompatibilityHandlers, "is_installed", False)
    name = new_name("torch")
    torch_metrics.configure(metrics.PrometheusMetricHandler(), "g")
    torch_metrics.put_metric(name, 3, "g")
    del torch_metrics.api._metrics_map["g"]

    assert stat_state(f"g.{name}").sum == 3


def outcomes(handler: MetricsInMemory) -> list[str]:
    return [name.rpartition(".")[2] for name in handler.names() if not name.endswith(".ms")]


def test_a_coroutine_is_measured_to_its_end_and_its_cancellation_is_a_failure() -> None:
    handler = MetricsInMemory()
    metrics.configure(handler, "g")

    @metrics.prof(group="g")
    async def sleeping(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "awake"

    async def time_out_and_finish() -> str:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sleeping(60), 0.01)
        return await sleeping(0.02)

    assert asyncio.run(time_out_and_finish()) == "awake"
    assert outcomes(handler) == ["failure", "success"]
    assert handler.data[-1].value >= 20


def test_a_generator_is_measured_from_its_first_step_and_may_be_left_early() -> None:
    handler = MetricsInMemory()
    metrics.configure(handler, "g")

    @metrics.prof(group="g")
    def counting() -> Iterator[int]:
        yield from (1, 2, 3)

    generator = counting()
    assert handler.data == []
    assert list(generator) == [1, 2, 3]
    closed_generator = counting()
    next(closed_generator)
    closed_generator.close()  # type: ignore[attr-defined]

    assert outcomes(handler) == ["success", "success"]


def test_concurrent_puts_lose_nothing_while_handlers_change() -> None:
    name = new_name("threads")

    def put_metrics() -> None:
        for _ in range(2000):
            metrics.put_metric(name, 1, "g")

    threads = [threading.Thread(target=put_metrics) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.configure(MetricsInMemory(), "g")
        metrics.unconfigure("g")
    for thread in threads:
        thread.join()

    assert stat_state(f"g.{name}").count == 8000
