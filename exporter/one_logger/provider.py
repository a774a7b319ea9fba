"""The providers: a job says once who it is, what is exported and to whom.

Used in the training process, by its own threads. Configuring is loud: settings that cannot be raise `OneLoggerError`,
before training begins. Calls in the wrong order are misuse, counted and logged; they raise only where the job chose
`PROPAGATE_EXCEPTIONS`. Exporters start on threads of their own, so one that cannot connect delays and stops nothing.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exporter.errors import OneLoggerError
from exporter.one_logger.config import OneLoggerConfig, Settings, TrainingTelemetryConfig
from exporter.one_logger.delivery import Delivery, Filter
from exporter.one_logger.exporter_config import ExporterConfig, ExporterConfigManager
from exporter.one_logger.exporters import Exporter, missing_methods
from exporter.one_logger.names import ExportCustomizationMode
from exporter.one_logger.recorder import BEFORE, DefaultRecorder, TrainingRecorder, get_recorder
from exporter.one_logger.state import (
    configure,
    current,
    force_off,
    instance,
    misuse,
    set_training,
    the_records,
)
from exporter.training.attributes import SpanName, assert_that, shown
from exporter.training.metrics import report

if TYPE_CHECKING:
    from typing_extensions import Self

Path = str | os.PathLike[str]


class _Provider:
    """What both providers have: one object per process, given by `instance()`."""

    def __init__(self) -> None:
        name = type(self).__name__
        raise TypeError(f"{name} cannot be instantiated directly. Use {name}.instance() instead.")

    @classmethod
    def instance(cls) -> Self:
        """Give the object of this process."""
        return instance(cls)

    @property
    def one_logger_ready(self) -> bool:
        """Whether it was configured."""
        return current() is not None

    def force_disable_logging(self) -> None:
        """Tell nothing from now on."""
        force_off()


class OneLoggerProvider(_Provider):
    """The provider of core one-logger's API: a configuration and a recorder, for spans that are not a training's."""

    def configure(self, config: OneLoggerConfig, recorder: DefaultRecorder) -> None:
        """Set both, once per process; a second time is a misuse and changes nothing."""
        is_one = isinstance(config, OneLoggerConfig)
        assert_that(is_one, f"config must be a OneLoggerConfig, not {shown(config)}")
        delivery = getattr(recorder, "delivery", None)
        if not configure(config, delivery if isinstance(delivery, Delivery) else Delivery(()), recorder):
            misuse("OneLoggerProvider.configure", "configured_twice", "to be called once per process")

    @property
    def recorder(self) -> DefaultRecorder:
        """The recorder; before configuration one that exports to nobody."""
        return get_recorder()

    @property
    def config(self) -> OneLoggerConfig:
        """The configuration, which is not to be changed; `OneLoggerError` where there is none yet."""
        return the_records().settings

    @property
    def one_logger_enabled(self) -> bool:
        """Whether it was configured and tells anything."""
        records = current()
        return records is not None and records.enabled


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

    def with_base_config(self, one_logger_config: OneLoggerConfig) -> TrainingTelemetryProvider:
        """Set the configuration that the overrides change; once."""
        if self._open("with_base_config"):
            is_one = isinstance(one_logger_config, OneLoggerConfig)
            assert_that(is_one, f"with_base_config takes a OneLoggerConfig, not {shown(one_logger_config)}")
            if self._base is not None:
                expected = "to be called once; with_config_override changes fields"
                misuse("with_base_config", "called_twice", expected)
            else:
                self._base = one_logger_config
        return self

    def with_config_override(self, partial_config: Mapping[str, Any]) -> TrainingTelemetryProvider:
        """Change fields of the configuration, nested ones by nested mappings; the last call counts."""
        if self._open("with_config_override"):
            is_mapping = isinstance(partial_config, Mapping)
            expected = "with_config_override takes a mapping of fields"
            assert_that(is_mapping, f"{expected}, not {shown(partial_config)}")
            self._overrides = nested_update(self._overrides, partial_config)
        return self

    def with_config_override_from_json_file(self, file_path: Path) -> TrainingTelemetryProvider:
        """Change fields of the configuration as a JSON file says."""
        if not self._open("with_config_override_from_json_file"):
            return self
        try:
            with open(file_path, "rb") as file:  # noqa: PTH123  # os.PathLike
                found = json.load(file)
        except (OSError, ValueError) as error:
            raise OneLoggerError(f"{os.fspath(file_path)}: {error}") from error
        assert_that(isinstance(found, dict), f"{os.fspath(file_path)}: must be a JSON object of fields")
        return self.with_config_override(found)

    def with_config_override_from_config_server(self, config_server_url: str) -> TrainingTelemetryProvider:
        """Raise `OneLoggerError`: one-logger names it, but there is no configuration server, here or there."""
        raise OneLoggerError(
            f"there is no configuration server to ask at {config_server_url!r}:"
            " fetch the fields yourself and pass them to with_config_override"
        )

    def with_exporter(self, exporter: Exporter) -> TrainingTelemetryProvider:
        """Export through one more exporter, of any class that has the methods of `Exporter`."""
        if self._open("with_exporter"):
            missing = missing_methods(exporter)
            assert_that(not missing, f"{shown(exporter)} is no exporter: it has no {', '.join(missing)}")
            self._exporters += (exporter,)
        return self

    def with_export_customization(
        self,
        export_customization_mode: ExportCustomizationMode,
        span_name_filter: Iterable[SpanName] | None = None,
    ) -> TrainingTelemetryProvider:
        """Choose which spans are exported, once; without it, all but the short and frequent ones."""
        if self._open("with_export_customization"):
            if self._filter is not None:
                misuse("with_export_customization", "called_twice", "to be called once")
            else:
                self._filter = Filter(export_customization_mode, span_name_filter)
        return self

    def with_export_config(
        self,
        exporters_config: Sequence[ExporterConfig | Mapping[str, Any]] | None = None,
        config_file_path: Path | None = None,
    ) -> TrainingTelemetryProvider:
        """Add the exporters that a configuration names: of installed packages, of a file, and the one given here.

        One that cannot be made is reported and left out. The file is YAML or JSON; None for
        `$ONE_LOGGER_EXPORTER_CONFIG_PATH`, else `one_logger_exporters_config.{yaml,yml,json}` in the working directory.
        """
        if self._open("with_export_config"):
            manager = ExporterConfigManager()
            found = manager.generate_export_config(exporters_config, config_file_path)
            self._exporters += tuple(manager.create_exporters_from_config(found, self._base))
        return self

    def configure_provider(self) -> None:
        """Put it into force, once per process; the exporters begin to start, on threads of their own."""
        if not self._open("configure_provider"):
            return
        settings = self._merged()
        exporters = self._exporters if settings.enable_for_current_rank else ()
        apply_logger_config(settings)
        chosen = self._filter or Filter.default()
        recorder = TrainingRecorder(settings, exporters, chosen.mode, chosen.names)
        if not configure(settings, recorder.delivery, recorder):  # another thread was faster
            recorder.delivery.close()
            misuse("configure_provider", "configured_twice", "to be called once per process")

    def _open(self, call: str) -> bool:
        if current() is not None:
            expected = "to be called before configure_provider, which takes effect once"
            misuse(call, "configured_already", expected)
            return False
        return True

    def _merged(self) -> OneLoggerConfig:
        if self._overrides:
            return OneLoggerConfig(**nested_update(given_of(self._base), self._overrides))
        if self._base is None:
            raise OneLoggerError("no configuration was provided: with_base_config(…) before")
        return self._base

    @property
    def recorder(self) -> TrainingRecorder:
        """The recorder; before configuration one that exports to nobody."""
        found = get_recorder()
        return found if isinstance(found, TrainingRecorder) else BEFORE

    @property
    def config(self) -> OneLoggerConfig:
        """A copy of the configuration in force; `OneLoggerError` where there is none yet."""
        records = the_records()
        training = records.training or records.settings.telemetry_config
        return records.settings.model_copy({"telemetry_config": training})

    def set_training_telemetry_config(self, training_telemetry_config: TrainingTelemetryConfig) -> None:
        """Say what the training job is, once it is known; before the application's start as well as after it.

        A second time is a misuse and changes nothing; before the provider is configured, nothing happens.
        """
        training = TrainingTelemetryConfig.of(training_telemetry_config)
        records = current()
        if records is not None and not set_training(records, training):
            what = "to be called once: the configuration is set already"
            misuse("set_training_telemetry_config", "already_set", what)


def given_of(settings: Settings | None) -> dict[str, Any]:
    """Give what was stated in settings, nested ones as mappings."""
    given = {} if settings is None else settings.given
    return {name: given_of(value) if isinstance(value, Settings) else value for name, value in given.items()}


def nested_update(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change a mapping as another says, mappings inside both in the same way; neither is touched."""
    merged = dict(base)
    for name, change in changes.items():
        value = given_of(change) if isinstance(change, Settings) else change
        before = merged.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = nested_update(before, value)
        merged[name] = value
    return merged


def apply_logger_config(settings: OneLoggerConfig) -> None:
    """Set the level and add the files that were stated; a rank that is disabled opens no file."""
    if "logger_config" not in settings.given:
        return
    stated = settings.logger_config
    logger = logging.getLogger("exporter")
    if "log_level" in stated.given:
        logger.setLevel(stated.log_level)
    known = {each.baseFilename for each in logger.handlers if isinstance(each, logging.FileHandler)}
    files = ((stated.log_file_path_for_info, logging.INFO), (stated.log_file_path_for_err, logging.ERROR))
    for path, level in files if settings.enable_for_current_rank else ():
        if path is None or os.path.abspath(path) in known:  # noqa: PTH100  # as there
            continue
        try:
            handler = logging.FileHandler(path)
        except OSError as error:
            expected = f"a file that can be written: {path}: {error.strerror or error}"
            report("LoggerConfig", "log_file", expected)
            continue
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter(stated.log_format))
        logger.addHandler(handler)
