"""Gap rules: absent series of stale feeds, exited processes and empty windows."""

from __future__ import annotations

import logging
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from collectors_support import UPDATE_GOLDEN_FILES
from ledger_support import (
    START,
    Page,
    SimulatedSidecar,
    make_definition,
    make_process,
    make_reading,
    make_snapshot,
)
from places import DATA

from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page as ExpositionPage
from exporter.recording.values import Aggregation, EventsReading, WindowReading

STEP_STAT = make_definition("train.step", Aggregation.MEAN, Aggregation.P95, unit="seconds")
RANK_0_LABELS = {"run": "r", "rank": "0"}
WINDOW = WindowReading(START - 60, START, 2, {Aggregation.MEAN: 0.5, Aggregation.P95: 0.75})
EMPTY_WINDOW = WindowReading(START - 60, START, 0, {})
MEAN_SERIES, SAMPLES_SERIES, LAST_SAMPLE_SERIES, COUNT_SERIES = (
    "train_step_window_mean_seconds",
    "train_step_window_samples",
    "train_step_last_sample_timestamp_seconds",
    "train_step_seconds_count",
)


TOTAL_SERIES = {LAST_SAMPLE_SERIES, COUNT_SERIES}
ALL_SERIES = TOTAL_SERIES | {MEAN_SERIES, SAMPLES_SERIES}


@pytest.fixture
def sidecar(tmp_path: Path) -> SimulatedSidecar:
    return SimulatedSidecar(tmp_path)


def published_series(page: Page) -> set[str]:
    return {name for name in ALL_SERIES if page.get(name, **RANK_0_LABELS) is not None}


@pytest.mark.parametrize("window", [EMPTY_WINDOW, None])
def test_a_window_without_samples_has_no_aggregates(
    sidecar: SimulatedSidecar, window: WindowReading | None
) -> None:
    sidecar.feed.publish(make_snapshot(make_process(), make_reading(STEP_STAT, [0.25], window=window)))
    page = sidecar.collect()

    assert published_series(page) == ALL_SERIES - {MEAN_SERIES}
    assert page.get(SAMPLES_SERIES, **RANK_0_LABELS) == 0


def test_totals_of_a_dead_rank_linger_for_15_minutes_and_return_with_a_restart(
    sidecar: SimulatedSidecar,
) -> None:
    process = make_process()
    sidecar.feed.publish(make_snapshot(process, make_reading(STEP_STAT, [0.25])))
    sidecar.collect()
    sidecar.feed.kill(process)
    page_after_death = sidecar.collect_after(1)

    assert published_series(page_after_death) == TOTAL_SERIES
    assert page_after_death.get("training_feed_alive", **RANK_0_LABELS) == 0
    assert page_after_death.get("training_feed_dropped_total", reason="nan", **RANK_0_LABELS) == 0
    sidecar.clock.wall += 86_400  # only the monotonic clock decides
    assert published_series(sidecar.collect_after(899)) == TOTAL_SERIES
    sidecar.clock.wall -= 2 * 86_400
    gap_page = sidecar.collect_after(2)
    assert published_series(gap_page) == set()
    assert gap_page.get("training_feed_alive", **RANK_0_LABELS) is None
    assert gap_page.get("training_feed_dropped_total", reason="nan", **RANK_0_LABELS) is None
    sidecar.feed.publish(make_snapshot(make_process(started=START + 2000), make_reading(STEP_STAT, [0.25])))
    assert sidecar.collect_after(1000).get(COUNT_SERIES, **RANK_0_LABELS) == 2


def test_a_stopped_process_has_a_last_update_and_no_windows(sidecar: SimulatedSidecar) -> None:
    process = make_process()
    snapshot = make_snapshot(process, make_reading(STEP_STAT, [0.25], window=WINDOW), written=START + 1)
    sidecar.feed.publish(snapshot, age_seconds=9.9)
    assert published_series(sidecar.collect()) == ALL_SERIES
    sidecar.feed.publish(snapshot, age_seconds=10.1)

    page = sidecar.collect_after(1)

    assert published_series(page) == TOTAL_SERIES
    assert page.get("training_feed_last_update_timestamp_seconds", **RANK_0_LABELS) == START + 1
    assert page.get("training_feed_alive", **RANK_0_LABELS) == 1
    sidecar.feed.publish(snapshot.replace(sequence=2), age_seconds=0.0)
    assert published_series(sidecar.collect_after(1)) == ALL_SERIES


