r"""Exporters of spans: where a job's spans, events and errors go besides Prometheus.

Used in the training process, each on a thread of its own (`exporter.one_logger.delivery`). An exporter that raises is asked
again with the same record, so a record is either taken as a whole or not at all.

Records are JSON objects of one-logger's shapes. The start of a span is held back until the next record, so that one
without children, events or errors is a single `complete`. Beside one-logger's fields each record says whose it is
(`application_name`, `rank`, `node_name`) and each span what it is part of (`parent_id`). A number that is not finite becomes
text. A line of a logger is `[key=value | key.key=value]`: values are JSON; in a key, a dot, an equals sign, a vertical bar,
a bracket and a backslash of its own are written with a backslash before them, so that every line reads back.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any

from exporter.errors import EventsLostError, ExportError
from exporter.one_logger.names import RecordType
from exporter.recording.handlers.json_lines import LinesFile, filled
from exporter.recording.identity import identity
from exporter.training.attributes import Attributes
from exporter.training.buffers import Hooks
from exporter.training.events import ErrorEvent, Event, TelemetryDataError
from exporter.training.spans import Span

KNOWN_SECONDS = 1.0
_SEPARATOR = " | "
_SPECIAL = str.maketrans({each: f"\\{each}" for each in "\\.=|[]"})
_KEY = re.compile(r"((?:\\.|[^\\.=|\[\]])*)([.=])", re.DOTALL)
_DECODER = json.JSONDecoder()


METHODS = (
    *("initialize", "export_start", "export_stop", "export_event", "export_error"),
    *("export_telemetry_data_error", "close"),
)
"""What an exporter has; any object with these methods will do, such as one-logger's own."""


def missing_methods(exporter: object) -> list[str]:
    """Tell what an object lacks to be an exporter."""
    return [name for name in METHODS if not callable(getattr(exporter, name, None))]


class BaseExporter:
    """Takes what a job tells, as copies that nobody changes any more; this one only refuses it where it is not `ready`.

    `export_start(span)` and `export_stop(span)` take a span as it was then; `export_event(event, span)` and
    `export_error(event, span)` what happened in between, and `export_telemetry_data_error(error)` the news that the
    telemetry is incomplete. A method that cannot do its work raises `ExportError`, and is called again. One that holds
    records back may have a method `write_out()` too, called when its queue has run empty and at the latest after every 256
    records; what it cannot write then it has to keep, within bounds. `Exporter` is the same class.
    """

    ready = closed = False

    def initialize(self) -> None:
        """Get ready; asked again after a failure."""
        self.ready, self.closed = True, False

    def close(self) -> None:
        """Write out what is held back, and let go of every resource."""
        self.ready, self.closed = False, True

    def _check(self, *_: Any, **__: Any) -> None:
        if self.closed:
            raise ExportError("Exporter is closed and cannot be used anymore.")
        if not self.ready:
            raise ExportError("Exporter not initialized. Call initialize first.")

    export_start = export_stop = export_event = export_error = export_telemetry_data_error = _check


Exporter = BaseExporter


class BaseJsonExporter(BaseExporter):
    """Makes the records; a class that derives from it says where they go, by `_write`."""

    def __init__(self) -> None:
        super().__init__()
        self._record_count = 0
        self._lock = threading.RLock()  # for those that are used by hand, from several threads
        self._held_back: Span | None = None
        self._who: dict[str, Any] = {}
        self._known_until = 0.0

    def export_start(self, span: Span) -> None:
        """Hold the start back until the next record."""
        super().export_start(span)
        self._write_held_back()
        self._held_back = span

    def export_stop(self, span: Span) -> None:
        """Write the stop, or the whole span where nothing came between.

        Raises:
            ExportError: The span has not stopped, or it could not be written.
        """
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
        parent = span.exported_parent
        fields: dict[str, Any] = {
            "id": str(span.id),
            "name": span.name_str,
            "parent_id": None if parent is None else str(parent.id),
        }
        attributes = span.attributes
        if attributes:
            fields["attributes"] = _values(attributes)
        if kind is not RecordType.STOP:
            fields["start_event"] = _json_of(span.start_event)
        if kind is not RecordType.START and span.stop_event is not None:
            fields["stop_event"] = _json_of(span.stop_event)
        self._record(kind, **fields)

    def _record(self, kind: RecordType, **fields: Any) -> None:
        with self._lock:
            record = {"type": kind.value, **fields, "count": self._record_count + 1, "pid": os.getpid()}
            self._write(record | self._whose())
            self._record_count += 1  # a record that is offered again keeps its number

    def _whose(self) -> dict[str, Any]:
        """Say whose a record is: the application, if the provider was told, the rank and the node."""
        now = monotonic()
        if now >= self._known_until:  # asking the environment for each record would be a third of its cost
            who = identity()
            self._who = {"rank": who.rank or 0, "node_name": who.node}
            self._known_until = now + KNOWN_SECONDS
        name = Hooks.telemetry.application_name
        return self._who if name is None else self._who | {"application_name": name}


