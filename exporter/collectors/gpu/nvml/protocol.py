"""The pipe between the sidecar and the NVML child: a JSON object with the key `kind` a line.

From the child: `progress` (it is alive, and starts), `machine` (NVML answers), `sample` (values), `slow` (a call takes
long), `bye` (it ends, and why). To the child: `start` (its options, first of all), `admit` (use the GPU again that was
left out), `release` (end in order). When the other side dies, the file ends; half a line is dropped.
"""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 4 << 20
"""A message about 16 GPUs with every detail has about 200 KiB."""


class ProtocolError(ValueError):
    """Bytes that are no message; nothing after them can be understood."""


def encode(message: dict[str, Any]) -> bytes:
    """Give the bytes of a message; ValueError for a number that is not finite."""
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


class Decoder:
    """Bytes in pieces of any length to messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take what was read and give the messages that are complete now.

        Raises:
            ProtocolError: The bytes are no messages.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_BYTES:
            raise ProtocolError("a message without an end")
        return [_parse(line) for line in lines]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ProtocolError(f"no JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("no object with a kind")
    return message
