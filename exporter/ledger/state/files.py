r"""Format of state files.

training-exporter-ledger 3 3f2a90c4\n                   magic, format version, CRC-32 of the rest
{"key": ["rank", "run", "0", "", ""], "sidecar": "node7"}\n   key of the content, and the sidecar that saved the file
…content…                                               JSON: a dataclass, field by field
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path

from exporter.ledger.state.codec import parse

StateKey = tuple[str, ...]
"""Kind of content, run (empty if the content does not belong to a run), and further parts that make the key unique."""

SUFFIX = ".ledger"
"""End of the name of a state file."""
DAMAGED_MARK = ".damaged-"
"""Text after `SUFFIX` in the name of an unusable state file. A Unix time follows."""
MAX_BYTES = 32 << 20
"""Maximum size of a state file. Larger files are neither written nor read."""
_MAGIC = b"training-exporter-ledger"
_VERSION = 3  # of the format that this release writes
_MAX_FIRST_LINE_BYTES = 128
_MAX_READABLE_CHARACTERS = 60  # of the key, in a file name
_HASH_DIGITS = 32  # of the key's hash, in a file name


class DamagedFileError(Exception):
    """State file that cannot be used: incomplete, empty, too large, invalid, not a regular file, of a different version or key."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """Content of a state file."""

    key: StateKey
    sidecar: str  # name of the sidecar that saved the file last
    content: bytes


def file_name(key: StateKey) -> str:
    """Return the file name of a key: at most `_MAX_READABLE_CHARACTERS` of the key, and a hash that makes the name unique."""
    readable = re.sub(r"[^A-Za-z0-9_.]+", "_", "_".join(key))[:_MAX_READABLE_CHARACTERS].strip("._")
    # The length prefixes distinguish ("a", "b") from ("ab", ""). A key may contain lone surrogates.
    length_prefixed_key = "".join(f"{len(part)}:{part}" for part in key).encode("utf-8", "surrogatepass")
    return f"{readable or 'run'}-{hashlib.sha256(length_prefixed_key).hexdigest()[:_HASH_DIGITS]}{SUFFIX}"


def encode_file(file: StateFile) -> bytes:
    """Return the bytes of a state file. Raises OSError (EFBIG) above `MAX_BYTES`."""
    key_line = json.dumps({"key": file.key, "sidecar": file.sidecar}).encode() + b"\n"
    checksum = zlib.crc32(file.content, zlib.crc32(key_line))
    data = b"%s %d %08x\n" % (_MAGIC, _VERSION, checksum) + key_line + file.content
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"the state is larger than {MAX_BYTES >> 20} MiB")
    return data


def read_state_file(path: Path) -> StateFile:
    """Return the content of a state file. Raises DamagedFileError, or OSError if the file cannot be read."""
    data = _read(path)
    first_line, _, body = data.partition(b"\n")
    fields = first_line.split()
    if len(fields) != 3 or len(first_line) >= _MAX_FIRST_LINE_BYTES or fields[0] != _MAGIC:
        raise DamagedFileError("the file is empty or not a state file")
    _, version, checksum = fields
    if version != b"%d" % _VERSION:
        version_text = version.decode(errors="replace")
        raise DamagedFileError(f"format version {version_text} is not supported (supported: {_VERSION})")
    if checksum != b"%08x" % zlib.crc32(body):
        raise DamagedFileError("the checksum is wrong: the file is incomplete or damaged")
    key_line, _, content = body.partition(b"\n")
    try:
        header = parse(key_line)
        # Earlier releases wrote the key `keeper`.
        sidecar = header["sidecar"] if "sidecar" in header else header["keeper"]
        return StateFile(tuple([str(part) for part in header["key"]]), str(sidecar), content)
    except (LookupError, TypeError, ValueError) as error:
        raise DamagedFileError(f"invalid header: {error}") from error


def _read(path: Path) -> bytes:
    """Return the bytes of a regular file of at most `MAX_BYTES`. Raises DamagedFileError or OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
            raise DamagedFileError("not a regular file") from error
        raise
    try:
        # Before `fdopen`, which raises for a directory.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedFileError("not a regular file")
        if status.st_size > MAX_BYTES:
            raise DamagedFileError(f"{status.st_size} bytes, more than {MAX_BYTES}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise DamagedFileError(f"more than {MAX_BYTES} bytes")
    return data
