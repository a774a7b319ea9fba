"""The providers: a job says once who it is, what is exported and to whom, on its own threads.

Invalid settings raise `OneLoggerError`, before training begins; calls in the wrong order are misuse. After a fork the
child is not configured: it must not write under its parent's identity.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from exporter.errors import OneLoggerError
from exporter.one_logger.config import OneLoggerConfig, Settings, TrainingTelemetryConfig
from exporter.one_logger.delivery import Delivery, Filter, close_all, flush_all
from exporter.one_logger.exporters import Exporter, ExporterConfig, ExporterConfigManager, missing_methods
from exporter.one_logger.names import ExportCustomizationMode
from exporter.one_logger.names import StandardTrainingJobEventName as EventNames
from exporter.one_logger.recorder import BEFORE, DefaultRecorder, TrainingRecorder, get_recorder
from exporter.one_logger.records import TRAINING_FIELDS, Records, current, misuse
from exporter.recording.timing import AnyFunction
from exporter.training import calls
from exporter.training.attributes import SpanName, assert_that, shown
from exporter.training.buffers import Hooks
from exporter.training.calls import LOOP_FIELDS
from exporter.training.metrics import report
from exporter.training.recording import TRAINING
from exporter.training.spans import NO_TELEMETRY

if TYPE_CHECKING:
    from typing_extensions import Self

Path = str | os.PathLike[str]

_SWITCHED = {
    "is_train_iterations_enabled": EventNames.TRAINING_METRICS_UPDATE.value,
    "is_validation_iterations_enabled": EventNames.VALIDATION_METRICS_UPDATE.value,
    "is_test_iterations_enabled": EventNames.TESTING_METRICS_UPDATE.value,
}
"""A field of the training's configuration → the event that is not exported where it is false."""
_INSTANCES: dict[type, Any] = {}
"""Of each provider the object of this process."""


class _Provider:
    """What both providers have: one object per process, given by `instance()`."""

    def __init__(self) -> None:
        name = type(self).__name__
        raise TypeError(f"{name} cannot be instantiated directly. Use {name}.instance() instead.")

    @classmethod
    def instance(cls) -> Self:
        """Give the object of this process."""
        return _INSTANCES.setdefault(cls, object.__new__(cls))  # type: ignore[no-any-return]  # of this class

    @property
    def one_logger_ready(self) -> bool:
        """Whether it was configured."""
        return current() is not None

    def force_disable_logging(self) -> None:
        """Tell nothing from now on."""
        records = current()
        if records is not None:
            records.enabled = False
            TRAINING.configure(records)


class OneLoggerProvider(_Provider):
    """The provider of core one-logger's API: a configuration and a recorder, for spans that are not a training's."""

    def configure(self, config: OneLoggerConfig, recorder: DefaultRecorder) -> None:
        """Set both, once per process; a second time is a misuse and changes nothing."""
        problem = f"config must be a OneLoggerConfig, not {shown(config)}"
        assert_that(isinstance(config, OneLoggerConfig), problem)
        if current() is not None:
            misuse("OneLoggerProvider.configure", "configured_twice", "to be called once per process")
        else:
            _configure(config, recorder)

    @property
    def recorder(self) -> DefaultRecorder:
        """The recorder; before configuration one that exports to nobody."""
        return get_recorder()

    @property
    def config(self) -> OneLoggerConfig:
        """The configuration, which is not to be changed; `OneLoggerError` where there is none yet."""
        return _configured().settings

    @property
    def one_logger_enabled(self) -> bool:
        """Whether it was configured and tells anything."""
        records = current()
        return records is not None and records.enabled


def _building(method: AnyFunction) -> AnyFunction:
    """Have a method count as misuse, and change nothing, once the process is configured; it gives the provider."""

    @wraps(method)
    def step(self: TrainingTelemetryProvider, *args: Any, **kwargs: Any) -> TrainingTelemetryProvider:
        if current() is None:
            method(self, *args, **kwargs)
        else:
            expected = "to be called before configure_provider, which takes effect once"
            misuse(method.__name__, "configured_already", expected)
        return self

    return step  # type: ignore[return-value]  # the same arguments


