"""The bridge to Keras 3: a callback for `fit` and `evaluate`.

Used in the training process, on the thread that trains; with the torch backend:

    model.fit(..., callbacks=[exporter.bridges.keras.callback()])

With `EXPORTER_AUTO=1` every list of callbacks gets one. It has no hooks for batches: with one, Keras would wait for the
device after each. Where a batch begins and ends is seen by the function that Keras makes for one, which is patched on
the model while it is trained. An iteration goes from the end of one batch to the end of the next; what is not in that
function is waiting for data. What happens inside of a batch is not told.

Outside of `fit`, in a loop of the job's own, Keras' optimizers are told to whoever tells of that loop, as torch's are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from exporter.bridges.loop import BATCH, EVALUATION, ITERATION, LOOP, SAVE, Discarded, LoopTracker
from exporter.bridges.patching import never_raises, patch, patch_existing, when_imported
from exporter.bridges.sources import ACTIVE, LEADING, Source

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
    patch(module.CallbackList, "__init__", _list_begins, _list_made)


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
        patch(model, name, _call_begins, _call_ends)
    patch_existing(model, ("save", "save_weights"), _save_begins, _save_ends)


def _watch_optimizers(module: ModuleType) -> None:
    patch_existing(module.BaseOptimizer, ("apply",), _update_begins, _update_ends)


def _update_begins(optimizer: Any, *_args: Any, **_kwargs: Any) -> object:
    if "keras.src.backend.torch" not in sys.modules:
        return None
    source = ACTIVE.source
    source.optimizer_begins(optimizer)
    return source, optimizer


def _update_ends(kept: Any, _result: Any, error: BaseException | None) -> None:
    source, optimizer = kept
    if error is None:
        source.optimizer_ends(optimizer)


class FitSource(Source):
    """Tells of one call.

    Args:
        model: Whose.

    Attributes:
        model: Whose.
        tracker: Where it is.
        training: `exporter.training`.
    """

    strength = LEADING

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tracker = LoopTracker()
        self.training: Any = self.tracker.training
        self._patched: list[tuple[str, Any, Any]] = []
        self._steps_of_epoch: int | None = None
        self._epochs: int | None = None

    def has_phases(self) -> bool:
        """There is a tracker from the begin."""
        return True

    @property
    def step(self) -> int:
        """Steps that the optimizer has made; read from its device, so only where a loop begins and at saves."""
        iterations = getattr(getattr(self.model, "optimizer", None), "iterations", None)
        return 0 if iterations is None else int(iterations)

    def yields(self) -> None:
        """Nobody is stronger, but the next call may come after one whose end nobody has seen."""
        self.ends(Discarded())

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
        self.tracker.begin_loop(self.step)
        self._patch("train_function", self._batch_begins, self._batch_ends)

    def epoch_begins(self, epoch: int) -> None:
        """An epoch begins; the first one says how many are left."""
        if self._steps_of_epoch and self._epochs:
            self.training.describe(step_target=self.step + self._steps_of_epoch * (self._epochs - epoch))
            self._epochs = None
        self.training.record(epoch=epoch)
        self._batch_is_awaited()

    def epoch_ends(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """An epoch ends, after its validation."""
        self.tracker.discard_iteration()
        self.training.record(epoch=epoch + 1)
        if "val_loss" in logs:
            self.training.record(loss=logs["val_loss"], mode="validation")

    def train_ends(self) -> None:
        """The training loop ends."""
        self.tracker.discard_iteration()
        self.tracker.end(LOOP)
        _release(self)

    def evaluation_begins(self) -> None:
        """A validation within `fit`, or an evaluation of its own, begins."""
        self.tracker.discard_iteration()
        training = self.training
        inside = self.tracker.is_open(LOOP)
        self.tracker.begin(EVALUATION, training.validation_loop() if inside else training.testing_loop())
        self._patch("test_function", self._test_batch_begins, self._test_batch_ends)

    def evaluation_ends(self) -> None:
        """It ends."""
        self.tracker.end(EVALUATION)
        if not self.tracker.is_open(LOOP):
            _release(self)

    def ends(self, error: BaseException | None) -> None:
        """The call is over."""
        for name, patched, function in self._patched:
            if getattr(self.model, name, None) is patched:
                setattr(self.model, name, function)
        self._patched.clear()
        self.tracker.end_all(error)

    def _patch(self, name: str, before: Any, after: Any) -> None:
        function = getattr(self.model, name, None)
        if function is None or any(patched is function for _, patched, _ in self._patched):
            return
        patch(self.model, name, before, after)
        self._patched.append((name, getattr(self.model, name), function))

    def _batch_is_awaited(self) -> None:
        self.tracker.begin_iteration()
        self.tracker.phase("data_loading")

    def _batch_begins(self, *_data: Any) -> object:
        self.tracker.begin_iteration()
        self.tracker.phase(None)
        return self

    def _batch_ends(self, _kept: Any, logs: Any, error: BaseException | None) -> None:
        if error is not None:
            return
        if isinstance(logs, Mapping) and "loss" in logs:
            self.tracker.record("loss", logs["loss"])
        self.training.record(microbatches=1)
        self.tracker.end(ITERATION)
        self._batch_is_awaited()

    def _test_batch_begins(self, *_data: Any) -> object:
        training = self.training
        inside = self.tracker.is_open(LOOP)
        self.tracker.begin(BATCH, training.validation_iteration() if inside else training.testing_iteration())
        return self

    def _test_batch_ends(self, _kept: Any, _logs: Any, error: BaseException | None) -> None:
        self.tracker.end(BATCH, error)


def _reports(report: Callable[[FitSource, Any, Any], object]) -> Any:
    """Make a hook that reports something to the source of its model's call; it gets the epoch, where there is one, and logs."""

    @never_raises
    def hook(self: Hooks, first: Any = None, logs: Any = None) -> None:
        source = _source_of(self.model)
        if source is not None:
            report(source, first, logs)

    return hook


