"""Ledger and page of a sidecar with limited address space.

Usage: crowd_child.py DIRECTORY

The program prints its peak resident memory in MiB, the number of processes in the feed, and the number of dropped readings.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.feed.reader import FeedReader
from exporter.ledger.collector import JobCollector
from exporter.ledger.state.store import StateStore

MAX_ADDRESS_SPACE_BYTES = 400 << 20
"""Limit of the address space. An interpreter with its libraries needs over 100 MiB at the start."""

resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE_BYTES, MAX_ADDRESS_SPACE_BYTES))
directory = Path(sys.argv[1])
collector = JobCollector(FeedReader(directory), StateStore(directory))
page = Page()
for _ in range(3):
    families = collector.collect()
    page.publish("feed", families)
    page.render(Format.TEXT)
dropped_counts = [
    sample.value
    for family in families
    if family.name == "training_feed_dropped"
    for sample in family.samples
    if sample.labels["reason"] == "memory"
]
# Not ru_maxrss, which includes the memory of the parent process before exec.
peak_mebibytes = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10
print(peak_mebibytes, len(dropped_counts), int(sum(dropped_counts)))
