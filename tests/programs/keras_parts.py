"""Parts of training jobs of Keras: data, a fitted model and a callback that fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

INPUTS = np.random.default_rng(0).random((12, 4))
TARGETS = INPUTS[:, :1]


class FailingCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types here
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            raise ZeroDivisionError("amid an epoch")


def fit(callbacks: Sequence[Any] = (), targets: Any = TARGETS, model: Any = None, **options: Any) -> Any:
    """Fit a linear model, by default a new model, in three batches an epoch, and return the model."""
    if model is None:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(INPUTS, targets, batch_size=4, verbose=0, callbacks=[*callbacks], **options)
    return model
