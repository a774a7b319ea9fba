"""Bridge to Keras 3 with the torch backend: a callback for `fit` and `evaluate`.

Used in the training process, on the thread that trains. Batches are recorded by patching the batch function that Keras creates
for a model. With batch hooks in a callback, Keras would wait for the device after each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from exporter import training
from exporter.bridges.loop import Discarded, Level, LoopTracker
from exporter.bridges.sources import ACTIVE, Source, Strength
from exporter.patching import Around, Hook, never_raises, patch, patch_existing, version_of, when_imported


def callback() -> Any:
    """Return a new callback. Raises ImportError if Keras is not installed."""
    keras: Any = import_module("keras")
    _watch_models(keras.Model)
    return type("ExporterCallback", (_Hooks, keras.callbacks.Callback), {})()


def install() -> None:
    """Add a callback to each list of callbacks that is created after the import of Keras."""
    when_imported("keras.src.models.model", lambda module: _watch_models(module.Model))
    when_imported(
        "keras.src.callbacks.callback_list",
        lambda module: patch(module.CallbackList, "__init__", _list_created),
    )


def _list_created(callbacks: Any, *_args: Any, **_kwargs: Any) -> Around:
    """Add a callback to a new list of callbacks, unless the list has one. The list sets the model of its callbacks before this hook."""
    _, error = yield
    if error is None and not any(isinstance(item, _Hooks) for item in callbacks.callbacks):
        hooks = callback()
        hooks.set_model(getattr(callbacks, "_model", None))
        hooks.set_params(getattr(callbacks, "params", None) or {})
        callbacks.callbacks.append(hooks)


def _watch_models(model: Any) -> None:
    """Patch `fit` and `evaluate`, because callbacks do not report an exception, and the saves, which have no callback."""
    patch(model, "fit", _around_call)
    patch(model, "evaluate", _around_call)
    patch_existing(model, ("save", "save_weights"), _around_save)


class _FitSource(Source):
    """Source of a call of `fit` or `evaluate`. The methods `on_…` receive the calls of Keras' hooks of these names."""

    strength = Strength.LEADING

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tracker = LoopTracker()
        self._functions: dict[str, Any] = {}  # original functions of the model that are patched, by name

    @property
    def step(self) -> int:
        """Number of steps of the optimizer. The number may be on the device; therefore the bridge does not read it in every step."""
        iterations = getattr(getattr(self.model, "optimizer", None), "iterations", None)
        return 0 if iterations is None else int(iterations)

    def on_train_begin(self, *_: Any) -> None:
        policy = getattr(self.model, "dtype_policy", None)
        training.describe(
            framework="keras",
            framework_version=version_of("keras"),
            model=str(getattr(self.model, "name", "")) or None,
            precision=str(getattr(policy, "name", "")) or None,
        )
        self.tracker.begin_loop(self.step)
        self._patch("train_function", self._train_batch)

    def on_epoch_begin(self, params: Mapping[str, Any], epoch: int, _logs: Any = None) -> None:
        if params.get("steps") and params.get("epochs"):
            remaining_steps = params["steps"] * (params["epochs"] - epoch)
            training.describe(step_target=self.step + remaining_steps)
        training.record(epoch=epoch)
        self._await_batch()

    def on_epoch_end(self, _params: Mapping[str, Any], epoch: int, logs: Any = None) -> None:
        self.tracker.discard_iteration()
        training.record(epoch=epoch + 1)
        if logs and "val_loss" in logs:
            training.record(loss=logs["val_loss"], mode="validation")

    def on_train_end(self, *_: Any) -> None:
        self.tracker.discard_iteration()
        self.tracker.end(Level.LOOP)

    def on_test_begin(self, *_: Any) -> None:
        """Start a validation inside `fit`, or a separate evaluation."""
        self.tracker.discard_iteration()
        self.tracker.begin_evaluation(self._mode)
        self._patch("test_function", self._test_batch)

    def on_test_end(self, *_: Any) -> None:
        self.tracker.end(Level.EVALUATION)

    def release(self, error: BaseException | None) -> None:
        """Restore the functions of the model and close all blocks, at the end of the call of `fit` or `evaluate`."""
        for name, function in self._functions.items():
            setattr(self.model, name, function)
        self._functions.clear()
        self.tracker.end_all(error)
        ACTIVE.release(self)

    @property
    def _mode(self) -> str:
        return "validation" if self.tracker.is_open(Level.LOOP) else "test"

    def _patch(self, name: str, hook: Hook) -> None:
        """Patch the batch function that Keras has created for the model, until `release`."""
        function = getattr(self.model, name, None)
        if function is not None and name not in self._functions:
            self._functions[name] = function
            patch(self.model, name, hook)

    def _await_batch(self) -> None:
        """Start an iteration with the wait for its batch."""
        self.tracker.begin_iteration()
        self.tracker.phase("data_loading")

    def _train_batch(self, *_data: Any) -> Around:
        self.tracker.begin_iteration()
        self.tracker.phase(None)
        logs, error = yield
        if error is None:
            if isinstance(logs, Mapping) and "loss" in logs:
                self.tracker.record("loss", logs["loss"])
            training.record(microbatches=1)
            self.tracker.end(Level.ITERATION)
            self._await_batch()

    def _test_batch(self, *_data: Any) -> Around:
        self.tracker.begin_batch(self._mode)
        _, error = yield
        self.tracker.end(Level.BATCH, error)


