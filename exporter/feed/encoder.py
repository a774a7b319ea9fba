"""Feed file format and encoder.

The encoder returns bytes and writes no file. The text of unchanged parts is reused, so most flushes render only the totals.

A file contains a Snapshot: a header of 52 bytes, little-endian on every machine, and three adjacent sections of JSON (UTF-8).

    offset size
         0    8 magic: 89 "EXPF" 0d 0a 1a; a transfer as text damages the magic
         8    2 format version; a reader refuses unknown versions
        10    2 flags, 0
        12    4 checksum: CRC-32 (zlib's) of the whole file with these four bytes as 0
        16   16 process id; the file name contains the id in hexadecimal digits
        32    8 sequence: 1 for the first snapshot of a process, incremented with each write
        40    4 length of section 1: {"process": {...}, "stats": [definition, ...]}
        44    4 length of section 2: {"windows": [last closed window or null, ...]}
        48    4 length of section 3: {"written": ..., ..., "stats": [totals, ...]}
        52      section 1

The three lists have an item for each Stat, in the same order. Keys are the fields of the contract's types (`snapshot`,
`recording.values`). Default values are omitted, and a reader ignores unknown keys. A mapping whose keys are pairs is a list of rows:
`"counts":[[type, severity, events], ...]`. `exponential` is a list of buckets and a list of counts. Numbers are finite; an absent
number is null or omitted. No bytes follow section 3.

The process replaces its file by a rename, about once a second. A reader that has opened the file therefore reads a complete
snapshot, which may be the previous snapshot. On a full disk, the process instead writes its final snapshot into the existing file, so that a
reader may find a damaged file for a moment.

Example: process 000102…0f (run "r", rank 0) has recorded three values of the Stat "loss", two of them in the last closed
window, and lost a snapshot to a full disk. The second snapshot has 392 bytes:

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

The file contains no line breaks within the sections.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from json import JSONEncoder
from math import isfinite
from time import sleep
from typing import Any
from zlib import crc32

from exporter.errors import FeedFormatError
from exporter.feed.snapshot import Snapshot
from exporter.recording.values import ProcessIdentity, StatReading, TrainingReading

MAGIC = b"\x89EXPF\r\n\x1a"
"""Magic number. The first byte is not valid UTF-8. As in PNG, a transfer that converts line ends or stops at Ctrl-Z damages it."""
VERSION = 2
"""Version of the file format."""

HEADER = struct.Struct("<8sHHI16sQIII")
"""Magic, version, flags (0), checksum, process id, sequence, lengths of the three sections."""
CHECKSUM = struct.Struct("<I")
CHECKSUM_OFFSET = 12

MAX_BYTES = 4 << 20
"""Maximum size of a snapshot in bytes, about 10,000 Stats with the default aggregations. Further Stats are omitted, counted and named
in a log line."""
MAX_COUNT = (1 << 63) - 1
"""Largest count and sequence number that a reader accepts."""
_BATCH_VALUES = 32
"""Number of values that are rendered before the job's threads may take the interpreter lock, about 0.1 ms."""

_dumps: Callable[[object], str] = JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False
).encode


def encode(snapshot: Snapshot) -> bytes:
    """Return the bytes of a snapshot. For successive snapshots, use an `Encoder`."""
    return Encoder().encode(snapshot)


