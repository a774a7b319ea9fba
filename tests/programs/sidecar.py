"""Sidecar without a web server. The program prints totals until a test kills the process."""

from __future__ import annotations

from pathlib import Path

from exporter.feed.reader import FeedReader
from exporter.ledger.collector import JobCollector
from exporter.ledger.state.store import StateStore


def print_counts_until_killed(feed: str, state: str) -> None:
    """Collect a feed directory repeatedly, and print the counts of `train_stat0` while this process owns the directory."""
    collector = JobCollector(FeedReader(Path(feed)), StateStore(Path(state)))
    print("ready", flush=True)
    while True:
        families = {family.name: family for family in collector.collect()}
        is_owner = bool(families["exporter_feed_owner"].samples[0].value)
        if is_owner and "train_stat0" in families:
            samples = families["train_stat0"].samples
            counts = [int(sample.value) for sample in samples if sample.name.endswith("_count")]
            print(*counts, flush=True)
