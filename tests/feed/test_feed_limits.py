"""Limits of the feed reader: no file content exhausts the memory of the sidecar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from feed_support import (
    TOTAL,
    definition_json,
    feed_file_bytes,
    file_with_many_stats,
    file_with_unknown_keys,
    header_bytes,
    with_process_number,
)

from exporter.errors import FeedFormatError
from exporter.feed.decoder import decode
from exporter.feed.encoder import HEADER, MAX_BYTES
from exporter.recording.limits import MAX_BUCKETS, MAX_STAT_LABELS

MEMORY_PROGRAM = """
import sys
from pathlib import Path
from exporter.feed.reader import FeedReader

reader = FeedReader(Path(sys.argv[1]))
scan = reader.scan()
while scan.unread_files:
    scan = reader.scan()
for _ in range(2):
    scan = reader.scan()
(peak_line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak_line.split()[1]) // 1024, len(scan.entries), len(scan.refused_files))
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": [[f"l{index:05}", "x"] for index in range(MAX_STAT_LABELS + 1)]},
        {"labels": [["label", "x" * 257]]},
        {"labels": [["l" * 201, "x"]]},
        {"buckets": list(range(MAX_BUCKETS + 1)), "aggregations": ["histogram"], "kind": "histogram"},
        {"aggregations": ["mean"] * 65},
        {"name": "n" * 201},
        {"help": "h" * 501},
        {"unit": "u" * 201},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_definition_beyond_a_limit_of_the_writer_is_refused(changes: dict[str, Any]) -> None:
    total = {**TOTAL, "bucket_counts": [0] * len(changes.get("buckets", ()))}

    with pytest.raises(FeedFormatError):
        decode(feed_file_bytes([definition_json(**changes)], [total]))


@pytest.mark.parametrize("field", ["run", "node", "version"])
def test_an_identity_beyond_a_limit_of_the_writer_is_refused(field: str) -> None:
    valid_file = feed_file_bytes([], [])
    body = valid_file[HEADER.size :].replace(
        b'"run":"r"', b'"run":"r","%b":"%b"' % (field.encode(), b"x" * 257), 1
    )
    lengths = HEADER.unpack_from(valid_file)[-3:]
    extra_bytes = len(body) - sum(lengths)
    header = header_bytes(0, lengths[0] + extra_bytes, *lengths[1:], body=body)

    with pytest.raises(FeedFormatError):
        decode(header + body)


def test_rejected_reasons_beyond_the_limit_are_refused() -> None:
    total = {**TOTAL, "rejected": {f"reason{index}": 1 for index in range(33)}}

    with pytest.raises(FeedFormatError):
        decode(feed_file_bytes([definition_json()], [total]))


def file_with_labels_and_buckets() -> bytes:
    labels = [[f"l{index:05}", "x" * 20] for index in range(2000)]
    buckets = list(range(30_000))
    stat_definition = definition_json(
        labels=labels, buckets=buckets, aggregations=["histogram"], kind="histogram"
    )
    return feed_file_bytes([stat_definition], [{**TOTAL, "bucket_counts": [0] * len(buckets)}])


def file_with_empty_lists() -> bytes:
    return feed_file_bytes(
        [], [], last_section_suffix=b',"later":[%b[]]' % (b"[]," * (MAX_BYTES // 3 - 1000))
    )


def file_with_many_facts() -> bytes:
    facts = json.dumps([[f"{index}", "x" * 700] for index in range(5000)]).encode()
    return feed_file_bytes([], [], last_section_suffix=b',"training":{"facts":%b}' % facts)


@pytest.mark.parametrize(
    ("create_file", "file_count"),
    [
        (file_with_labels_and_buckets, 30),
        (file_with_unknown_keys, 30),
        (file_with_empty_lists, 10),
        (file_with_many_stats, 30),
        (file_with_many_facts, 30),
    ],
    ids=lambda parameter: getattr(parameter, "__name__", str(parameter)),
)
def test_the_memory_of_a_reader_of_hostile_files_is_bounded(
    tmp_path: Path, create_file: Callable[[], bytes], file_count: int
) -> None:
    directory = tmp_path / "feed"
    directory.mkdir(mode=0o700)
    feed_bytes = create_file()
    for process_number in range(file_count):
        (directory / f"{process_number:032x}.feed").write_bytes(
            with_process_number(feed_bytes, process_number)
        )
    environment = {**os.environ, "PYTHONMALLOC": "pymalloc"}

    result = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, directory],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )

    peak_mib, entry_count, refused_count = map(int, result.stdout.split())
    assert peak_mib < 100
    assert entry_count + refused_count == file_count
