"""Totals that outlive processes: restarts of ranks and of the sidecar, in every order."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_support import (
    START,
    Sidecar,
    a_definition,
    a_process,
    a_reading,
    a_snapshot,
)

from exporter.families import Distribution
from exporter.ledger.ranks import KEPT_PROCESSES

LOSS = a_definition("loss")
RANK_0 = {"run": "r", "rank": "0"}


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    return Sidecar(tmp_path)


def test_a_process_that_comes_back_after_its_share_was_sealed_is_refused_and_told(sidecar: Sidecar) -> None:
    ghost = a_process()
    sidecar.record(ghost, 5)
    sidecar.collect()
    sidecar.feed.files.clear()
    sidecar.after(1)
    sidecar.after(1)
    for life in range(KEPT_PROCESSES + 2):
        sidecar.record(a_process(started=START + life), 1, alive=False)
        sidecar.after(1)
    sidecar.record(ghost, 6, sequence=2)

    page = sidecar.after(1)

    assert page.count("loss", **RANK_0) == 5 + KEPT_PROCESSES + 2
    assert page.get("exporter_feed_refused_total", reason="taken") == 1
    assert ghost.id in sidecar.feed.files


def test_a_file_that_a_listing_misses_once_makes_no_gap(sidecar: Sidecar) -> None:
    process = a_process()
    sidecar.record(process, 5)
    sidecar.collect()
    kept = dict(sidecar.feed.files)
    sidecar.feed.files.clear()

    page = sidecar.after(1)

    assert page.get("training_feed_alive", **RANK_0) == 1
    sidecar.feed.files.update(kept)
    assert sidecar.after(1).get("training_feed_alive", **RANK_0) == 1


def test_a_file_that_is_listed_twice_is_counted_once(sidecar: Sidecar) -> None:
    process = a_process()
    sidecar.record(process, 5)
    sidecar.feed.files["again"] = sidecar.feed.files[process.id]

    assert sidecar.collect().count("loss", **RANK_0) == 5


def test_a_stat_that_the_restarted_rank_has_not_made_yet_lingers(sidecar: Sidecar) -> None:
    sidecar.record(a_process(), 5)
    sidecar.collect()
    sidecar.feed.kill(next(iter(sidecar.feed.files.values())).snapshot.process)
    sidecar.feed.put(a_snapshot(a_process(started=START + 1)))

    page = sidecar.after(1)

    assert page.count("loss", **RANK_0) == 5
    assert page.get("training_feed_alive", **RANK_0) == 1


def test_once_a_negative_sample_was_seen_there_is_no_sum_any_more(sidecar: Sidecar) -> None:
    first, second = a_process(), a_process(started=START + 1)
    sidecar.record(first, 2)
    assert sidecar.collect().sum("loss", **RANK_0) == 4.0
    sidecar.record(first, 3, sequence=2, alive=False, value=-1.0)
    assert sidecar.after(1).sum("loss", **RANK_0) is None
    sidecar.record(second, 3)

    page = sidecar.after(1)

    assert page.sum("loss", **RANK_0) is None
    assert page.count("loss", **RANK_0) == 6
    sidecar.restart()
    assert sidecar.after(1).sum("loss", **RANK_0) is None


def test_buckets_that_change_over_a_restart_start_the_histogram_anew(sidecar: Sidecar) -> None:
    fine, coarse = a_definition(buckets=(1.0, 2.0)), a_definition(buckets=(5.0,))
    lives = [(fine, [1.5, 9.0]), (coarse, [4.0]), (coarse, [4.0, 6.0]), (fine, [0.5])]
    seen = []
    for life, (definition, samples) in enumerate(lives):
        process = a_process(started=START + life)
        sidecar.feed.put(a_snapshot(process, a_reading(definition, samples)))
        sidecar.after(1)
        sidecar.restart()
        value = sidecar.after(1).get("loss", **RANK_0)
        assert isinstance(value, Distribution)
        seen.append((value.count, value.buckets))
        sidecar.feed.kill(process)

    assert seen == [
        (2, ((1.0, 0), (2.0, 1))),
        (1, ((5.0, 1),)),
        (3, ((5.0, 2),)),
        (1, ((1.0, 1), (2.0, 1))),
    ]


def test_losses_continue_over_restarts_too(sidecar: Sidecar) -> None:
    for life in range(2):
        process = a_process(started=START + life)
        reading = a_reading(LOSS, [1.0], rejected={"nan": 2, "capture": 1}, overflows=3)
        sidecar.feed.put(a_snapshot(process, reading, dropped={"write_failed": 4}), alive=False)

        page = sidecar.after(1)

    assert page.get("training_stat_rejected_samples_total", **RANK_0, stat="loss", reason="nan") == 4
    assert page.get("training_stat_rejected_samples_total", **RANK_0, stat="loss", reason="overflow") == 6
    reasons = {"nan": 4, "overflow": 6, "write_failed": 8, "infinite": None, "capture": 2}
    found = {each: page.get("training_feed_dropped_total", **RANK_0, reason=each) for each in reasons}
    assert found == reasons


def test_totals_that_cannot_be_saved_are_withheld_and_gauges_are_not(sidecar: Sidecar) -> None:
    process = a_process()
    sidecar.record(process, 3)
    sidecar.collect()
    sidecar.break_state()
    sidecar.record(process, 4, sequence=2, alive=False)

    sidecar.clock.advance(1)
    collected = sidecar.collector.collect()
    page = sidecar.collect()

    assert [reason for reason, _ in collected.problems] == ["state"]
    assert page.count("loss", **RANK_0) is None
    assert page.get("training_feed_dropped_total", reason="nan", **RANK_0) is None
    assert page.get("training_feed_alive", **RANK_0) == 0
    assert page.get("loss_last_sample_timestamp_seconds", **RANK_0) == START
    assert page.get("exporter_ledger_withheld_ranks") == 1
    assert page.all("exporter_ledger_state_errors_total")[("reason", "failed"),] > 0
    assert process.id in sidecar.feed.files, "its totals are nowhere else yet"
    sidecar.mend_state()
    assert sidecar.after(1).count("loss", **RANK_0) == 4
    assert sidecar.feed.files == {}


def test_what_does_not_change_is_not_written_again(sidecar: Sidecar) -> None:
    sidecar.record(a_process(), 3)
    sidecar.collect()
    written = {path: path.stat().st_ino for path in sidecar.state.directory.iterdir()}
    sidecar.after(1)
    sidecar.after(1)

    assert {path: path.stat().st_ino for path in sidecar.state.directory.iterdir()} == written
