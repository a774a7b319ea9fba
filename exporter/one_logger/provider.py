"""Providers: configuration of one-logger for a process.

Invalid settings raise OneLoggerError. A call in the wrong order is counted as misuse, and raises only if the job uses
PROPAGATE_EXCEPTIONS. A forked child is not configured, because its records would carry the identity of the parent.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from exporter.errors import OneLoggerError
from exporter.one_logger.config import OneLoggerConfig, Settings, TrainingTelemetryConfig
from exporter.one_logger.current_observer import current_observer, disable, install, misuse
from exporter.one_logger.delivery import Delivery, SpanFilter
from exporter.one_logger.export_config import ExporterConfig, ExporterConfigManager
from exporter.one_logger.exporters import Exporter, missing_methods
from exporter.one_logger.names import ExportCustomizationMode
from exporter.one_logger.observer import OneLoggerObserver
from exporter.one_logger.recorders import DefaultRecorder
from exporter.one_logger.training_recorder import UNCONFIGURED, TrainingRecorder, get_recorder
from exporter.recording.conversion import safe_repr
from exporter.recording.notices import NOTICES
from exporter.training.attributes import SpanName, assert_that
from exporter.training.misuse import report

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OneLoggerProvider", "TrainingTelemetryProvider"]

Path = str | os.PathLike[str]


class _Singleton:
    """Base class of providers with a single instance per process."""

    _instance: _Singleton | None = None
    _pid = 0  # of the process that created the instance

    def __init__(self) -> None:
        name = type(self).__name__
        raise TypeError(f"{name} cannot be instantiated directly. Use {name}.instance() instead.")

    @classmethod
    def instance(cls) -> Self:
        """Return the instance of this process."""
        if not isinstance(cls._instance, cls) or cls._pid != os.getpid():
            cls._instance, cls._pid = object.__new__(cls), os.getpid()
        return cls._instance

    @property
    def one_logger_ready(self) -> bool:
        """True if the process is configured."""
        return current_observer() is not None

    def force_disable_logging(self) -> None:
        """Stop all exports."""
        disable()


class OneLoggerProvider(_Singleton):
    """Provider of the configuration and the recorder of one-logger's core."""

    def configure(self, config: OneLoggerConfig, recorder: DefaultRecorder) -> None:
        """Set the configuration and the recorder. A second call has no effect and is counted as misuse."""
        problem = f"config must be a OneLoggerConfig, not {safe_repr(config)}"
        assert_that(isinstance(config, OneLoggerConfig), problem)
        if current_observer() is not None:
            misuse("OneLoggerProvider.configure", "configured_twice", "to be called once per process")
        else:
            _configure(config, recorder)

    @property
    def recorder(self) -> DefaultRecorder:
        """Recorder of this process; before the configuration, a recorder without exporters."""
        return get_recorder()

    @property
    def config(self) -> OneLoggerConfig:
        """Configuration of this process, which the caller must not change.

        Raises:
            OneLoggerError: The process is not configured.
        """
        return _configured_observer().settings

    @property
    def one_logger_enabled(self) -> bool:
        """True if the process is configured and exports."""
        observer = current_observer()
        return observer is not None and observer.is_enabled


