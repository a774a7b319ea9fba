"""Configuration classes of one-logger, without pydantic.

Setting an invalid value raises OneLoggerError. A field named `…_or_fn` also accepts a callable, which is called whenever the
current value is read. If the callable raises or returns an invalid value, the call is counted as misuse and the current value
is None.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload, runtime_checkable

from exporter.errors import OneLoggerError
from exporter.one_logger.names import ApplicationType, CheckPointStrategy, OneLoggerErrorHandlingStrategy
from exporter.recording.conversion import safe_repr, to_attribute
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.training.attributes import assert_that
from exporter.training.misuse import report

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LoggerConfig", "OneLoggerConfig", "TelemetryConfig", "TrainingTelemetryConfig"]

Value = TypeVar("Value")

REQUIRED: Any = object()
"""Default of a field that must be set."""
CALLABLE_SUFFIX = "_or_fn"
"""Suffix of the fields that accept a callable."""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_DIGITS = 4000
"""Maximum number of digits of an integer in text. Python converts at most 4,300 digits by default."""
MAX_SIZE = 10**100
"""Bound of sizes and FLOPs, so that their products are in the range of a float."""
WHOLE_NUMBER = re.compile(r"\s*[+-]?[0-9]+\s*")


# Checks: each returns the value converted to the type of the field, or raises OneLoggerError ---------------


def _text(value: object) -> str:
    assert_that(isinstance(value, str), "must be a string")
    return str.__str__(value)


def _non_blank(value: object) -> str:
    assert_that(isinstance(value, str) and value.strip(), "cannot be empty or whitespace-only")
    return _text(value)


def _tags(value: object) -> str | list[str]:
    if isinstance(value, (list, tuple)):
        assert_that(all(isinstance(tag, str) for tag in value), "must be a string or a list of strings")
        return list(value)
    assert_that(isinstance(value, str), "must be a string or a list of strings")
    return _text(value)


def _metadata(value: object) -> dict[str, Any]:
    assert_that(isinstance(value, Mapping), "must be a mapping")
    are_keys_valid = all(isinstance(key, str) and key.strip() for key in value)  # type: ignore[attr-defined]  # checked above
    assert_that(are_keys_valid, "keys must be non-empty strings")  # the words of one-logger
    return dict(value)  # type: ignore[call-overload,no-any-return]  # checked above


def _path(value: object) -> str:
    assert_that(isinstance(value, (str, PathLike)), "must be a path")
    return fspath(value)  # type: ignore[call-overload,no-any-return]  # checked above


def _level(value: object) -> str:
    assert_that(value in LOG_LEVELS, f"must be one of {', '.join(LOG_LEVELS)}")
    return str(value)


def _format(value: object) -> str:
    text = _text(value)
    try:
        logging.Formatter(text)
    except ValueError as error:
        raise OneLoggerError(f"must be a format of the logging module ({error})") from None
    return text


def _boolean(value: object) -> bool:
    boolean = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    assert_that(isinstance(boolean, int) and boolean in {0, 1}, "must be true or false")
    return bool(boolean)


def _integer(value: object) -> int:
    number = to_attribute(value)  # also converts numbers of numpy
    # The value of an environment variable is text.
    if isinstance(number, str) and WHOLE_NUMBER.fullmatch(number):
        assert_that(len(number) <= MAX_DIGITS, f"must be an integer of at most {MAX_DIGITS} digits")
        return int(number)
    is_whole = number.is_integer() if isinstance(number, float) else type(number) is int
    assert_that(is_whole, "must be an integer")
    return int(number)  # type: ignore[arg-type]  # an integer, checked above


def _size(value: object) -> int:
    number = _integer(value)
    assert_that(abs(number) < MAX_SIZE, "must be an integer of at most 100 digits")
    return number


def _positive(value: object) -> int:
    try:
        number = _size(value)
    except OneLoggerError:
        number = 0
    assert_that(number > 0, "must be set to a positive value of at most 100 digits")
    return number


def _strategy(value: object) -> CheckPointStrategy:
    member: CheckPointStrategy = _member(CheckPointStrategy, value)
    return member


def _error_handling(value: object) -> OneLoggerErrorHandlingStrategy:
    member: OneLoggerErrorHandlingStrategy = _member(OneLoggerErrorHandlingStrategy, value)
    return member


def _member(enumeration: type[enum.Enum], value: object) -> Any:
    """Return the member of an enumeration with a value or a name. Also accepts members of one-logger's enumeration."""
    key = value.value if isinstance(value, enum.Enum) else value
    match = next((member for member in enumeration if key in (member.value, member.name)), None)
    assert_that(match is not None, f"must be one of {', '.join(str(member.value) for member in enumeration)}")
    return match


# Settings --------------------------------------------------------------------------------------------------


