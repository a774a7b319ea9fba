"""Instrumented blocks replace inferred blocks of a bridge without double counting or loss."""

from __future__ import annotations

import threading

import pytest
from training_support import misuse_counts, publish_and_read, published_value

from exporter import training
from exporter.training import api
from exporter.training.recorder import TRAINING

pytestmark = pytest.mark.usefixtures("initial_recorder")


def infer(steps: int, *, is_last_iteration_ended: bool = True) -> None:
    """Enter an inferred loop and its iterations like a bridge. The loop stays open.

    A bridge ends an iteration at the next batch, so that the last iteration of a loop may stay open.
    """
    api.inferred_loop(0).__enter__()
    for step in range(steps):
        iteration = api.inferred_iteration()
        iteration.__enter__()
        if is_last_iteration_ended or step < steps - 1:
            iteration.__exit__(None, None, None)


def run_iterations(times: int) -> None:
    for _ in range(times):
        with training.training_iteration(), training.model_forward():
            pass


@pytest.mark.parametrize("is_last_iteration_ended", [True, False])
def test_a_loop_of_the_job_continues_after_an_inferred_warm_up(is_last_iteration_ended: bool) -> None:
    infer(10, is_last_iteration_ended=is_last_iteration_ended)
    with training.application(), training.training_loop(train_iterations_start=0):
        run_iterations(400)
        with training.checkpoint_save(400):
            pass

    reading = publish_and_read()
    assert published_value("training.steps", mode="train") == (410 if is_last_iteration_ended else 409)
    assert published_value("training.step") == reading.step == 400
    assert not reading.inferred_loop
    assert published_value("training.phase_entries", phase="forward") == 400
    assert reading.finished
    assert reading.committed_seconds == pytest.approx(reading.work_seconds)
    assert reading.work_seconds > 0
    assert reading.segments == ()
    assert misuse_counts() == {}


def test_instrumented_iterations_replace_inferred_iterations() -> None:
    infer(2)
    for _ in range(5):
        with training.training_iteration(), api.inferred_iteration():
            pass
        with api.inferred_loop(0), api.inferred_iteration():
            pass

    assert published_value("training.steps", mode="train") == 7
    assert publish_and_read().step == 7


def test_an_iteration_of_another_thread_can_be_discarded() -> None:
    def run() -> None:
        for is_kept in (True, False):
            with api.inferred_iteration():
                if not is_kept:
                    TRAINING.discard_iteration()

    with training.span("on the main thread"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    assert published_value("training.steps", mode="train") == 1
