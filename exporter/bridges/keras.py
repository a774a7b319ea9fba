"""The bridge to Keras 3: a callback for `fit` and `evaluate`.

Used in the training process, on the thread that trains; with the torch backend:

    model.fit(..., callbacks=[exporter.bridges.keras.callback()])

With `EXPORTER_AUTO=1` every list of callbacks gets one. It has no hooks for batches: with one, Keras would wait for the
device after each. Where a batch begins and ends is seen by the function that Keras makes for one, which is bracketed on
the model while it is trained. An iteration goes from the end of one batch to the end of the next; what is not in that
function is waiting for data. What happens inside of a batch is not told.

Outside of `fit`, in a loop of the job's own, Keras' optimizers are told to whoever tells of that loop, as torch's are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from exporter.bridges.brackets import bracket, bracket_what_exists, never_raises
from exporter.bridges.claims import CLAIMS, LEADING, Teller
from exporter.bridges.course import BATCH, EVALUATION, ITERATION, LOOP, SAVE, Abandoned, Course
from exporter.bridges.imports import when_imported

_LIST = "keras.src.callbacks.callback_list"
_OPTIMIZER = "keras.src.optimizers.base_optimizer"


def callback() -> Any:
    """Make a callback.

    Raises:
        ImportError: Keras is not installed.
    """
    keras: Any = import_module("keras")
    _watch(keras.Model)
    return type("ExporterCallback", (Hooks, keras.callbacks.Callback), {})()


def install() -> None:
    """Put one into every list of callbacks, from when Keras is imported."""
    when_imported("keras.src.models.model", lambda module: _watch(module.Model))
    when_imported(_LIST, _add_to_lists)
    when_imported(_OPTIMIZER, _watch_optimizers)


def _add_to_lists(module: ModuleType) -> None:
    bracket(module.CallbackList, "__init__", _list_begins, _list_made)


def _list_begins(callbacks: Any, *_args: Any, **_kwargs: Any) -> object:
    return (callbacks,)


def _list_made(kept: Any, _result: Any, error: BaseException | None) -> None:
    (callbacks,) = kept
    if error is not None or any(isinstance(each, Hooks) for each in callbacks.callbacks):
        return
    added = callback()
    added.set_model(getattr(callbacks, "_model", None))
    added.set_params(getattr(callbacks, "params", None) or {})
    callbacks.callbacks.append(added)


def _watch(model: Any) -> None:
    """Bracket what no callback tells: that a call has failed, and saves, which hold the optimizer's state."""
    for name in ("fit", "evaluate"):
        bracket(model, name, _call_begins, _call_ends)
    bracket_what_exists(model, ("save", "save_weights"), _save_begins, _save_ends)


def _watch_optimizers(module: ModuleType) -> None:
    bracket_what_exists(module.BaseOptimizer, ("apply",), _update_begins, _update_ends)


def _update_begins(optimizer: Any, *_args: Any, **_kwargs: Any) -> object:
    if "keras.src.backend.torch" not in sys.modules:
        return None
    teller = CLAIMS.holder
    teller.optimizer_begins(optimizer)
    return teller, optimizer


def _update_ends(kept: Any, _result: Any, error: BaseException | None) -> None:
    teller, optimizer = kept
    if error is None:
        teller.optimizer_ends(optimizer)


class FitTeller(Teller):
    """Tells of one call.

    Args:
        model: Whose.

    Attributes:
        model: Whose.
        course: Where it is.
        training: `exporter.training`.
    """

    strength = LEADING

    def __init__(self, model: Any) -> None:
        self.model = model
        self.course = Course()
        self.training: Any = self.course.training
        self._bracketed: list[tuple[str, Any, Any]] = []
        self._steps_of_epoch: int | None = None
        self._epochs: int | None = None

    def tells_phases(self) -> bool:
        """There is one from the begin."""
        return True

    @property
    def step(self) -> int:
        """Steps that the optimizer has made; read from its device, so only where a loop begins and at saves."""
        iterations = getattr(getattr(self.model, "optimizer", None), "iterations", None)
        return 0 if iterations is None else int(iterations)

    def yields(self) -> None:
        """Nobody is stronger, but the next call may come after one whose end nobody has seen."""
        self.ends(Abandoned())

    def train_begins(self, params: Any) -> None:
        """The training loop begins."""
        policy = getattr(self.model, "dtype_policy", None)
        self.training.describe(
            framework="keras",
            framework_version=str(getattr(sys.modules.get("keras"), "__version__", "")) or None,
            model=str(getattr(self.model, "name", "")) or None,
            precision=str(getattr(policy, "name", "")) or None,
        )
        self._steps_of_epoch, self._epochs = params.get("steps"), params.get("epochs")
        self.course.begin_loop(self.step)
        self._bracket("train_function", self._batch_begins, self._batch_ends)

    def epoch_begins(self, epoch: int) -> None:
        """An epoch begins; the first one says how many are left."""
        if self._steps_of_epoch and self._epochs:
            self.training.describe(step_target=self.step + self._steps_of_epoch * (self._epochs - epoch))
            self._epochs = None
        self.training.record(epoch=epoch)
        self._batch_is_awaited()

    def evaluation_begins(self) -> None:
        """A validation within `fit`, or an evaluation of its own, begins."""
        self.course.abandon_iteration()
        training = self.training
        inside = self.course.is_open(LOOP)
        self.course.begin(EVALUATION, training.validation_loop() if inside else training.testing_loop())
        self._bracket("test_function", self._test_batch_begins, self._test_batch_ends)

    def ends(self, error: BaseException | None) -> None:
        """The call is over."""
        for name, bracketed, function in self._bracketed:
            if getattr(self.model, name, None) is bracketed:
                setattr(self.model, name, function)
        self._bracketed.clear()
        self.course.end_all(error)

    def _bracket(self, name: str, before: Any, after: Any) -> None:
        function = getattr(self.model, name, None)
        if function is None or any(bracketed is function for _, bracketed, _ in self._bracketed):
            return
        bracket(self.model, name, before, after)
        self._bracketed.append((name, getattr(self.model, name), function))

    def _batch_is_awaited(self) -> None:
        self.course.begin_iteration()
        self.course.phase("data_loading")

    def _batch_begins(self, *_data: Any) -> object:
        self.course.begin_iteration()
        self.course.phase(None)
        return self

    def _batch_ends(self, _kept: Any, logs: Any, error: BaseException | None) -> None:
        if error is not None:
            return
        if isinstance(logs, Mapping) and "loss" in logs:
            self.course.record_loss(logs["loss"])
        self.training.record(microbatches=1)
        self.course.end(ITERATION)
        self._batch_is_awaited()

    def _test_batch_begins(self, *_data: Any) -> object:
        training = self.training
        inside = self.course.is_open(LOOP)
        self.course.begin(BATCH, training.validation_iteration() if inside else training.testing_iteration())
        return self

    def _test_batch_ends(self, _kept: Any, _logs: Any, error: BaseException | None) -> None:
        self.course.end(BATCH, error)


