"""Synthetic recordings and feed files, a controlled training process, and mounts, for the tests of the feed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from exporter.feed import directory as feed_directory
from exporter.feed.encoder import CHECKSUM, CHECKSUM_OFFSET, HEADER, MAGIC, MAX_BYTES, VERSION
from exporter.feed.reader import FeedEntry, FeedReader
from exporter.feed.snapshot import ProcessIdentity
from exporter.feed.writer import FeedWriter
from exporter.recording.values import Aggregation, Recording, StatDefinition, StatReading, WindowReading

CHILD = Path(__file__).with_name("feed_child.py")


def redirect_default_directory(parent: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Move the user's default feed directory below *parent* and return its path, without creating it."""
    monkeypatch.setattr(feed_directory, "SHARED_MEMORY", str(parent))
    return feed_directory.default_directory()


def new_identity(**fields: object) -> ProcessIdentity:
    """Return the identity of this process under a new id, by default as rank 0 of the run `r`."""
    default = ProcessIdentity(
        id=os.urandom(16).hex(), pid=os.getpid(), started=1_700_000_000.0, run="r", rank=0
    )
    return default.replace(**fields)


def new_recording(
    stats: int = 2, *, count: int = 1, final: bool = False, help_characters: int = 0
) -> Recording:
    """Return a recording of Stats named `train.stat0`, `train.stat1` and so on, each with a window and a histogram."""
    aggregations = frozenset({Aggregation.MEAN, Aggregation.HISTOGRAM})
    window = WindowReading(1_700_000_000.0, 1_700_000_060.0, 1, {Aggregation.MEAN: 0.5})
    return Recording(
        tuple(
            StatReading(
                StatDefinition(
                    f"train.stat{index}", aggregations, help="h" * help_characters, buckets=(0.1, 1.0)
                ),
                count=count,
                sum=0.5 * count,
                bucket_counts=(0, count),
                window=window,
                last_sample=1_700_000_030.5,
            )
            for index in range(stats)
        ),
        final=final,
    )


TOTAL = {"count": 1, "sum": 1.0}
"""Totals of a Stat in the JSON of a feed file."""


def feed_file_bytes(
    definitions: Any,
    totals: Any,
    *,
    last_section_suffix: bytes = b"",
    first_section_suffix: bytes = b"",
) -> bytes:
    """Return the bytes of a feed file with a valid checksum.

    A suffix is JSON that is inserted before the last brace of the first or the last section, such as `,"later":[]`.
    """
    process = {"pid": 7, "started": 1.0, "run": "r", "rank": 0}
    sections = [
        json.dumps({"process": process, "stats": definitions}, separators=(",", ":")).encode()[:-1]
        + first_section_suffix
        + b"}",
        json.dumps({"windows": [None] * len(definitions)}).encode(),
        json.dumps({"written": 1.0, "flush_seconds": 1.0, "stats": totals}).encode()[:-1]
        + last_section_suffix
        + b"}",
    ]
    body = b"".join(sections)
    return header_bytes(1, *map(len, sections), body=body) + body


def header_bytes(process_number: int, *section_lengths: int, body: bytes) -> bytes:
    """Return the header of a feed file with a process id and a checksum."""
    header = bytearray(
        HEADER.pack(MAGIC, VERSION, 0, 0, process_number.to_bytes(16, "big"), 1, *section_lengths)
    )
    CHECKSUM.pack_into(header, CHECKSUM_OFFSET, crc32(body, crc32(header)))
    return bytes(header)


def with_process_number(feed_bytes: bytes, process_number: int) -> bytes:
    """Return the bytes of a feed file with the id of another process."""
    body = feed_bytes[HEADER.size :]
    return header_bytes(process_number, *HEADER.unpack_from(feed_bytes)[-3:], body=body) + body


def definition_json(index: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the definition of a Stat as in the JSON of a feed file."""
    return {"name": f"stat{index}", "aggregations": ["mean"], **changes}


def file_with_unknown_keys() -> bytes:
    return feed_file_bytes([], [], first_section_suffix=b',"later":"%b"' % (b"x" * (MAX_BYTES - 1000)))


def file_with_many_stats() -> bytes:
    stats = [definition_json(index, labels=[["a", "x" * 100]]) for index in range(9000)]
    return feed_file_bytes(stats, [TOTAL] * len(stats))


def publish_once(directory: Path, *, final: bool = False, **fields: object) -> str:
    """Create the feed file of an exited process and return the process id."""
    identity = new_identity(**fields)
    writer = FeedWriter(directory, identity)
    assert writer.publish(new_recording(final=final))
    writer.close()
    return identity.id


def only_entry(reader: FeedReader) -> FeedEntry:
    """Scan, and return the only entry. Another number of entries fails the test."""
    scan = reader.scan()
    assert len(scan.entries) == 1, scan
    return scan.entries[0]


class TrainingProcess:
    """Training process that executes a command for each line that it receives; see feed_child.py."""

    def __init__(self, directory: Path, *prefix: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(CHILD), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.id = self.read_line()

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def execute(self, command: str) -> str:
        """Send a command and return the line that the process prints after the command."""
        self.send(command)
        return self.read_line()

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> str:
        """Kill the process and return its remaining output."""
        stdout = self.process.stdout
        assert stdout is not None
        self.process.kill()
        remaining_output = "" if stdout.closed else stdout.read()
        with self.process:  # closes the pipes and waits
            return remaining_output


@contextmanager
def training_process(directory: Path, *prefix: str) -> Iterator[TrainingProcess]:
    """Run a training process with a command prefix, and kill the process at the end."""
    child = TrainingProcess(directory, *prefix)
    try:
        yield child
    finally:
        child.kill()


@contextmanager
def mounted_filesystem(target: Path, *arguments: str) -> Iterator[None]:
    """Mount a filesystem during a test, or skip the test if mounting is not permitted."""
    result = subprocess.run(["mount", *arguments, str(target)], capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"mounting is not permitted here: {result.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


@contextmanager
def read_only_view(directory: Path, target: Path) -> Iterator[Path]:
    """Bind-mount a directory read-only, like the volume of a container."""
    target.mkdir()
    with mounted_filesystem(target, "--bind", str(directory)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(target)], check=True)
        yield target


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")
