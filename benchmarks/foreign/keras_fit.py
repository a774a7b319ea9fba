"""Keras `fit` on the torch backend, with validation data and ModelCheckpoint."""

import os
import time

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy
from own_log import DIRECTORY, SECONDS, begin_step, end_job, end_step, log


class Log(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        begin_step()

    def on_train_batch_end(self, batch, logs=None):
        end_step(logs["loss"], 4)

    def on_epoch_end(self, epoch, logs=None):
        log("epoch")
        log("validation", batches=5)
        log("save")


def slow_loss(target, output):
    time.sleep(SECONDS)
    return keras.losses.mean_squared_error(target, output)


keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), slow_loss)
x, y = numpy.random.rand(80, 8), numpy.random.rand(80, 1)
checkpoint = keras.callbacks.ModelCheckpoint(str(DIRECTORY / "last.keras"))
model.fit(
    *(x, y),
    batch_size=4,
    epochs=2,
    verbose=0,
    validation_data=(x[:20], y[:20]),
    validation_batch_size=4,
    callbacks=[checkpoint, Log()],
)
end_job()