def _json_of(event: Event) -> dict[str, Any]:
    return {"name": event.name_str, "attributes": _values(event.attributes)}


def _values(attributes: Attributes) -> dict[str, Any]:
    return {name: finite(attribute.value) for name, attribute in attributes.copied().items()}


def finite(value: Any) -> Any:
    """Make a value fit for JSON."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return [finite(item) for item in value] if isinstance(value, list) else value


class FileExporter(BaseJsonExporter):
    """Appends records to a file.

    Args:
        file_path: `{run}`, `{rank}` and `{pid}` in it stand for those of the process. Missing directories are made.
        rotate: Whether a file that is there already is moved aside when the job begins (`telemetry.json` becomes
            `telemetry.json.1`, and so on); else it is appended to.
        max_bytes: A file that would become larger is rotated; 1024 or more.
        backups: Rotated files that are kept, up to 1000.
    """

    def __init__(
        self,
        file_path: str | os.PathLike[str],
        *,
        rotate: bool = False,
        max_bytes: int = 1 << 30,
        backups: int = 5,
    ) -> None:
        super().__init__()
        self._pattern = os.path.abspath(os.fspath(file_path))  # noqa: PTH100  # before the job changes its directory
        self._file = LinesFile(max_bytes=max_bytes, backups=backups)
        self._rotates = rotate
        self._path = Path()

    def initialize(self) -> None:
        """Make the directory and the file, so that one that cannot be written to is an `ExportError` early."""
        who = identity()
        path = filled(self._pattern, who.run, who.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._rotates:
                self._file.rotate(path)
                self._rotates = False
            path.touch()
        except OSError as error:
            raise ExportError(f"{path}: {error.strerror or error}") from error
        self._path = path
        super().initialize()

    def _write(self, json_dict: dict[str, Any]) -> None:
        line = json.dumps(json_dict, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
        try:
            self._file.append(self._path, [line])
        except EventsLostError as error:
            raise ExportError(str(error)) from error


class LoggerExporter(BaseJsonExporter):
    """Logs each record as one line, at the level INFO."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    def _write(self, json_dict: dict[str, Any]) -> None:
        self._logger.info("%s", self._format_log(json_dict))

    @staticmethod
    def _format_log(json_dict: dict[str, Any]) -> str:
        return f"[{_SEPARATOR.join(_items(json_dict, ''))}]"

    @staticmethod
    def deserialize_log(text: str) -> dict[str, Any]:
        """Read a line back, whatever the logging has put before and after it; `ExportError` where there is none."""
        for start, character in enumerate(text):
            found = _parse(text, start + 1) if character == "[" else None
            if found is not None:
                return found
            # Else a bracket of the log's own, such as around the level.
        raise ExportError(f"no record in square brackets: {text}")


def _items(fields: dict[str, Any], prefix: str) -> list[str]:
    items: list[str] = []
    for name, value in sorted(fields.items(), reverse=True):
        key = prefix + name.translate(_SPECIAL)
        items += _items(value, f"{key}.") if isinstance(value, dict) else [f"{key}={json.dumps(value)}"]
    return items


def _parse(text: str, position: int) -> dict[str, Any] | None:
    """Read `key=value | key.key=value]`; None where it is something else."""
    found: dict[str, Any] = {}
    while True:
        inner, ends = found, "."
        while ends == ".":
            match = _KEY.match(text, position)
            if match is None:
                return None
            ends, position = match[2], match.end()
            key = re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL)
            if ends == ".":
                inner = inner.setdefault(key, {})
                if not isinstance(inner, dict):
                    return None
        try:
            inner[key], position = _DECODER.raw_decode(text, position)
        except ValueError:
            return None
        if text.startswith("]", position):
            return found
        if not text.startswith(_SEPARATOR, position):
            return None
        position += len(_SEPARATOR)
