"""Exporters: files, loggers, OpenTelemetry, Weights & Biases, custom classes, and configured ones.

A test whose name starts with a number, such as d30, shows that row of the table of defects in docs/one-logger.md.
"""

from __future__ import annotations

import json
import logging
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_support import collect_misuse
from waiting import WAIT_LIMIT_SECONDS

from exporter import training
from exporter.errors import ExportError
from exporter.one_logger.config import OneLoggerConfig
from exporter.one_logger.delivery import Delivery
from exporter.one_logger.export_config import ExporterConfig, ExporterConfigManager
from exporter.one_logger.exporters import (
    BaseExporter,
    BaseJsonExporter,
    FileExporter,
    LoggerExporter,
)
from exporter.one_logger.provider import OneLoggerProvider
from exporter.one_logger.recorders import DefaultRecorder
from exporter.one_logger.wandb.exporter import wandb_exporter as wandb
from exporter.training.attributes import Attributes
from exporter.training.spans import Event, Span

pytestmark = pytest.mark.usefixtures("unconfigured_process")


SETTINGS = OneLoggerConfig(application_name="app", world_size_or_fn=4, session_tag_or_fn="s")
RECORD_TYPES = ["start", "complete", "event", "application_error", "stop", "telemetry_data_error"]
"""Types of the records of `export_sample`, in the order of their export."""


