"""Saves reported to the training API, and the work that they commit."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from one_logger_support import configure, wait_for_delivery
from training_support import misuse_counts, publish_and_read, published_value, train, values_by_label

from exporter import training

pytestmark = pytest.mark.usefixtures("unconfigured_process")


def test_saves_reported_afterwards_are_counted() -> None:
    train(4, 0.005)
    training.checkpoint_saved(3, seconds=2.0, bytes=1000, blocking_seconds=0.5)
    training.checkpoint_saved(4, kind="async", ok=False)
    training.checkpoint_saved(4, kind="local")
    training.checkpoint_saved(-1)
    training.checkpoint_saved(5, kind="paper")
    training.checkpoint_saved(5, seconds=-1)

    reading = publish_and_read()
    assert values_by_label("training.checkpoints") == {
        ("sync", "ok"): 1,
        ("async", "failed"): 1,
        ("local", "ok"): 1,
    }
    assert (
        published_value("training.checkpoint_last_step"),
        published_value("training.checkpoint_last"),
    ) == (3, 1000)
    assert reading.committed_step == 3
    assert reading.committed_seconds == pytest.approx(reading.work_seconds * 3 / 4)
    assert [segment[:3] for segment in reading.segments] == [(1, 3, 3)]
    assert misuse_counts() == {("checkpoint_saved", "value"): 3}


def test_a_late_report_of_an_earlier_save_does_not_move_the_committed_step_back() -> None:
    with training.application(), training.training_loop(train_iterations_start=0):
        train(3, 0.004)
        training.checkpoint_saved(3, kind="async")
        training.checkpoint_saved(2, kind="async")
        reading = publish_and_read()
    with training.training_loop(train_iterations_start=1):
        train(1, 0.004)
        training.checkpoint_saved(2, kind="async")
        reading_of_second_loop = publish_and_read()

    assert reading.committed_step == 3
    assert reading.committed_seconds == pytest.approx(reading.work_seconds)
    assert reading_of_second_loop.committed_step == 2


def test_a_late_report_does_not_commit_the_steps_after_a_save_that_the_job_numbers_differently() -> None:
    with training.application(), training.training_loop(train_iterations_start=0):
        train(2, 0.004)
        work_seconds_of_two_steps = publish_and_read().work_seconds
        with training.checkpoint_save(100):
            pass
        train(2, 0.004)
        training.checkpoint_saved(2, kind="async")
        reading = publish_and_read()

    assert reading.committed_step == 2
    assert reading.committed_seconds == pytest.approx(work_seconds_of_two_steps)
    assert reading.work_seconds > work_seconds_of_two_steps


def test_work_covered_by_a_save_is_committed_and_the_rest_is_uncommitted() -> None:
    with training.application(), training.training_loop(train_iterations_start=10):
        train(3, 0.004)
        with training.checkpoint_save(13):
            pass
        reading_after_save = publish_and_read()
        train(1, 0.004)
        with pytest.raises(OSError, match="full"), training.checkpoint_save(14):
            raise OSError("full")
        reading = publish_and_read()

    assert (reading_after_save.committed_step, reading_after_save.segments) == (13, ())
    assert reading_after_save.committed_seconds == pytest.approx(reading_after_save.work_seconds)
    assert (reading.committed_step, reading.committed_seconds) == (13, reading_after_save.committed_seconds)
    assert [segment[:3] for segment in reading.segments] == [(1, 13, 13)]
    assert reading.segments[0].seconds == pytest.approx(reading.work_seconds - reading.committed_seconds)
    assert values_by_label("training.checkpoints") == {("sync", "failed"): 1, ("sync", "ok"): 1}


def test_asynchronous_saves_commit_the_work_before_their_start() -> None:
    configure(telemetry={"save_checkpoint_strategy": "async"})
    with training.application(), training.training_loop(train_iterations_start=0):
        for step in (1, 2, 3):
            train(1, 0.004)
            training.on_save_checkpoint_start(step)
            training.on_save_checkpoint_end()
        training.on_save_checkpoint_success(2)
        reading = publish_and_read()
        training.on_save_checkpoint_success(1)
        reading_after_older_save = publish_and_read()

    assert reading.committed_step == reading_after_older_save.committed_step == 2
    assert reading.committed_seconds == reading_after_older_save.committed_seconds
    assert [(segment.first_step, segment.last_step) for segment in reading_after_older_save.segments] == [
        (2, 2)
    ]
    assert values_by_label("training.checkpoints") == {("async", "ok"): 2}
    assert published_value("training.checkpoint_last_step") == 2


def test_another_thread_can_confirm_a_save_with_the_time_of_a_host_whose_clock_is_ahead() -> None:
    memory = configure(telemetry={"save_checkpoint_strategy": "async"})
    ahead_time = time.time() + 300
    with training.application():
        for step in (5, 6):
            training.on_save_checkpoint_start(step)
            training.on_save_checkpoint_end()
        thread = threading.Thread(target=training.on_save_checkpoint_success, args=(5, ahead_time * 1000))
        thread.start()
        thread.join()
        training.on_save_checkpoint_success(6, (ahead_time + 3600) * 1000)

    assert misuse_counts() == {}
    first, second = wait_for_delivery(memory).attributes("save_checkpoint_success")
    assert first["latest_successful_save_checkpoint_timestamp_sec"] == pytest.approx(ahead_time)
    # A time more than ten minutes ahead is replaced by the current time.
    assert second["latest_successful_save_checkpoint_timestamp_sec"] < ahead_time


def test_a_signal_handler_can_save_during_an_iteration() -> None:
    memory = configure(telemetry={})

    def save(*_: object) -> None:
        with training.checkpoint_save(1):
            pass

    old_handler = signal.signal(signal.SIGUSR1, save)
    try:
        with training.application(), training.training_loop(train_iterations_start=0):
            for _ in range(20):
                with training.training_iteration(), training.model_forward():
                    signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, old_handler)

    assert misuse_counts() == {}
    assert len(wait_for_delivery(memory).attributes("save_checkpoint_success")) == 20
    assert published_value("training.steps", mode="train") == 20
