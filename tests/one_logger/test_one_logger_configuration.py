"""Settings of one-logger: callables and invalid values. Fields and defaults are tested in `test_one_logger_peer.py`.

A test whose name starts with a number, such as d39, shows that row of the table of defects in docs/one-logger.md.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from one_logger_support import APPLICATION, TELEMETRY
from training_support import collect_misuse

from exporter.errors import OneLoggerError
from exporter.one_logger.config import LoggerConfig, OneLoggerConfig, Settings, TrainingTelemetryConfig
from exporter.one_logger.names import OneLoggerErrorHandlingStrategy


def test_each_callable_field_has_an_attribute_with_its_current_value() -> None:
    application = OneLoggerConfig(
        application_name="app",
        world_size_or_fn=lambda: 4,
        session_tag_or_fn=lambda: "s",
        is_baseline_run_or_fn=lambda: True,
    )
    batch_sizes = iter(range(1, 10))
    training = TrainingTelemetryConfig(
        perf_tag_or_fn=lambda: ["a", "b"], global_batch_size_or_fn=lambda: next(batch_sizes)
    )

    assert application.world_size == 4
    assert application.session_tag == "s"
    assert application.is_baseline_run is True
    assert training.perf_tag == ["a", "b"]
    assert training.global_batch_size == 1
    assert training.current_value("global_batch_size_or_fn") == 2
    assert [training.is_callable(name) for name in ("perf_tag_or_fn", "seq_length_or_fn")] == [True, False]


def test_d39_a_callable_is_not_called_before_its_value_is_needed() -> None:
    calls: list[int] = []

    def world_size() -> int:
        calls.append(1)
        return 8

    config = OneLoggerConfig(**APPLICATION | {"world_size_or_fn": world_size})
    assert calls == []
    assert config.world_size == 8
    assert calls == [1]


@pytest.mark.parametrize(
    ("field", "read_value", "rules"),
    [
        ("global_batch_size_or_fn", lambda: 0, ["callable_value"]),
        ("global_batch_size_or_fn", lambda: "many", ["callable_value"]),
        ("seq_length_or_fn", lambda: 1.5, ["callable_value"]),
        ("seq_length_or_fn", lambda: "9" * 5000, ["callable_value"]),
        ("flops_per_sample_or_fn", lambda: 10**400, ["callable_value"]),
        ("is_log_throughput_enabled_or_fn", lambda: 7, ["callable_value"]),
        ("perf_tag_or_fn", lambda: [1], ["callable_value"]),
        ("perf_tag_or_fn", lambda: os.environ["NOT_SET"], ["callable_raised"]),
        ("seq_length_or_fn", lambda: None, []),  # not known yet
    ],
)
def test_a_callable_that_raises_or_returns_an_invalid_value_is_reported(
    field: str, read_value: Callable[[], Any], rules: list[str]
) -> None:
    config = TrainingTelemetryConfig(**TELEMETRY | {field: read_value})

    with collect_misuse() as reports:
        assert config.current_value(field) is None

    assert [(record.call, record.rule) for record in reports] == [
        (f"TrainingTelemetryConfig.{field}", rule) for rule in rules
    ]
    # The log line is "expected" and this text.
    assert all(record.expected.startswith(("a value, ", "a valid value, ")) for record in reports)


@pytest.mark.parametrize(
    ("config_class", "field", "invalid"),
    [
        (OneLoggerConfig, "application_name", "  "),
        (OneLoggerConfig, "application_name", 5),
        (OneLoggerConfig, "world_size_or_fn", 0),
        (OneLoggerConfig, "world_size_or_fn", "eight"),
        (OneLoggerConfig, "session_tag_or_fn", 5),
        (OneLoggerConfig, "is_baseline_run_or_fn", "maybe"),
        (OneLoggerConfig, "custom_metadata", {" ": 1}),
        (OneLoggerConfig, "custom_metadata", [1]),
        (OneLoggerConfig, "error_handling_strategy", "panic"),
        (OneLoggerConfig, "logger_config", {"log_level": "LOUD"}),
        (OneLoggerConfig, "logger_config", 5),
        (OneLoggerConfig, "telemetry_config", 5),
        (OneLoggerConfig, "telemetry_config", {"perf_tag_or_fn": "p"}),
        (TrainingTelemetryConfig, "global_batch_size_or_fn", -1),
        (TrainingTelemetryConfig, "global_batch_size_or_fn", 10**400),
        (TrainingTelemetryConfig, "global_batch_size_or_fn", "9" * 5000),
        (TrainingTelemetryConfig, "log_every_n_train_iterations", 0),
        (TrainingTelemetryConfig, "save_checkpoint_strategy", "sometimes"),
    ],
)
def test_an_invalid_value_is_refused_with_the_name_of_the_field(
    config_class: type[Settings], field: str, invalid: Any
) -> None:
    fields = (APPLICATION if config_class is OneLoggerConfig else TELEMETRY) | {field: invalid}

    with pytest.raises(OneLoggerError, match=f"{config_class.__name__}: {field.removesuffix('_or_fn')} "):
        config_class(**fields)


@pytest.mark.parametrize("key", ["", "   "])
def test_the_message_about_an_empty_key_has_the_words_of_one_logger(key: str) -> None:
    with pytest.raises(OneLoggerError, match="custom_metadata keys must be non-empty strings"):
        OneLoggerConfig(**APPLICATION, custom_metadata={key: "value", "key2": "value2"})


def test_throughput_needs_the_flops_of_a_sample() -> None:
    with pytest.raises(ValueError, match="flops_per_sample must"):
        TrainingTelemetryConfig(**TELEMETRY, is_log_throughput_enabled_or_fn=True)


def test_d38_an_unknown_field_is_reported_with_the_known_fields() -> None:
    with collect_misuse() as reports:
        config = TrainingTelemetryConfig(**TELEMETRY, world_size_or_fn=5)
        config.perf_tags_or_fn = "typo"

    assert [(record.call, record.rule) for record in reports] == [
        ("TrainingTelemetryConfig", "unknown_field")
    ] * 2
    expectation = reports[0].expected
    assert "'world_size_or_fn'" in expectation
    assert "seq_length_or_fn" in expectation


def test_numbers_and_booleans_can_come_from_the_environment() -> None:
    application = OneLoggerConfig(
        **APPLICATION | {"world_size_or_fn": "16", "enable_for_current_rank": "false"}
    )

    assert application.world_size == 16
    assert application.enable_for_current_rank is False


def test_exceptions_propagate_only_with_the_propagating_strategy() -> None:
    propagate = OneLoggerErrorHandlingStrategy.PROPAGATE_EXCEPTIONS

    assert not OneLoggerConfig(**APPLICATION).propagates
    for strategy in (propagate, "propagate_exceptions"):
        assert OneLoggerConfig(**APPLICATION, error_handling_strategy=strategy).model_copy().propagates


def test_a_later_assignment_to_a_field_is_validated() -> None:
    config = OneLoggerConfig(**APPLICATION)
    config.telemetry_config = TrainingTelemetryConfig(**TELEMETRY)
    with pytest.raises(OneLoggerError, match="OneLoggerConfig: application_name"):
        config.application_name = ""

    assert config.application_name == "app"
    assert config.telemetry_config == TrainingTelemetryConfig(**TELEMETRY)


def test_a_copy_can_change_fields_and_mutable_defaults_are_not_shared() -> None:
    config, equal_config = OneLoggerConfig(**APPLICATION), OneLoggerConfig(**APPLICATION)
    changed_copy = config.model_copy({"application_name": "other"})
    assert config == equal_config != changed_copy
    assert changed_copy.application_name == "other"
    config.logger_config.log_level = "ERROR"

    assert config.logger_config.log_level == "ERROR"
    assert equal_config.logger_config.log_level == "INFO"


def test_mappings_replace_nested_configurations() -> None:
    config = OneLoggerConfig(
        **APPLICATION, telemetry_config=TELEMETRY, logger_config={"log_file_path_for_err": Path("/tmp/e")}
    )

    assert config.telemetry_config == TrainingTelemetryConfig(**TELEMETRY)
    assert config.logger_config == LoggerConfig(log_file_path_for_err="/tmp/e")


def test_the_configuration_of_an_application_without_training_is_accepted() -> None:
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


def test_a_log_format_that_logging_refuses_is_an_invalid_value() -> None:
    with pytest.raises(OneLoggerError, match="log_format must be a format of the logging module"):
        LoggerConfig(log_format="no field")


def test_a_negative_target_may_be_the_text_of_an_environment_variable() -> None:
    training = TrainingTelemetryConfig(**TELEMETRY, train_iterations_target_or_fn="-1")

    assert training.train_iterations_target == -1