class Encoder:
    """Encoder of the successive snapshots of a process."""

    def __init__(self) -> None:
        self._definitions = _Column(lambda definition: _body(definition, "min_samples"))
        self._windows = _Column(lambda window: None if window is None else _body(window))
        self._totals = _Column(_total)
        self._intervals = _Column(lambda group: group, batch=1)
        self._process: ProcessIdentity | None = None
        self._process_json = b""  # of `_process`

    def encode(self, snapshot: Snapshot) -> bytes:
        """Return the bytes of a snapshot. Raises `FeedFormatError` for invalid Unicode and for values outside the contract."""
        try:
            process_id = bytes.fromhex(snapshot.process.id)
            sections = self._sections(snapshot)
            header = bytearray(
                HEADER.pack(MAGIC, VERSION, 0, 0, process_id, snapshot.sequence, *map(len, sections))
            )
        except (AttributeError, TypeError, ValueError, OverflowError, struct.error) as error:
            raise FeedFormatError(f"cannot encode the snapshot: {error}", reason="content") from error
        checksum = crc32(header)
        for section in sections:
            checksum = crc32(section, checksum)
        CHECKSUM.pack_into(header, CHECKSUM_OFFSET, checksum)
        return b"".join((header, *sections))

    def _sections(self, snapshot: Snapshot) -> tuple[bytes, bytes, bytes]:
        """Return the three sections of the file."""
        recording = snapshot.recording
        definitions = self._definitions.render([stat.definition for stat in recording.stats])
        windows = self._windows.render([stat.window for stat in recording.stats])
        totals = self._totals.render(recording.stats)
        other_fields = _body(snapshot, "process", "sequence", "recording") | _body(
            recording, "stats", "training"
        )
        training = b"" if recording.training is None else self._training_text(recording.training)
        return (
            b'{"process":%b,"stats":[%b]}' % (self._process_text(snapshot.process), definitions),
            b'{"windows":[%b]}' % windows,
            b'%b%b,"stats":[%b]}' % (_dumps(other_fields).encode()[:-1], training, totals),
        )

    def _training_text(self, training: TrainingReading) -> bytes:
        """Return `,"training":{...}`, in which the text of unchanged groups of intervals is reused."""
        text = _dumps(_body(training, "intervals")).encode()[:-1]
        if training.intervals:
            comma = b"," if len(text) > 1 else b""
            text += b'%b"intervals":[%b]' % (comma, self._intervals.render(training.intervals))
        return b',"training":%b}' % text

    def _process_text(self, process: ProcessIdentity) -> bytes:
        """Return the JSON object of the identity, rendered again only for a new object."""
        if self._process is not process:
            self._process = process
            self._process_json = _dumps(_body(process, "id")).encode()  # the id is in the header
        return self._process_json


class _Column:
    """JSON list with an item for each Stat. The text of a batch of unchanged objects is reused."""

    def __init__(self, to_json: Callable[[Any], object], *, batch: int = _BATCH_VALUES) -> None:
        self._to_json = to_json
        self._batch = batch
        # By the identities of the values. The stored references keep the identities valid.
        self._batches: dict[tuple[int, ...], tuple[Sequence[object], str]] = {}

    def render(self, values: Sequence[object]) -> bytes:
        """Return the JSON of the values, joined by commas."""
        previous, self._batches = self._batches, {}
        texts = []
        has_rendered = False
        for start in range(0, len(values), self._batch):
            batch = values[start : start + self._batch]
            key = tuple(map(id, batch))
            batch_and_text = previous.get(key)
            if batch_and_text is None:
                if has_rendered:
                    sleep(0)  # release the interpreter lock
                has_rendered = True
                batch_and_text = batch, _dumps([self._to_json(value) for value in batch])[1:-1]
            self._batches[key] = batch_and_text
            _, text = batch_and_text
            texts.append(text)
        return ",".join(texts).encode()


_fields = cache(fields)


def _body(value: Any, *omitted: str) -> dict[str, object]:
    """Return the fields of a contract type as JSON values, without omitted fields and default values."""
    body: dict[str, object] = {}
    for field in _fields(value.__class__):
        name = field.name
        item = getattr(value, name)
        is_default = item == field.default or (field.default_factory is not MISSING and not item)
        if is_default or name in omitted:
            continue
        json_value = _to_json(item)
        if json_value is not None or item is None:
            body[name] = json_value
    return body


def _to_json(item: Any) -> Any:
    """Return a field as JSON values, or None for a number that is not finite."""
    if isinstance(item, float):
        return _finite(item)
    if isinstance(item, frozenset):
        return sorted(element.value for element in item)
    if isinstance(item, Mapping):
        json_values = {key: _to_json(value) for key, value in item.items()}
        numbers = {key: number for key, number in json_values.items() if number is not None}
        if any(isinstance(key, tuple) for key in numbers):
            return [[*key, number] for key, number in numbers.items()]
        return {getattr(key, "value", key): number for key, number in numbers.items()}
    return _body(item) if is_dataclass(item) else item


def _total(stat: StatReading) -> dict[str, object]:
    """Return the item of a Stat in section 3. Called for each Stat at each flush; most items have three numbers."""
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
    """Return a number, or None for an infinite number and NaN, which JSON cannot represent."""
    return None if number is None or not isfinite(number) else float(number)
