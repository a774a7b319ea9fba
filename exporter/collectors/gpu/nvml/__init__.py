"""NVML child process and the pipe protocol: each line is a JSON object with the key `kind`.

From the child: `progress` (the child is responsive), `machine` (NVML is initialised), `sample` (readings), `slow` (a slow call),
`exit` (the child ends, with the reason). To the child: `start` (options, the first message), `reattach` (use a skipped GPU
again), `stop` (exit in order). After the exit of either side the pipe ends; an incomplete line is dropped.
"""

from __future__ import annotations

import json
import os
from typing import Any


class ProtocolError(ValueError):
    """Bytes that are not a message; the rest of the pipe cannot be read."""


def encode(message: dict[str, Any]) -> bytes:
    """Return the bytes of a message; raises ValueError for a number that is not finite."""
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


class MessageReader:
    """Reader of the messages of a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._rest = b""

    def receive(self) -> list[dict[str, Any]] | None:
        """Read from the pipe and return complete messages; may block; None at the end; raises ProtocolError."""
        data = os.read(self.descriptor, 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [parse(line) for line in lines]


def parse(line: bytes) -> dict[str, Any]:
    """Return the message of a line; raises ProtocolError."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ProtocolError(f"no JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("no object with a kind")
    return message