class TrainingTelemetryProvider(_Singleton):
    """Provider of training telemetry. A method raises OneLoggerError for an invalid argument.

    (TrainingTelemetryProvider.instance()
        .with_base_config(config)
        .with_exporter(FileExporter(file_path=Path("telemetry.jsonl")))
        .configure_provider())
    """

    _base: OneLoggerConfig | None = None
    _overrides: Mapping[str, Any] = {}
    _exporters: tuple[Exporter, ...] = ()
    _filter: SpanFilter | None = None

    def with_base_config(self, one_logger_config: OneLoggerConfig) -> TrainingTelemetryProvider:
        """Set the configuration. A second call has no effect and is counted as misuse."""
        problem = f"with_base_config expects a OneLoggerConfig, not {safe_repr(one_logger_config)}"
        assert_that(isinstance(one_logger_config, OneLoggerConfig), problem)
        if not self._configurable("with_base_config"):
            return self
        if self._base is None:
            self._base = one_logger_config
        else:
            expected = "to be called once; use with_config_override to change fields"
            propagates = self._propagates() or one_logger_config.propagates
            misuse("with_base_config", "called_twice", expected, propagates=propagates)
        return self

    def with_config_override(self, partial_config: Mapping[str, Any]) -> TrainingTelemetryProvider:
        """Override fields of the configuration. A nested mapping overrides the fields of a nested configuration.

        Later calls take precedence.
        """
        problem = f"with_config_override expects a mapping of fields, not {safe_repr(partial_config)}"
        assert_that(isinstance(partial_config, Mapping), problem)
        if self._configurable("with_config_override"):
            self._overrides = _merged(self._overrides, partial_config)
        return self

    def with_config_override_from_json_file(self, file_path: Path) -> TrainingTelemetryProvider:
        """Raise OneLoggerError, because one-logger does not implement this method either."""
        problem = f"not implemented: read {os.fspath(file_path)}, and pass the fields to with_config_override"
        raise OneLoggerError(problem)

    def with_config_override_from_config_server(self, config_server_url: str) -> TrainingTelemetryProvider:
        """Raise OneLoggerError, because one-logger does not implement this method either."""
        problem = f"not implemented: fetch {config_server_url}, and pass the fields to with_config_override"
        raise OneLoggerError(problem)

    def with_exporter(self, exporter: Exporter) -> TrainingTelemetryProvider:
        """Add an exporter, which may be of any class with the methods of `Exporter`."""
        missing = missing_methods(exporter)
        assert_that(
            not missing, f"{safe_repr(exporter)} is not an exporter: methods {', '.join(missing)} are missing"
        )
        if self._configurable("with_exporter"):
            self._exporters += (exporter,)
        return self

    def with_export_customization(
        self,
        export_customization_mode: ExportCustomizationMode,
        span_name_filter: Iterable[SpanName] | None = None,
    ) -> TrainingTelemetryProvider:
        """Select the spans to export. Without this call, short and frequent spans are not exported.

        A second call has no effect and is counted as misuse.
        """
        if not self._configurable("with_export_customization"):
            return self
        if self._filter is None:
            self._filter = SpanFilter(export_customization_mode, span_name_filter)
        else:
            propagates = self._propagates()
            misuse("with_export_customization", "called_twice", "to be called once", propagates=propagates)
        return self

    def with_export_config(
        self,
        exporters_config: Sequence[ExporterConfig | Mapping[str, Any]] | None = None,
        config_file_path: Path | None = None,
    ) -> TrainingTelemetryProvider:
        """Add the exporters that the argument, a file or installed packages configure.

        The file is YAML or JSON. Without *config_file_path* the file is `$ONE_LOGGER_EXPORTER_CONFIG_PATH`, otherwise
        `one_logger_exporters_config.{yaml,yml,json}` in the working directory. An exporter that cannot be created is counted as
        misuse and omitted.
        """
        if self._configurable("with_export_config"):
            manager = ExporterConfigManager()
            configs = manager.generate_export_config(exporters_config, config_file_path)
            self._exporters += tuple(manager.create_exporters_from_config(configs))
        return self

    def configure_provider(self) -> TrainingTelemetryProvider:
        """Apply the configuration and start a thread for each exporter. A second call has no effect and is counted as misuse."""
        if not self._configurable("configure_provider"):
            return self
        problem = "No configuration was provided. Please provide a base config and/or config overrides."
        assert_that(self._overrides or self._base is not None, problem)
        settings = self._base
        if settings is None or self._overrides:
            settings = OneLoggerConfig(**_merged(_explicit_values(settings), self._overrides))
        exporters = self._exporters if settings.enable_for_current_rank else ()
        _apply_logger_config(settings)
        span_filter = self._filter or SpanFilter.default()
        _configure(settings, TrainingRecorder(settings, exporters, span_filter.mode, span_filter.names))
        return self

    @property
    def recorder(self) -> TrainingRecorder:
        """Recorder of this process; before the configuration, a recorder without exporters."""
        recorder = get_recorder()
        return recorder if isinstance(recorder, TrainingRecorder) else UNCONFIGURED

    @property
    def config(self) -> OneLoggerConfig:
        """Copy of the configuration.

        Raises:
            OneLoggerError: The process is not configured.
        """
        return _configured_observer().settings.model_copy()

    def set_training_telemetry_config(self, training_telemetry_config: TrainingTelemetryConfig) -> None:
        """Set the configuration of the training, before or after the start of the application.

        A call before `configure_provider` has no effect. A second call has no effect and is counted as misuse.
        """
        training = TrainingTelemetryConfig.convert(training_telemetry_config)
        observer = current_observer()
        if observer is None:
            return
        if observer.training is not None:
            expected = "to be called once; the configuration is already set"
            misuse("set_training_telemetry_config", "already_set", expected)
            return
        observer.settings.telemetry_config = training
        observer.set_training(training)

    @staticmethod
    def _configurable(call: str) -> bool:
        """Return True if the process is not configured yet. Otherwise count the late call as misuse."""
        if current_observer() is None:
            return True
        misuse(call, "configured_already", "to be called before configure_provider")
        return False

    def _propagates(self) -> bool:
        """Return True if the configuration that is being built requests PROPAGATE_EXCEPTIONS."""
        return self._base is not None and self._base.propagates


