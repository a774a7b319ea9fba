"""The bytes around a snapshot: header, sections and the limits that both sides keep.

Used in the training process by the encoder and in the sidecar by the decoder; `codec` describes the whole
format with a worked example. No I/O, no threads; standard library only, and little of that, since every
training process imports it.
"""

from __future__ import annotations

import struct

MAGIC = b"\x89EXPF\r\n\x1a"
"""Not text in any encoding; a transfer that changes line ends or cuts at Ctrl-Z damages it (PNG's idea)."""
VERSION = 1

HEADER = struct.Struct("<8sHHI16sQIII")
"""magic, version, flags (0), checksum, process id, sequence, lengths of the three sections."""
CHECKSUM = struct.Struct("<I")
CHECKSUM_OFFSET = 12

MAX_BYTES = 4 << 20
"""A larger snapshot is neither written nor read: some 6,000 Stats with the default aggregations. Beyond it a process
leaves its newest Stats out, counts them and says which."""
MAX_STATS = 65_536
MAX_EVENT_ROWS = 4096
"""Rows of each list about events: many times what a writer makes."""
MAX_COUNT = (1 << 63) - 1
MAX_IDENTITY_TEXT = 1024
"""Characters of the run's name, the node's, the role's and of descriptive labels."""
