"""Exporters of spans: where a job's spans, events and errors go besides Prometheus, by code or by configuration.

Records are JSON objects of one-logger's shapes; the start of a span is held back until the next record, so that one without
children, events or errors is a single `complete`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.errors import ExportError
from exporter.one_logger.names import RecordType
from exporter.recording.handlers import LinesFile, filled
from exporter.recording.recorder import RECORDER
from exporter.training.attributes import Attributes, shown
from exporter.training.buffers import Hooks
from exporter.training.metrics import report
from exporter.training.spans import ErrorEvent, Event, Span, TelemetryDataError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class BaseExporter:
    """Takes what a job tells, as copies that nobody changes any more; this one only refuses it where it is not `ready`.

    A method that cannot do its work raises `ExportError`, and is called again. One that holds records back may have a
    method `write_out()` too, called when its queue has run empty and at the latest after every 256 records; what it cannot
    write then it has to keep, within bounds. `Exporter` is the same class.
    """

    ready = closed = False

    def initialize(self) -> None:
        """Get ready; asked again after a failure."""
        self.ready, self.closed = True, False

    def export_start(self, span: Span) -> None:  # noqa: ARG002  # the interface's, as in all of these
        """Take a span as it was at its start."""
        self._check()

    def export_stop(self, span: Span) -> None:  # noqa: ARG002
        """Take a span as it was when it stopped."""
        self._check()

    def export_event(self, event: Event, span: Span) -> None:  # noqa: ARG002
        """Take what happened in between."""
        self._check()

    def export_error(self, event: ErrorEvent, span: Span) -> None:  # noqa: ARG002
        """Take an error of the application."""
        self._check()

    def export_telemetry_data_error(self, error: TelemetryDataError) -> None:  # noqa: ARG002
        """Take the news that the telemetry is incomplete."""
        self._check()

    def close(self) -> None:
        """Write out what is held back, and let go of every resource."""
        self.ready, self.closed = False, True

    def _check(self) -> None:
        if self.closed:
            raise ExportError("Exporter is closed and cannot be used anymore.")
        if not self.ready:
            raise ExportError("Exporter not initialized. Call initialize first.")


Exporter = BaseExporter


def missing_methods(exporter: object) -> list[str]:
    """Tell what an object lacks to be an exporter: any with these methods will do, such as one-logger's own."""
    methods = [name for name, value in vars(BaseExporter).items() if callable(value) and name[0] != "_"]
    return [name for name in methods if not callable(getattr(exporter, name, None))]


class BaseJsonExporter(BaseExporter):
    """Makes the records; a class that derives from it says where they go, by `_write`."""

    def __init__(self) -> None:
        super().__init__()
        self._record_count = 0
        self._held_back: Span | None = None

    def export_start(self, span: Span) -> None:
        """Hold the start back until the next record."""
        super().export_start(span)
        self._write_held_back()
        self._held_back = span

    def export_stop(self, span: Span) -> None:
        """Write the stop, or the whole span where nothing came between."""
        super().export_stop(span)
        if span.stop_event is None:
            raise ExportError(f"Span {span.id} has no stop event")
        if self._held_back is not None and self._held_back.id == span.id:
            self._record_span(span, RecordType.COMPLETE)
            self._held_back = None
            return
        self._write_held_back()
        self._record_span(span, RecordType.STOP)

    def export_event(self, event: Event, span: Span) -> None:
        """Write the event, or the error."""
        super().export_event(event, span)
        self._write_held_back()
        kind = RecordType.APPLICATION_ERROR if isinstance(event, ErrorEvent) else RecordType.EVENT
        self._record(kind, span_id=str(span.id), event=_json_of(event))

    export_error = export_event

    def export_telemetry_data_error(self, error: TelemetryDataError) -> None:
        """Write the error."""
        super().export_telemetry_data_error(error)
        self._record(RecordType.TELEMETRY_DATA_ERROR, error=_json_of(error))

    def close(self) -> None:
        """Write what is held back."""
        try:
            if self.ready:
                self._write_held_back()
        finally:
            super().close()

    def _write(self, json_dict: dict[str, Any]) -> None:
        """Write one record, or raise `ExportError`; it is offered again then."""
        raise NotImplementedError

    def _write_held_back(self) -> None:
        if self._held_back is not None:
            self._record_span(self._held_back, RecordType.START)
            self._held_back = None

    def _record_span(self, span: Span, kind: RecordType) -> None:
        parent, attributes = span.exported_parent, _values(span.attributes)
        fields = {
            "id": str(span.id),
            "name": span.name_str,
            "parent_id": None if parent is None else str(parent.id),
            "attributes": attributes or None,
            "start_event": None if kind is RecordType.STOP else _json_of(span.start_event),
            "stop_event": None if kind is RecordType.START else _json_of(span.stop_event),
        }
        self._record(kind, **{name: value for name, value in fields.items() if value is not None})

    def _record(self, kind: RecordType, **fields: Any) -> None:
        who, name = RECORDER.process.identity(), Hooks.telemetry.application_name
        whose: dict[str, Any] = {} if who.rank is None else {"rank": who.rank, "node_name": who.node}
        if name is not None:
            whose["application_name"] = name
        count = self._record_count + 1
        self._write({"type": kind.value, **fields, "count": count, "pid": os.getpid(), **whose})
        self._record_count = count  # a record that is offered again keeps its number


