"""Comparison with the real one-logger: names, records of the same job, and exporters of one-logger."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from one_logger_support import unconfigured
from training_support import run_python

from exporter import one_logger
from exporter.one_logger.config import REQUIRED

pytest.importorskip("nv_one_logger")

MODULES = (
    "api",
    "api.config",
    "api.one_logger_provider",
    "api.recorder",
    "api.telemetry_config",
    "api.timed_span",
    "core",
    "core.attributes",
    "core.event",
    "core.exceptions",
    "core.internal.metric_summarizer",
    "core.internal.multi_window_timer",
    "core.span",
    "core.time",
    "exporter",
    "exporter.base_json_exporter",
    "exporter.export_config_manager",
    "exporter.exporter",
    "exporter.exporter_config",
    "exporter.file_exporter",
    "exporter.internal.record_type",
    "exporter.logger_exporter",
    "otel.exporter.otel_exporter",
    "recorder",
    "recorder.default_recorder",
    "training_telemetry.api",
    "training_telemetry.api.attributes",
    "training_telemetry.api.callbacks",
    "training_telemetry.api.checkpoint",
    "training_telemetry.api.config",
    "training_telemetry.api.context",
    "training_telemetry.api.events",
    "training_telemetry.api.spans",
    "training_telemetry.api.training_recorder",
    "training_telemetry.api.training_telemetry_provider",
    "wandb.exporter.wandb_exporter",
)
"""Public modules of one-logger, without the top-level name."""

PEER_IMPORTS = """
from nv_one_logger.api.config import OneLoggerConfig
from nv_one_logger.api.timed_span import timed_span
from nv_one_logger.core.attributes import Attributes
from nv_one_logger.core.event import Event
from nv_one_logger.exporter.file_exporter import FileExporter
from nv_one_logger.training_telemetry.api.callbacks import on_distributed_init_end, on_distributed_init_start
from nv_one_logger.training_telemetry.api.config import TrainingTelemetryConfig
from nv_one_logger.training_telemetry.api.context import (
    application, checkpoint_load, checkpoint_save, dataloader_init, model_init, optimizer_init, testing_loop,
    training_iteration, training_loop, validation_iteration, validation_loop)
from nv_one_logger.training_telemetry.api.training_telemetry_provider import TrainingTelemetryProvider
"""

JOB = """
import enum
from pathlib import Path

class Mine(str, enum.Enum):
    CUSTOM = "custom"
    FAILING = "failing"
    __str__ = str.__str__

provider = TrainingTelemetryProvider.instance()
(provider.with_base_config(OneLoggerConfig(application_name="app", session_tag_or_fn="session", world_size_or_fn=4,
        custom_metadata={"team": "x"}))
    .with_exporter(FileExporter(file_path=Path("telemetry.json")))
    .configure_provider())

@application()
def main():
    provider.set_training_telemetry_config(TrainingTelemetryConfig(perf_tag_or_fn="perf", global_batch_size_or_fn=32,
        seq_length_or_fn=128, flops_per_sample_or_fn=1000, is_log_throughput_enabled_or_fn=True,
        train_iterations_target_or_fn=20, train_samples_target_or_fn=640, log_every_n_train_iterations=5))
    on_distributed_init_start()
    on_distributed_init_end()
    for block in (dataloader_init, model_init, optimizer_init, checkpoint_load):
        with block():
            pass
    with training_loop(train_iterations_start=0) as loop:
        for step in range(20):
            with training_iteration():
                sum(range(1000))
            if step % 10 == 9:
                with checkpoint_save(global_step=step + 1):
                    pass
                with validation_loop():
                    for _ in range(3):
                        with validation_iteration():
                            sum(range(100))
        loop.add_attribute("mine", "yes")
        with timed_span(Mine.CUSTOM, span_attributes=Attributes({"a": 1})) as span:
            provider.recorder.event(span, Event.create("happened", Attributes({"b": [1, 2]})))
        try:
            with timed_span(Mine.FAILING):
                raise ValueError("why")
        except ValueError:
            pass
    with testing_loop():
        pass

