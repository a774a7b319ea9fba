"""What the job tells itself takes the place of what a bridge has guessed: nothing is counted twice, nothing is lost."""

from __future__ import annotations

import pytest
from training_support import misuses, of, told

from exporter import training
from exporter.training import api

pytestmark = pytest.mark.usefixtures("fresh")


def guessed(steps: int, *, ended: bool = True) -> None:
    """As a bridge does: the last iteration ends with the fetch of the next batch, which may never come."""
    api.guessed_loop(0).__enter__()
    for step in range(steps):
        iteration = api.guessed_iteration()
        iteration.__enter__()
        if ended or step < steps - 1:
            iteration.__exit__(None, None, None)


def iterations(times: int) -> None:
    for _ in range(times):
        with training.training_iteration(), training.model_forward():
            pass


@pytest.mark.parametrize("ended", [True, False])
def test_a_loop_that_the_job_tells_goes_on_after_a_guessed_warm_up(ended: bool) -> None:
    guessed(10, ended=ended)
    with training.application(), training.training_loop(train_iterations_start=0):
        iterations(400)
        with training.checkpoint_save(400):
            pass

    reading = told()
    assert of("training.steps", mode="train") == (410 if ended else 409)
    assert of("training.step") == reading.step == 400
    assert not reading.guessed
    assert of("training.phase_entries", phase="forward") == 400
    assert reading.finished
    assert reading.committed_seconds == pytest.approx(reading.work_seconds)
    assert reading.work_seconds > 0
    assert reading.segments == ()
    assert misuses() == {}


def test_iterations_that_the_job_tells_are_counted_and_those_guessed_beside_them_are_not() -> None:
    guessed(2)
    for _ in range(5):
        with training.training_iteration(), api.guessed_iteration():
            pass
        with api.guessed_loop(0), api.guessed_iteration():
            pass

    assert of("training.steps", mode="train") == 7
    assert told().step == 7
