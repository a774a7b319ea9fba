"""NVML child process, and the protocol of its pipes: each line is a JSON object with the key `kind`.

From the child: `progress` (the child is responsive), `machine` (NVML is initialized), `sample` (readings of a pass),
`slow` (a slow call), `exit` (the reason of the exit). To the child: `start` (the first message, with the options),
`reattach` (use a skipped GPU again), `stop` (exit normally). A pipe ends when either process exits; an incomplete
last line is ignored. A `sample` of one GPU, on several lines for legibility:

    {"kind": "sample", "time": 512.25, "gpus": [
      {"index": 0, "uuid": "GPU-1f2e…", "job_index": 0, "xids": {"79": [1, 1767225600.0]},
       "values": {"power_watts": [[[], 305.1]], "clock_hertz": [[["sm"], 1.98e9], [["memory"], null]]},
       "replaced": {"nvlink_links": [[["active"], 18], [["inactive"], 0]]}}]}

Each reading has pairs of label values and a number; null means that the series has become absent. All earlier values of a reading
in `replaced` are discarded. `failure` stands in place of the readings of a GPU that is down.
"""

from __future__ import annotations

import json
import os
from typing import Any


class ProtocolError(ValueError):
    """Bytes that are not a message."""


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as bytes. Raises ValueError for a number that is not finite."""
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


class MessageReader:
    """Reader of the messages of a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._incomplete_line = b""

    def receive(self) -> list[dict[str, Any]] | None:
        """Read once from the pipe, which may block. Return the complete messages, or None at the end of the pipe.

        Raises:
            ProtocolError: A line is not a message.
        """
        data = os.read(self.descriptor, 1 << 16)
        if not data:
            return None
        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        return [parse(line) for line in lines]


def parse(line: bytes) -> dict[str, Any]:
    """Return the message of a line. Raises ProtocolError."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("not an object with the key kind")
    return message
