"""Exporters by configuration: from the job's code, from a file, and from installed packages.

Used in the training process, once, when the provider is configured. What the code says goes before what a file says,
which stands in the place of what packages say. An exporter that cannot be made, and a file or a package that cannot
be read, is reported with its reason and left out: none of it stops the job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.one_logger.config import OneLoggerConfig
from exporter.one_logger.exporters import Exporter
from exporter.training.attributes import shown
from exporter.training.metrics import report

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = ("exporter.span_exporters", "nv_one_logger.exporter_configs")
"""Groups of entry points; the second is one-logger's, so that a package made for it serves here too."""
FILE_VARIABLE = "ONE_LOGGER_EXPORTER_CONFIG_PATH"
FILE_NAMES = tuple(f"one_logger_exporters_config.{suffix}" for suffix in ("yaml", "yml", "json"))
OURS = {
    "FileExporter": "exporter.one_logger.exporters.FileExporter",
    "LoggerExporter": "exporter.one_logger.exporters.LoggerExporter",
    "nv_one_logger.exporter.file_exporter.FileExporter": "exporter.one_logger.exporters.FileExporter",
    "nv_one_logger.exporter.logger_exporter.LoggerExporter": "exporter.one_logger.exporters.LoggerExporter",
    "nv_one_logger.otel.exporter.otel_exporter.OTelExporter": "exporter.bridges.opentelemetry.OTelExporter",
}
"""Classes that stand in for one-logger's, so that a configuration written for it serves here unchanged."""


@dataclass(slots=True)
class ExporterConfig:
    """One exporter, to be made by module and class, with dots; of this package's own the class alone will do."""

    class_name: str
    config: dict[str, Any] = field(default_factory=dict)
    enabled: bool = True


class ExporterConfigManager:
    """Finds and merges the configurations, and makes the exporters.

    Args:
        environment: Usually `os.environ`.
        directory: Where a file of the usual name is looked for; None for the working directory.
        packages: Entry points; None for those of the installed packages.
    """

    ENTRY_POINT_NAME = GROUPS[1]

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        directory: Path | None = None,
        packages: Iterable[EntryPoint] | None = None,
    ) -> None:
        self._environment = environment
        self._directory = directory
        if packages is None:
            # Here: with what it imports (email, zipfile) it is a fifth of what a job pays for all of ours.
            from importlib.metadata import entry_points  # noqa: PLC0415

            packages = [point for group in GROUPS for point in entry_points(group=group)]
        self._packages = list(packages)

    def generate_export_config(
        self,
        direct_config: Sequence[ExporterConfig | Mapping[str, Any]] | None = None,
        config_file_path: str | os.PathLike[str] | None = None,
    ) -> list[ExporterConfig]:
        """Merge what the code, a file and the packages say; the arguments of the same class are joined one by one."""
        base = self._of_file(config_file_path)
        if base is None:
            base = _checked(self._of_packages(), "the installed packages")
        merged = {each.class_name: each for each in base}
        for each in _checked(direct_config or (), "exporters_config"):
            before = merged.get(each.class_name)
            config = each.config if before is None else before.config | each.config
            merged[each.class_name] = ExporterConfig(each.class_name, config, each.enabled)
        return list(merged.values())

    def create_exporters_from_config(
        self,
        exporters_config: Sequence[ExporterConfig],
        training_telemetry_config: OneLoggerConfig | None = None,  # noqa: ARG002  # one-logger passes it
    ) -> list[Exporter]:
        """Make those that are enabled and can be made."""
        made = [_make(each) for each in exporters_config if each.enabled]
        return [each for each in made if each is not None]

    def _of_packages(self) -> Iterable[object]:
        for point in self._packages:
            try:
                yield point.load().get_default_config()
            except Exception as error:  # noqa: BLE001, PERF203  # the package's own code
                _report("package", f"a configuration from the package entry {point.name}: {shown(error)}")

    def _of_file(self, stated: str | os.PathLike[str] | None) -> list[ExporterConfig] | None:
        path = self._path_of_file(stated)
        if path is None:
            return None
        try:
            found = _read(path)
        except (OSError, ValueError, ImportError) as error:
            _report("file", f"a configuration that can be read: {path}: {error}")
            return None
        listed = found.get("exporters") if isinstance(found, Mapping) else None
        if not isinstance(listed, list):
            _report("file", f"a list `exporters` in {path}")
            return None
        return _checked(listed, str(path))

    def _path_of_file(self, stated: str | os.PathLike[str] | None) -> Path | None:
        for name in (stated, self._environment.get(FILE_VARIABLE)):
            if not name:
                continue
            if Path(name).exists():
                return Path(name)
            _report("file", f"a file that exists: {name}")
        directory = self._directory or Path.cwd()
        return next((directory / name for name in FILE_NAMES if (directory / name).exists()), None)


def _report(rule: str, expected: str) -> None:
    report("with_export_config", rule, expected)


def _checked(given: Iterable[object], source: str) -> list[ExporterConfig]:
    checked = []
    for each in given:
        names = ("class_name", "config", "enabled")  # one-logger's own class has them too
        told = {name: getattr(each, name) for name in names if hasattr(each, name)}
        fields = each if isinstance(each, Mapping) else told
        name, config = fields.get("class_name"), fields.get("config")
        if not isinstance(name, str) or not name:
            _report("entry", f"an entry with a class_name in {source}, not {shown(each)}")
            continue
        config = dict(config) if isinstance(config, Mapping) else {}
        checked.append(ExporterConfig(name, config, bool(fields.get("enabled", True))))
    return checked


def _make(asked: ExporterConfig) -> Exporter | None:
    config = dict(asked.config)
    module, _, kind = OURS.get(asked.class_name, asked.class_name).rpartition(".")
    try:
        if isinstance(config.get("file_path"), str):
            config["file_path"] = Path(config["file_path"])
        made: Exporter = getattr(import_module(module), kind)(**config)
    except Exception as error:  # noqa: BLE001  # the exporter's own code
        _report("exporter", f"an exporter that can be made: {asked.class_name}: {shown(error)}")
        return None
    return made


def _read(path: Path) -> object:
    if path.suffix.lower() == ".json":
        return json.loads(path.read_bytes())
    if path.suffix.lower() not in {".yaml", ".yml"}:
        raise ValueError("the name must end in .yaml, .yml or .json")
    yaml = import_module("yaml")  # the job's own; where it has none, JSON will do
    try:
        found: object = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return found