class TrainingTelemetryProvider(_Provider):
    """The provider of training telemetry, built step by step; what cannot be raises `OneLoggerError`.

    (TrainingTelemetryProvider.instance()
        .with_base_config(config)
        .with_exporter(FileExporter(file_path=Path("telemetry.jsonl")))
        .configure_provider())
    """

    _base: OneLoggerConfig | None = None
    _overrides: Mapping[str, Any] = {}
    _exporters: tuple[Exporter, ...] = ()
    _filter: Filter | None = None

    @_building
    def with_base_config(self, one_logger_config: OneLoggerConfig) -> TrainingTelemetryProvider:
        """Set the configuration that the overrides change; once."""
        problem = f"with_base_config takes a OneLoggerConfig, not {shown(one_logger_config)}"
        assert_that(isinstance(one_logger_config, OneLoggerConfig), problem)
        if self._base is None:
            self._base = one_logger_config
        else:
            misuse(
                "with_base_config", "called_twice", "to be called once; with_config_override changes fields"
            )
        return self

    @_building
    def with_config_override(self, partial_config: Mapping[str, Any]) -> TrainingTelemetryProvider:
        """Change fields of the configuration, nested ones by nested mappings; the last call counts."""
        problem = f"with_config_override takes a mapping of fields, not {shown(partial_config)}"
        assert_that(isinstance(partial_config, Mapping), problem)
        self._overrides = _updated(self._overrides, partial_config)
        return self

    def with_config_override_from_json_file(self, file_path: Path) -> TrainingTelemetryProvider:
        """Raise `OneLoggerError`: one-logger names it, but does not read the file, either."""
        problem = f"read {os.fspath(file_path)} yourself, and pass its fields to with_config_override"
        raise OneLoggerError(problem)

    def with_config_override_from_config_server(self, config_server_url: str) -> TrainingTelemetryProvider:
        """Raise `OneLoggerError`: one-logger names it, but there is no configuration server, here or there."""
        problem = f"fetch {config_server_url} yourself, and pass its fields to with_config_override"
        raise OneLoggerError(problem)

    @_building
    def with_exporter(self, exporter: Exporter) -> TrainingTelemetryProvider:
        """Export through one more exporter, of any class that has the methods of `Exporter`."""
        missing = missing_methods(exporter)
        assert_that(not missing, f"{shown(exporter)} is no exporter: it has no {', '.join(missing)}")
        self._exporters += (exporter,)
        return self

    @_building
    def with_export_customization(
        self,
        export_customization_mode: ExportCustomizationMode,
        span_name_filter: Iterable[SpanName] | None = None,
    ) -> TrainingTelemetryProvider:
        """Choose which spans are exported, once; without it, all but the short and frequent ones."""
        if self._filter is None:
            self._filter = Filter(export_customization_mode, span_name_filter)
        else:
            misuse("with_export_customization", "called_twice", "to be called once")
        return self

    @_building
    def with_export_config(
        self,
        exporters_config: Sequence[ExporterConfig | Mapping[str, Any]] | None = None,
        config_file_path: Path | None = None,
    ) -> TrainingTelemetryProvider:
        """Add the exporters that a configuration names: of installed packages, of a file, and the one given here.

        One that cannot be made is reported and left out. The file is YAML or JSON; None for
        `$ONE_LOGGER_EXPORTER_CONFIG_PATH`, else `one_logger_exporters_config.{yaml,yml,json}` in the working directory.
        """
        manager = ExporterConfigManager()
        found = manager.generate_export_config(exporters_config, config_file_path)
        self._exporters += tuple(manager.create_exporters_from_config(found))
        return self

    @_building
    def configure_provider(self) -> None:
        """Put it into force, once per process; the exporters begin to start, on threads of their own."""
        problem = "No configuration was provided. Please provide a base config and/or config overrides."
        assert_that(self._overrides or self._base is not None, problem)
        settings = self._base
        if settings is None or self._overrides:
            settings = OneLoggerConfig(**_updated(_given(settings), self._overrides))
        exporters = self._exporters if settings.enable_for_current_rank else ()
        _apply_logger_config(settings)
        chosen = self._filter or Filter.default()
        _configure(settings, TrainingRecorder(settings, exporters, chosen.mode, chosen.names))

    @property
    def recorder(self) -> TrainingRecorder:
        """The recorder; before configuration one that exports to nobody."""
        found = get_recorder()
        return found if isinstance(found, TrainingRecorder) else BEFORE

    @property
    def config(self) -> OneLoggerConfig:
        """A copy of the configuration in force; `OneLoggerError` where there is none yet."""
        return _configured().settings.model_copy()

    def set_training_telemetry_config(self, training_telemetry_config: TrainingTelemetryConfig) -> None:
        """Say what the training job is, once it is known; before the application's start as well as after it.

        A second time is a misuse and changes nothing; before the provider is configured, nothing happens.
        """
        training = TrainingTelemetryConfig.of(training_telemetry_config)
        records = current()
        if records is None:
            return
        if records.training is not None:
            what = "to be called once: the configuration is set already"
            misuse("set_training_telemetry_config", "already_set", what)
            return
        records.set_training(training)
        records.settings.telemetry_config = training
        _apply_training(records)
        if records.enabled:
            calls.say("set_training_telemetry_config", training=records.ask(*TRAINING_FIELDS))