def _json_of(event: Event | None) -> dict[str, Any] | None:
    return None if event is None else {"name": event.name_str, "attributes": _values(event.attributes)}


def _values(attributes: Attributes) -> dict[str, Any]:
    return {name: _finite(value) for name, value in attributes.copied().to_json().items()}


def _finite(value: Any) -> Any:
    """Make text of a number that is not finite: JSON knows none."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return [_finite(item) for item in value] if isinstance(value, list) else value


class FileExporter(BaseJsonExporter):
    """Appends records to a file.

    Args:
        file_path: `{run}`, `{rank}` and `{pid}` in it stand for those of the process. Missing directories are made.
        max_bytes: A file that would become larger is moved aside (`telemetry.json` becomes `telemetry.json.1`, and so
            on); 1024 or more.
        backups: Files moved aside that are kept, up to 1000.
    """

    def __init__(self, file_path: str | Path, *, max_bytes: int = 1 << 30, backups: int = 5) -> None:
        super().__init__()
        self._pattern = os.path.abspath(file_path)  # noqa: PTH100  # before the job changes its directory
        self._file = LinesFile(max_bytes=max_bytes, backups=backups)
        self._path = Path()

    def initialize(self) -> None:
        """Make the directory and the file, so that one that cannot be written to is an `ExportError` early."""
        who = RECORDER.process.identity()
        self._path = filled(self._pattern, who.run, who.rank)
        with self._refusals():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        super().initialize()

    def _write(self, json_dict: dict[str, Any]) -> None:
        line = json.dumps(json_dict, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
        with self._refusals():
            self._file.append(self._path, line)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ExportError(f"{self._path}: {error.strerror or error}") from error


_SEPARATOR = " | "
_KEY = re.compile(r"([\w.-]+)=")
_DECODER = json.JSONDecoder()


class LoggerExporter(BaseJsonExporter):
    """Logs each record as one line, `[key=value | key.key=value]`, at the level INFO; values are JSON.

    A mapping with a key that has a dot or a sign in it is a value as a whole, so that every line reads back.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    def _write(self, json_dict: dict[str, Any]) -> None:
        self._logger.info(self._format_log(json_dict))

    @staticmethod
    def _format_log(json_dict: dict[str, Any]) -> str:
        return f"[{_SEPARATOR.join(_items(json_dict, ''))}]"

    @staticmethod
    def deserialize_log(text: str) -> dict[str, Any]:
        """Read a line back, whatever the logging has put before and after it; `ExportError` where there is none."""
        for start, character in enumerate(text):
            if character == "[":
                try:
                    return _parsed(text, start + 1)
                except (ValueError, AttributeError):  # a bracket of the log's own, such as around the level
                    continue
        raise ExportError(f"no record in square brackets: {text}")