class Field:
    """Field of a configuration: a check, which converts the value, and a default.

    A callable, in a field with the suffix `_or_fn`, and a None that is also the default are not checked.
    """

    def __init__(self, check: Callable[[object], Any], default: Any = REQUIRED) -> None:
        self.check = check
        self.default = default
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Settings | None, owner: type) -> Any:
        if instance is None:
            return self
        if isinstance(self.default, Settings):  # mutable, so each configuration has a copy
            instance.explicit_values.setdefault(self.name, self.default.model_copy())
        return instance.explicit_values.get(self.name, self.default)

    def __set__(self, instance: Settings, value: object) -> None:
        is_callable_field = callable(value) and self.name.endswith(CALLABLE_SUFFIX)
        if not is_callable_field and not (value is None and self.default is None):
            try:
                value = self.check(value)
            except OneLoggerError as error:
                name = self.name.removesuffix(CALLABLE_SUFFIX)
                message = f"{type(instance).__name__}: {name} {error}, not {safe_repr(value)}"
                raise OneLoggerError(message) from None
        instance.explicit_values[self.name] = value


class CurrentValue(Generic[Value]):
    """Current value of the field with the same name and the suffix `_or_fn`, or None if unknown."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.field_name = name + CALLABLE_SUFFIX

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: Settings, owner: type) -> Value | None: ...

    def __get__(self, instance: Settings | None, owner: type) -> Any:
        return self if instance is None else instance.current_value(self.field_name)


class Settings:
    """Base class of configurations; the fields are keyword arguments. Unknown fields are counted as misuse and ignored.

    Attributes:
        explicit_values: The explicitly set values, by field.

    Raises:
        OneLoggerError: A required field is missing, or a value is invalid.
    """

    def __init__(self, **values: Any) -> None:
        self.explicit_values: dict[str, Any] = {}
        fields = dict(self.fields())
        class_name = type(self).__name__
        missing = [name for name, field in fields.items() if field.default is REQUIRED and name not in values]
        assert_that(not missing, f"Invalid configuration! {class_name} needs {', '.join(missing)}")
        for name, value in values.items():
            if name in fields:
                fields[name].__set__(self, value)
            else:
                report(class_name, "unknown_field", f"no field {name!r}; the fields are {', '.join(fields)}")
        self.check()

    def __setattr__(self, name: str, value: object) -> None:
        if name != "explicit_values" and not isinstance(getattr(type(self), name, None), Field):
            report(type(self).__name__, "unknown_field", f"no field {name!r}")
        super().__setattr__(name, value)

    @classmethod
    def fields(cls) -> Iterator[tuple[str, Field]]:
        """Yield the name and the field of each field that this class defines."""
        return ((field.name, field) for field in vars(cls).values() if isinstance(field, Field))

    def check(self) -> None:
        """Check combinations of fields. Raises OneLoggerError."""

    def current_value(self, name: str) -> Any:
        """Return the value of a field, or the result of a callable. Return None if the value is unknown."""
        value = getattr(self, name)
        if not callable(value):
            return value
        call = f"{type(self).__name__}.{name}"
        try:
            value = value()
        except Exception as error:  # the callable belongs to the job
            if is_from_signal_handler(error):
                raise
            report(call, "callable_raised", f"a value, but the callable raised {safe_repr(error)}")
            return None
        if value is None:  # the value is not available yet
            return None
        try:
            return getattr(type(self), name).check(value)
        except OneLoggerError as error:
            report(call, "callable_value", f"a valid value, not {to_attribute(value)!r} ({error})")
            return None

    def is_callable(self, name: str) -> bool:
        """Return True if the value of a field is a callable."""
        return callable(self.explicit_values.get(name))

    def model_copy(self, update: Mapping[str, Any] | None = None) -> Self:
        """Return a copy with some fields changed. pydantic's models have a method of this name."""
        return type(self)(**self.explicit_values | dict(update or {}))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Settings) or type(self) is not type(other):
            return False
        return all(getattr(self, name) == getattr(other, name) for name, _ in self.fields())

    __hash__ = None  # type: ignore[assignment]  # the fields are mutable

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.explicit_values.items())
        return f"{type(self).__name__}({fields})"


class LoggerConfig(Settings):
    """Log level, format and files for the notices of this package, such as invalid calls. Without a path, no file is written."""

    log_level = Field(_level, "INFO")
    log_format = Field(_format, "%(name)s - %(levelname)s - %(message)s")
    log_file_path_for_info = Field(_path, None)
    log_file_path_for_err = Field(_path, None)


