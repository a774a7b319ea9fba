"""Exporters from a configuration: arguments, a file, or entry points of installed packages."""

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
from exporter.recording.conversion import safe_repr
from exporter.training.misuse import report

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["ExporterConfig", "ExporterConfigManager"]

ENTRY_POINT_GROUP = "nv_one_logger.exporter_configs"
"""Group of one-logger's entry points: packages that configure exporters for one-logger work unchanged."""
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
"""Modules of the exporters that a configuration can name by class alone, or by one-logger's module."""


@dataclass(slots=True)
class ExporterConfig:
    """Configuration of one exporter: class with module, and the arguments of the class."""

    class_name: str
    config: dict[str, Any] = field(default_factory=dict)
    enabled: bool = True


class ExporterConfigManager:
    """Merger of exporter configurations; a file replaces the configurations of packages.

    Args:
        packages: Entry points; None for those of the installed packages.
    """

    ENTRY_POINT_NAME = ENTRY_POINT_GROUP

    def __init__(self, packages: Iterable[EntryPoint] | None = None) -> None:
        if packages is None:
            # Imported here: with email and zipfile, a fifth of the import time of all modules.
            from importlib.metadata import entry_points  # noqa: PLC0415

            packages = entry_points(group=ENTRY_POINT_GROUP)
        self.entry_point_exporter_configs: dict[str, Any] = {}
        for point in packages:
            with _reporting("package", f"a configuration from the package entry {point.name}"):
                self.entry_point_exporter_configs[point.name] = point.load()

    def generate_export_config(
        self,
        direct_config: Sequence[ExporterConfig | Mapping[str, Any]] | None = None,
        config_file_path: str | os.PathLike[str] | None = None,
    ) -> list[ExporterConfig]:
        """Return the merged configurations of code, file and packages; arguments of the same class are merged."""
        base = self._of_file(config_file_path)
        if base is None:
            base = _parsed_configs(self._of_packages(), "the installed packages")
        merged = {each.class_name: each for each in base}
        for each in _parsed_configs(direct_config or (), "exporters_config"):
            before = merged.get(each.class_name, each)
            merged[each.class_name] = ExporterConfig(
                each.class_name, before.config | each.config, each.enabled
            )
        return list(merged.values())

    def create_exporters_from_config(
        self,
        exporters_config: Sequence[ExporterConfig],
        training_telemetry_config: object = None,  # noqa: ARG002  # one-logger has the argument
    ) -> list[Exporter]:
        """Return the enabled exporters; an exporter that cannot be created is reported and omitted."""
        exporters = []
        for each in exporters_config:
            module, _, kind = each.class_name.rpartition(".")
            if not module or module.startswith("nv_one_logger."):
                module = MODULES.get(kind, module)
            config = {
                name: Path(value) if name == "file_path" else value for name, value in each.config.items()
            }
            with _reporting("exporter", f"an exporter that can be created: {each.class_name}"):
                if each.enabled:
                    exporters.append(getattr(import_module(module), kind)(**config))
        return exporters

    def _of_packages(self) -> Iterator[object]:
        for name, kind in self.entry_point_exporter_configs.items():
            with _reporting("package", f"a configuration from the package entry {name}"):
                yield kind.get_default_config()

    def _of_file(self, path: str | os.PathLike[str] | None) -> list[ExporterConfig] | None:
        named = [str(each) for each in (path, os.environ.get(FILE_VARIABLE)) if each]
        found: list[ExporterConfig] | None = None
        for name in (*named, *FILE_NAMES):
            if Path(name).exists():
                with _reporting("file", f"a file with a list `exporters`: {name}"):
                    found = _parsed_configs(_read(Path(name))["exporters"], name)
                break
            if name in named:
                _report("file", f"a file that exists: {name}")
        return found


def _report(rule: str, expected: str) -> None:
    report("with_export_config", rule, expected)


@contextmanager
def _reporting(rule: str, expected: str) -> Iterator[None]:
    """Report an exception of the block, which runs code of other packages, and continue."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # of code of another package
        _report(rule, f"{expected}: {safe_repr(error)}")


def _parsed_configs(configs: Iterable[object], source: str) -> list[ExporterConfig]:
    """Convert mappings, or objects of one-logger's class with the same attributes."""
    parsed = []
    for each in configs:
        fields = each if isinstance(each, Mapping) else _fields(each)
        name, config, enabled = fields.get("class_name"), fields.get("config"), fields.get("enabled")
        if isinstance(name, str) and name:
            config = dict(config) if isinstance(config, Mapping) else {}
            parsed.append(ExporterConfig(name, config, enabled is None or bool(enabled)))
        else:
            _report("entry", f"an entry with a class_name in {source}, not {safe_repr(each)}")
    return parsed


def _fields(config: object) -> dict[str, Any]:
    return {name: getattr(config, name, None) for name in ("class_name", "config", "enabled")}


def _read(path: Path) -> Any:
    if path.suffix.lower() == ".json":
        return json.loads(path.read_bytes())
    yaml = import_module("yaml")  # PyYAML, if the job has it
    return yaml.safe_load(path.read_bytes())
