"""Configuration: one-logger's configuration classes, field by field, without pydantic.

What the job states is refused with one clear message. What it leaves to a callable (`…_or_fn`) is asked for on the job's own
thread whenever it is needed; where that raises, or gives what cannot be, it is counted, and the value unknown (None).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from exporter.errors import OneLoggerError
from exporter.one_logger.names import (
    ApplicationType,
    CheckPointStrategy,
    OneLoggerErrorHandlingStrategy,
)
from exporter.training.attributes import assert_that, plain_value, shown
from exporter.training.metrics import report

if TYPE_CHECKING:
    from typing_extensions import Self

REQUIRED: Any = object()


class Field:
    """A field: `check` gives a value in its own type, or raises `OneLoggerError` saying what it may be.

    One whose name ends in `_or_fn` may be left to a callable; its present value is beside it, without the ending.
    """

    def __init__(self, check: Callable[[Any], Any], default: Any = REQUIRED) -> None:
        self.check = check
        self.default = default
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        short = name.removesuffix("_or_fn")
        if short != name:
            setattr(owner, short, property(lambda settings: settings.value(short)))

    def __get__(self, instance: Settings | None, owner: type) -> Any:
        if instance is None:
            return self
        if isinstance(self.default, Settings):  # each configuration's own, since it may be changed
            instance.given.setdefault(self.name, self.default.model_copy())
        return instance.given.get(self.name, self.default)

    def __set__(self, instance: Settings, value: object) -> None:
        short = self.name.removesuffix("_or_fn")
        later = callable(value) and short != self.name  # it is asked when it is needed
        if not later and not (value is None and self.default is None):
            try:
                value = self.check(value)
            except OneLoggerError as problem:
                told = f"{type(instance).__name__}: {short} {problem}, not {shown(value)}"
                raise OneLoggerError(told) from None
        instance.given[self.name] = value


class Settings:
    """A set of named fields, given by keyword; `OneLoggerError` where one is missing, or cannot be as it was given."""

    def __init__(self, **given: Any) -> None:
        self.given: dict[str, Any] = {}  # what was stated, by the fields' names; the others have defaults
        fields = dict(self.fields())
        kind = type(self).__name__
        missing = [name for name, each in fields.items() if each.default is REQUIRED and name not in given]
        assert_that(not missing, f"Invalid configuration! {kind} needs {', '.join(missing)}")
        for name, value in given.items():
            if name in fields:
                fields[name].__set__(self, value)
            else:
                report(kind, "unknown_field", f"no field {name!r} exists; there are {', '.join(fields)}")
        self.check()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Give the present value of a field that may be left to a callable; None while it is unknown."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "given" and not isinstance(getattr(type(self), name, None), Field):
            report(type(self).__name__, "unknown_field", f"no field {name!r} exists")
        super().__setattr__(name, value)

    @classmethod
    def fields(cls) -> Iterator[tuple[str, Field]]:
        """Give every field by its name."""
        return ((each.name, each) for each in vars(cls).values() if isinstance(each, Field))

    def check(self) -> None:
        """Check what concerns several fields; raises `OneLoggerError`."""

    def value(self, name: str) -> Any:
        """Give the present value of a field, with or without `_or_fn`, asking its callable; None where nobody knows it."""
        fields = dict(self.fields())
        field = fields.get(name) or fields.get(f"{name}_or_fn")
        if field is None:
            return None
        found = self.given.get(field.name, field.default)
        if not callable(found):
            return found
        call = f"{type(self).__name__}.{field.name}"
        try:
            found = found()
        except Exception as error:  # noqa: BLE001  # the user's callable
            report(call, "callable_raised", f"a value, but it raised {shown(error)}")
            return None
        try:
            return None if found is None else field.check(found)  # None is not known yet
        except OneLoggerError as problem:
            report(call, "callable_value", f"{problem}, not {plain_value(found)!r}")
            return None

    def varying(self) -> frozenset[str]:
        """Give the names, without `_or_fn`, of the fields that are left to a callable."""
        return frozenset(name.removesuffix("_or_fn") for name, value in self.given.items() if callable(value))

    def model_copy(self, update: Mapping[str, Any] | None = None) -> Self:
        """Copy it, with some fields changed (pydantic's spelling)."""
        return type(self)(**self.given | dict(update or {}))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Settings) or type(self) is not type(other):
            return False
        return all(getattr(self, name) == getattr(other, name) for name, _ in self.fields())

    __hash__ = None  # type: ignore[assignment]  # its fields may be set

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.given.items())
        return f"{type(self).__name__}({given})"


# Checks ----------------------------------------------------------------------------------------------------


