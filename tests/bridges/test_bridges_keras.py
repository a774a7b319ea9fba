"""Bridge for Keras 3, with the real package on the torch backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, FAILED, SAVED, STEPS, VALIDATED, Job, job, loops, wanted

pytestmark = [wanted("keras", "torch"), pytest.mark.timeout(180)]

PRELUDE = """
import os, warnings
warnings.simplefilter("ignore")
os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy

class Failing(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            raise ZeroDivisionError("amid an epoch")

def fit(callbacks=(), y=None, model=None, **options):
    if model is None:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(x, x[:, :1] if y is None else y, batch_size=4, verbose=0, callbacks=[*callbacks], **options)
    return model

x = numpy.random.rand(12, 4)
"""

LOOPS = """
import copy, pickle
from exporter.bridges import keras as bridge
recorded = pickle.loads(pickle.dumps(copy.deepcopy(bridge.callback())))

def ordinary():
    fit([recorded, keras.callbacks.ModelCheckpoint("model.keras")], epochs=2, validation_data=(x, x[:, :1]))

def several_loops():
    model = fit([recorded], epochs=1)
    fit([recorded], model=model, initial_epoch=1, epochs=3)
    model.evaluate(x, x[:, :1], batch_size=4, verbose=0, callbacks=[recorded])

def failing():
    try:
        fit([Failing(), recorded])
    except ZeroDivisionError as error:
        print("raised", error)
    fit([recorded])

def failed_save():
    class Saving(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            try:
                self.model.save("/proc/nowhere/model.keras")
            except OSError:
                pass
            self.model.save_weights("model.weights.h5")
    fit([recorded, Saving()], epochs=2)

def not_finite():
    fit([recorded], y=x[:, :1] * float("nan"))

def left_as_it_was():
    model = fit()
    model.make_train_function()
    before = model.train_function
    fit([recorded], model=model)
    assert model.train_function is before
"""
recorded = loops(PRELUDE, LOOPS)

EXPECTED: dict[str, dict[str, float | None]] = {
    "ordinary": {
        STEPS: 6,
        VALIDATED: 6,
        "epochs_total": 2,
        "phase validation": 2,
        SAVED: 2,
        "gauge step": 6,
        "gauge step_target": 6,
    },
    # A second loop continues at the end of the first.
    "several_loops": {"gauge step": 9, "gauge step_target": 9, "steps_total mode=test": 3},
    # The next `fit` after an exception counts right.
    "failing": {STEPS: 2 + 3},
    "failed_save": {SAVED: 2, FAILED: 2, STEPS: 6},
    "not_finite": {"nonfinite_total kind=loss value=nan": 3},
    "left_as_it_was": {STEPS: 3},
}


@pytest.mark.parametrize("run", EXPECTED)
def test_training_and_evaluation_of_a_model_are_recorded(recorded: Job, run: str) -> None:
    assert recorded.unlike(EXPECTED[run], run) == {}


def test_losses_match_keras_and_exceptions_propagate(recorded: Job) -> None:
    assert recorded.gauges("ordinary")["loss,mode=train"] > 0
    assert recorded.gauges("ordinary")["loss,mode=validation"] > 0
    assert (recorded.number("phase data_loading", "ordinary") or 0) >= 6
    assert "raised amid an epoch" in recorded.done.stdout


def test_an_unchanged_job_that_continues_after_an_exception_is_recorded_as_finished(
    tmp_path: Path,
) -> None:
    program = """
try:
    fit([Failing()])
except ZeroDivisionError:
    model = fit([keras.callbacks.ModelCheckpoint("model.keras")], epochs=2)
print("asynchronous", keras.callbacks.CallbackList([], model=model)._async_train)
"""
    recorded = job(tmp_path, PRELUDE + program, AUTO)

    assert recorded.unlike({STEPS: 2 + 6, SAVED: 2, "uncommitted_seconds": 0}) == {}
    assert (recorded.value("training_productive_seconds_total") or 0) > 0
    assert "asynchronous True" in recorded.done.stdout
