"""The file exporter: a job's spans and events as lines of JSON.

Used in the training process, on its own thread. Each record is on disk at once, the start of a span with the next. A
run's file is never lost to the next one: it is appended to, or rotated.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from exporter.errors import EventsLostError, ExportError
from exporter.recording.handlers.lines_file import LinesFile, filled
from exporter.recording.identity import identity
from exporter.training.exporters.json_records import BaseJsonExporter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class FileExporter(BaseJsonExporter):
    """Appends records to a file.

    Args:
        file_path: `{run}`, `{rank}` and `{pid}` in it stand for those of the process. Missing directories are made.
        rotate: Whether a file that is there already is moved aside when the job begins (`telemetry.json` becomes
            `telemetry.json.1`, and so on); else it is appended to.
        max_bytes: A file that would become larger is rotated.
        backups: Rotated files that are kept; 0 keeps none.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `max_bytes` is below 1024, or `backups` is not from 0 to 1000.
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
        self._path: Path | None = None

    def initialize(self) -> None:
        """Make the directory and the file, so that one that cannot be written to is known early.

        Raises:
            ExportError: It cannot be written to.
        """
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
        if self._path is None:
            raise ExportError("File exporter not initialized or already closed!")
        line = json.dumps(json_dict, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
        try:
            self._file.append(self._path, [line])
        except EventsLostError as error:
            raise ExportError(str(error)) from error