def export_sample(exporter: BaseExporter) -> None:
    """Export a span with a child, an event and an error, report missing telemetry, and close the exporter."""
    recorder = DefaultRecorder([exporter])
    outer = recorder.start("outer", Attributes({"size": 2**70, "bad": float("nan"), "a.b": [1, 2]}))
    recorder.stop(recorder.start("inner"))
    recorder.event(outer, Event.create("update", Attributes({"loss": 0.5})))
    try:
        _ = 1 / 0
    except ZeroDivisionError as error:
        recorder.error(outer, "it failed", error)
    recorder.stop(outer)
    recorder.telemetry_data_error("a gap")
    assert recorder.delivery.flush(WAIT_LIMIT_SECONDS)
    recorder.close()


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def test_records_have_the_shapes_of_one_logger_and_a_parent(tmp_path: Path) -> None:
    export_sample(FileExporter(file_path=tmp_path / "deep" / "telemetry.json"))

    records = records_of(tmp_path / "deep" / "telemetry.json")
    start, inner, event, error, stop, gap = records
    assert [record["type"] for record in records] == RECORD_TYPES
    assert [record["count"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert start["attributes"] == {"size": 2**70, "bad": "nan", "a.b": [1, 2]}
    assert inner["parent_id"] == start["id"] == event["span_id"] == stop["id"]
    identity_fields = {"rank", "node_name"}
    assert set(start) - identity_fields == {"type", "id", "name", "attributes", "start_event", "count", "pid"}
    assert set(inner) >= {"start_event", "stop_event"}
    assert event["event"]["name"] == "update"
    assert event["event"]["attributes"].items() >= {"loss": 0.5}.items()
    assert error["event"]["attributes"]["exception_type"] == "ZeroDivisionError"
    assert "1 / 0" in error["event"]["attributes"]["exception_traceback"]
    assert stop["attributes"]["duration_msec"] >= 0
    assert gap["error"]["attributes"]["telemetry_data_error_type"] == "incomplete_telemetry_data"


def test_d35_records_have_application_rank_and_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    recorder = DefaultRecorder([FileExporter(tmp_path / "t.json")])
    OneLoggerProvider.instance().configure(SETTINGS, recorder)
    recorder.stop(recorder.start("work"))
    assert recorder.delivery.flush(WAIT_LIMIT_SECONDS)

    (record,) = records_of(tmp_path / "t.json")
    assert record["application_name"] == "app"
    assert record["rank"] == 3
    assert record["pid"] == os.getpid()
    assert record["node_name"] == os.uname().nodename


@pytest.mark.parametrize("rank", ["abc", "-1", "", None])
def test_d24_records_of_a_job_without_a_valid_rank_have_no_rank_also_after_the_first_iteration(
    rank: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    recorder = DefaultRecorder([FileExporter(tmp_path / "t.json")])
    for _ in range(2):
        recorder.stop(recorder.start("work"))
        with training.training_iteration():  # makes the process rank 0
            pass
    recorder.close()

    assert len(records_of(tmp_path / "t.json")) == 2
    assert not any({"rank", "node_name"} & set(record) for record in records_of(tmp_path / "t.json"))


def test_every_record_of_a_job_with_a_rank_has_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    export_sample(FileExporter(tmp_path / "t.json"))

    records = records_of(tmp_path / "t.json")
    assert {(record["rank"], record["node_name"]) for record in records} == {(3, os.uname().nodename)}


def test_d30_records_are_appended_to_the_file_of_the_previous_run(tmp_path: Path) -> None:
    for _ in range(2):
        export_sample(FileExporter(tmp_path / "t.json"))

    assert len(records_of(tmp_path / "t.json")) == 12


def test_d30_a_failed_write_raises_and_its_retry_is_numbered_as_the_first_record(
    tmp_path: Path,
) -> None:
    directory, path = tmp_path / "records", tmp_path / "records" / "t.json"
    exporter = FileExporter(path)
    directory.write_text("a file", encoding="ascii")
    with pytest.raises(ExportError, match=r"t\.json"):
        exporter.initialize()
    directory.unlink()
    exporter.initialize()
    path.unlink()
    path.mkdir()

    span = Span.create("work")
    exporter.export_start(span)
    span.stop()
    for _ in range(2):  # a retry is refused as a whole
        with pytest.raises(ExportError):
            exporter.export_stop(span)
    path.rmdir()
    exporter.export_stop(span)
    exporter.close()
    (record,) = records_of(path)
    assert record["type"] == "complete"
    assert record["count"] == 1


def test_an_exporter_accepts_records_only_between_initialize_and_close(tmp_path: Path) -> None:
    exporter = FileExporter(tmp_path / "t.json")
    with pytest.raises(ExportError, match="not initialized"):
        exporter.export_start(Span.create("work"))
    exporter.initialize()
    assert exporter.ready
    exporter.export_start(Span.create("open"))
    exporter.close()
    with pytest.raises(ExportError, match="closed"):
        exporter.export_start(Span.create("work"))

    assert exporter.closed
    assert [line["name"] for line in records_of(tmp_path / "t.json")] == ["open"]


def test_d31_a_key_with_a_dot_survives_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "one-logger-test"):
        export_sample(LoggerExporter(logging.getLogger("one-logger-test")))

    records = [LoggerExporter.deserialize_log(line) for line in caplog.text.splitlines()]
    assert [record["type"] for record in records] == RECORD_TYPES
    assert records[0]["attributes"] == {"size": 2**70, "bad": "nan", "a.b": [1, 2]}


keys = st.text(min_size=1, max_size=8)
leaves = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.lists(st.integers(), max_size=3)
)
trees = st.dictionaries(
    keys, leaves | st.dictionaries(keys, leaves, min_size=1, max_size=3), min_size=1, max_size=4
)


@given(trees)
def test_d31_every_log_line_round_trips(fields: dict[str, Any]) -> None:
    record = {"type": "event", "event": {"attributes": fields}}
    line = LoggerExporter._format_log(record)

    assert LoggerExporter.deserialize_log(line) == record
    assert LoggerExporter.deserialize_log(f"2026-11-20 [INFO] {line} [end") == record


@pytest.mark.parametrize("text", ["", "no brackets", "[a=]", "[=1", "[a=1", "[a=1 b=2]", "[a.b=1 | a=2"])
def test_a_log_line_without_a_record_is_refused(text: str) -> None:
    with pytest.raises(ExportError, match="no record in square brackets"):
        LoggerExporter.deserialize_log(text)


def test_a_custom_exporter_needs_no_decorator_and_can_override_any_method() -> None:
    class CollectingExporter(BaseJsonExporter):
        def __init__(self) -> None:
            super().__init__()
            self.records: list[dict[str, Any]] = []

        def _write(self, json_dict: dict[str, Any]) -> None:
            self.records.append(json_dict)

    exporter = CollectingExporter()
    export_sample(exporter)

    assert len(exporter.records) == 6


def test_configuration_in_code_precedes_files_and_packages(tmp_path: Path) -> None:
    file = tmp_path / "exporters.json"
    file_entries = [
        {"class_name": "FileExporter", "config": {"file_path": "a.json", "backups": 2}},
        {"class_name": "a.b.Other", "enabled": False},
    ]
    file.write_text(json.dumps({"exporters": file_entries}), encoding="ascii")
    package = SimpleNamespace(
        get_default_config=lambda: {"class_name": "Package", "config": {"x": 1}, "enabled": True}
    )
    entry_point: Any = SimpleNamespace(name="p", load=lambda: package)
    manager = ExporterConfigManager(packages=[entry_point])

    assert manager.generate_export_config() == [ExporterConfig("Package", {"x": 1})]
    configs = manager.generate_export_config(
        [{"class_name": "FileExporter", "config": {"file_path": str(tmp_path / "t.json")}}], str(file)
    )
    assert configs == [
        ExporterConfig("FileExporter", {"file_path": str(tmp_path / "t.json"), "backups": 2}),
        ExporterConfig("a.b.Other", {}, enabled=False),
    ]
    assert [type(exporter) for exporter in manager.create_exporters_from_config(configs)] == [FileExporter]


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_the_file_is_found_by_the_variable_or_in_the_working_directory(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one_logger_exporters_config", "named"):
        text = json.dumps({"exporters": [{"class_name": name}]})  # JSON is YAML
        (tmp_path / f"{name}.{suffix}").write_text(text, encoding="ascii")
    monkeypatch.chdir(tmp_path)
    manager = ExporterConfigManager(packages=[])

    assert manager.generate_export_config() == [ExporterConfig("one_logger_exporters_config")]
    monkeypatch.setenv("ONE_LOGGER_EXPORTER_CONFIG_PATH", f"named.{suffix}")
    assert manager.generate_export_config() == [ExporterConfig("named")]


@pytest.mark.parametrize("text", ["{", "[]", '{"exporters": 5}', '{"exporters": [5, {"class_name": 3}]}'])
def test_an_unreadable_file_is_reported_and_ignored(text: str, tmp_path: Path) -> None:
    file = tmp_path / "exporters.json"
    file.write_text(text, encoding="ascii")
    manager = ExporterConfigManager(packages=[])

    with collect_misuse() as reports:
        assert manager.generate_export_config(config_file_path=file) == []

    assert {record.call for record in reports} == {"with_export_config"}


def test_a_path_that_the_system_refuses_is_reported_and_ignored() -> None:
    manager = ExporterConfigManager(packages=[])

    with collect_misuse() as reports:
        assert manager.generate_export_config(config_file_path="x" * 5000) == []

    assert [(record.call, record.rule) for record in reports] == [("with_export_config", "file")]


@pytest.mark.parametrize(
    ("entry", "shown_entry"),
    [
        ({"class": "W", "config": {"api_key": "hush"}}, "with the keys class, config"),
        (ExporterConfig("", {"api_key": "hush"}), "an object of the class ExporterConfig"),
    ],
)
def test_the_report_of_an_entry_without_a_class_shows_no_argument(entry: Any, shown_entry: str) -> None:
    manager = ExporterConfigManager(packages=[])
    with collect_misuse() as reports:
        assert manager.generate_export_config([entry]) == []

    (record,) = reports
    assert record.expected == f"an entry with a class_name in exporters_config, not {shown_entry}"


def test_a_package_or_class_that_cannot_be_loaded_is_reported_and_ignored(tmp_path: Path) -> None:
    group, file = "nv_one_logger.exporter_configs", {"file_path": str(tmp_path / "t.json")}
    entry_points = [
        EntryPoint("broken", "no_such_module:Config", group),
        EntryPoint("loadable", "exporter.one_logger:ExporterConfig", group),
    ]
    configs = [
        ExporterConfig("no.such.Class"),
        ExporterConfig("NoModule"),
        ExporterConfig("FileExporter", {"no_such_argument": 1}),
        ExporterConfig("exporter.one_logger.exporters.FileExporter", file),
        ExporterConfig("nv_one_logger.exporter.file_exporter.FileExporter", file),  # written for one-logger
    ]
    with collect_misuse() as reports:
        manager = ExporterConfigManager(packages=entry_points)
        exporters = manager.create_exporters_from_config(configs)

    assert manager.entry_point_exporter_configs == {"loadable": ExporterConfig}
    assert [record.rule for record in reports] == ["package", "exporter", "exporter", "exporter"]
    assert [type(exporter) for exporter in exporters] == [FileExporter, FileExporter]


def test_d33_opentelemetry_gets_each_span_and_event_once_under_the_applications_name() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from exporter.one_logger.otel.exporter.otel_exporter import OTelExporter

    memory = InMemorySpanExporter()
    recorder = DefaultRecorder([OTelExporter(memory)])
    OneLoggerProvider.instance().configure(SETTINGS, recorder)
    outer = recorder.start("outer", Attributes({"size": 2**70, "huge": 10**400}))
    inner = recorder.start("inner")
    recorder.event(inner, Event.create("update", Attributes({"loss": 0.5})))
    recorder.error(inner, "it failed", ValueError("why"))
    recorder.stop(inner)
    recorder.stop(outer)
    assert recorder.delivery.flush(WAIT_LIMIT_SECONDS)
    assert not trace.get_current_span().get_span_context().is_valid

    finished_inner, finished_outer = memory.get_finished_spans()
    assert finished_inner.name == "inner"
    assert finished_outer.name == "outer"
    assert finished_inner.parent.span_id == finished_outer.context.span_id
    assert [event.name for event in finished_inner.events] == ["update", "exception"]
    assert finished_inner.events[1].attributes["exception.type"] == "ValueError"
    assert finished_inner.resource.attributes["service.name"] == "app"
    assert finished_outer.attributes["size"] == float(2**70)
    assert finished_outer.attributes["huge"] == str(10**400)
    assert finished_outer.attributes["one_logger_span_id"] == str(outer.id)
    assert finished_outer.end_time >= finished_inner.end_time
    assert finished_inner.end_time >= finished_inner.start_time >= finished_outer.start_time


def test_d33_spans_refused_by_opentelemetry_are_retried() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from exporter.one_logger.otel.exporter.otel_exporter import OTelExporter

    class Flaky(InMemorySpanExporter):  # type: ignore[misc]  # mypy does not follow the imports of the SDK
        calls = 0

        def export(self, spans: Any) -> Any:
            self.calls += 1
            return super().export(spans) if self.calls % 3 == 0 else SpanExportResult.FAILURE

    memory = Flaky()
    delivery = Delivery([OTelExporter(memory)], first_pause_seconds=0.001)
    delivery.start_exporters()
    for number in range(20):
        span = Span.create(f"span-{number}")
        delivery.start(span)
        span.stop()
        delivery.stop(span)
        assert delivery.flush(WAIT_LIMIT_SECONDS)
    open_span = Span.create("open")
    delivery.start(open_span)
    delivery.flush(WAIT_LIMIT_SECONDS)
    memory.calls = 2
    delivery.close(WAIT_LIMIT_SECONDS)

    assert [span.name for span in memory.get_finished_spans()] == [
        *(f"span-{number}" for number in range(20)),
        "open",
    ]


def test_opentelemetry_gets_the_spans_of_a_second_application_and_is_shut_down_at_the_end() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from exporter.one_logger.otel.exporter.otel_exporter import OTelExporter

    class Memory(InMemorySpanExporter):  # type: ignore[misc]  # mypy does not follow the imports of the SDK
        shutdown_calls = 0

        def shutdown(self) -> None:
            super().shutdown()
            self.shutdown_calls += 1

    memory = Memory()
    delivery = Delivery([OTelExporter(memory)], first_pause_seconds=0.001)
    delivery.start_exporters()
    for name in ("first", "second"):
        span = Span.create(name)
        delivery.start(span)
        span.stop()
        delivery.stop(span)
        delivery.close_exporters()  # as at the end of an application
        assert delivery.flush(WAIT_LIMIT_SECONDS)
    assert memory.shutdown_calls == 0
    delivery.close(WAIT_LIMIT_SECONDS)

    assert [span.name for span in memory.get_finished_spans()] == ["first", "second"]
    assert memory.shutdown_calls == 1


def test_d34_weights_and_biases_gets_attributes_as_metrics_and_errors_too() -> None:
    records: list[dict[str, Any]] = []
    finish_calls: list[bool] = []
    run = SimpleNamespace(
        log=lambda metrics, commit: records.append(metrics),
        finish=lambda quiet: finish_calls.append(quiet),  # noqa: PLW0108  # by keyword
    )
    export_sample(wandb.WandBExporterAsync(wandb.Config("team"), create_run=lambda config: run))

    metrics = {name: value for record in records for name, value in record.items()}
    assert metrics["outer.update.loss"] == 0.5
    assert metrics["outer.error.exception_type"] == "ZeroDivisionError"
    assert metrics["inner.duration_msec"] >= 0
    assert metrics["telemetry_data_error"] == "INCOMPLETE_TELEMETRY_DATA"
    assert all("app_last_log_time" in record for record in records)
    assert finish_calls == [True]


def test_the_repr_of_the_settings_for_weights_and_biases_omits_the_api_key() -> None:
    assert "secret" not in repr(wandb.Config("team", api_key="secret"))


def test_metrics_are_named_by_the_chosen_strategy() -> None:
    records: list[dict[str, Any]] = []
    run = SimpleNamespace(log=lambda metrics, commit: records.append(metrics), finish=lambda quiet: None)
    flat_exporter = wandb.WandBExporter(
        {"entity": "team"}, wandb.FlatMetricNamingStrategy(), create_run=lambda config: run
    )
    hierarchical_strategy = wandb.HierarchicalMetricNamingStrategy(separator="/")
    export_sample(flat_exporter)

    assert any("loss" in record for record in records)
    span, event = Span.create("s"), Event.create("e", Attributes({"a": 1}))
    assert hierarchical_strategy.from_event_attribute(span, event, event.attributes["a"]) == "s/e/a"
