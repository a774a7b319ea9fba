"""gzip bodies joined from fragments that were compressed beforehand.

Used in the sidecar: a block is compressed once, when it is published, and a scrape only joins. Pure
functions.

The result is one ordinary gzip member (RFC 1952), because some readers stop after the first:

    1f 8b 08 00 | 00 00 00 00 | 04 ff     magic, deflate, no flags | no time | fastest level, no system
    fragment fragment …                   raw deflate (RFC 1951), none of them marked as the last
    03 00                                 an empty block marked as the last
    crc32 length                          of the joined plain bytes, little endian

A fragment ends with a sync flush, so that the next one begins at a whole byte, and refers to nothing before
its own start, so that it may stand after any other.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"
_END = b"\x03\x00"

_LEVEL = 1
# A window of 16 KiB and a small hash: with zlib's defaults a third of a megabyte is allocated and given back
# for each fragment, which costs more time than compressing one of 8 kB (54 against 20 µs); the output is as
# small.
_WINDOW_BITS = -14
_MEMORY_LEVEL = 5


@dataclass(frozen=True, slots=True)
class Fragment:
    """A stretch of a body.

    Attributes:
        plain: Its text; the checksum of the whole is taken over it (4 GB/s, so cheaper than combining
            checksums below some thousand series).
        deflated: The same, raw deflate, ready to be joined; empty for empty text.
    """

    plain: bytes
    deflated: bytes


def deflate(plain: bytes) -> Fragment:
    """Compress a stretch of text so that it can be joined with others."""
    if not plain:
        return Fragment(plain, b"")
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL)
    return Fragment(plain, compressor.compress(plain) + compressor.flush(zlib.Z_SYNC_FLUSH))


def join(fragments: Iterable[Fragment]) -> bytes:
    """Make one gzip member of fragments."""
    parts, checksum, length = [_HEADER], 0, 0
    for fragment in fragments:
        parts.append(fragment.deflated)
        checksum = zlib.crc32(fragment.plain, checksum)
        length += len(fragment.plain)
    parts += (_END, struct.pack("<II", checksum, length & 0xFFFFFFFF))
    return b"".join(parts)
