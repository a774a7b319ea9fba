"""Exporter configuration from arguments, a file and entry points of installed packages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.one_logger.exporters import Exporter
from exporter.recording.conversion import class_name as class_name_of
from exporter.recording.conversion import safe_repr, to_name
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.training.misuse import report

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["ExporterConfig", "ExporterConfigManager"]

ENTRY_POINT_GROUP = "nv_one_logger.exporter_configs"
"""Entry point group of one-logger, so that packages with exporters for one-logger work unchanged."""
FILE_VARIABLE = "ONE_LOGGER_EXPORTER_CONFIG_PATH"
FILE_NAMES = (
    "one_logger_exporters_config.yaml",
    "one_logger_exporters_config.yml",
    "one_logger_exporters_config.json",
)
MODULES = {
    "FileExporter": "exporter.one_logger.exporters",
    "LoggerExporter": "exporter.one_logger.exporters",
    "OTelExporter": "exporter.one_logger.otel.exporter.otel_exporter",
    "WandBExporterSync": "exporter.one_logger.wandb.exporter.wandb_exporter",
    "WandBExporterAsync": "exporter.one_logger.wandb.exporter.wandb_exporter",
}
"""Module by exporter class, for configurations with a bare class name or with a module of one-logger."""


@dataclass(slots=True)
class ExporterConfig:
    """Configuration of an exporter: the qualified name of the class and the arguments of its constructor."""

    class_name: str
    config: dict[str, Any] = field(default_factory=dict, repr=False)  # an argument may be a secret
    enabled: bool = True


class ExporterConfigManager:
    """Manager of the exporter configurations of installed packages, of a file and of the caller.

    Args:
        packages: Entry points; None for the entry points of the installed packages.
    """

    ENTRY_POINT_NAME = ENTRY_POINT_GROUP

    def __init__(self, packages: Iterable[EntryPoint] | None = None) -> None:
        if packages is None:
            # Imported here, because email and zipfile would add a fifth to the import time of all modules.
            from importlib.metadata import entry_points  # noqa: PLC0415

            packages = entry_points(group=ENTRY_POINT_GROUP)
        self.entry_point_exporter_configs: dict[str, Any] = {}
        for entry_point in packages:
            with _reporting("package", f"a configuration from the entry point {entry_point.name}"):
                self.entry_point_exporter_configs[entry_point.name] = entry_point.load()

    def generate_export_config(
        self,
        direct_config: Sequence[ExporterConfig | Mapping[str, Any]] | None = None,
        config_file_path: str | os.PathLike[str] | None = None,
    ) -> list[ExporterConfig]:
        """Return the configurations of the file, or of the packages if no file can be read, merged with *direct_config*.

        If both configure the same class, the arguments are merged and *direct_config* takes precedence.
        """
        base = self._file_configs(config_file_path)
        if base is None:
            base = _parsed_configs(self._package_configs(), "the installed packages")
        configs = {config.class_name: config for config in base}
        for config in _parsed_configs(direct_config or (), "exporters_config"):
            base_config = configs.get(config.class_name, config)
            configs[config.class_name] = ExporterConfig(
                config.class_name, base_config.config | config.config, config.enabled
            )
        return list(configs.values())

    def create_exporters_from_config(
        self,
        exporters_config: Sequence[ExporterConfig],
        training_telemetry_config: object = None,  # noqa: ARG002  # an argument of one-logger
    ) -> list[Exporter]:
        """Create the enabled exporters. An exporter that cannot be created is reported as misuse and omitted."""
        exporters = []
        for exporter_config in exporters_config:
            module, _, class_name = exporter_config.class_name.rpartition(".")
            if not module or module.startswith("nv_one_logger."):
                module = MODULES.get(class_name, module)
            config = {
                name: Path(value) if name == "file_path" else value
                for name, value in exporter_config.config.items()
            }
            with _reporting("exporter", f"an exporter that can be created: {exporter_config.class_name}"):
                if exporter_config.enabled:
                    exporters.append(getattr(import_module(module), class_name)(**config))
        return exporters

    def _package_configs(self) -> Iterator[object]:
        """Yield the default configuration of each entry point. A failure is reported as misuse."""
        for name, config_class in self.entry_point_exporter_configs.items():
            with _reporting("package", f"a configuration from the entry point {name}"):
                yield config_class.get_default_config()

    def _file_configs(self, path: str | os.PathLike[str] | None) -> list[ExporterConfig] | None:
        """Return the configurations of the first file that exists. Return None without such a file, or if it cannot be read.

        The candidates are *path*, the file of the environment variable, and `FILE_NAMES` in the working directory. An explicit file that
        does not exist is reported as misuse.
        """
        explicit_paths = [str(candidate) for candidate in (path, os.environ.get(FILE_VARIABLE)) if candidate]
        configs: list[ExporterConfig] | None = None
        for name in (*explicit_paths, *FILE_NAMES):
            if os.path.exists(name):  # noqa: PTH110  # `Path.exists` raises for a path that is too long or not accessible
                with _reporting("file", f"a file with a list `exporters`: {name}"):
                    configs = _parsed_configs(_read(Path(name))["exporters"], name)
                break
            if name in explicit_paths:
                _report("file", f"a file that exists: {name}")
        return configs


def _report(rule: str, expected: str) -> None:
    report("with_export_config", rule, expected)


@contextmanager
def _reporting(rule: str, expected: str) -> Iterator[None]:
    """Report an exception of the block as misuse, and continue."""
    try:
        yield
    except Exception as error:  # the block runs code of other packages
        if is_from_signal_handler(error):
            raise
        _report(rule, f"{expected}: {safe_repr(error)}")


def _parsed_configs(configs: Iterable[object], source: str) -> list[ExporterConfig]:
    """Convert mappings, and objects with the attributes of one-logger's `ExporterConfig`. Invalid entries are reported."""
    exporter_configs = []
    for entry in configs:
        fields = entry if isinstance(entry, Mapping) else _fields(entry)
        name, config, is_enabled = fields.get("class_name"), fields.get("config"), fields.get("enabled")
        if isinstance(name, str) and name:
            config = dict(config) if isinstance(config, Mapping) else {}
            exporter_configs.append(ExporterConfig(name, config, is_enabled is None or bool(is_enabled)))
        else:
            # Without the values, because an argument may be a secret.
            shown_entry = f"an object of the class {class_name_of(entry)}"
            if isinstance(entry, Mapping):
                shown_entry = f"with the keys {', '.join(map(to_name, entry))}"
            _report("entry", f"an entry with a class_name in {source}, not {shown_entry}")
    return exporter_configs


def _fields(config: object) -> dict[str, Any]:
    """Return the attributes of an object that a configuration of an exporter has, with None for a missing attribute."""
    return {name: getattr(config, name, None) for name in ("class_name", "config", "enabled")}


def _read(path: Path) -> Any:
    """Return the content of a JSON file or a YAML file."""
    if path.suffix.lower() == ".json":
        return json.loads(path.read_bytes())
    yaml = import_module("yaml")  # PyYAML is optional
    return yaml.safe_load(path.read_bytes())
