"""The bridge to Keras 3, with the real one on its torch backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, Job, job, wanted

pytestmark = [wanted("keras", "torch"), pytest.mark.timeout(180)]

PRELUDE = """
import os, sys, tempfile, warnings
warnings.simplefilter("ignore")
os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy
ROOT = tempfile.mkdtemp(dir=os.environ["EXPORTER_FEED_DIR"] + "/..")

def made(**options):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", **options)
    return model

x = numpy.random.rand(12, 4)
y = x[:, :1]
"""

SCENARIOS = """
import copy, pickle
from exporter.bridges import keras as bridge
told = pickle.loads(pickle.dumps(copy.deepcopy(bridge.callback())))

def ordinary():
    made().fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=(x, y),
               callbacks=[told, keras.callbacks.ModelCheckpoint(f"{ROOT}/model.keras")])
    print("ordinary", gauges())

def several_loops():
    model = made()
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=[told])
    model.fit(x, y, batch_size=4, initial_epoch=1, epochs=3, verbose=0, callbacks=[told])
    model.evaluate(x, y, batch_size=4, verbose=0, callbacks=[told])
    print("several_loops", gauges())

def failing():
    class Failing(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                raise ZeroDivisionError("amid an epoch")
    try:
        made().fit(x, y, batch_size=4, verbose=0, callbacks=[Failing(), told])
    except ZeroDivisionError as error:
        print("raised", error)
    made().fit(x, y, batch_size=4, verbose=0, callbacks=[told])

def failed_save():
    class Saving(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            try:
                self.model.save("/proc/nowhere/model.keras")
            except OSError:
                pass
            self.model.save_weights(f"{ROOT}/model.weights.h5")
    made().fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[told, Saving()])

def not_finite():
    made().fit(x, y * float("nan"), batch_size=4, verbose=0, callbacks=[told])

def left_as_it_was():
    model = made()
    model.make_train_function()
    before = model.train_function
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[told])
    assert model.train_function is before

for scenario in (ordinary, several_loops, failing, failed_save, not_finite, left_as_it_was):
    begin(scenario.__name__)
    scenario()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job(tmp_path_factory.mktemp("keras"), PRELUDE + SCENARIOS)


STEPS, VALIDATED = "steps_total mode=train", "steps_total mode=validation"
SAVED, FAILED = "checkpoints_total result=ok", "checkpoints_total result=failed"
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
    # A second loop goes on where the first one ended.
    "several_loops": {"gauge step": 9, "gauge step_target": 9, "steps_total mode=test": 3},
    # The next `fit` after an exception counts right.
    "failing": {STEPS: 2 + 3},
    "failed_save": {SAVED: 2, FAILED: 2, STEPS: 6},
    "not_finite": {"nonfinite_total kind=loss value=nan": 3},
    "left_as_it_was": {STEPS: 3},
}


@pytest.mark.parametrize("run", EXPECTED)
def test_what_a_model_does_is_told(told: Job, run: str) -> None:
    assert told.numbers(run, EXPECTED[run]) == EXPECTED[run]


def test_losses_are_those_of_keras_exceptions_come_out_and_no_notice_was_given(told: Job) -> None:
    gauges = told.told()["ordinary"]

    assert gauges["training.loss,mode=train"] > 0
    assert gauges["training.loss,mode=validation"] > 0
    assert told.phases("ordinary")["data_loading"] >= 6
    assert "raised amid an epoch" in told.done.stdout
    assert "training_misuse_total" not in told.page
    assert "exporter" not in told.done.stderr


def test_a_job_that_goes_on_after_an_exception_and_ends_in_order_has_done_its_work(tmp_path: Path) -> None:
    program = """
class Failing(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        1 / (2 - batch)
try:
    made().fit(x, y, batch_size=4, verbose=0, callbacks=[Failing()])
except ZeroDivisionError:
    made().fit(x, y, batch_size=4, verbose=0)
"""
    told = job(tmp_path, PRELUDE + program, AUTO)

    assert told.value("training_uncommitted_seconds") == 0
    assert (told.value("training_productive_seconds_total") or 0) > 0


def test_a_job_that_is_not_changed_is_told(tmp_path: Path) -> None:
    program = """
model = made()
model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(f"{ROOT}/m.keras")])
callbacks = keras.callbacks.CallbackList([], model=model)
print("asynchronous", callbacks._async_train)
"""
    told = job(tmp_path, PRELUDE + program, AUTO)

    assert told.value("training_steps_total", mode="train") == 6
    assert told.value("training_checkpoints_total", result="ok") == 2
    assert "asynchronous True" in told.done.stdout
