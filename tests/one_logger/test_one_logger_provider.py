"""The providers and recorders: configuring once, overrides, calls in the wrong order, and spans made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from one_logger_support import KeepingExporter, reported
from training_support import begun_anew

import exporter
from exporter import training
from exporter.errors import OneLoggerError
from exporter.one_logger.records import current
from exporter.training import (
    Attributes,
    DefaultRecorder,
    Event,
    ExportCustomizationMode,
    LoggerConfig,
    OneLoggerConfig,
    OneLoggerErrorHandlingStrategy,
    OneLoggerProvider,
    Recorder,
    Span,
    StandardSpanName,
    StandardTrainingJobSpanName,
    TracingTimestamp,
    TrainingRecorder,
    TrainingTelemetryConfig,
    TrainingTelemetryProvider,
    application,
    get_recorder,
    timed_span,
    training_iteration,
    training_loop,
    validation_loop,
)

SOON = 10.0
APPLICATION: dict[str, Any] = {
    "application_name": "app",
    "world_size_or_fn": 8,
    "session_tag_or_fn": "session",
}
TRAINING: dict[str, Any] = {"perf_tag_or_fn": "perf", "global_batch_size_or_fn": 32}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with begun_anew():
        yield


def provider() -> TrainingTelemetryProvider:
    return TrainingTelemetryProvider.instance()


def configured(*exporters: Any, **fields: Any) -> TrainingTelemetryProvider:
    built = provider().with_base_config(OneLoggerConfig(**APPLICATION | fields))
    for each in exporters:
        built.with_exporter(each)
    built.configure_provider()
    return built


def names(exporter_: KeepingExporter) -> list[tuple[str, str]]:
    """What arrived, once all of it has."""
    assert exporter.flush(SOON)
    found = current()
    assert found is not None
    assert found.delivery.flush(SOON)
    return exporter_.kept[1:]


def test_a_provider_is_one_object_and_cannot_be_called() -> None:
    assert provider() is provider()
    with pytest.raises(TypeError, match=r"Use TrainingTelemetryProvider\.instance\(\) instead"):
        TrainingTelemetryProvider()
    with pytest.raises(TypeError, match="cannot be instantiated"):
        OneLoggerProvider()


def test_what_was_configured_is_found_again() -> None:
    assert not provider().one_logger_ready
    with pytest.raises(OneLoggerError, match="configure the provider"):
        _ = provider().config

    configured(KeepingExporter(), telemetry_config=TrainingTelemetryConfig(**TRAINING))

    found = current()
    assert found is not None
    assert found.enabled
    assert provider().one_logger_ready
    assert OneLoggerProvider.instance().one_logger_enabled
    assert provider().config.application_name == "app"
    assert provider().config.telemetry_config == found.training
    assert isinstance(provider().recorder, TrainingRecorder)
    assert get_recorder() is provider().recorder is OneLoggerProvider.instance().recorder


def test_overrides_change_nested_fields_and_the_last_one_counts() -> None:
    (
        provider()
        .with_base_config(OneLoggerConfig(**APPLICATION, telemetry_config=TRAINING))
        .with_config_override({"application_name": "first", "custom_metadata": {"a": 1}})
        .with_config_override({"application_name": "second", "telemetry_config": {"seq_length_or_fn": 5}})
        .with_config_override({"error_handling_strategy": "propagate_exceptions"})
        .configure_provider()
    )

    config = provider().config
    assert (config.application_name, config.custom_metadata, config.propagates) == ("second", {"a": 1}, True)
    assert config.telemetry_config == TrainingTelemetryConfig(**TRAINING, seq_length_or_fn=5)


def test_a_configuration_may_come_from_overrides_alone() -> None:
    provider().with_config_override(APPLICATION).configure_provider()

    assert provider().config == OneLoggerConfig(**APPLICATION)


def test_d40_a_part_of_a_training_over_a_base_without_one_is_refused_in_words() -> None:
    built = provider().with_base_config(OneLoggerConfig(**APPLICATION))
    built.with_config_override({"telemetry_config": {"seq_length_or_fn": 5}})

    with pytest.raises(OneLoggerError, match="needs perf_tag_or_fn, global_batch_size_or_fn"):
        built.configure_provider()
    assert current() is None


@pytest.mark.parametrize(
    ("call", "arguments", "words"),
    [
        ("with_base_config", ({"application_name": "a"},), "takes a OneLoggerConfig"),
        ("with_config_override", (5,), "takes a mapping of fields"),
        ("with_config_override_from_json_file", ("override.json",), "with_config_override"),
        ("with_config_override_from_config_server", ("https://config.example.com",), "with_config_override"),
        ("with_exporter", ("not an exporter",), "is no exporter"),
        ("set_training_telemetry_config", (5,), "must be a TrainingTelemetryConfig"),
        ("configure_provider", (), "No configuration was provided"),
    ],
)
def test_what_is_no_configuration_is_refused_in_words(
    call: str, arguments: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(OneLoggerError, match=words):
        getattr(provider(), call)(*arguments)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("with_base_config", (OneLoggerConfig(**APPLICATION),)),
        ("with_config_override", ({},)),
        ("with_exporter", (KeepingExporter(),)),
        ("with_export_customization", (ExportCustomizationMode.EXPORT_ALL_SPANS,)),
        ("with_export_config", ()),
        ("configure_provider", ()),
    ],
)
def test_s13_what_comes_too_late_is_a_misuse_and_changes_nothing(
    call: str, arguments: tuple[Any, ...]
) -> None:
    configured()
    before = current()

    with reported() as found:
        getattr(provider(), call)(*arguments)

    assert [(name, rule) for name, rule, _ in found] == [(call, "configured_already")]
    assert current() is before


def test_with_the_propagating_strategy_a_misuse_raises_at_its_call_and_bodies_run_all_the_same() -> None:
    configured(
        telemetry_config=TRAINING,
        error_handling_strategy=OneLoggerErrorHandlingStrategy.PROPAGATE_EXCEPTIONS,
    )
    with pytest.raises(OneLoggerError, match="on_train_end"):
        training.on_train_end()
    ran = []
    with application():
        with contextlib.suppress(OneLoggerError), application():
            ran.append("second application")
        with training_loop(train_iterations_start=0), training_iteration():
            ran.append("iteration")
    with pytest.raises(OneLoggerError):
        get_recorder().stop(None)  # type: ignore[arg-type]  # what one-logger gives where it is off

    assert "iteration" in ran


def test_d15_a_block_that_raises_as_it_is_entered_leaves_those_around_it_as_they_are() -> None:
    keeping = KeepingExporter()
    configured(
        keeping,
        telemetry_config=TRAINING,
        error_handling_strategy=OneLoggerErrorHandlingStrategy.PROPAGATE_EXCEPTIONS,
    )
    for _ in range(2):
        with application():
            with pytest.raises(OneLoggerError, match="application"), application():
                pass
            with training_loop(train_iterations_start=0):
                with pytest.raises(OneLoggerError, match="training_iteration"), training_iteration():
                    training_iteration().__enter__()
                with training_iteration():
                    pass

    told = names(keeping)
    assert told.count(("stop", "application")) == told.count(("stop", "training_loop")) == 2
    assert told.count(("event", "training_metrics_update")) == 2  # of the one that was completed in each


def test_a_configuration_of_the_training_that_comes_later_is_part_of_the_whole() -> None:
    base = OneLoggerConfig(**APPLICATION)
    provider().with_base_config(base).configure_provider()
    provider().set_training_telemetry_config(TrainingTelemetryConfig(**TRAINING))

    for each in (provider(), OneLoggerProvider.instance()):
        assert each.config.telemetry_config == TrainingTelemetryConfig(**TRAINING)
    assert base.telemetry_config is None


def test_s8_a_second_configuration_of_the_training_is_a_misuse_and_changes_nothing() -> None:
    configured(telemetry_config=TrainingTelemetryConfig(**TRAINING))

    with reported() as found:
        provider().set_training_telemetry_config(
            TrainingTelemetryConfig(**TRAINING | {"global_batch_size_or_fn": 1})
        )

    assert [rule for _, rule, _ in found] == ["already_set"]
    found_training = provider().config.telemetry_config
    assert isinstance(found_training, TrainingTelemetryConfig)
    assert found_training.global_batch_size == 32


@pytest.mark.parametrize(
    ("mode", "filter", "expected"),
    [
        (
            ExportCustomizationMode.EXPORT_ALL_SPANS,
            None,
            ["application", "a", "training_single_iteration", "b"],
        ),
        (ExportCustomizationMode.WHITELIST_SPANS, ["a"], ["a"]),
        (
            ExportCustomizationMode.BLACKLIST_SPANS,
            ["a", StandardSpanName.APPLICATION],
            ["training_single_iteration", "b"],
        ),
        (None, None, ["application", "a", "b"]),
    ],
)
def test_d32_every_mode_can_be_reached_through_the_provider(
    mode: ExportCustomizationMode | None, filter: list[Any] | None, expected: list[str]
) -> None:
    keeping = KeepingExporter()
    built = provider().with_base_config(OneLoggerConfig(**APPLICATION)).with_exporter(keeping)
    if mode is not None:
        built.with_export_customization(mode, filter)
    built.configure_provider()

    with application(), timed_span("a"), training_iteration(), timed_span("b"):
        pass

    assert [name for method, name in names(keeping) if method == "start"] == expected


@pytest.mark.parametrize(
    ("field", "event"),
    [
        ("is_train_iterations_enabled_or_fn", "training_metrics_update"),
        ("is_validation_iterations_enabled_or_fn", "validation_metrics_update"),
        ("is_test_iterations_enabled_or_fn", "testing_metrics_update"),
    ],
)
def test_d37_each_switch_switches_its_event(field: str, event: str) -> None:
    keeping = KeepingExporter()
    configured(keeping, telemetry_config=TRAINING | {field: lambda: False, "log_every_n_train_iterations": 1})
    with application(), training_loop(train_iterations_start=0):
        with training_iteration():
            pass
        with validation_loop(), training.testing_loop():
            pass

    told = {name for method, name in names(keeping) if method == "event"}
    updates = {"training_metrics_update", "validation_metrics_update", "testing_metrics_update"}
    assert told & updates == updates - {event}


def test_exporters_may_come_from_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    provider().with_base_config(OneLoggerConfig(**APPLICATION)).with_export_config(
        [{"class_name": "FileExporter", "config": {"file_path": str(path)}}]
    ).configure_provider()
    with application():
        pass

    assert exporter.flush(SOON)
    assert json.loads(path.read_text(encoding="ascii").splitlines()[0])["name"] == "application"


def test_a_disabled_rank_exports_nothing_and_opens_nothing(tmp_path: Path) -> None:
    keeping = KeepingExporter()
    logs = LoggerConfig(log_file_path_for_err=tmp_path / "err")
    configured(keeping, enable_for_current_rank=False, logger_config=logs)

    with application() as span:
        span.add_attribute("a", 1)

    assert exporter.flush(SOON)
    assert keeping.calls == []
    assert list(tmp_path.iterdir()) == []


def test_forcing_it_off_ends_the_telling() -> None:
    keeping = KeepingExporter()
    configured(keeping)
    provider().force_disable_logging()
    with application():
        pass

    assert names(keeping) == []
    assert not OneLoggerProvider.instance().one_logger_enabled


def test_timed_span_is_told_with_its_attributes_and_its_error() -> None:
    keeping = KeepingExporter()
    configured(keeping)
    with (
        contextlib.suppress(ZeroDivisionError),
        timed_span("mine", Attributes({"a": 1}), Attributes({"s": 2})) as span,
    ):
        span.add_attribute("b", 2)
        _ = 1 / 0

    kept = names(keeping)
    assert [method for method, _ in kept] == ["start", "error", "stop"]
    assert kept[1][1] == "Error in mine: "
    start, _, stop = keeping.spans
    assert start.attributes.to_json() == {"a": 1}
    assert start.start_event.attributes.to_json()["s"] == 2
    assert stop.attributes.to_json()["b"] == 2


def test_d47_timed_span_takes_any_name_and_decorates_functions() -> None:
    keeping = KeepingExporter()
    configured(keeping)

    @timed_span("custom")
    def work(depth: int) -> int:
        return depth if depth == 0 else work(depth - 1)

    assert work(2) == 0
    starts = [
        span for (method, _), span in zip(names(keeping), keeping.spans, strict=True) if method == "start"
    ]
    assert [span.name_str for span in starts] == ["custom"] * 3
    assert starts[2].parent_span.id == starts[1].id


def test_spans_by_hand_stand_in_one_tree_with_the_standard_ones() -> None:
    keeping = KeepingExporter()
    built = configured(keeping, telemetry_config=TRAINING)
    with application(), training_loop(train_iterations_start=0) as loop:
        recorder = built.recorder
        mine = recorder.start("mine", parent_span=None)
        assert recorder.get_active_spans_by_name(StandardTrainingJobSpanName.TRAINING_LOOP) == [loop]
        recorder.event(mine, Event.create("e"))
        recorder.stop(mine)
        recorder.stop(recorder.start("of the loop", parent_span=loop))

    names(keeping)
    parents = {span.name_str: span.parent_span for span in keeping.spans}
    assert parents["mine"].id == parents["of the loop"].id == loop.id
    assert parents["training_loop"].name_str == "application"


def test_an_iteration_that_is_open_is_found_and_its_forced_end_says_why() -> None:
    keeping = KeepingExporter()
    recorder = configured(keeping, telemetry_config=TRAINING).recorder
    recorder.on_app_start()
    recorder.on_training_loop_start(0)
    recorder.on_training_single_iteration_start()
    (iteration,) = recorder.get_active_spans_by_name(StandardTrainingJobSpanName.TRAINING_SINGLE_ITERATION)
    recorder.on_app_end()

    (error,) = [event for event in iteration.events if event.name == "error"]
    message = error.attributes.get_str_value("error_message") or ""
    assert "Timer for span training_single_iteration was automatically stopped" in message
    assert not iteration.active
    assert names(keeping)[-1] == ("stop", "application")


def test_the_initialization_says_whose_records_these_are() -> None:
    keeping = KeepingExporter()
    configured(keeping)
    with application() as span:
        names(keeping)

    (told,) = [each for each in span.events if each.name == "one_logger_initialization"]
    assert told.attributes.get_str_value("one_logger_training_telemetry_version") == "2.3.1"


def test_the_recorders_methods_are_the_callbacks() -> None:
    keeping = KeepingExporter()
    recorder = configured(keeping, telemetry_config=TRAINING).recorder
    pairs = ["distributed_init", "model_init", "dataloader_init", "load_checkpoint", "optimizer_init"]
    recorder.on_app_start(TracingTimestamp.now())
    for each in (*pairs, "testing", "validation", "training_single_iteration", "validation_single_iteration"):
        if each == "training_single_iteration":
            recorder.on_training_loop_start(0, 0, train_iterations_target=5)
        getattr(recorder, f"on_{each}_start")(TracingTimestamp.now())
        getattr(recorder, f"on_{each}_end")(TracingTimestamp.now())
    recorder.on_save_checkpoint_start(1)
    event = recorder.create_sync_checkpoint_metrics_event(StandardTrainingJobSpanName.CHECKPOINT_SAVE_SYNC)
    recorder.on_save_checkpoint_success(1)
    recorder.on_save_checkpoint_end()
    recorder.on_training_loop_end()
    recorder.on_app_end()

    assert event.name == "sync_checkpoint_metrics_update"
    told = names(keeping)
    assert sum(method == "start" for method, _ in told) == sum(method == "stop" for method, _ in told) == 10
    assert ("event", "save_checkpoint_success") in told
    recorder.close()
    with application():
        pass
    assert names(keeping)[-1] == ("stop", "application")


def test_a_recorder_of_the_jobs_own_keeps_a_tree_per_thread_and_task() -> None:
    keeping = KeepingExporter()
    recorder = DefaultRecorder([keeping])
    OneLoggerProvider.instance().configure(OneLoggerConfig(**APPLICATION), recorder)

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

    assert recorder.delivery.flush(SOON)
    parents = {span.name_str: span.parent_span and span.parent_span.name_str for span in keeping.spans}
    assert parents == {
        "root": None,
        "a": "root",
        "b": "root",
        "a inside": "a",
        "b inside": "b",
        "of a thread": None,
    }
    recorder.close()


def test_d14_a_recorder_that_is_used_wrongly_raises_nothing() -> None:
    keeping = KeepingExporter()
    recorder = DefaultRecorder([keeping])
    span = recorder.start("work")
    recorder.stop(span)
    with reported() as found:
        recorder.stop(span)
        recorder.stop(None)  # type: ignore[arg-type]  # what one-logger gives where it is off
        recorder.event(None, Event.create("e"))  # type: ignore[arg-type]  # likewise
        recorder.error(None, "bad")  # type: ignore[arg-type]  # likewise
        recorder.close()
        recorder.close()
        recorder.stop(recorder.start("after"))

    assert [rule for _, rule, _ in found] == ["no_such_span"] * 4 + ["closed", "closed"]


def test_closing_a_recorder_ends_what_is_open_the_innermost_first() -> None:
    keeping = KeepingExporter()
    recorder = DefaultRecorder([keeping])
    for name in ("outer", "inner"):
        recorder.start(name)
    assert [span.name for span in recorder.get_active_spans_by_name("inner")] == ["inner"]
    recorder.close()

    assert [name for method, name in keeping.kept if method == "stop"] == ["inner", "outer"]


def test_a_recorder_of_the_jobs_own_class_that_raises_harms_nothing() -> None:
    class Broken(DefaultRecorder):
        def start(self, *arguments: Any, **named: Any) -> Span:
            raise RuntimeError("broken")

    OneLoggerProvider.instance().configure(OneLoggerConfig(**APPLICATION), Broken())
    with reported() as found, timed_span("work") as span:
        span.add_attribute("a", 1)

    assert [rule for _, rule, _ in found] == ["recorder_raised"]
    assert issubclass(Broken, Recorder)


def test_s13_a_second_recorder_is_a_misuse_and_changes_nothing() -> None:
    first = DefaultRecorder()
    OneLoggerProvider.instance().configure(OneLoggerConfig(**APPLICATION), first)
    with reported() as found:
        OneLoggerProvider.instance().configure(OneLoggerConfig(**APPLICATION), DefaultRecorder())

    assert [rule for _, rule, _ in found] == ["configured_twice"]
    assert get_recorder() is first


def test_d36_a_log_file_exists_only_where_one_is_named(tmp_path: Path) -> None:
    logger = logging.getLogger("exporter")
    level, before = logger.level, list(logger.handlers)
    paths = {"log_file_path_for_info": tmp_path / "info", "log_file_path_for_err": tmp_path / "no" / "err"}
    with reported() as found:
        configured(logger_config=LoggerConfig(log_level="ERROR", **paths))
    added = [each for each in logger.handlers if each not in before]
    try:
        assert [Path(each.baseFilename).name for each in added if isinstance(each, logging.FileHandler)] == [
            "info"
        ]
        assert logger.level == logging.ERROR
        assert [rule for _, rule, _ in found] == ["log_file"]
    finally:
        logger.setLevel(level)
        for each in added:
            logger.removeHandler(each)
            each.close()
