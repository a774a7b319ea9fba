"""gzip compression of bodies, also of bodies whose parts were compressed at different times.

Parts can be joined without compressing them again, because a part is compressed without reference to earlier parts and its deflate blocks
end at a byte boundary. The result is a single gzip member, because some clients read only one member.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

_LEVEL = 1
"""Compression level. Level 9 is 20 times slower, for two thirds of the size."""

_HEADER = b"\x1f\x8b\x08\x00" + bytes(4) + b"\x04\xff"
"""Header of a gzip member (RFC 1952): deflate, no flags, no time, fastest algorithm, unknown operating system."""

_FINAL_BLOCK = b"\x03\x00"
"""Empty last block of a deflate stream."""


class CompressedPart:
    """Part of a body, which the constructor compresses.

    Attributes:
        data: Uncompressed bytes.
        blocks: Deflate blocks of these bytes.
    """

    def __init__(self, data: bytes) -> None:
        # A negative size of the window means deflate blocks without a header.
        compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, wbits=-zlib.MAX_WBITS)
        self.data = data
        self.blocks = compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH) if data else b""


def compress(body: bytes) -> bytes:
    """Return the body compressed with gzip."""
    # 16 added to the size of the window means the header and trailer of gzip.
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, wbits=zlib.MAX_WBITS | 16)
    return compressor.compress(body) + compressor.flush()


def gzip_body(parts: Iterable[CompressedPart]) -> bytes:
    """Return the parts joined into a gzip-compressed body."""
    checksum, size, blocks = 0, 0, [_HEADER]
    for part in parts:
        checksum = zlib.crc32(part.data, checksum)
        size += len(part.data)
        blocks.append(part.blocks)
    trailer = checksum.to_bytes(4, "little") + (size % 2**32).to_bytes(4, "little")
    return b"".join([*blocks, _FINAL_BLOCK, trailer])