def _forwarding(name: str) -> Callable[..., None]:
    """Return a hook that calls the method of this name of the source. `on_train_begin` and `on_test_begin` create the source."""

    @never_raises
    def hook(self: _Hooks, *args: Any, **kwargs: Any) -> None:
        source = _source_of(self.model)
        if source is None and name in {"on_train_begin", "on_test_begin"}:
            source = _FitSource(self.model)
            if not ACTIVE.activate(source):
                return
        if source is not None:
            getattr(source, name)(self.params or {}, *args, *kwargs.values())
            is_open = source.tracker.is_open(Level.LOOP) or source.tracker.is_open(Level.EVALUATION)
            if not is_open and not _is_called(self.model):
                source.release(None)  # the end of this call will not be reported

    return hook


class _Hooks:
    """Methods that Keras calls: for each method `on_…` of `_FitSource`, a hook that calls the method."""

    model: Any
    params: Any

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without state: the receiving process creates a new callback."""
        return callback, ()


for _name in vars(_FitSource):
    if _name.startswith("on_"):
        setattr(_Hooks, _name, _forwarding(_name))

_called_models: list[Any] = []
"""Models with a call of `fit` or `evaluate` in progress, through the patch of this bridge.

A call whose arguments create the first callback is not in the list: Python looks up `fit` before it evaluates the arguments, and the
first callback patches `fit`.
"""


def _is_called(model: Any) -> bool:
    return any(called_model is model for called_model in _called_models)


def _source_of(model: Any) -> _FitSource | None:
    """Return the source of the call of a model, or None. Release the source of another model whose end was not reported."""
    source = ACTIVE.source
    if isinstance(source, _FitSource) and source.model is not model and not _is_called(source.model):
        source.release(Discarded())
    return source if isinstance(source, _FitSource) and source.model is model else None


def _around_call(model: Any, *_args: Any, **_kwargs: Any) -> Around:
    """Release the source of a call of `fit` or `evaluate` at the end of the call, also after an exception."""
    is_nested = _is_called(model)  # the validation of a `fit` is a call of `evaluate`
    earlier_source = _source_of(model)
    if earlier_source is not None and not is_nested:
        earlier_source.release(Discarded())
    _called_models.append(model)
    _, error = yield
    _called_models.pop()
    source = _source_of(model)
    if source is not None and not is_nested:
        source.release(error)


def _around_save(model: Any, *_args: Any, **_kwargs: Any) -> Around | None:
    source = _source_of(model)
    if source is None or source.tracker.is_open(Level.SAVE):
        return None
    source.tracker.discard_iteration()
    return source.tracker.save(source.step)
