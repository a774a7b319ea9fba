"""Providers and recorders: configuration, overrides, calls in the wrong order, and manual spans.

A test whose name starts with a number, such as d40, shows that row of the table of defects in docs/one-logger.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from one_logger_support import APPLICATION, TELEMETRY, InMemoryExporter, configure, wait_for_delivery
from training_support import collect_misuse, publish_and_read
from waiting import WAIT_LIMIT_SECONDS

import exporter
from exporter import one_logger, training
from exporter.errors import OneLoggerError
from exporter.one_logger import ExportCustomizationMode, timed_span
from exporter.one_logger.current_observer import current_observer
from exporter.recording.notices import NOTICES, log_once
from exporter.training import application, training_iteration, training_loop, validation_loop

pytestmark = pytest.mark.usefixtures("unconfigured_process")


PROPAGATE = one_logger.OneLoggerErrorHandlingStrategy.PROPAGATE_EXCEPTIONS


def provider() -> one_logger.TrainingTelemetryProvider:
    return one_logger.TrainingTelemetryProvider.instance()


def test_the_provider_is_a_singleton_and_not_callable() -> None:
    assert provider() is provider()
    for provider_class in (one_logger.TrainingTelemetryProvider, one_logger.OneLoggerProvider):
        with pytest.raises(TypeError, match=r"Use \w+\.instance\(\) instead"):
            provider_class()


def test_the_configuration_is_readable() -> None:
    assert not provider().one_logger_ready
    with pytest.raises(OneLoggerError, match="the provider is not configured"):
        _ = provider().config

    configure(telemetry={})

    observer = current_observer()
    assert observer is not None
    assert provider().one_logger_ready
    assert one_logger.OneLoggerProvider.instance().one_logger_enabled
    assert provider().config.application_name == "test"
    assert provider().config.telemetry_config == observer.training
    assert isinstance(provider().recorder, one_logger.TrainingRecorder)
    assert (
        one_logger.get_recorder() is provider().recorder is one_logger.OneLoggerProvider.instance().recorder
    )


def test_overrides_change_nested_fields_and_the_last_one_wins() -> None:
    (
        provider()
        .with_base_config(one_logger.OneLoggerConfig(**APPLICATION, telemetry_config=TELEMETRY))
        .with_config_override({"application_name": "first", "custom_metadata": {"a": 1}})
        .with_config_override({"application_name": "second", "telemetry_config": {"seq_length_or_fn": 5}})
        .with_config_override({"error_handling_strategy": "propagate_exceptions"})
        .configure_provider()
    )

    config = provider().config
    assert config.application_name == "second"
    assert config.custom_metadata == {"a": 1}
    assert config.propagates is True
    assert config.telemetry_config == one_logger.TrainingTelemetryConfig(**TELEMETRY, seq_length_or_fn=5)


def test_a_configuration_can_come_from_overrides_alone() -> None:
    provider().with_config_override(APPLICATION).configure_provider()

    assert provider().config == one_logger.OneLoggerConfig(**APPLICATION)


def test_d40_training_overrides_without_a_training_configuration_are_refused_clearly() -> None:
    builder = provider().with_base_config(one_logger.OneLoggerConfig(**APPLICATION))
    builder.with_config_override({"telemetry_config": {"seq_length_or_fn": 5}})

    with pytest.raises(OneLoggerError, match="needs perf_tag_or_fn, global_batch_size_or_fn"):
        builder.configure_provider()
    assert current_observer() is None


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("with_base_config", ({"application_name": "a"},), "expects a OneLoggerConfig"),
        ("with_config_override", (5,), "expects a mapping of fields"),
        ("with_config_override_from_json_file", ("override.json",), "with_config_override"),
        ("with_config_override_from_config_server", ("https://config.example.com",), "with_config_override"),
        ("with_exporter", ("not an exporter",), "methods initialize, export_start"),
        ("set_training_telemetry_config", (5,), "must be a TrainingTelemetryConfig"),
        ("configure_provider", (), "No configuration was provided"),
    ],
)
def test_an_invalid_configuration_object_is_refused_clearly(
    call: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(OneLoggerError, match=message):
        getattr(provider(), call)(*arguments)


@pytest.mark.parametrize(
    ("call", "arguments", "rule"),
    [
        ("with_base_config", (one_logger.OneLoggerConfig(**APPLICATION),), "configured_already"),
        ("with_config_override", ({},), "configured_already"),
        ("with_exporter", (InMemoryExporter(),), "configured_already"),
        ("with_export_customization", (ExportCustomizationMode.EXPORT_ALL_SPANS,), "configured_already"),
        ("with_export_config", (), "configured_already"),
        ("configure_provider", (), "configured_already"),
        ("set_training_telemetry_config", (one_logger.TrainingTelemetryConfig(**TELEMETRY),), "already_set"),
    ],
)
def test_a_late_configuration_is_a_misuse_without_effect(
    call: str, arguments: tuple[Any, ...], rule: str
) -> None:
    configure(telemetry={})
    observer, config = current_observer(), provider().config

    with collect_misuse() as reports:
        getattr(provider(), call)(*arguments)
        one_logger.OneLoggerProvider.instance().configure(config, one_logger.DefaultRecorder())

    expected = [(call, rule), ("OneLoggerProvider.configure", "configured_twice")]
    assert [(record.call, record.rule) for record in reports] == expected
    assert current_observer() == observer
    assert provider().config == config


def test_the_propagating_strategy_raises_at_the_call_and_later_bodies_still_run() -> None:
    configure(telemetry={}, error_handling_strategy=PROPAGATE)
    with pytest.raises(OneLoggerError, match="on_train_end"):
        training.on_train_end()
    finished_bodies = []
    with application():
        with contextlib.suppress(OneLoggerError), application():
            finished_bodies.append("second application")
        with training_loop(train_iterations_start=0), training_iteration():
            finished_bodies.append("iteration")
    with pytest.raises(OneLoggerError):
        one_logger.get_recorder().stop(None)  # type: ignore[arg-type]  # the span of a disabled one-logger

    assert finished_bodies == ["iteration"]


def test_d15_a_block_that_raises_on_entry_does_not_affect_outer_blocks() -> None:
    memory = configure(telemetry={}, error_handling_strategy=PROPAGATE)
    for _ in range(2):
        with application():
            with pytest.raises(OneLoggerError, match="application"), application():
                pass
            with training_loop(train_iterations_start=0):
                with pytest.raises(OneLoggerError, match="training_iteration"), training_iteration():
                    training_iteration().__enter__()
                with training_iteration():
                    pass

    records = wait_for_delivery(memory).named_records
    assert records.count(("stop", "application")) == records.count(("stop", "training_loop")) == 2
    # Each application has one completed iteration.
    assert records.count(("event", "training_metrics_update")) == 2


def test_a_later_training_configuration_is_merged() -> None:
    base = one_logger.OneLoggerConfig(**APPLICATION)
    provider().with_base_config(base).configure_provider()
    provider().set_training_telemetry_config(one_logger.TrainingTelemetryConfig(**TELEMETRY))

    for instance in (provider(), one_logger.OneLoggerProvider.instance()):
        assert instance.config.telemetry_config == one_logger.TrainingTelemetryConfig(**TELEMETRY)
    assert base.telemetry_config is None


@pytest.mark.parametrize(
    ("export", "exported_names"),
    [
        (
            (ExportCustomizationMode.EXPORT_ALL_SPANS,),
            ["application", "a", "training_single_iteration", "b"],
        ),
        ((ExportCustomizationMode.WHITELIST_SPANS, ["a"]), ["a"]),
        (
            (ExportCustomizationMode.BLACKLIST_SPANS, ["a", one_logger.StandardSpanName.APPLICATION]),
            ["training_single_iteration", "b"],
        ),
        ((), ["application", "a", "b"]),
    ],
)
def test_d32_the_provider_accepts_every_mode_of_span_selection(
    export: tuple[Any, ...], exported_names: list[str]
) -> None:
    memory = configure(export=export)

    with application(), timed_span("a"), training_iteration(), timed_span("b"):
        pass

    assert wait_for_delivery(memory).names() == exported_names


@pytest.mark.parametrize(
    ("field", "event"),
    [
        ("is_train_iterations_enabled_or_fn", "training_metrics_update"),
        ("is_validation_iterations_enabled_or_fn", "validation_metrics_update"),
        ("is_test_iterations_enabled_or_fn", "testing_metrics_update"),
    ],
)
def test_d37_each_switch_disables_its_event(field: str, event: str) -> None:
    memory = configure(telemetry={field: lambda: False, "log_every_n_train_iterations": 1})
    with application(), training_loop(train_iterations_start=0):
        with training_iteration():
            pass
        with validation_loop(), training.testing_loop():
            pass

    updates = {"training_metrics_update", "validation_metrics_update", "testing_metrics_update"}
    assert updates & set(wait_for_delivery(memory).names("event")) == updates - {event}


def test_exporters_can_come_from_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    provider().with_base_config(one_logger.OneLoggerConfig(**APPLICATION)).with_export_config(
        [{"class_name": "FileExporter", "config": {"file_path": str(path)}}]
    ).configure_provider()
    with application():
        pass

    assert exporter.flush(WAIT_LIMIT_SECONDS)
    assert json.loads(path.read_text(encoding="ascii").splitlines()[0])["name"] == "application"


def test_a_disabled_rank_exports_nothing_and_opens_no_file(tmp_path: Path) -> None:
    logs = one_logger.LoggerConfig(log_file_path_for_err=tmp_path / "err")
    memory = configure(enable_for_current_rank=False, logger_config=logs)

    with application() as span:
        span.add_attribute("a", 1)

    assert exporter.flush(WAIT_LIMIT_SECONDS)
    assert memory.calls == []
    assert list(tmp_path.iterdir()) == []


def test_force_disabling_ends_the_export() -> None:
    memory = configure()
    provider().force_disable_logging()
    with application():
        pass

    assert wait_for_delivery(memory).named_records == [("initialize", "")]
    assert not one_logger.OneLoggerProvider.instance().one_logger_enabled


def test_timed_span_exports_attributes_and_error() -> None:
    memory = configure()
    with (
        contextlib.suppress(ZeroDivisionError),
        timed_span("mine", one_logger.Attributes({"a": 1}), one_logger.Attributes({"s": 2})) as span,
    ):
        span.add_attribute("b", 2)
        _ = 1 / 0

    assert wait_for_delivery(memory).named_records[1:] == [
        ("start", "mine"),
        ("error", "Error in mine: "),
        ("stop", "mine"),
    ]
    (start,), (stop,) = memory.records_of("start"), memory.records_of("stop")
    assert start.attributes.to_json() == {"a": 1}
    assert start.start_event.attributes.to_json()["s"] == 2
    assert stop.attributes.to_json()["b"] == 2


def test_d47_timed_span_takes_any_name_and_decorates_functions() -> None:
    memory = configure()

    @timed_span("custom")
    def work(depth: int) -> int:
        return depth if depth == 0 else work(depth - 1)

    assert work(2) == 0
    starts = wait_for_delivery(memory).records_of("start")
    assert [span.name_str for span in starts] == ["custom"] * 3
    assert starts[2].parent_span.id == starts[1].id


def test_manual_and_standard_spans_form_one_tree() -> None:
    memory, recorder = configure(telemetry={}), provider().recorder
    with application(), training_loop(train_iterations_start=0) as loop:
        manual_span = recorder.start("mine", parent_span=None)
        assert recorder.get_active_spans_by_name(one_logger.StandardTrainingJobSpanName.TRAINING_LOOP) == [
            loop
        ]
        recorder.event(manual_span, one_logger.Event.create("e"))
        recorder.stop(manual_span)
        recorder.stop(recorder.start("of the loop", parent_span=loop))

    parents = {span.name_str: span.parent_span for span in wait_for_delivery(memory).records_of("start")}
    assert parents["mine"].id == parents["of the loop"].id == loop.id
    assert parents["training_loop"].name_str == "application"


def test_the_initialization_record_identifies_the_job() -> None:
    memory = configure()
    with application():
        pass

    (attributes,) = wait_for_delivery(memory).attributes("one_logger_initialization")
    expected = {
        "session_tag": "session",
        "world_size": 1,
        "rank": 0,
        "node_name": os.uname().nodename,
        "one_logger_training_telemetry_version": "2.3.1",
    }
    assert attributes.items() >= expected.items()


def test_the_methods_of_the_recorder_are_the_callbacks() -> None:
    memory, recorder = configure(telemetry={}), provider().recorder
    pairs = ["distributed_init", "model_init", "dataloader_init", "load_checkpoint", "optimizer_init"]
    recorder.on_app_start(one_logger.TracingTimestamp.now())
    for name in (*pairs, "testing", "validation", "training_single_iteration", "validation_single_iteration"):
        if name == "training_single_iteration":
            recorder.on_training_loop_start(0, 0, train_iterations_target=5)
        getattr(recorder, f"on_{name}_start")(one_logger.TracingTimestamp.now())
        getattr(recorder, f"on_{name}_end")(one_logger.TracingTimestamp.now())
    recorder.on_save_checkpoint_start(1)
    event = recorder.create_sync_checkpoint_metrics_event(
        one_logger.StandardTrainingJobSpanName.CHECKPOINT_SAVE_SYNC
    )
    recorder.on_save_checkpoint_success(1)
    recorder.on_save_checkpoint_end()
    recorder.on_training_loop_end()
    recorder.on_app_end()

    assert event.name == "sync_checkpoint_metrics_update"
    assert len(wait_for_delivery(memory).names("start")) == len(memory.names("stop")) == 10
    assert "save_checkpoint_success" in memory.names("event")
    recorder.close()
    with application():
        pass
    assert wait_for_delivery(memory).named_records[-2:] == [("stop", "application"), ("close", "")]


def test_a_custom_recorder_has_a_span_tree_per_thread_and_task() -> None:
    memory = InMemoryExporter()
    recorder = one_logger.DefaultRecorder([memory])
    one_logger.OneLoggerProvider.instance().configure(one_logger.OneLoggerConfig(**APPLICATION), recorder)

    async def task(name: str) -> None:
        with timed_span(name):
            await asyncio.sleep(0.01)
            with timed_span(f"{name} inside"):
                await asyncio.sleep(0.01)

    async def main() -> None:
        await asyncio.gather(task("a"), task("b"))

    with timed_span("root"):
        asyncio.run(main())
        thread = threading.Thread(target=lambda: recorder.stop(recorder.start("of a thread")))
        thread.start()
        thread.join()

    parents = {
        span.name_str: span.parent_span and span.parent_span.name_str
        for span in wait_for_delivery(memory).records_of("start")
    }
    assert parents == {
        "root": None,
        "a": "root",
        "b": "root",
        "a inside": "a",
        "b inside": "b",
        "of a thread": None,
    }
    recorder.close()


def test_d14_invalid_calls_of_a_recorder_raise_nothing() -> None:
    recorder = one_logger.DefaultRecorder([InMemoryExporter()])
    span = recorder.start("work")
    recorder.stop(span)
    with collect_misuse() as reports:
        recorder.stop(span)
        recorder.stop(None)  # type: ignore[arg-type]  # the span of a disabled one-logger
        recorder.event(None, one_logger.Event.create("e"))  # type: ignore[arg-type]  # None as a span
        recorder.error(None, "it failed")  # type: ignore[arg-type]  # None as a span
        recorder.close()
        recorder.close()
        recorder.stop(recorder.start("after"))

    assert [record.rule for record in reports] == ["no_such_span"] * 4 + ["closed", "closed"]


def test_closing_a_recorder_ends_open_spans_innermost_first() -> None:
    memory = InMemoryExporter()
    recorder = one_logger.DefaultRecorder([memory])
    for name in ("outer", "inner"):
        recorder.start(name)
    assert [span.name for span in recorder.get_active_spans_by_name("inner")] == ["inner"]
    recorder.close()

    assert memory.names("stop") == ["inner", "outer"]


@pytest.mark.parametrize("name", ["data_loading", "model_forward", "training_loop", "mine"])
def test_spans_of_a_recorder_with_the_same_name_can_be_nested(name: str) -> None:
    memory = InMemoryExporter()
    recorder = one_logger.DefaultRecorder([memory])
    outer = recorder.start(name)
    recorder.stop(recorder.start(name))
    recorder.stop(outer)
    recorder.close()

    assert memory.names("start") == memory.names("stop") == [name, name]


def test_a_raising_custom_recorder_does_not_affect_the_job() -> None:
    class Broken(one_logger.DefaultRecorder):
        def start(self, *arguments: Any, **named: Any) -> one_logger.Span:
            raise RuntimeError("broken")

    one_logger.OneLoggerProvider.instance().configure(one_logger.OneLoggerConfig(**APPLICATION), Broken())
    with collect_misuse() as reports, timed_span("work") as span:
        span.add_attribute("a", 1)

    assert [record.rule for record in reports] == ["recorder_raised"]


@pytest.fixture
def _default_notices() -> Iterator[None]:
    """Forget the logged notices of this process before a test. After the test, close its log files and write to stderr again."""
    NOTICES._logged_keys.clear()  # a process logs each notice once, and earlier tests may have logged it
    yield
    NOTICES.is_quiet = False
    for listener in NOTICES.listeners:
        getattr(listener, "args")[0].close()  # noqa: B009  # a partial
    NOTICES.listeners.clear()


@pytest.mark.usefixtures("_default_notices")
def test_d36_a_log_file_exists_only_if_configured_and_has_the_notices(tmp_path: Path) -> None:
    paths = {"log_file_path_for_info": tmp_path / "info", "log_file_path_for_err": tmp_path / "no" / "err"}
    with collect_misuse() as reports:
        configure(logger_config=one_logger.LoggerConfig(log_level="ERROR", **paths))
    log_once(f"{tmp_path}", "a notice")
    NOTICES.flush(WAIT_LIMIT_SECONDS)

    assert [record.rule for record in reports] == ["log_file"]
    assert (tmp_path / "info").read_text(encoding="utf-8") == "exporter - WARNING - a notice\n"
    assert NOTICES.is_quiet


def test_with_base_config_twice_raises_if_the_first_configuration_propagates_exceptions() -> None:
    config = one_logger.OneLoggerConfig(**APPLICATION, error_handling_strategy=PROPAGATE)
    provider().with_base_config(config)

    with pytest.raises(OneLoggerError, match="with_base_config"):
        provider().with_base_config(one_logger.OneLoggerConfig(**APPLICATION))


def test_the_end_of_the_application_closes_the_exporters_and_another_start_opens_them_again() -> None:
    memory = configure()
    for _ in range(2):
        with application():
            pass

    exporter_calls = [
        name for name in wait_for_delivery(memory).calls if name in {"initialize", "start", "stop", "close"}
    ]
    assert exporter_calls == ["initialize", "start", "stop", "close"] * 2


@pytest.mark.parametrize("training_config", [None, {}])
def test_a_session_tag_does_not_change_the_counted_steps_and_saves(
    training_config: dict[str, Any] | None,
) -> None:
    configure(telemetry=training_config)
    with training_loop(train_iterations_start=0):
        for step in range(3):
            with training_iteration():
                time.sleep(0.01)
            with training.checkpoint_save(step + 1):
                pass

    reading = publish_and_read()
    assert reading.steps == 3
    assert reading.step == 3
    assert reading.committed_step == 3
    assert reading.work_seconds >= 0.03
    assert reading.committed_seconds == pytest.approx(reading.work_seconds)
    assert dict(reading.facts)["session_tag"] == "session"


def test_the_session_of_the_process_is_the_tag_of_a_configuration_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EXPORTER_SESSION", "pretraining-7")
    memory = configure(session_tag_or_fn="")
    with application():
        pass

    (attributes,) = wait_for_delivery(memory).attributes("one_logger_initialization")
    assert attributes["session_tag"] == "pretraining-7"
