"""The pipe between the sidecar and the NVML child: JSON objects, each behind its length.

Used on both sides. A message is a dictionary with the key `kind`; on the wire it is four bytes of length (big
endian) and that many bytes of JSON in UTF-8, without NaN. No threads; whoever holds the descriptor reads.

From the child: `progress` (it is alive, and starts), `machine` (NVML answers), `sample` (values), `slow` (a
call takes long), `bye` (it ends, and why). To the child: `start` (its options, first of all), `admit` (use the
GPU again that was left out), `release` (end in order).

What holds when the other side dies: the reader sees the end of the file; half a message is dropped.
"""

from __future__ import annotations

import json
import struct
from typing import Any

_LENGTH = struct.Struct(">I")

MAX_BYTES = 4 << 20
"""A message about 16 GPUs with every detail has about 200 KiB."""


class ProtocolError(ValueError):
    """Bytes that are no message; nothing after them can be understood."""


def encode(message: dict[str, Any]) -> bytes:
    """Give the bytes of a message.

    Raises:
        ValueError: It holds a number that is not finite, or is longer than any message may be.
    """
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Bytes in pieces of any length to messages."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take what was read and give the messages that are complete now.

        Raises:
            ProtocolError: The bytes are no messages.
        """
        self._rest += data
        found = []
        start = 0
        while len(self._rest) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest, start)
            if length > MAX_BYTES:
                raise ProtocolError(f"a message of {length} bytes")
            end = start + _LENGTH.size + length
            if end > len(self._rest):
                break
            found.append(_parse(self._rest[start + _LENGTH.size : end]))
            start = end
        self._rest = self._rest[start:]
        return found


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ProtocolError(f"no JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("no object with a kind")
    return message


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