def _configured_observer() -> OneLoggerObserver:
    """Return the observer of this process, or raise OneLoggerError before the configuration."""
    observer = current_observer()
    if observer is None:
        raise OneLoggerError(
            "the provider is not configured; call with_base_config(…) and configure_provider() first"
        )
    return observer


def _configure(settings: OneLoggerConfig, recorder: DefaultRecorder) -> None:
    """Install an observer that exports through the exporters of a recorder."""
    delivery = getattr(recorder, "delivery", None)  # None if the job's own recorder class has no delivery
    if not isinstance(delivery, Delivery):
        delivery = Delivery(())
    delivery.set_application_name(settings.application_name)
    install(OneLoggerObserver(settings.model_copy(), recorder, delivery))


def _explicit_values(settings: Settings | None) -> dict[str, Any]:
    """Return the explicitly set values, with nested configurations as mappings."""
    values = {} if settings is None else settings.explicit_values
    return {
        name: _explicit_values(value) if isinstance(value, Settings) else value
        for name, value in values.items()
    }


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new mapping with the changes applied. Nested mappings are merged, not replaced."""
    merged = dict(base)
    for name, change in changes.items():
        value = _explicit_values(change) if isinstance(change, Settings) else change
        current_value = merged.get(name)
        if isinstance(current_value, Mapping) and isinstance(value, Mapping):
            value = _merged(current_value, value)
        merged[name] = value
    return merged


def _apply_logger_config(settings: OneLoggerConfig) -> None:
    """Apply the log level, and open the configured log files unless this rank is disabled."""
    config = settings.logger_config
    if "log_level" in config.explicit_values:
        NOTICES.is_quiet = logging.getLevelName(config.log_level) > logging.WARNING
    files = ((config.log_file_path_for_info, logging.INFO), (config.log_file_path_for_err, logging.ERROR))
    for path, level in files if settings.enable_for_current_rank else ():
        if path is None:
            continue
        try:
            handler = logging.FileHandler(path)
        except OSError as error:
            report("LoggerConfig", "log_file", f"a writable file: {path}: {error}")
            continue
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter(config.log_format))
        NOTICES.listeners.append(partial(_log_to, handler))


def _log_to(handler: logging.Handler, message: str) -> None:
    """Log a notice to a handler, on the thread that writes notices."""
    record = logging.LogRecord("exporter", logging.WARNING, __file__, 0, message, None, None)
    if record.levelno >= handler.level:
        handler.handle(record)


def forget() -> None:
    """Reset the providers to the unconfigured state, for tests."""
    install(None)
    OneLoggerProvider._instance = TrainingTelemetryProvider._instance = None  # noqa: SLF001  # classes of this module
