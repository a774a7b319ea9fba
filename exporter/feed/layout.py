"""The format of a feed file, byte by byte, and the limits that both sides keep.

Used in the training process by the encoder and in the sidecar by the decoder. A file is one Snapshot: a header of 52 bytes, little-endian whatever the machine, and three sections of
JSON (UTF-8), one after the other without a gap.

    offset size
         0    8 magic: 89 "EXPF" 0d 0a 1a; a transfer that takes it for text damages it
         8    2 format version, 1; a reader refuses every version that it does not know
        10    2 flags, 0
        12    4 checksum: CRC-32 (zlib's) of the whole file with these four bytes as 0
        16   16 process id; in hexadecimal digits it is the file's name
        32    8 sequence: 1 for the first snapshot of a process, one more for each that was written
        40    4 length of section 1: {"process": {...}, "stats": [definition, ...]}
        44    4 length of section 2: {"windows": [last closed window or null, ...]}
        48    4 length of section 3: {"written": ..., ..., "stats": [totals, ...]}
        52      section 1

The three lists have one item for each Stat, in the same order. Sections 1 and 2 rarely change, so that a writer
keeps their bytes and a reader what it made of them. In JSON a key of a later version is passed over; a missing
key has the default of the contract (`snapshot`, `recording.values`) where that has one. Numbers are finite:
there is no NaN and no infinity, absent is null or no key at all. Nothing follows section 3.

The file is written by the process whose id it carries, never in place: a new one is renamed over it about once a
second. So a reader that has opened it reads one whole snapshot, at worst one that is just being replaced, which
is harmless, since each snapshot is complete and the next is never more than a look away.

Example: process 000102…0f (run "r", rank 0) has recorded three values of the Stat "loss", two of them in the
last closed window, and lost one snapshot to a full disk. Its second snapshot has 621 bytes:

     0  89 45 58 50 46 0d 0a 1a   magic
     8  01 00 00 00 fa 25 2e 55   version 1, flags 0, checksum 0x552e25fa
    16  00 01 02 03 04 05 06 07   process id
    24  08 09 0a 0b 0c 0d 0e 0f
    32  02 00 00 00 00 00 00 00   sequence 2
    40  48 01 00 00 5e 00 00 00   328 bytes, 94 bytes,
    48  93 00 00 00               147 bytes

    {"process":{"pid":7,"started":1700000000.0,"run":"r","rank":0,"local_rank":null,"role":"trainer","node":"",
    "labels":[],"version":"","run_given":true,"trains":false},"stats":[{"name":"loss","aggregations":["mean"],"window_seconds":60.0,
    "window_samples":null,"unit":null,"help":"","labels":[],"buckets":[],"stale_seconds":300.0}]}
    {"windows":[{"started":1700000000.0,"ended":1700000060.0,"samples":2,"values":{"mean":1.25}}]}
    {"written":1700000061.5,"flush_seconds":1.0,"final":false,"dropped":{"write_failed":1},"stats":[{"count":3,"sum":4.5,
    "last_sample":1700000061.25}]}

(in the file the JSON has no line ends). A total may also have "bucket_counts", "rejected" and "overflows".
Section 3 of a process that has logged events also has, before "stats",

    "events":{"counts":[[type, severity, events, time of the latest or null], ...],
    "suppressed":[[type, reason, events], ...],"delivered":[[handler, events], ...],
    "dropped":[[handler, reason, events], ...]}

and that of a process that tells of its training (`TrainingReading`, field by field)

    "training":{"facts":[[name, value], ...],"phase":"forward","phases":{"init":1.5,"forward":0.25},"loop":1,
    "steps":3,"segments":[[loop, first step, last step, seconds], ...],"finished":false,"failure":"",
    "history_until":51234.56,"history_phases":["forward","backward"],"history":[0,125000,1,240000,0,95000],
    "phase_since":1700000060.0,"work_seconds":0.25,
    "open_seconds":0.0,"failed_seconds":0.0,"committed_seconds":0.0,"first_step":0,"step":3}
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
MAX_COUNT = (1 << 63) - 1