def _items(fields: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in sorted(fields.items(), reverse=True):
        if isinstance(value, dict) and value and all(re.fullmatch(r"[\w-]+", key) for key in value):
            yield from _items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={json.dumps(value)}"


def _parsed(text: str, position: int) -> dict[str, Any]:
    """Read `key=value | key.key=value]`; ValueError or AttributeError where it is something else."""
    found: dict[str, Any] = {}
    while match := _KEY.match(text, position):
        *path, name = match[1].split(".")
        inner = found
        for each in path:
            inner = inner.setdefault(each, {})
        value, position = _DECODER.raw_decode(text, match.end())
        inner.update({name: value})
        if text.startswith("]", position):
            return found
        position += len(_SEPARATOR) * text.startswith(_SEPARATOR, position)
    raise ValueError(text)


# By configuration -----------------------------------------------------------------------------------------

GROUP = "nv_one_logger.exporter_configs"
"""Of entry points: one-logger's, so that a package made for it serves here too."""
FILE_VARIABLE = "ONE_LOGGER_EXPORTER_CONFIG_PATH"
FILE_NAMES = tuple(f"one_logger_exporters_config.{suffix}" for suffix in ("yaml", "yml", "json"))
OURS = dict.fromkeys(("FileExporter", "LoggerExporter"), __name__)
OURS["OTelExporter"] = "exporter.bridges.opentelemetry"
"""Classes by their name alone, or as one-logger's, so that a configuration written for it serves here unchanged."""


@dataclass(slots=True)
class ExporterConfig:
    """One exporter, to be made by module and class, with dots; of this package's own the class alone will do."""

    class_name: str
    config: dict[str, Any] = field(default_factory=dict)
    enabled: bool = True


_PARTS = ("class_name", "config", "enabled")


class ExporterConfigManager:
    """Merges the configurations of exporters, and makes them: a file stands in the place of what packages say.

    The packages are entry points; None for those of the installed ones.
    """

    ENTRY_POINT_NAME = GROUP

    def __init__(self, packages: Iterable[EntryPoint] | None = None) -> None:
        if packages is None:
            # Here: with what it imports (email, zipfile) it is a fifth of what a job pays for all of ours.
            from importlib.metadata import entry_points  # noqa: PLC0415

            packages = entry_points(group=GROUP)
        self.entry_point_exporter_configs: dict[str, Any] = {}
        for point in packages:
            with _left_out("package", f"a configuration from the package entry {point.name}"):
                self.entry_point_exporter_configs[point.name] = point.load()

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
            before = merged.get(each.class_name, each)
            merged[each.class_name] = ExporterConfig(
                each.class_name, before.config | each.config, each.enabled
            )
        return list(merged.values())

    def create_exporters_from_config(
        self,
        exporters_config: Sequence[ExporterConfig],
        training_telemetry_config: object = None,  # noqa: ARG002  # one-logger passes it
    ) -> list[Exporter]:
        """Make those that are enabled and can be made."""
        made = []
        for each in exporters_config:
            module, _, kind = each.class_name.rpartition(".")
            if not module or module.startswith("nv_one_logger."):
                module = OURS.get(kind, module)
            config = {
                name: Path(value) if name == "file_path" else value for name, value in each.config.items()
            }
            with _left_out("exporter", f"an exporter that can be made: {each.class_name}"):
                if each.enabled:
                    made.append(getattr(import_module(module), kind)(**config))
        return made

    def _of_packages(self) -> Iterator[object]:
        for name, kind in self.entry_point_exporter_configs.items():
            with _left_out("package", f"a configuration from the package entry {name}"):
                yield kind.get_default_config()

    def _of_file(self, stated: str | os.PathLike[str] | None) -> list[ExporterConfig] | None:
        named = [str(each) for each in (stated, os.environ.get(FILE_VARIABLE)) if each]
        found = None
        for name in (*named, *FILE_NAMES):
            if Path(name).exists():
                with _left_out("file", f"a file with a list `exporters`: {name}"):
                    found = _checked(_read(Path(name))["exporters"], name)
                break
            if name in named:
                _report("file", f"a file that exists: {name}")
        return found


def _report(rule: str, expected: str) -> None:
    report("with_export_config", rule, expected)


@contextmanager
def _left_out(rule: str, expected: str) -> Iterator[None]:
    """Report what cannot be had, and go on without it: any exception may come out of foreign code."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # see above
        _report(rule, f"{expected}: {shown(error)}")


def _checked(given: Iterable[object], source: str) -> list[ExporterConfig]:
    checked = []
    for each in given:  # one-logger's own class has the names, too
        fields = each if isinstance(each, Mapping) else {name: getattr(each, name, None) for name in _PARTS}
        name, config, enabled = (fields.get(part) for part in _PARTS)
        if isinstance(name, str) and name:
            config = dict(config) if isinstance(config, Mapping) else {}
            checked.append(ExporterConfig(name, config, enabled is None or bool(enabled)))
        else:
            _report("entry", f"an entry with a class_name in {source}, not {shown(each)}")
    return checked


def _read(path: Path) -> Any:
    if path.suffix.lower() == ".json":
        return json.loads(path.read_bytes())
    yaml = import_module("yaml")  # the job's own; where it has none, JSON will do
    return yaml.safe_load(path.read_bytes())
