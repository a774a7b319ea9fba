"""The settings of training telemetry: every field, its callable form, and what cannot be."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from one_logger_support import reported

from exporter.errors import OneLoggerError
from exporter.one_logger.config import (
    LoggerConfig,
    OneLoggerConfig,
    TrainingTelemetryConfig,
)
from exporter.one_logger.names import (
    ApplicationType,
    CheckPointStrategy,
    OneLoggerErrorHandlingStrategy,
)

APPLICATION: dict[str, Any] = {
    "application_name": "app",
    "world_size_or_fn": 8,
    "session_tag_or_fn": "session",
}
TRAINING: dict[str, Any] = {"perf_tag_or_fn": "perf", "global_batch_size_or_fn": 32}


def test_the_defaults_are_one_loggers() -> None:
    application, training = OneLoggerConfig(**APPLICATION), TrainingTelemetryConfig(**TRAINING)

    assert application.model_dump() | {"logger_config": None} == {
        **APPLICATION,
        "is_baseline_run_or_fn": False,
        "custom_metadata": None,
        "error_handling_strategy": OneLoggerErrorHandlingStrategy.DISABLE_QUIETLY_AND_REPORT_METRIC_ERROR,
        "enable_for_current_rank": True,
        "logger_config": None,
        "summary_data_schema_version": "1.0.0",
        "telemetry_config": None,
    }
    assert training.model_dump() == {
        **TRAINING,
        "micro_batch_size_or_fn": None,
        "seq_length_or_fn": None,
        "flops_per_sample_or_fn": None,
        "train_iterations_target_or_fn": None,
        "train_samples_target_or_fn": None,
        "log_every_n_train_iterations": 50,
        "is_log_throughput_enabled_or_fn": False,
        "is_train_iterations_enabled_or_fn": True,
        "is_validation_iterations_enabled_or_fn": True,
        "is_test_iterations_enabled_or_fn": True,
        "is_save_checkpoint_enabled_or_fn": True,
        "save_checkpoint_strategy": CheckPointStrategy.SYNC,
        "custom_metadata": None,
    }
    assert training.app_type is ApplicationType.TRAINING


def test_each_field_with_a_callable_form_has_its_present_value_beside_it() -> None:
    application = OneLoggerConfig(
        application_name="app",
        world_size_or_fn=lambda: 4,
        session_tag_or_fn=lambda: "s",
        is_baseline_run_or_fn=lambda: True,
    )
    numbers = iter(range(1, 10))
    training = TrainingTelemetryConfig(
        perf_tag_or_fn=lambda: ["a", "b"], global_batch_size_or_fn=lambda: next(numbers)
    )

    assert (application.world_size, application.session_tag, application.is_baseline_run) == (4, "s", True)
    assert training.perf_tag == ["a", "b"]
    assert (training.global_batch_size, training.value("global_batch_size_or_fn")) == (1, 2)
    assert training.varying() == {"perf_tag", "global_batch_size"}
    assert training.value("no_such_field") is None


def test_d39_no_callable_is_asked_before_its_value_is_needed() -> None:
    asked: list[int] = []

    def world_size() -> int:
        asked.append(1)
        return 8

    config = OneLoggerConfig(**APPLICATION | {"world_size_or_fn": world_size})
    assert asked == []
    assert config.world_size == 8
    assert asked == [1]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("global_batch_size_or_fn", 0),
        ("global_batch_size_or_fn", "many"),
        ("seq_length_or_fn", 1.5),
        ("is_log_throughput_enabled_or_fn", 7),
        ("perf_tag_or_fn", [1]),
        ("seq_length_or_fn", None),
    ],
)
def test_a_callable_that_gives_what_cannot_be_is_reported_and_its_value_is_unknown(
    field: str, given: Any
) -> None:
    config = TrainingTelemetryConfig(**TRAINING | {field: lambda: given})

    with reported() as found:
        assert config.value(field) is None

    misuse = (f"TrainingTelemetryConfig.{field}", "callable_value")
    assert [each[:2] for each in found] == ([] if given is None else [misuse])  # None: not known yet


def test_a_callable_that_raises_is_reported_and_nothing_escapes() -> None:
    config = OneLoggerConfig(**APPLICATION | {"world_size_or_fn": lambda: os.environ["NOT_SET"]})

    with reported() as found:
        assert config.world_size is None

    assert found[0][:2] == ("OneLoggerConfig.world_size_or_fn", "callable_raised")
    assert "KeyError" in found[0][2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("application_name", "  "),
        ("application_name", 5),
        ("world_size_or_fn", 0),
        ("world_size_or_fn", "eight"),
        ("session_tag_or_fn", 5),
        ("is_baseline_run_or_fn", "maybe"),
        ("custom_metadata", {" ": 1}),
        ("custom_metadata", [1]),
        ("error_handling_strategy", "panic"),
        ("logger_config", {"log_level": "LOUD"}),
        ("logger_config", 5),
        ("telemetry_config", 5),
        ("telemetry_config", {"perf_tag_or_fn": "p"}),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_stated_with_the_name_of_the_field(
    field: str, value: Any
) -> None:
    with pytest.raises(
        OneLoggerError,
        match=f"OneLoggerConfig: {field.removesuffix('_or_fn')} .*(must|needs|cannot be empty|keys must)",
    ):
        OneLoggerConfig(**APPLICATION | {field: value})


@pytest.mark.parametrize(
    "given",
    [
        {"global_batch_size_or_fn": -1},
        {"log_every_n_train_iterations": 0},
        {"save_checkpoint_strategy": "sometimes"},
        {"is_log_throughput_enabled_or_fn": True},  # without flops_per_sample
    ],
)
def test_what_a_training_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"TrainingTelemetryConfig: \w+ must"):
        TrainingTelemetryConfig(**TRAINING | given)


def test_d38_an_unknown_field_is_reported_with_those_that_exist() -> None:
    with reported() as found:
        config = TrainingTelemetryConfig(**TRAINING, world_size_or_fn=5)
        config.perf_tags_or_fn = "typo"

    assert [each[:2] for each in found] == [("TrainingTelemetryConfig", "unknown_field")] * 2
    expected = found[0][2]
    assert "'world_size_or_fn'" in expected
    assert "seq_length_or_fn" in expected


def test_numbers_and_truth_values_may_come_from_the_environment() -> None:
    application = OneLoggerConfig(
        **APPLICATION | {"world_size_or_fn": "16", "enable_for_current_rank": "false"}
    )

    assert application.world_size == 16
    assert application.enable_for_current_rank is False


def test_only_an_explicit_choice_propagates() -> None:
    propagate = OneLoggerErrorHandlingStrategy.PROPAGATE_EXCEPTIONS

    assert not OneLoggerConfig(**APPLICATION).propagates
    for chosen in (propagate, "propagate_exceptions"):
        assert OneLoggerConfig(**APPLICATION, error_handling_strategy=chosen).propagates
    assert OneLoggerConfig(**APPLICATION, error_handling_strategy=propagate).model_copy().propagates


def test_a_field_may_be_changed_afterwards_and_is_checked_then_too() -> None:
    config = OneLoggerConfig(**APPLICATION)
    config.telemetry_config = TrainingTelemetryConfig(**TRAINING)
    with pytest.raises(OneLoggerError, match="OneLoggerConfig: application_name"):
        config.application_name = ""

    assert config.application_name == "app"
    assert config.telemetry_config == TrainingTelemetryConfig(**TRAINING)


def test_a_copy_may_differ_and_a_default_that_is_changed_is_one_configurations_own() -> None:
    first, second = OneLoggerConfig(**APPLICATION), OneLoggerConfig(**APPLICATION)
    copy = first.model_copy({"application_name": "other"})
    assert first == second != copy
    assert "application_name='other'" in repr(copy)
    first.logger_config.log_level = "ERROR"

    assert (first.logger_config.log_level, second.logger_config.log_level) == ("ERROR", "INFO")


def test_mappings_stand_for_nested_settings() -> None:
    config = OneLoggerConfig(
        **APPLICATION, telemetry_config=TRAINING, logger_config={"log_file_path_for_err": Path("/tmp/e")}
    )

    assert config.telemetry_config == TrainingTelemetryConfig(**TRAINING)
    assert config.logger_config == LoggerConfig(log_file_path_for_err="/tmp/e")


def test_the_configuration_of_an_application_that_does_not_train_is_taken_as_it_is() -> None:
    @dataclasses.dataclass
    class Serving:
        custom_metadata: None = None
        app_type: str = "online_inference"
        is_train_iterations_enabled: bool = False
        is_validation_iterations_enabled: bool = False
        is_test_iterations_enabled: bool = False
        is_save_checkpoint_enabled: bool = False

    serving: Any = Serving()

    assert OneLoggerConfig(**APPLICATION, telemetry_config=serving).telemetry_config is serving