class Hooks:
    """What Keras calls; `CLAIMS` knows who tells of it."""

    model: Any
    params: Any

    def __reduce__(self) -> tuple[Any, ...]:
        """Be made anew where it is sent to."""
        return callback, ()

    @never_raises
    def on_train_begin(self, logs: Any = None) -> None:
        """The training loop begins."""
        del logs
        teller = _claimed(self.model)
        if teller is not None:
            teller.train_begins(self.params or {})

    @never_raises
    def on_train_end(self, logs: Any = None) -> None:
        """The training loop ends."""
        del logs
        teller = _told_of(self.model)
        if teller is not None:
            teller.course.abandon_iteration()
            teller.course.end(LOOP)
            _release(teller)

    @never_raises
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins."""
        del logs
        teller = _told_of(self.model)
        if teller is not None:
            teller.epoch_begins(epoch)

    @never_raises
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """An epoch ends, after its validation."""
        teller = _told_of(self.model)
        if teller is not None:
            teller.course.abandon_iteration()
            teller.training.record(epoch=epoch + 1)
            if logs and "val_loss" in logs:
                teller.training.record(loss=logs["val_loss"], mode="validation")

    @never_raises
    def on_test_begin(self, logs: Any = None) -> None:
        """A validation within `fit`, or an evaluation of its own, begins."""
        del logs
        teller = _told_of(self.model) or _claimed(self.model)
        if teller is not None:
            teller.evaluation_begins()

    @never_raises
    def on_test_end(self, logs: Any = None) -> None:
        """It ends."""
        del logs
        teller = _told_of(self.model)
        if teller is not None:
            teller.course.end(EVALUATION)
            if not teller.course.is_open(LOOP):
                _release(teller)


_calls: list[Any] = []
"""The models of the calls that brackets have seen begin. A bracket that is made while the arguments of the first call are
made does not see that call."""


def _told_of(model: Any) -> FitTeller | None:
    holder = CLAIMS.holder
    return holder if isinstance(holder, FitTeller) and holder.model is model else None


def _claimed(model: Any) -> FitTeller | None:
    """Begin to tell of a call, unless somebody else tells; a call of which nobody saw the end is over."""
    holder = CLAIMS.holder
    if isinstance(holder, FitTeller) and (holder.model is model or not _is_called(holder.model)):
        holder.yields()
        CLAIMS.release(holder)
    teller = FitTeller(model)
    return teller if CLAIMS.take(teller) else None


def _is_called(model: Any) -> bool:
    return any(each is model for each in _calls)


def _release(teller: FitTeller) -> None:
    """Give the claim back where no bracket will."""
    if not _is_called(teller.model):
        teller.ends(None)
        CLAIMS.release(teller)


def _call_begins(model: Any, *_args: Any, **_kwargs: Any) -> object:
    _calls.append(model)
    return model, _told_of(model)


def _call_ends(kept: Any, _result: Any, error: BaseException | None) -> None:
    model, before = kept
    _calls.pop()
    teller = _told_of(model)
    if teller is not None and teller is not before:
        teller.ends(error)
        CLAIMS.release(teller)


def _save_begins(model: Any, *_args: Any, **_kwargs: Any) -> object:
    teller = _told_of(model)
    if teller is None or teller.course.is_open(SAVE):
        return None
    teller.course.abandon_iteration()
    teller.course.begin_save(teller.step)
    return teller


def _save_ends(teller: FitTeller, _result: Any, error: BaseException | None) -> None:
    teller.course.end(SAVE, error)
