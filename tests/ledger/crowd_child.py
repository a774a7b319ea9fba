"""Ledger and page of a sidecar under a limit of address space; prints memory and dropped series.

crowd_child.py DIRECTORY
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

LIMIT = 400 << 20
"""Address space; an interpreter with its libraries needs over 100 MiB at start."""

resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
directory = Path(sys.argv[1])
collector = JobCollector(FeedReader(directory), StateStore(directory))
page = Page()
for _ in range(3):
    families = collector.collect()
    page.publish("feed", families)
    page.render(Format.TEXT)
dropped = [
    sample.value
    for family in families
    if family.name == "training_feed_dropped"
    for sample in family.samples
    if sample.labels["reason"] == "memory"
]
# Not ru_maxrss: over fork and exec that is at least the memory of the process that started this one.
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10
print(peak, len(dropped), int(sum(dropped)))
