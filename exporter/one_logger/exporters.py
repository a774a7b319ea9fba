"""Span exporters: base classes, JSON files and loggers.

The records are one-logger's JSON objects. An exporter of JSON stores the start of a span until the next record. If the next record is the
end of the same span, both are written as a single record of the type `complete`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from exporter.errors import ExportError
from exporter.one_logger.names import RecordType
from exporter.recording.handlers import LinesFile, expand_path
from exporter.recording.recorder import RECORDER
from exporter.training.attributes import Attributes
from exporter.training.spans import ErrorEvent, Event, Span, TelemetryDataError

__all__ = ["BaseExporter", "BaseJsonExporter", "Exporter", "FileExporter", "LoggerExporter"]


class BaseExporter:
    """Interface of span exporters. The methods receive copies, which no other thread changes.

    A method raises `ExportError` on failure, and is then called again with the same arguments. `close()` is called at the end of each
    application, and `initialize()` again if a record follows. `Exporter` is another name of this class.

    A subclass can define two more methods. `write_out()` writes buffered records: it is called when the queue is empty and after every 256
    records, and half a minute after a failure. `shut_down()` is called once, after the last `close()`. An exporter with a buffer must limit
    the size of the buffer, and count the records that it discards in `dropped_records`.

    Attributes:
        application_name: Name of the application, which a configured provider sets.
        dropped_records: Number of records that the exporter accepted and then discarded, since its creation. Counted in
            `training_span_exporter_dropped_total` with the reason `rejected`.
    """

    ready = closed = False
    application_name: str | None = None
    dropped_records = 0

    def initialize(self) -> None:
        """Prepare for records. Called again after a failure, and if a record follows after `close`."""
        self.ready, self.closed = True, False

    def export_start(self, span: Span) -> None:  # noqa: ARG002  # part of the interface
        """Export the start of a span."""
        self._check()

    def export_stop(self, span: Span) -> None:  # noqa: ARG002
        """Export the stop of a span."""
        self._check()

    def export_event(self, event: Event, span: Span) -> None:  # noqa: ARG002
        """Export an event of a span."""
        self._check()

    def export_error(self, event: ErrorEvent, span: Span) -> None:  # noqa: ARG002
        """Export an error of the application."""
        self._check()

    def export_telemetry_data_error(self, error: TelemetryDataError) -> None:  # noqa: ARG002
        """Export a notice that records are missing."""
        self._check()

    def close(self) -> None:
        """Write all buffered records and release all resources."""
        self.ready, self.closed = False, True

    def _check(self) -> None:
        if self.closed:
            raise ExportError("Exporter is closed and cannot be used anymore.")
        if not self.ready:
            raise ExportError("Exporter not initialized. Call initialize first.")


Exporter = BaseExporter

METHODS = (
    "initialize",
    "export_start",
    "export_stop",
    "export_event",
    "export_error",
    "export_telemetry_data_error",
    "close",
)


def missing_methods(exporter: object) -> list[str]:
    """Return the exporter methods that are missing in an object."""
    return [name for name in METHODS if not callable(getattr(exporter, name, None))]


class BaseJsonExporter(BaseExporter):
    """Exporter of JSON records; a derived class implements `_write`."""

    def __init__(self) -> None:
        super().__init__()
        self._record_count = 0
        self._pending_start: Span | None = None
        self._rank = RECORDER.process.identity().rank

    def initialize(self) -> None:
        """Prepare for records. A rank above 0 replaces the rank that the process had when the exporter was created."""
        super().initialize()
        # Without a launcher, the rank is None until the training starts, and then 0. An exporter that was created before the start
        # omits the rank in all records.
        self._rank = RECORDER.process.identity().rank or self._rank

    def export_start(self, span: Span) -> None:
        """Store the start until the next record, and write the stored start of an outer span."""
        super().export_start(span)
        self._write_pending_start()
        self._pending_start = span

    def export_stop(self, span: Span) -> None:
        """Write the stop, or the complete span if its start is still stored."""
        super().export_stop(span)
        if span.stop_event is None:
            raise ExportError(f"Span {span.id} has no stop event")
        if self._pending_start is not None and self._pending_start.id == span.id:
            self._record_span(span, RecordType.COMPLETE)
            self._pending_start = None
            return
        self._write_pending_start()
        self._record_span(span, RecordType.STOP)

    def export_event(self, event: Event, span: Span) -> None:
        """Write an event."""
        super().export_event(event, span)
        self._record_event(RecordType.EVENT, event, span)

    def export_error(self, event: ErrorEvent, span: Span) -> None:
        """Write an error of the application."""
        super().export_error(event, span)
        self._record_event(RecordType.APPLICATION_ERROR, event, span)

    def export_telemetry_data_error(self, error: TelemetryDataError) -> None:
        """Write a notice that records are missing."""
        super().export_telemetry_data_error(error)
        self._record(RecordType.TELEMETRY_DATA_ERROR, error=_event_as_json(error))

    def close(self) -> None:
        """Write the stored start, if any."""
        try:
            if self.ready:
                self._write_pending_start()
        finally:
            super().close()

    def _write(self, json_dict: dict[str, Any]) -> None:
        """Write a record. Raises ExportError on failure; the record is then repeated."""
        raise NotImplementedError

    def _write_pending_start(self) -> None:
        """Write the stored start of a span, if any."""
        if self._pending_start is not None:
            self._record_span(self._pending_start, RecordType.START)
            self._pending_start = None

    def _record_event(self, kind: RecordType, event: Event, span: Span) -> None:
        """Write an event of a span, after the stored start."""
        self._write_pending_start()
        self._record(kind, span_id=str(span.id), event=_event_as_json(event))

    def _record_span(self, span: Span, kind: RecordType) -> None:
        """Write the start or the stop of a span, or the complete span. Fields without a value are omitted."""
        parent, attributes = span.exported_parent, _values(span.attributes)
        fields = {
            "id": str(span.id),
            "name": span.name_str,
            "parent_id": None if parent is None else str(parent.id),
            "attributes": attributes or None,
            "start_event": None if kind is RecordType.STOP else _event_as_json(span.start_event),
            "stop_event": None if kind is RecordType.START else _event_as_json(span.stop_event),
        }
        self._record(kind, **{name: value for name, value in fields.items() if value is not None})

    def _record(self, kind: RecordType, **fields: Any) -> None:
        """Write a record with a number, the process and, if known, the rank and the application."""
        process, count = RECORDER.process.identity(), self._record_count + 1
        record = {"type": kind.value, **fields, "count": count, "pid": os.getpid()}
        if self._rank is not None:
            record |= {"rank": self._rank, "node_name": process.node}
        if self.application_name is not None:
            record["application_name"] = self.application_name
        self._write(record)
        self._record_count = count  # after the write, so that a repeated record has the same number


def _event_as_json(event: Event | None) -> dict[str, Any] | None:
    """Return the name and the attributes of an event, or None for None."""
    return None if event is None else {"name": event.name_str, "attributes": _values(event.attributes)}


def _values(attributes: Attributes) -> dict[str, Any]:
    """Return the values of attributes by name, with infinities and NaN as text."""
    return {name: _finite(value) for name, value in attributes.copied().to_json().items()}


def _finite(value: Any) -> Any:
    """Return infinities and NaN as text, because JSON does not support them. Other values are unchanged."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return [_finite(item) for item in value] if isinstance(value, list) else value