main()
"""

JOB_RECORDS = 38
"""Number of records that the job writes."""
MIGRATED_IMPORTS = PEER_IMPORTS.replace("nv_one_logger", "exporter.one_logger")
"""The same imports from the package of the exporter. Only the top-level name differs."""


def shapes(path: Path) -> list[tuple[str, str, list[str], set[str]]]:
    """Return the type, name, attribute names and fields of each record of a file."""
    shapes_in_order = []
    for line in path.read_text(encoding="ascii").splitlines():
        record: dict[str, Any] = json.loads(line)
        event = record.get("event", {})
        attributes = record.get("attributes", event.get("attributes", {}))
        keys = set(record) - {"parent_id", "rank", "node_name", "application_name"}
        shapes_in_order.append(
            (record["type"], record.get("name", event.get("name")), sorted(attributes), keys)
        )
    return shapes_in_order


def test_the_same_job_with_only_its_imports_changed_writes_the_same_records(tmp_path: Path) -> None:
    """Compare all attributes except those that depend on the clock."""
    attributes_by_source: dict[str, list[Any]] = {}
    for name, imports in (("peer", PEER_IMPORTS), ("own", MIGRATED_IMPORTS)):
        (tmp_path / name).mkdir()
        completed = run_python(imports + JOB, tmp_path / name)
        assert completed.returncode == 0, completed.stderr
        lines = (tmp_path / name / "telemetry.json").read_text(encoding="ascii").splitlines()
        attributes_by_source[name] = [stable_attributes(json.loads(line)) for line in lines]
    peer_shapes, own_shapes = (shapes(tmp_path / name / "telemetry.json") for name in ("peer", "own"))

    assert len(own_shapes) == JOB_RECORDS
    assert own_shapes == peer_shapes
    assert attributes_by_source["own"] == attributes_by_source["peer"]


def stable_attributes(record: dict[str, Any]) -> dict[str, Any]:
    """Return the type and the attributes of a record that do not depend on the clock or on the implementation."""
    event = record.get("event", {})
    attributes = record.get("attributes", {}) | event.get("attributes", {})
    variable_parts = ("_sec", "_msec", "throughput", "version", "traceback", "error_message", "interval")
    return {
        name: value
        for name, value in attributes.items()
        if not any(variable_part in name for variable_part in variable_parts)
    } | {"type": record["type"]}


def test_an_exporter_of_one_logger_works_here(tmp_path: Path) -> None:
    job = MIGRATED_IMPORTS.replace(
        "exporter.one_logger.exporter.file_exporter", "nv_one_logger.exporter.file_exporter"
    )
    completed = run_python(job + JOB, tmp_path)

    assert completed.returncode == 0, completed.stderr
    records = shapes(tmp_path / "telemetry.json")
    assert len(records) == JOB_RECORDS
    assert {name for _, name, _, _ in records} >= {"application", "training_loop", "custom", "happened"}


def test_one_logger_parses_the_log_lines_of_the_exporter() -> None:
    from nv_one_logger.exporter.logger_exporter import (
        LoggerExporter as PeerExporter,
    )

    from exporter.one_logger.exporters import LoggerExporter as OwnExporter

    record = {"type": "event", "event": {"name": "e", "attributes": {"a": 1, "b": [1, 2]}}, "count": 3}
    line = OwnExporter._format_log(record)

    assert PeerExporter.deserialize_log(line) == record
    assert OwnExporter.deserialize_log(line) == record


def test_a_custom_exporter_that_declares_its_overrides_works_here(tmp_path: Path) -> None:
    """Define an exporter with the `@override` that one-logger requires and that compares the names of parameters."""
    methods = {
        "initialize": "",
        "export_start": "span",
        "export_stop": "span",
        "export_event": "event, span",
        "export_error": "event, span",
        "export_telemetry_data_error": "error",
        "close": "",
    }
    body = "".join(
        f"    @override\n    def {name}(self, {parameters}): super().{name}({parameters})\n"
        for name, parameters in methods.items()
    )
    exporter_code = f"from overrides import override\nclass Own(FileExporter):\n{body}"
    completed = run_python(MIGRATED_IMPORTS + exporter_code + JOB.replace("FileExporter(", "Own("), tmp_path)

    assert completed.returncode == 0, completed.stderr
    assert len(shapes(tmp_path / "telemetry.json")) == JOB_RECORDS


RE_EXPORTING_MODULES = ("nv_one_logger.api", "nv_one_logger.training_telemetry.api", "nv_one_logger.exporter")
"""Modules of one-logger that re-export the names of other modules."""
DIFFERENT_SIGNATURES = {
    *("LoggerConfig", "OneLoggerConfig", "TrainingTelemetryConfig"),  # by the names of their fields
    *("OneLoggerProvider", "TrainingTelemetryProvider", "OneLoggerError", "ExportError"),
    *("TracingTimestamp", "TrainingRecorder"),
}
"""Names with different arguments here, or not callable."""


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_of_a_module_of_one_logger_exists_here_with_its_arguments_and_methods(
    module: str,
) -> None:
    peer_name = f"nv_one_logger.{module}"
    peer_module = pytest.importorskip(peer_name, exc_type=ImportError)
    own_module = importlib.import_module(f"exporter.one_logger.{module}")
    peer_members = {
        name: value
        for name, value in vars(peer_module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and str(getattr(value, "__module__", "")).startswith("nv_one_logger")
        and (value.__module__ == peer_name or peer_name in RE_EXPORTING_MODULES)
    }

    assert set(peer_members) <= set(getattr(own_module, "__all__", ()))
    if module.split(".", maxsplit=1)[0] not in {"otel", "wandb"}:
        assert set(peer_members) <= set(one_logger.__all__)
    for name, peer_member in peer_members.items():
        own_member = getattr(own_module, name)
        if name not in DIFFERENT_SIGNATURES:
            peer_parameters = list(inspect.signature(peer_member).parameters)
            own_parameters = inspect.signature(own_member).parameters
            common_parameters = [name for name in own_parameters if name in peer_parameters]
            assert common_parameters == peer_parameters, name
        fields = inspect.get_annotations(own_member) if inspect.isclass(own_member) else ()
        for attribute, value in vars(peer_member).items():
            if not attribute.startswith(("_", "model_", "validate_", "apply_")) and (
                inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod))
            ):
                assert hasattr(own_member, attribute) or attribute in fields, f"{name}.{attribute}"


PEER_ATTRIBUTES = importlib.import_module("nv_one_logger.training_telemetry.api.attributes")


@pytest.mark.parametrize(
    "name", [name for name, member in vars(PEER_ATTRIBUTES).items() if getattr(member, "create", None)]
)
def test_attribute_classes_have_the_same_constructors_and_fields(name: str) -> None:
    peer_class, own_class = getattr(PEER_ATTRIBUTES, name), getattr(one_logger, name)
    parameters = inspect.signature(peer_class.create).parameters
    arguments = {argument: sample_argument(parameter) for argument, parameter in parameters.items()}
    own_attributes, peer_attributes = own_class.create(**arguments), peer_class.create(**arguments)

    assert own_class.create(*arguments.values()).to_json() == own_attributes.to_json()
    assert own_attributes.to_json() == peer_attributes.to_json()
    for field in [name for name, member in vars(peer_class).items() if isinstance(member, property)]:
        own_value, expected = getattr(own_attributes, field), getattr(peer_attributes, field)
        if field == "app_type":
            expected = "training"  # absent in the original
        assert getattr(own_value, "value", own_value) == getattr(expected, "value", expected), field


def sample_argument(parameter: inspect.Parameter) -> Any:
    """Return a valid argument for a parameter, by its name and annotation."""
    if parameter.name == "custom_metadata":
        return {"k": 1}
    for annotation, sample in {"CheckPointStrategy": "sync", "bool": True, "str": "x"}.items():
        if annotation in str(parameter.annotation):
            return sample
    return 1


DIFFERENT_DEFAULTS = {
    "error_handling_strategy",
    "logger_config",
    "log_file_path_for_info",
    "log_file_path_for_err",
}
"""Fields with different defaults; docs/one-logger.md gives the reasons."""


@pytest.mark.parametrize("name", ["OneLoggerConfig", "LoggerConfig", "TrainingTelemetryConfig"])
def test_configurations_have_the_fields_and_defaults_of_one_logger(name: str) -> None:
    module = "training_telemetry.api.config" if name == "TrainingTelemetryConfig" else "api.config"
    peer_fields = getattr(importlib.import_module(f"nv_one_logger.{module}"), name).model_fields
    own_fields = dict(getattr(one_logger, name).fields())

    assert set(own_fields) == set(peer_fields)
    required = {name for name, field in own_fields.items() if field.default is REQUIRED}
    assert required == {name for name, field in peer_fields.items() if field.is_required()}
    for field_name in set(own_fields) - required - DIFFERENT_DEFAULTS:
        own_default, peer_default = own_fields[field_name].default, peer_fields[field_name].default
        assert getattr(own_default, "value", own_default) == getattr(peer_default, "value", peer_default), (
            field_name
        )


def test_summaries_and_window_timers_have_the_figures_of_one_logger() -> None:
    from nv_one_logger.core.internal.metric_summarizer import MetricSummarizer
    from nv_one_logger.core.internal.multi_window_timer import MultiWindowTimer
    from nv_one_logger.core.time import TracingTimestamp

    pairs: list[tuple[Any, Any]] = []
    for summary, timer, timestamp in (
        (MetricSummarizer(), MultiWindowTimer(), TracingTimestamp),
        (one_logger.MetricSummarizer(), one_logger.MultiWindowTimer(), one_logger.TracingTimestamp),
    ):
        for value in (3, 1, 2):
            summary.add_value(value)
        for start, stop in ((0.0, 3.0), (5.0, 6.0)):
            timer.start(timestamp(start, start))
            timer.stop(timestamp(stop, stop))
        pairs += [(summary, timer)]

    (peer_summary, peer_timer), (own_summary, own_timer) = pairs
    for peer, own in ((peer_summary, own_summary), (peer_timer, own_timer)):
        for name, figure in vars(own).items():
            if not isinstance(figure, one_logger.TracingTimestamp):
                assert figure == getattr(peer, name), name
    own_timer.reset()
    assert own_timer == one_logger.MultiWindowTimer()


def test_configuration_objects_of_one_logger_are_accepted(tmp_path: Path) -> None:
    from nv_one_logger.training_telemetry.api.config import (
        TrainingTelemetryConfig as PeerTrainingTelemetryConfig,
    )

    from exporter.one_logger import OneLoggerConfig, TrainingTelemetryConfig, TrainingTelemetryProvider

    peer_config = PeerTrainingTelemetryConfig(
        perf_tag_or_fn="p", global_batch_size_or_fn=lambda: 8, save_checkpoint_strategy="async"
    )
    with unconfigured():
        (
            TrainingTelemetryProvider.instance()
            .with_base_config(
                OneLoggerConfig(application_name="a", world_size_or_fn=1, session_tag_or_fn="s")
            )
            .configure_provider()
        )
        TrainingTelemetryProvider.instance().set_training_telemetry_config(peer_config)
        accepted_config = TrainingTelemetryProvider.instance().config.telemetry_config

    assert isinstance(accepted_config, TrainingTelemetryConfig)
    assert accepted_config.global_batch_size == 8
    assert accepted_config.save_checkpoint_strategy == "async"
