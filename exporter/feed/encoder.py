"""The format of a feed file, byte by byte, and the training process's side of it: a snapshot to bytes.

What comes in is the recording thread's Snapshot; no file is touched. What is the same as at the last flush is kept as
text, so that most flushes render little more than totals.

A file is one Snapshot: a header of 52 bytes, little-endian whatever the machine, and three sections of JSON (UTF-8), one
after the other without a gap.

    offset size
         0    8 magic: 89 "EXPF" 0d 0a 1a; a transfer that takes it for text damages it
         8    2 format version; a reader refuses every one that it does not know
        10    2 flags, 0
        12    4 checksum: CRC-32 (zlib's) of the whole file with these four bytes as 0
        16   16 process id; in hexadecimal digits it is the file's name
        32    8 sequence: 1 for the first snapshot of a process, one more for each that was written
        40    4 length of section 1: {"process": {...}, "stats": [definition, ...]}
        44    4 length of section 2: {"windows": [last closed window or null, ...]}
        48    4 length of section 3: {"written": ..., ..., "stats": [totals, ...]}
        52      section 1

The three lists have one item for each Stat, in the same order. Keys are the fields of the contract's types (`snapshot`,
`recording.values`); what is the default there is left out, a key of a later version is passed over, and a mapping whose
keys are pairs is a list of rows: `"counts":[[type, severity, events], ...]`; `exponential` is a list of buckets and one of
their counts. Numbers are finite: absent is null or no key
at all. Nothing follows section 3.

The file is written by the process whose id it carries, never in place: a new one is renamed over it about once a
second. So a reader that has opened it reads one whole snapshot, at worst one that is just being replaced, which
is harmless, since each snapshot is complete and the next is never more than a look away.

Example: process 000102…0f (run "r", rank 0) has recorded three values of the Stat "loss", two of them in the
last closed window, and lost one snapshot to a full disk. Its second snapshot has 392 bytes:

     0  89 45 58 50 46 0d 0a 1a   magic
     8  02 00 00 00 d5 f0 c6 71   version 2, flags 0, checksum 0x71c6f0d5
    16  00 01 02 03 04 05 06 07   process id
    24  08 09 0a 0b 0c 0d 0e 0f
    32  02 00 00 00 00 00 00 00   sequence 2
    40  71 00 00 00 5e 00 00 00   113 bytes, 94 bytes,
    48  85 00 00 00               133 bytes

    {"process":{"pid":7,"started":1700000000.0,"run":"r","rank":0},"stats":[{"name":"loss",
    "aggregations":["mean"]}]}
    {"windows":[{"started":1700000000.0,"ended":1700000060.0,"samples":2,"values":{"mean":1.25}}]}
    {"written":1700000061.5,"flush_seconds":1.0,"dropped":{"write_failed":1},"stats":[{"count":3,"sum":4.5,
    "last_sample":1700000061.25}]}

(in the file the JSON has no line ends).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from json import JSONEncoder
from math import isfinite
from time import sleep
from typing import Any
from zlib import crc32

from exporter.errors import FeedFormatError
from exporter.feed.snapshot import Snapshot
from exporter.recording.values import StatReading

MAGIC = b"\x89EXPF\r\n\x1a"
"""Not text in any encoding; a transfer that changes line ends or cuts at Ctrl-Z damages it (PNG's idea)."""
VERSION = 2

HEADER = struct.Struct("<8sHHI16sQIII")
"""magic, version, flags (0), checksum, process id, sequence, lengths of the three sections."""
CHECKSUM = struct.Struct("<I")
CHECKSUM_OFFSET = 12

MAX_BYTES = 4 << 20
"""A larger snapshot is neither written nor read: some 10,000 Stats with the default aggregations. Beyond it a process
leaves its newest Stats out, counts them and says which."""
MAX_COUNT = (1 << 63) - 1
_BATCH = 32
"""Values rendered between two chances for the job's threads to take the interpreter lock: a tenth of a millisecond."""

_dumps: Callable[[object], str] = JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False
).encode


def encode(snapshot: Snapshot) -> bytes:
    """Render one snapshot; a writer of many uses one `Encoder`."""
    return Encoder().encode(snapshot)