class TrainingTelemetryConfig(Settings):
    """Configuration of a training job. A target of 0 or less means that the job has no target."""

    perf_tag_or_fn = Field(_tags)
    global_batch_size_or_fn = Field(_positive)
    micro_batch_size_or_fn = Field(_size, None)
    seq_length_or_fn = Field(_size, None)
    flops_per_sample_or_fn = Field(_size, None)
    train_iterations_target_or_fn = Field(_integer, None)
    train_samples_target_or_fn = Field(_integer, None)
    log_every_n_train_iterations = Field(_positive, 50)
    is_log_throughput_enabled_or_fn = Field(_boolean, default=False)
    is_train_iterations_enabled_or_fn = Field(_boolean, default=True)
    is_validation_iterations_enabled_or_fn = Field(_boolean, default=True)
    is_test_iterations_enabled_or_fn = Field(_boolean, default=True)
    is_save_checkpoint_enabled_or_fn = Field(_boolean, default=True)
    save_checkpoint_strategy = Field(_strategy, CheckPointStrategy.SYNC)
    custom_metadata = Field(_metadata, None)
    app_type = ApplicationType.TRAINING

    def check(self) -> None:
        """Check that the FLOPs are set if the throughput is enabled. Raises OneLoggerError."""
        flops = self.flops_per_sample_or_fn
        is_known = callable(flops) or (flops is not None and flops > 0)
        assert_that(
            is_known or self.is_log_throughput_enabled_or_fn is not True,
            "TrainingTelemetryConfig: flops_per_sample must be set to a positive value when"
            f" is_log_throughput_enabled is True, not {flops!r}",
        )

    @classmethod
    def convert(cls, settings: object) -> TrainingTelemetryConfig:
        """Convert a mapping of fields, or a configuration of one-logger.

        Raises:
            OneLoggerError: The object is neither of these.
        """
        if isinstance(settings, TrainingTelemetryConfig):
            return settings
        if isinstance(settings, Mapping):
            return cls(**settings)
        assert_that(is_telemetry_config(settings), "must be a TrainingTelemetryConfig")
        return cls(**{name: getattr(settings, name) for name, _ in cls.fields() if hasattr(settings, name)})

    perf_tag = CurrentValue[str | list[str]]()
    global_batch_size = CurrentValue[int]()
    micro_batch_size = CurrentValue[int]()
    seq_length = CurrentValue[int]()
    flops_per_sample = CurrentValue[int]()
    train_iterations_target = CurrentValue[int]()
    train_samples_target = CurrentValue[int]()
    is_log_throughput_enabled = CurrentValue[bool]()
    is_train_iterations_enabled = CurrentValue[bool]()
    is_validation_iterations_enabled = CurrentValue[bool]()
    is_test_iterations_enabled = CurrentValue[bool]()
    is_save_checkpoint_enabled = CurrentValue[bool]()


@runtime_checkable
class TelemetryConfig(Protocol):
    """Attributes that `OneLoggerConfig.telemetry_config` requires of an application that does not train."""

    is_train_iterations_enabled: bool | None
    is_validation_iterations_enabled: bool | None
    is_test_iterations_enabled: bool | None
    is_save_checkpoint_enabled: bool | None
    app_type: ApplicationType | str
    custom_metadata: Mapping[str, Any] | None


def is_telemetry_config(value: object) -> bool:
    """Return True if an object has the attributes of TelemetryConfig.

    The values are not read, because a property may run code of the job.
    """
    instance_attributes = getattr(value, "__dict__", {})
    return all(
        hasattr(type(value), name) or name in instance_attributes for name in TelemetryConfig.__annotations__
    )


def _telemetry_config(value: object) -> Any:
    """Convert the configuration of a training job. The configuration of another application is returned unchanged."""
    is_other_application = is_telemetry_config(value) and not hasattr(value, "global_batch_size_or_fn")
    return value if is_other_application else TrainingTelemetryConfig.convert(value)


def _logger_config(value: object) -> LoggerConfig:
    if isinstance(value, LoggerConfig):
        return value
    assert_that(isinstance(value, Mapping), "must be a LoggerConfig")
    return LoggerConfig(**value)  # type: ignore[arg-type]  # checked above


class OneLoggerConfig(Settings):
    """Configuration of an application. `enable_for_current_rank` decides whether this process exports."""

    application_name = Field(_non_blank)
    world_size_or_fn = Field(_positive)
    session_tag_or_fn = Field(_text)
    is_baseline_run_or_fn = Field(_boolean, default=False)
    custom_metadata = Field(_metadata, None)
    error_handling_strategy = Field(
        _error_handling, OneLoggerErrorHandlingStrategy.DISABLE_QUIETLY_AND_REPORT_METRIC_ERROR
    )
    enable_for_current_rank = Field(_boolean, default=True)
    logger_config = Field(_logger_config, LoggerConfig())
    summary_data_schema_version = Field(_text, "1.0.0")
    telemetry_config = Field(_telemetry_config, None)

    world_size = CurrentValue[int]()
    session_tag = CurrentValue[str]()
    is_baseline_run = CurrentValue[bool]()

    @property
    def propagates(self) -> bool:
        """True if an invalid call raises."""
        return self.error_handling_strategy is OneLoggerErrorHandlingStrategy.PROPAGATE_EXCEPTIONS