def _configured() -> Records:
    records = current()
    if records is None:
        raise OneLoggerError("configure the provider before: with_base_config(…), then configure_provider()")
    return records


def _configure(settings: OneLoggerConfig, recorder: DefaultRecorder) -> None:
    delivery = getattr(recorder, "delivery", None)
    settings = settings.model_copy()  # the training's may be set later
    records = Records(settings, recorder, delivery if isinstance(delivery, Delivery) else Delivery(()))
    TRAINING.configure(records)
    _apply_training(records)


def _apply_training(records: Records) -> None:
    """Leave out the events that are switched off, and have the callables asked at each iteration."""
    training, settings = records.training, records.settings
    if training is None or not records.enabled:
        return
    records.delivery.leave_out(event for flag, event in _SWITCHED.items() if training.value(flag) is False)
    varying = tuple(sorted(training.varying() & set(LOOP_FIELDS)))
    world = "world_size" in settings.varying()

    def values() -> dict[str, Any]:
        found = {name: training.value(name) for name in varying}
        return found | {"world_size": settings.value("world_size")} if world else found

    Hooks.values = values if varying or world else None


def _given(settings: Settings | None) -> dict[str, Any]:
    """Give what was stated in settings, nested ones as mappings."""
    given = {} if settings is None else settings.given
    return {name: _given(value) if isinstance(value, Settings) else value for name, value in given.items()}


def _updated(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change a mapping as another says, mappings inside both in the same way; neither is touched."""
    merged = dict(base)
    for name, change in changes.items():
        value = _given(change) if isinstance(change, Settings) else change
        before = merged.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = _updated(before, value)
        merged[name] = value
    return merged


def _apply_logger_config(settings: OneLoggerConfig) -> None:
    """Set the level and add the files that were stated; a rank that is disabled opens no file."""
    stated, logger = settings.logger_config, logging.getLogger("exporter")
    if "log_level" in stated.given:
        logger.setLevel(stated.log_level)
    files = ((stated.log_file_path_for_info, logging.INFO), (stated.log_file_path_for_err, logging.ERROR))
    for path, level in files if settings.enable_for_current_rank else ():
        if path is None:
            continue
        try:
            handler = logging.FileHandler(path)
        except OSError as error:
            report("LoggerConfig", "log_file", f"a file that can be written: {path}: {error}")
            continue
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter(stated.log_format))
        logger.addHandler(handler)


def forget() -> None:
    """Begin as an unconfigured process; in a forked child, and in tests."""
    Hooks.telemetry = NO_TELEMETRY
    _INSTANCES.clear()


TRAINING.flush, TRAINING.close = flush_all, close_all

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)