class Encoder:
    """Encodes the successive snapshots of one process."""

    def __init__(self) -> None:
        self._definitions = _Column(lambda definition: _body(definition, "min_samples"))
        self._windows = _Column(lambda window: None if window is None else _body(window))
        self._totals = _Column(_total)

    def encode(self, snapshot: Snapshot) -> bytes:
        """Render the whole file; `FeedFormatError` for text that is not Unicode, and values outside the contract."""
        try:
            process_id = bytes.fromhex(snapshot.process.id)
            sections = self._sections(snapshot)
            header = bytearray(
                HEADER.pack(MAGIC, VERSION, 0, 0, process_id, snapshot.sequence, *map(len, sections))
            )
        except (AttributeError, TypeError, ValueError, OverflowError, struct.error) as error:
            raise FeedFormatError(f"a snapshot that cannot be written: {error}", reason="content") from error
        checksum = crc32(header)
        for section in sections:
            checksum = crc32(section, checksum)
        CHECKSUM.pack_into(header, CHECKSUM_OFFSET, checksum)
        return b"".join((header, *sections))

    def _sections(self, snapshot: Snapshot) -> tuple[bytes, bytes, bytes]:
        recording = snapshot.recording
        definitions = self._definitions.render([stat.definition for stat in recording.stats])
        windows = self._windows.render([stat.window for stat in recording.stats])
        totals = self._totals.render(recording.stats)
        process = _dumps(_body(snapshot.process, "id"))  # the id stands in the header
        rest = _body(snapshot, "process", "sequence", "recording") | _body(recording, "stats")
        return (
            b'{"process":%b,"stats":[%b]}' % (process.encode(), definitions),
            b'{"windows":[%b]}' % windows,
            b'%b,"stats":[%b]}' % (_dumps(rest).encode()[:-1], totals),
        )


class _Column:
    """One value of every Stat as JSON; a batch in which nothing is another object than the last time is kept."""

    def __init__(self, to_json: Callable[[Any], object]) -> None:
        self._to_json = to_json
        # by the identities of its values, which are kept so that they stay what they are
        self._batches: dict[tuple[int, ...], tuple[Sequence[object], str]] = {}

    def render(self, values: Sequence[object]) -> bytes:
        """Give them, joined by commas."""
        known, self._batches = self._batches, {}
        texts = []
        for start in range(0, len(values), _BATCH):
            batch = values[start : start + _BATCH]
            key = tuple(map(id, batch))
            kept = known.get(key)
            if kept is None:
                kept = batch, _dumps([self._to_json(value) for value in batch])[1:-1]
                sleep(0)
            self._batches[key] = kept
            texts.append(kept[1])
        return ",".join(texts).encode()


def _body(value: Any, *without: str) -> dict[str, object]:
    """Give the fields of one of the contract's types, without those that are the default."""
    body: dict[str, object] = {}
    for each in fields(value):
        item = getattr(value, each.name)
        if each.name not in without and item != each.default and (item or each.default_factory is MISSING):
            plain = _plain(item)
            if plain is not None or item is None:
                body[each.name] = plain
    return body


def _plain(item: Any) -> Any:
    """Make of a field what JSON takes; a number that is not finite is None."""
    if isinstance(item, float):
        return _finite(item)
    if isinstance(item, frozenset):
        return sorted(each.value for each in item)
    if isinstance(item, Mapping):
        pairs = [(key, number) for key, value in item.items() if (number := _plain(value)) is not None]
        if pairs and isinstance(pairs[0][0], tuple):
            return [[*key, number] for key, number in pairs]
        return {getattr(key, "value", key): number for key, number in pairs}
    return _body(item) if is_dataclass(item) else item


def _total(stat: StatReading) -> dict[str, object]:
    # The hottest: most are three numbers long.
    row: dict[str, object] = {"count": stat.count, "sum": _finite(stat.sum)}
    if stat.last_sample is not None:
        row["last_sample"] = _finite(stat.last_sample)
    if stat.bucket_counts:
        row["bucket_counts"] = stat.bucket_counts
    if stat.exponential:
        row["exponential"] = [list(stat.exponential), list(stat.exponential.values())]
    if stat.rejected:
        row["rejected"] = stat.rejected
    if stat.overflows:
        row["overflows"] = stat.overflows
    if stat.value is not None:
        row["value"] = _finite(stat.value)
    return row


def _finite(number: float | None) -> float | None:
    return None if number is None or not isfinite(number) else float(number)