def test_windows_of_a_process_that_cannot_write_are_absent_immediately(sidecar: SimulatedSidecar) -> None:
    process = make_process()
    sidecar.feed.publish(make_snapshot(process, make_reading(STEP_STAT, [0.25, 0.75], window=WINDOW)))
    sidecar.feed.files[process.id] = replace(sidecar.feed.files[process.id], is_outdated=True)

    assert published_series(sidecar.collect()) == TOTAL_SERIES


def test_a_writer_with_a_long_interval_is_not_stale_between_writes(sidecar: SimulatedSidecar) -> None:
    snapshot = make_snapshot(make_process(), make_reading(STEP_STAT, [0.25], window=WINDOW))
    sidecar.feed.publish(snapshot.replace(flush_seconds=30.0), age_seconds=80.0)

    assert published_series(sidecar.collect()) == ALL_SERIES


def test_a_time_window_without_its_successor_is_absent(sidecar: SimulatedSidecar) -> None:
    sidecar.feed.publish(make_snapshot(make_process(), make_reading(STEP_STAT, [0.25], window=WINDOW)))

    assert published_series(sidecar.collect_after(68)) == ALL_SERIES
    assert published_series(sidecar.collect_after(3)) == TOTAL_SERIES


def test_a_process_whose_file_becomes_unreadable_is_alive_for_a_few_more_seconds(
    sidecar: SimulatedSidecar,
) -> None:
    process = make_process()
    sidecar.feed.publish(make_snapshot(process, make_reading(STEP_STAT, [0.25])))
    sidecar.collect()
    sidecar.feed.files.clear()
    sidecar.feed.refused_files = ((f"{process.id}.feed", "checksum"),)

    for _ in range(5):
        assert sidecar.collect_after(1).get("training_feed_alive", **RANK_0_LABELS) == 1
    assert sidecar.collect_after(6).get("training_feed_alive", **RANK_0_LABELS) == 0


def test_a_missing_feed_is_logged_once_after_a_minute(
    sidecar: SimulatedSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sidecar.collect()
    sidecar.collect_after(59)
    assert caplog.records == []

    sidecar.collect_after(2)
    sidecar.collect_after(60)

    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "no job has written" in record.message
    assert "installed" in vars(record)["remedy"]
    assert "EXPORTER_FEED_DIR" in vars(record)["remedy"]


GOLDEN = DATA / "ledger.metrics"


@pytest.fixture
def small_job_page(sidecar: SimulatedSidecar) -> str:
    """Return the page of two ranks and an agent, with all types of families. Rank 1 was restarted and has two workers."""
    histogram = make_definition(
        "train.step", Aggregation.MEAN, unit="seconds", buckets=(0.1, 1.0), help="Time per step."
    )
    loss_of_split = make_definition("eval.loss", Aggregation.VALUE, labels=(("split", "dev"),))
    window = WindowReading(START - 60, START, 2, {Aggregation.MEAN: 0.25, Aggregation.VALUE: 1.5})
    events = EventsReading(
        {("ckpt", "info"): 3, ("oom", "error"): 1},
        {("ckpt", "info"): 5.5},
        {("ckpt", "rate_limit"): 2},
        {"file": 4},
        {("file", "write"): 7},
    )

    dead_process = make_process(rank=1)
    sidecar.feed.publish(make_snapshot(dead_process, make_reading(histogram, [0.0625])), alive=False)
    for process in (
        make_process(labels=(("team", "nlp"),)),
        make_process(rank=1, started=START + 1),
        make_process(rank=1, started=START + 2),
    ):
        sidecar.feed.publish(
            make_snapshot(
                process,
                make_reading(histogram, [0.0625, 0.5], window=window, rejected={"nan": 1}, overflows=1),
                make_reading(loss_of_split, [1.5], window=window),
                written=START + 0.5,
            )
        )
    agent = make_snapshot(make_process(rank=None, role="agent"), make_reading(loss_of_split, [-1.0]))
    sidecar.feed.publish(agent.replace(recording=agent.recording.replace(events=events)))
    page = ExpositionPage()
    page.publish("feed", sidecar.collector.collect())
    return page.render(Format.TEXT).decode()


def test_a_small_job_has_the_expected_families(small_job_page: str) -> None:
    if UPDATE_GOLDEN_FILES:
        GOLDEN.write_text(small_job_page, encoding="utf-8")
    assert small_job_page == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_page(small_job_page: str) -> None:
    command = ["promtool", "check", "metrics"]
    result = subprocess.run(command, input=small_job_page, text=True, capture_output=True, check=False)

    assert result.stdout + result.stderr == ""
