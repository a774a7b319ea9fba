r"""The logger exporter: a job's spans and events as lines of a logger, `[key=value | key.key=value]`.

Used in the training process, on its own thread; the logger's handlers run there. Values are JSON. In a key, a dot, an
equals sign, a vertical bar, a bracket and a backslash of its own are written with a backslash before them, so that any
key survives, and `deserialize_log` reads every line back.
"""

from __future__ import annotations

import json
import logging

from exporter.errors import ExportError
from exporter.training.exporters.json_records import BaseJsonExporter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SEPARATOR = " | "
_SPECIAL = str.maketrans({each: f"\\{each}" for each in "\\.=|[]"})
_DECODER = json.JSONDecoder()


class LoggerExporter(BaseJsonExporter):
    """Logs each record as one line, at the level INFO.

    Args:
        logger: Where to.
    """

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
        """Read a line back, whatever the logging has put before and after it.

        Raises:
            ExportError: There is none in the text.
        """
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
        if isinstance(value, dict):
            items += _items(value, f"{key}.")
        else:
            items.append(f"{key}={json.dumps(value)}")
    return items


def _parse(text: str, position: int) -> dict[str, Any] | None:
    """Read `key=value | key=value]`; None where it is something else."""
    found: dict[str, Any] = {}
    while True:
        keys, position = _parse_keys(text, position)
        try:
            value, position = _DECODER.raw_decode(text, position)
        except ValueError:
            return None
        inner = found
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        if not keys or not isinstance(inner, dict):
            return None
        inner[keys[-1]] = value
        if text.startswith("]", position):
            return found
        if not text.startswith(_SEPARATOR, position):
            return None
        position += len(_SEPARATOR)


def _parse_keys(text: str, position: int) -> tuple[list[str], int]:
    """Read `key.key=`; no keys where it is something else."""
    keys: list[str] = []
    key = ""
    while position < len(text):
        character = text[position]
        position += 1
        if character == "\\":
            key += text[position : position + 1]
            position += 1
        elif character == "=":
            return [*keys, key], position
        elif character == ".":
            keys.append(key)
            key = ""
        elif character in "[]|":
            break
        else:
            key += character
    return [], position
