"""Hostile run names and sums in a feed file, from the file to the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from exposition_support import parse
from feed_support import new_identity, new_recording, publish_once

from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.feed.reader import FeedReader
from exporter.feed.writer import FeedWriter
from exporter.ledger.collector import JobCollector
from exporter.ledger.state.store import StateStore
from exporter.recording.values import Recording

HONEST_LABELS = (("rank", "0"), ("run", "honest"))


def honest_total(directory: Path, form: Format) -> float | None:
    """Return the total of the honest run on a page."""
    page = Page()
    page.publish("feed", JobCollector(FeedReader(directory), StateStore(directory)).collect())
    return parse(page.render(form), form).get(("train_stat0_count", HONEST_LABELS))


@pytest.mark.parametrize("form", [Format.TEXT, Format.OPENMETRICS])
@pytest.mark.parametrize("run", ["x" * 4096, "\N{GRINNING FACE}" * 256], ids=["characters", "bytes"])
def test_a_long_run_name_removes_no_total_of_another_run(tmp_path: Path, run: str, form: Format) -> None:
    publish_once(tmp_path, run="honest")
    publish_once(tmp_path, run=run)

    assert honest_total(tmp_path, form) == 1


def test_a_run_with_negative_samples_removes_no_total_of_another_run(tmp_path: Path) -> None:
    publish_once(tmp_path, run="honest")
    negative = Recording(tuple([stat.replace(sum=None) for stat in new_recording().stats]))
    writer = FeedWriter(tmp_path, new_identity(run="negative"))
    writer.publish(negative)
    writer.close()

    assert honest_total(tmp_path, Format.OPENMETRICS) == 1
