"""Hostile times in a feed file: other runs keep their totals, and the status page is rendered."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from feed_support import new_identity, new_recording, publish_once
from prometheus_client.core import Metric

from exporter.exposition.page import Page
from exporter.feed.files import FEED
from exporter.feed.reader import FeedReader
from exporter.feed.writer import FeedWriter
from exporter.ledger.collector import JobCollector
from exporter.ledger.state.store import StateStore
from exporter.recording.values import TrainingReading
from exporter.status.attention import FindingStarts
from exporter.status.document import render
from exporter.status.history import History
from exporter.status.samples import SampleIndex
from exporter.status.view import ExporterInfo, build_view

TRAINING = TrainingReading(phase="forward", loop=1, step=1, steps=1, longest_step_seconds=1.0)


def publish_training(directory: Path, training: TrainingReading, **identity: object) -> None:
    """Write the snapshot of an exited process that trained."""
    writer = FeedWriter(directory, new_identity(trains=True, **identity))
    assert writer.publish(new_recording().replace(training=training))
    writer.close()


def collect(directory: Path) -> list[Metric]:
    """Return the families on the page of a sidecar."""
    page = Page()
    page.publish("feed", JobCollector(FeedReader(directory), StateStore(directory)).collect())
    return page.snapshot()


def count_of_honest_run(families: list[Metric]) -> float | None:
    series = SampleIndex(families).select("train_stat0", "_count", run="honest", rank="0")
    return next((count for _, count in series), None)


def show_page(families: list[Metric]) -> str:
    """Return the status page of a sidecar with these families."""
    info = ExporterInfo("1.2.3", "node7", 0.0, 10.0, "/dev/shm/x")
    return render(build_view(info, SampleIndex(families), History()), FindingStarts()).decode()


@pytest.mark.parametrize(
    "training",
    [
        TRAINING.replace(phases={"forward": 1.7e308, "init": 1.7e308}),
        TRAINING.replace(open_seconds=1.7e308, failed_seconds=1.7e308),
    ],
)
def test_seconds_whose_sum_overflows_remove_no_total_of_another_run(
    tmp_path: Path, training: TrainingReading
) -> None:
    publish_once(tmp_path, run="honest")
    publish_training(tmp_path, training, run="hostile")

    assert count_of_honest_run(collect(tmp_path)) == 1


@pytest.mark.parametrize("seconds", [-1e300, -1e18])
def test_times_that_no_calendar_has_leave_the_status_page_intact(tmp_path: Path, seconds: float) -> None:
    publish_once(tmp_path, run="honest")
    writer = FeedWriter(tmp_path, new_identity(run="hostile", started=seconds, trains=True))
    writer.publish(new_recording().replace(training=TRAINING.replace(last_progress=seconds)))
    families = collect(tmp_path)
    writer.close()

    assert count_of_honest_run(families) == 1
    assert "honest" in show_page(families)


def test_a_modification_time_that_no_calendar_has_leaves_the_status_page_intact() -> None:
    with TemporaryDirectory(dir="/dev/shm") as name:  # other file systems have no such times
        writer = FeedWriter(name, identity := new_identity(run="hostile", trains=True))
        writer.publish(new_recording().replace(training=TRAINING))
        os.utime(Path(name, identity.id + FEED), (-1e18, -1e18))
        families = collect(Path(name))
        writer.close()

    assert "hostile" in show_page(families)
