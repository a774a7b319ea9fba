"""Totals that outlive processes: restarts of ranks and of the sidecar, in every order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from goodput_support import MonitoredJob, job_in_loop, training_value
from hypothesis import given
from hypothesis import strategies as st
from ledger_support import START, SimulatedSidecar, make_definition, make_process, make_reading, make_snapshot

from exporter.families import DistributionSample
from exporter.ledger import ranks
from exporter.ledger.goodput.families import SPECS
from exporter.ledger.rank_record import encode_rank
from exporter.ledger.totals import WorkerSlot, sum_events
from exporter.recording.values import EventsReading

LOSS_STAT = make_definition("loss")
RANK_0_LABELS = {"run": "r", "rank": "0"}


@pytest.fixture
def sidecar(tmp_path: Path) -> SimulatedSidecar:
    return SimulatedSidecar(tmp_path)


def test_a_process_that_returns_after_its_totals_joined_the_base_is_refused_and_logged(
    sidecar: SimulatedSidecar,
) -> None:
    returning_process = make_process()
    sidecar.record_loss(returning_process, 5)
    sidecar.collect()
    sidecar.feed.files.clear()
    sidecar.collect_after(1)
    sidecar.collect_after(1)
    for life in range(ranks.MAX_EXITED_PROCESSES + 2):
        sidecar.record_loss(make_process(started=START + life), 1, alive=False)
        sidecar.collect_after(1)
    sidecar.record_loss(returning_process, 6, sequence=2)
    page = sidecar.collect_after(1)

    assert page.count("loss", **RANK_0_LABELS) == 5 + ranks.MAX_EXITED_PROCESSES + 2
    assert page.get("exporter_feed_refused_total", reason="taken") == 1
    assert returning_process.id in sidecar.feed.files


def test_a_listing_that_misses_or_repeats_a_file_changes_nothing(sidecar: SimulatedSidecar) -> None:
    sidecar.record_loss(make_process(), 5)
    sidecar.collect()
    feed_files = dict(sidecar.feed.files)
    sidecar.feed.files.clear()
    page_without_file = sidecar.collect_after(1)
    sidecar.feed.files.update(feed_files)
    later_page = sidecar.collect_after(1)
    sidecar.feed.files |= {f"again {process_id}": feed_file for process_id, feed_file in feed_files.items()}

    for page in (page_without_file, later_page, sidecar.collect_after(1)):
        assert page.get("training_feed_alive", **RANK_0_LABELS) == 1
        assert page.count("loss", **RANK_0_LABELS) == 5


def test_a_stat_not_yet_created_by_the_restarted_rank_lingers(sidecar: SimulatedSidecar) -> None:
    ended_process = make_process()
    sidecar.record_loss(ended_process, 5)
    sidecar.collect()
    sidecar.feed.kill(ended_process)
    sidecar.feed.publish(make_snapshot(make_process(started=START + 1)))
    page = sidecar.collect_after(1)

    assert page.count("loss", **RANK_0_LABELS) == 5
    assert page.get("training_feed_alive", **RANK_0_LABELS) == 1


def test_after_a_negative_sample_the_sum_is_absent(sidecar: SimulatedSidecar) -> None:
    process = make_process()
    sidecar.record_loss(process, 2)
    pages = [sidecar.collect()]
    sidecar.record_loss(process, 3, sequence=2, alive=False, value=-1.0)
    pages.append(sidecar.collect_after(1))
    sidecar.record_loss(make_process(started=START + 1), 3)
    pages.append(sidecar.collect_after(1))
    sidecar.restart()
    pages.append(sidecar.collect_after(1))

    assert [page.get("loss_sum", **RANK_0_LABELS) for page in pages] == [4.0, None, None, None]
    assert [page.count("loss", **RANK_0_LABELS) for page in pages] == [2, 3, 6, 6]


def test_changed_buckets_restart_the_sum_that_a_negative_sample_ended(sidecar: SimulatedSidecar) -> None:
    sums = []
    for life, (bound, sample) in enumerate([(1.0, -1.0), (5.0, 4.0), (5.0, 6.0)]):
        process = make_process(started=START + life)
        reading = make_reading(make_definition(buckets=(bound,)), [sample])
        reading = reading.replace(sum=None if sample < 0 else sample)
        sidecar.feed.publish(make_snapshot(process, reading))
        sums.append(sidecar.collect_after(1).get("loss_sum", **RANK_0_LABELS))
        sidecar.feed.kill(process)
        sidecar.collect_after(1)

    assert sums == [None, 4.0, 10.0]


def test_changed_buckets_restart_the_histogram(sidecar: SimulatedSidecar) -> None:
    two_buckets, one_bucket = make_definition(buckets=(1.0, 2.0)), make_definition(buckets=(5.0,))
    lives = [
        (two_buckets, [1.5, 9.0]),
        (one_bucket, [4.0]),
        (one_bucket, [4.0, 6.0]),
        (two_buckets, [0.5]),
    ]
    published_buckets = []
    for life, (definition, samples) in enumerate(lives):
        process = make_process(started=START + life)
        sidecar.feed.publish(make_snapshot(process, make_reading(definition, samples)))
        sidecar.collect_after(1)
        sidecar.restart()
        published_buckets.append(
            {
                dict(labels)["le"]: count
                for labels, count in sidecar.collect_after(1).all("loss_bucket").items()
            }
        )
        sidecar.feed.kill(process)

    assert published_buckets == [
        {"1.0": 0, "2.0": 1, "+Inf": 2},
        {"5.0": 1, "+Inf": 1},
        {"5.0": 2, "+Inf": 3},
        {"1.0": 1, "2.0": 1, "+Inf": 1},
    ]


@pytest.mark.parametrize("writer", ["this version", "an older version"])
def test_exponential_buckets_continue_over_restarts_and_older_states_are_read(
    sidecar: SimulatedSidecar, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    def encoded_without_exponential(slots: Mapping[int, WorkerSlot], folded_ids: Mapping[str, None]) -> bytes:
        record = json.loads(
            encode_rank(slots, folded_ids),
            object_hook=lambda mapping: {
                key: value for key, value in mapping.items() if key != "exponential"
            },
        )
        return json.dumps(record).encode()

    if writer != "this version":
        monkeypatch.setattr(ranks, "encode_rank", encoded_without_exponential)
    for life in (1, 2):
        reading = make_reading(make_definition(buckets=(1.0,)), [0.5, 0.7 * life])
        reading = reading.replace(exponential={-8: 1, 3 * life: 1})
        sidecar.feed.publish(make_snapshot(make_process(started=START + life), reading), alive=False)
        sidecar.collect_after(1)
        sidecar.restart()
    page = sidecar.collect_after(1)
    (distribution,) = [
        sample for sample in page.families["loss"].samples if isinstance(sample, DistributionSample)
    ]

    assert page.count("loss", **RANK_0_LABELS) == 4
    assert distribution.distribution.exponential == ({-8: 2, 3: 1, 6: 1} if writer == "this version" else {})


def test_dropped_samples_and_events_continue_over_restarts(sidecar: SimulatedSidecar) -> None:
    for life in (1, 2):
        reading = make_reading(LOSS_STAT, [1.0], rejected={"nan": 2, "capture": 1}, overflows=3)
        snapshot = make_snapshot(make_process(started=START + life), reading, dropped={"write_failed": 4})
        events = EventsReading({("ckpt", "info"): 3 * life}, {("ckpt", "info"): 5.0 * life})
        recording = snapshot.recording.replace(events=events)
        sidecar.feed.publish(snapshot.replace(recording=recording), alive=False)
        sidecar.collect_after(1)
    sidecar.restart()
    page = sidecar.collect_after(1)

    assert page.get("training_stat_rejected_samples_total", **RANK_0_LABELS, stat="loss", reason="nan") == 4
    assert (
        page.get("training_stat_rejected_samples_total", **RANK_0_LABELS, stat="loss", reason="overflow") == 6
    )
    reasons = {"nan": 4, "overflow": 6, "write_failed": 8, "infinite": None, "capture": 2}
    dropped_counts = {
        reason: page.get("training_feed_dropped_total", **RANK_0_LABELS, reason=reason) for reason in reasons
    }
    assert dropped_counts == reasons
    event_labels = {"type": "ckpt", "severity": "info", **RANK_0_LABELS}
    assert page.get("training_events_total", **event_labels) == 9
    assert page.get("training_event_last_timestamp_seconds", **event_labels) == 10.0


def test_unsaved_totals_are_suppressed_and_gauges_are_not(sidecar: SimulatedSidecar) -> None:
    job = MonitoredJob(sidecar, job_in_loop(session_tag="s"))
    job.simulated.train(3)
    job.write(make_reading(LOSS_STAT, [2.0] * 3))
    sidecar.collect()
    sidecar.replace_state_by_file()
    job.simulated.train()
    job.write(make_reading(LOSS_STAT, [2.0] * 4)).kill()
    collected = sidecar.collector.collect()
    page = sidecar.collect()

    assert {reason for reason, _ in collected.problems} == {"state"}
    assert {spec.name for spec in SPECS} & page.families.keys() == set()
    assert page.count("loss", **RANK_0_LABELS) is None
    assert page.get("training_feed_dropped_total", reason="nan", **RANK_0_LABELS) is None
    assert page.get("training_feed_alive", **RANK_0_LABELS) == 0
    assert page.get("loss_last_sample_timestamp_seconds", **RANK_0_LABELS) == START
    assert page.get("exporter_ledger_suppressed_ranks") == 1
    assert (page.get("exporter_ledger_state_errors_total", reason="failed") or 0) > 0
    assert job.process.id in sidecar.feed.files, "the feed file, which alone has the totals, was removed"
    sidecar.restore_state()
    recovered_page = sidecar.collect_after(4)
    assert [
        recovered_page.count("loss", **RANK_0_LABELS),
        training_value(recovered_page, "uncommitted_seconds"),
    ] == [4, 4]
    assert sidecar.feed.files == {}


def test_unchanged_state_is_not_written_again(sidecar: SimulatedSidecar) -> None:
    sidecar.record_loss(make_process(), 3)
    sidecar.collect()
    inodes = {path: path.stat().st_ino for path in sidecar.state.directory.iterdir()}
    sidecar.collect_after(1)
    sidecar.collect_after(1)

    assert {path: path.stat().st_ino for path in sidecar.state.directory.iterdir()} == inodes


event_keys = st.tuples(st.sampled_from("abc"), st.sampled_from(["info", "error"]))
counts_by_key = st.dictionaries(event_keys, st.integers(1, 9))
delivered_counts = st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9))
readings = st.builds(
    lambda counts, timestamp, *others: EventsReading(counts, dict.fromkeys(counts, timestamp), *others),
    *(counts_by_key, st.floats(0, 9), counts_by_key, delivered_counts, counts_by_key),
)


@given(readings, readings, readings)
def test_adding_events_is_associative_and_adds_up(
    first: EventsReading, second: EventsReading, third: EventsReading
) -> None:
    total = sum_events(sum_events(first, second), third)

    assert total == sum_events(first, sum_events(second, third))
    for name in ("counts", "suppressed", "delivered", "dropped"):
        sums = [sum(getattr(reading, name).values()) for reading in (first, second, third)]
        assert sum(getattr(total, name).values()) == sum(sums)