class Hooks:
    """What Keras calls."""

    model: Any
    params: Any

    def __reduce__(self) -> tuple[Any, ...]:
        """Be made anew where it is sent to."""
        return callback, ()

    @never_raises
    def on_train_begin(self, logs: Any = None) -> None:
        """The training loop begins."""
        del logs
        source = _taken_for(self.model)
        if source is not None:
            source.train_begins(self.params or {})

    @never_raises
    def on_test_begin(self, logs: Any = None) -> None:
        """A validation within `fit`, or an evaluation of its own, begins."""
        del logs
        source = _source_of(self.model) or _taken_for(self.model)
        if source is not None:
            source.evaluation_begins()

    on_epoch_begin = _reports(lambda source, epoch, _: source.epoch_begins(epoch))
    on_epoch_end = _reports(lambda source, epoch, logs: source.epoch_ends(epoch, logs or {}))
    on_train_end = _reports(lambda source, *_: source.train_ends())
    on_test_end = _reports(lambda source, *_: source.evaluation_ends())


_calls: list[Any] = []
"""The models of the calls that brackets have seen begin. A bracket that is made while the arguments of the first call are
made does not see that call."""


def _source_of(model: Any) -> FitSource | None:
    source = ACTIVE.source
    return source if isinstance(source, FitSource) and source.model is model else None


def _taken_for(model: Any) -> FitSource | None:
    """Begin to tell of a call, unless somebody else tells; a call of which nobody saw the end is over."""
    source = ACTIVE.source
    if isinstance(source, FitSource) and (source.model is model or not _is_called(source.model)):
        source.yields()
        ACTIVE.release(source)
    source = FitSource(model)
    return source if ACTIVE.take(source) else None


def _is_called(model: Any) -> bool:
    return any(each is model for each in _calls)


def _release(source: FitSource) -> None:
    """Give the claim back where no bracket will."""
    if not _is_called(source.model):
        source.ends(None)
        ACTIVE.release(source)


def _call_begins(model: Any, *_args: Any, **_kwargs: Any) -> object:
    _calls.append(model)
    return model, _source_of(model)


def _call_ends(kept: Any, _result: Any, error: BaseException | None) -> None:
    model, before = kept
    _calls.pop()
    source = _source_of(model)
    if source is not None and source is not before:
        source.ends(error)
        ACTIVE.release(source)


def _save_begins(model: Any, *_args: Any, **_kwargs: Any) -> object:
    source = _source_of(model)
    if source is None or source.tracker.is_open(SAVE):
        return None
    source.tracker.discard_iteration()
    source.tracker.begin_save(source.step)
    return source


def _save_ends(source: FitSource, _result: Any, error: BaseException | None) -> None:
    source.tracker.end(SAVE, error)