def _of(told: str, test: Callable[[Any], object], made: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Take what passes a test, in its own type."""

    def check(value: Any) -> Any:
        assert_that(test(value), told)
        return made(value)

    return check


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_text = _of("must be a string", _is_text, str.__str__)
_non_blank = _of(
    "cannot be empty or whitespace-only", lambda value: _is_text(value) and value.strip(), str.__str__
)
_tags = _of(
    "must be a string or a list of strings",
    lambda value: _is_text(value) or (isinstance(value, (list, tuple)) and all(map(_is_text, value))),
    lambda value: str(value) if _is_text(value) else list(value),
)
_metadata = _of(
    "keys must be non-empty strings, in a mapping",
    lambda value: isinstance(value, Mapping) and all(_is_text(key) and key.strip() for key in value),
    dict,
)
_path = _of("must be a path", lambda value: isinstance(value, (str, PathLike)), fspath)
_level = _of(f"must be one of {', '.join(_LEVELS)}", lambda value: value in _LEVELS, str)


def _boolean(value: Any) -> bool:
    found = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    assert_that(isinstance(found, int) and found in {0, 1}, "must be true or false")
    return bool(found)


def _integer(value: object) -> int:
    found = plain_value(value)  # numpy's too
    if isinstance(found, str) and found.strip().isdecimal():  # from the environment
        return int(found)
    whole = found.is_integer() if isinstance(found, float) else type(found) is int
    assert_that(whole, "must be an integer")
    return int(found)


def _positive(value: object) -> int:
    try:
        found = _integer(value)
    except OneLoggerError:
        found = 0
    assert_that(found > 0, "must be set to a positive value")
    return found


def _one_of(kind: type[enum.Enum]) -> Callable[[object], Any]:
    """Take a member of an enumeration, or its value."""

    def check(value: object) -> Any:
        asked = value.value if isinstance(value, enum.Enum) else value  # one-logger's own member counts too
        found = next((each for each in kind if asked in (each.value, each.name)), None)
        assert_that(found is not None, f"must be one of {', '.join(str(each.value) for each in kind)}")
        return found

    return check


# The classes -----------------------------------------------------------------------------------------------


class LoggerConfig(Settings):
    """How misuse is logged: through `logging`, under `exporter`, and to files only where they are named."""

    log_level = Field(_level, "INFO")
    log_format = Field(_text, "%(name)s - %(levelname)s - %(message)s")
    log_file_path_for_info = Field(_path, None)
    log_file_path_for_err = Field(_path, None)


class TrainingTelemetryConfig(Settings):
    """What there is to know of a training job; a target of 0 or less says that there is none, as frameworks do."""

    perf_tag_or_fn = Field(_tags)
    global_batch_size_or_fn = Field(_positive)
    micro_batch_size_or_fn = Field(_integer, None)
    seq_length_or_fn = Field(_integer, None)
    flops_per_sample_or_fn = Field(_integer, None)
    train_iterations_target_or_fn = Field(_integer, None)
    train_samples_target_or_fn = Field(_integer, None)
    log_every_n_train_iterations = Field(_positive, 50)
    is_log_throughput_enabled_or_fn = Field(_boolean, default=False)
    is_train_iterations_enabled_or_fn = Field(_boolean, default=True)
    is_validation_iterations_enabled_or_fn = Field(_boolean, default=True)
    is_test_iterations_enabled_or_fn = Field(_boolean, default=True)
    is_save_checkpoint_enabled_or_fn = Field(_boolean, default=True)
    save_checkpoint_strategy = Field(_one_of(CheckPointStrategy), CheckPointStrategy.SYNC)
    custom_metadata = Field(_metadata, None)
    app_type = ApplicationType.TRAINING

    def check(self) -> None:
        """Throughput needs to know what a sample costs."""
        flops = self.flops_per_sample_or_fn
        known = callable(flops) or (flops is not None and flops > 0)
        assert_that(
            known or self.is_log_throughput_enabled_or_fn is not True,
            "TrainingTelemetryConfig: flops_per_sample must be set to a positive value when"
            f" is_log_throughput_enabled is True, not {flops!r}",
        )

    @classmethod
    def of(cls, other: object) -> TrainingTelemetryConfig:
        """Take ours, a mapping of fields, or an object with one-logger's names; else `OneLoggerError`."""
        if isinstance(other, TrainingTelemetryConfig):
            return other
        if isinstance(other, Mapping):
            return cls(**other)
        assert_that(_is_telemetry_config(other), "must be a TrainingTelemetryConfig")
        return cls(**{name: getattr(other, name) for name, _ in cls.fields() if hasattr(other, name)})


@runtime_checkable
class TelemetryConfig(Protocol):
    """What `OneLoggerConfig.telemetry_config` may be besides a `TrainingTelemetryConfig`: any object with these."""

    is_train_iterations_enabled: bool | None
    is_validation_iterations_enabled: bool | None
    is_test_iterations_enabled: bool | None
    is_save_checkpoint_enabled: bool | None
    app_type: ApplicationType | str
    custom_metadata: Mapping[str, Any] | None


def _is_telemetry_config(value: object) -> bool:
    """Whether it has the names, without asking for their values: behind each may be a callable."""
    own = getattr(value, "__dict__", {})
    return all(hasattr(type(value), name) or name in own for name in TelemetryConfig.__annotations__)


def _telemetry_config(value: Any) -> Any:
    """Take a training's configuration as such, and that of another kind of application as it is."""
    served = _is_telemetry_config(value) and not hasattr(value, "global_batch_size_or_fn")
    return value if served else TrainingTelemetryConfig.of(value)


def _logger_config(value: Any) -> Any:
    assert_that(isinstance(value, (Mapping, LoggerConfig)), "must be a LoggerConfig")
    return LoggerConfig(**value) if isinstance(value, Mapping) else value


class OneLoggerConfig(Settings):
    """Who the application is, and whether and how this process tells of it."""

    application_name = Field(_non_blank)
    world_size_or_fn = Field(_positive)
    session_tag_or_fn = Field(_text)
    is_baseline_run_or_fn = Field(_boolean, default=False)
    custom_metadata = Field(_metadata, None)
    error_handling_strategy = Field(
        _one_of(OneLoggerErrorHandlingStrategy),
        OneLoggerErrorHandlingStrategy.DISABLE_QUIETLY_AND_REPORT_METRIC_ERROR,
    )
    enable_for_current_rank = Field(_boolean, default=True)
    logger_config = Field(_logger_config, LoggerConfig())
    summary_data_schema_version = Field(_text, "1.0.0")
    telemetry_config = Field(_telemetry_config, None)

    @property
    def propagates(self) -> bool:
        """Whether a misuse is raised at the call."""
        return self.error_handling_strategy is OneLoggerErrorHandlingStrategy.PROPAGATE_EXCEPTIONS