class FileExporter(BaseJsonExporter):
    """Exporter that appends records to a file.

    Args:
        file_path: Path of the file, with the placeholders `{run}`, `{rank}` and `{pid}`. Missing directories are created.
        max_bytes: Size at which the file is renamed (`telemetry.json` to `telemetry.json.1`, and so on); at least 1024.
        backups: Number of renamed files to keep, at most 1000.
    """

    def __init__(self, file_path: str | Path, *, max_bytes: int = 1 << 30, backups: int = 5) -> None:
        super().__init__()
        self._pattern = os.path.abspath(file_path)  # noqa: PTH100  # the job may change the working directory
        self._file = LinesFile(max_bytes=max_bytes, backups=backups)
        self._path = Path()

    def initialize(self) -> None:
        """Create the directory and the file.

        Raises:
            ExportError: The file cannot be created.
        """
        process = RECORDER.process.identity()
        self._path = expand_path(self._pattern, process.run, process.rank)
        with self._os_errors_as_export_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        super().initialize()

    def _write(self, json_dict: dict[str, Any]) -> None:
        line = json.dumps(json_dict, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
        with self._os_errors_as_export_errors():
            self._file.append(self._path, line)

    @contextmanager
    def _os_errors_as_export_errors(self) -> Iterator[None]:
        """Raise an OSError of the file as an ExportError."""
        try:
            yield
        except OSError as error:
            raise ExportError(f"{self._path}: {error.strerror or error}") from error


_SEPARATOR = " | "
_KEY = re.compile(r"([\w.-]+)=")
_DECODER = json.JSONDecoder()


class LoggerExporter(BaseJsonExporter):
    """Exporter that logs each record as a line `[key=value | key.key=value]` at the level INFO, with values in JSON.

    A mapping with a key of other characters than letters, digits, `_` and `-` is written as a single JSON value, so that
    `deserialize_log` can parse the line.
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
        """Return the record in a log line. Text before and after the record is ignored.

        Raises:
            ExportError: The line contains no record.
        """
        for start, character in enumerate(text):
            if character == "[":
                try:
                    return _parsed(text, start + 1)
                except (ValueError, AttributeError):  # other text in brackets, such as the level of the line
                    continue
        raise ExportError(f"the line has no record in square brackets: {text}")


def _items(fields: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield `key=value` for each field, in descending order of the keys. A key in a nested mapping is `outer.inner`."""
    for name, value in sorted(fields.items(), reverse=True):
        if isinstance(value, dict) and value and all(re.fullmatch(r"[\w-]+", key) for key in value):
            yield from _items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={json.dumps(value)}"


def _parsed(text: str, position: int) -> dict[str, Any]:
    """Parse `key=value | key.key=value]`. Raises ValueError or AttributeError for any other text."""
    record: dict[str, Any] = {}
    while match := _KEY.match(text, position):
        *path, name = match[1].split(".")
        inner = record
        for part in path:
            inner = inner.setdefault(part, {})
        value, position = _DECODER.raw_decode(text, match.end())
        # Raises AttributeError if the outer key has a value that is not a mapping.
        inner.update({name: value})
        if text.startswith("]", position):
            return record
        if text.startswith(_SEPARATOR, position):
            position += len(_SEPARATOR)
    raise ValueError(text)
