"""The NVML child, and what goes through the pipe between it and the sidecar: a JSON object with the key `kind` a line.

From the child: `progress` (it is alive, and starts), `machine` (NVML answers), `sample` (values), `slow` (a call takes
long), `bye` (it ends, and why). To the child: `start` (its options, first of all), `admit` (use the GPU again that was
left out), `release` (end in order). When the other side dies, the file ends; half a line is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any


class ProtocolError(ValueError):
    """Bytes that are no message; nothing after them can be understood."""


def encode(message: dict[str, Any]) -> bytes:
    """Give the bytes of a message; ValueError for a number that is not finite."""
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def messages(descriptor: int) -> Iterator[dict[str, Any]]:
    """Wait for messages until the pipe ends; raises ProtocolError: the bytes are no messages."""
    rest = b""
    while data := os.read(descriptor, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        yield from map(parse, lines)


def parse(line: bytes) -> dict[str, Any]:
    """Read a message; raises ProtocolError."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ProtocolError(f"no JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("no object with a kind")
    return message
