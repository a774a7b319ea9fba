"""Training jobs of Keras. Each function is a job.

`programs.loops.run_loops` calls the functions in sequence in the same process; each call is a separate run.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import keras

from exporter.bridges import keras as bridge
from programs.keras_parts import INPUTS, TARGETS, FailingCallback, fit

CALLBACK = pickle.loads(pickle.dumps(copy.deepcopy(bridge.callback())))
"""Callback of all jobs, copied and pickled as Keras and its users do."""


def ordinary() -> None:
    saving = keras.callbacks.ModelCheckpoint("model.keras")
    fit([CALLBACK, saving], epochs=2, validation_data=(INPUTS, TARGETS))


def several_loops() -> None:
    model = fit([CALLBACK], epochs=1)
    fit([CALLBACK], model=model, initial_epoch=1, epochs=3)
    model.evaluate(INPUTS, TARGETS, batch_size=4, verbose=0, callbacks=[CALLBACK])


def failing_fit() -> None:
    try:
        fit([FailingCallback(), CALLBACK])
    except ZeroDivisionError as error:
        print("raised", error)
    fit([CALLBACK])


def failed_save() -> None:
    class BadAndGoodSaves(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types here
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with contextlib.suppress(OSError):
                self.model.save("/proc/nowhere/model.keras")
            self.model.save_weights("model.weights.h5")

    fit([CALLBACK, BadAndGoodSaves()], epochs=2)


def nonfinite_targets() -> None:
    fit([CALLBACK], targets=TARGETS * float("nan"))


def train_function_is_kept() -> None:
    model = fit()
    model.make_train_function()
    own_function = model.train_function
    fit([CALLBACK], model=model)
    assert model.train_function is own_function
