"""Hooks on torch that call the active source: batches, backward passes, optimizer steps, modes of modules, saves.

Used in the training process, on the thread that makes the call. The active source is the bridge that reports the training, see
`exporter.bridges.sources`. The hooks read no device, and are inactive in code that torch compiles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from time import monotonic
from types import ModuleType
from typing import Any

from exporter import training
from exporter.bridges.loop import leave
from exporter.bridges.sources import ACTIVE, NO_SOURCE, set_rank
from exporter.patching import (
    AfterHook,
    Around,
    BeforeHook,
    drop_frame,
    log_failure,
    never_raises,
    patch,
    patch_existing,
    patch_frequent,
    replace,
    when_imported,
)

SCALE_SECONDS = 1.0
"""Minimum interval between two records of the loss scale. After a skipped step, which lowers the scale, the next scale is always recorded."""


class _HookState:
    """State of the hooks in this process."""

    def __init__(self) -> None:
        self.is_installed = False
        self.has_optimizer = False  # True after an optimizer of torch was constructed
        # True if an optimizer has stepped since the last call of `GradScaler.step`
        self.has_optimizer_stepped = False
        self.next_scale_at = 0.0  # earliest time of the next record of the loss scale, in monotonic seconds
        self.compile_blocks: list[Any] = []  # open blocks of the phase `compile`
        self.is_traced: Callable[[], bool] = lambda: False  # returns True in a hook that torch compiles
        # `_optimizer_begins` and `_optimizer_ends`, excluded from the compilation
        self.untraced_begins: Callable[..., None] = _ignore
        self.untraced_ends: Callable[..., None] = _ignore


def _ignore(*_args: Any) -> None:
    pass


_HOOKS = _HookState()


def install() -> None:
    """Install the hooks on torch. A second call has no effect.

    Raises:
        ImportError: torch is not installed.
        AttributeError: A patched function does not exist in this version of torch.
    """
    if _HOOKS.is_installed:
        return
    torch: Any = import_module("torch")
    loaders: Any = import_module("torch.utils.data.dataloader")
    _HOOKS.is_installed = True
    optimizers: Any = import_module("torch.optim.optimizer")
    optimizers.register_optimizer_step_pre_hook(_optimizer_begins)
    optimizers.register_optimizer_step_post_hook(_optimizer_ends)
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)
    # The base class of the iterators of loaders has no other hook.
    replace(loaders._BaseDataLoaderIter, "__next__", _around_fetch)  # noqa: SLF001
    is_traced = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", is_compiling)
    replace(torch.autograd, "backward", partial(_around_backward, is_traced))

    def patch_success(owner: Any, name: str, hook: Callable[..., None]) -> None:
        before_hook, after_hook = _on_success(hook)

        def unless_compiling(*args: Any, **kwargs: Any) -> Any:
            return None if is_compiling() else before_hook(*args, **kwargs)

        patch_frequent(owner, name, wraps(before_hook)(unless_compiling), after_hook)

    patch_frequent(loaders.DataLoader, "__iter__", _iterator_begins, _iterator_created)
    patch_success(torch.nn.utils, "clip_grad_norm_", _gradients_clipped)
    patch_success(torch.nn.Module, "eval", _evaluation_mode_set)
    patch_success(torch.optim.Optimizer, "load_state_dict", _state_loaded)
    patch_success(torch.optim.Optimizer, "add_param_group", _optimizer_constructed)
    patch(torch, "save", _save)
    when_imported("torch.amp.grad_scaler", _watch_scaler)
    when_imported("torch.distributed.checkpoint", _watch_distributed_saves)
    when_imported("torch.distributed", _watch_process_group)
    when_imported("torch._dynamo", _watch_compiler)


def optimizer_exists() -> bool:
    """Return True if an optimizer of torch was constructed since the hooks were installed."""
    return _HOOKS.has_optimizer


def _on_success(hook: Callable[..., None]) -> tuple[BeforeHook, AfterHook]:
    """Return two hooks for `patch_frequent` that together call *hook* with the result and the arguments of a call that succeeded."""

    @wraps(hook)
    def store_arguments(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    @wraps(hook)
    def call_hook(arguments: Any, result: Any, error: BaseException | None) -> None:
        if error is None:
            args, kwargs = arguments
            hook(result, *args, **kwargs)

    return store_arguments, call_hook


# Data and backward passes ---------------------------------------------------------------------------------------
# These functions are called in every step. They are wrapped with their exact signatures, because the general wrapper of `patch_frequent`
# would cost as much as the hooks.


def _around_fetch(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a replacement of a loader iterator's `__next__`, which calls the active source before and after the fetch."""

    def next_batch(iterator: Any) -> Any:
        source = ACTIVE.source
        try:
            source.fetch_begins(iterator)
        except Exception as failure:  # noqa: BLE001  # the job must not fail because of a bridge
            log_failure(source.fetch_begins, failure)
        try:
            batch = fetch(iterator)
        except BaseException as error:
            never_raises(source.fetch_ends)(iterator, None, error)
            drop_frame(error)
            raise
        try:
            source.fetch_ends(iterator, batch, None)
        except Exception as failure:  # noqa: BLE001  # the job must not fail because of a bridge
            log_failure(source.fetch_ends, failure)
        return batch

    return next_batch


def _around_backward(is_traced: Callable[[], bool], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `torch.autograd.backward`, which calls the active source before and after the pass."""

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if is_traced():  # torch compiles the caller
            return backward(*args, **kwargs)
        source = ACTIVE.source
        try:
            token = source.backward_begins(args[0] if args else kwargs.get("tensors"))
        except Exception as failure:  # noqa: BLE001  # the job must not fail because of a bridge
            log_failure(source.backward_begins, failure)
            token = None
        try:
            result = backward(*args, **kwargs)
        except BaseException as error:
            if token is not None:
                never_raises(source.backward_ends)(token, error)
            drop_frame(error)
            raise
        if token is not None:
            try:
                source.backward_ends(token, None)
            except Exception as failure:  # noqa: BLE001  # the job must not fail because of a bridge
                log_failure(source.backward_ends, failure)
        return result

    return run_backward


def _iterator_begins(loader: Any) -> Any:
    ACTIVE.source.fetch_begins(loader)
    return loader


def _iterator_created(loader: Any, _iterator: Any, error: BaseException | None) -> None:
    ACTIVE.source.iterator_created(loader, error)


def _gradients_clipped(norm: Any, *_args: Any, **_kwargs: Any) -> None:
    ACTIVE.source.gradient_norm_computed(norm)


# Optimizers -----------------------------------------------------------------------------------------------------


def _optimizer_begins(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if _HOOKS.is_traced():
        _HOOKS.untraced_begins(optimizer, None, None)
        return
    _HOOKS.has_optimizer_stepped = True
    source = ACTIVE.source
    try:
        source.optimizer_begins(optimizer)
    except Exception as failure:  # noqa: BLE001  # the job must not fail because of a bridge
        log_failure(source.optimizer_begins, failure)


def _optimizer_ends(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if _HOOKS.is_traced():
        _HOOKS.untraced_ends(optimizer, None, None)
        return
    source = ACTIVE.source
    try:
        source.optimizer_ends(optimizer)
    except Exception as failure:  # noqa: BLE001  # the job must not fail because of a bridge
        log_failure(source.optimizer_ends, failure)


def _optimizer_constructed(*_args: Any, **_kwargs: Any) -> None:
    _HOOKS.has_optimizer = True


def _state_loaded(_result: Any, _optimizer: Any, state: Any = None, *_args: Any, **kwargs: Any) -> None:
    ACTIVE.source.optimizer_loaded(kwargs.get("state_dict", state))


# Modes of modules -----------------------------------------------------------------------------------------------


def _evaluation_mode_set(_result: Any, module: Any) -> None:
    ACTIVE.source.evaluation_mode_set(module)


def watch_training_mode(*, enabled: bool) -> None:
    """Call the active source whenever a module is set to training mode, or stop these calls.

    A source enables the calls only during a validation, because torch calls `train` for every module of a model, in some jobs in each
    step.
    """
    if not _HOOKS.is_installed:
        return
    module_class = import_module("torch").nn.Module
    train = module_class.train
    is_watched = hasattr(train, _ORIGINAL)
    if enabled and not is_watched:
        module_class.train = _around_train(train)
    elif is_watched and not enabled:
        module_class.train = getattr(train, _ORIGINAL)


_ORIGINAL = "__exporter_original__"
"""Attribute of a watched `train` method that has the original method."""


def _around_train(train: Any) -> Any:
    @wraps(train)
    def set_mode(self: Any, mode: bool = True) -> Any:  # torch's signature
        result = train(self, mode)
        if mode and ACTIVE.source.is_evaluating:
            _training_mode_set(self)
        return result

    setattr(set_mode, _ORIGINAL, train)
    return set_mode


@never_raises
def _training_mode_set(module: Any) -> None:
    ACTIVE.source.training_mode_set(module)


# Processes, saves, compilation, loss scale ----------------------------------------------------------------------


def _watch_process_group(module: ModuleType) -> None:
    """Record the rank of processes that the job starts itself, without a launcher that sets the rank in the environment."""

    def around_init(*_args: Any, **_kwargs: Any) -> Around:
        _, error = yield
        if error is None:
            set_rank(int(module.get_rank()))

    patch_existing(module, ("init_process_group",), around_init)


def _save(contents: Any = None, *_args: Any, **kwargs: Any) -> Around | None:
    """Record a call of `torch.save`."""
    contents = kwargs.get("obj", contents)
    if type(contents).__name__.endswith("Storage"):
        return None  # torch pickles a tensor for a child process
    save: Around | None = ACTIVE.source.save(contents, is_sync=True)
    return save


def _watch_distributed_saves(module: ModuleType) -> None:
    """Record the calls of `save` and `async_save` of `torch.distributed.checkpoint`."""

    def hook(state: Any = None, *_args: Any, is_sync: bool, **kwargs: Any) -> Around | None:
        save: Around | None = ACTIVE.source.save(kwargs.get("state_dict", state), is_sync=is_sync)
        return save

    patch_existing(module, ("save",), partial(hook, is_sync=True))
    patch_existing(module, ("async_save",), partial(hook, is_sync=False))


def _watch_compiler(module: ModuleType) -> None:
    """Keep the hooks on optimizers out of compiled functions, and record when torch compiles."""
    # A compiled function calls these hooks after a break of the graph. `disable` costs 5 µs a call, so it is used only there.
    disable = module.disable
    _HOOKS.untraced_begins, _HOOKS.untraced_ends = disable(_optimizer_begins), disable(_optimizer_ends)
    _HOOKS.is_traced = import_module("torch").compiler.is_dynamo_compiling
    # `torch._dynamo.reset()` drops registered callbacks.
    handler = type(getattr(module, "callback_handler", None))
    patch_existing(handler, ("run_start_callbacks",), _compiling_begins)
    patch_existing(handler, ("run_end_callbacks",), _compiling_ends)


def _compiling_begins(*_args: Any) -> None:
    if ACTIVE.source.has_phases() and threading.current_thread() is threading.main_thread():
        _HOOKS.compile_blocks.append(training.phase("compile"))
        _HOOKS.compile_blocks[-1].__enter__()


def _compiling_ends(*_args: Any) -> None:
    if _HOOKS.compile_blocks and threading.current_thread() is threading.main_thread():
        leave(_HOOKS.compile_blocks.pop())


def _watch_scaler(module: ModuleType) -> None:
    patch_frequent(module.GradScaler, "scale", _scale_begins, _ignore)
    patch_frequent(module.GradScaler, "step", _scaled_step_begins, _scaled_step_ends)
    patch_frequent(module.GradScaler, "update", *_on_success(_scale_updated))


def _scale_begins(scaler: Any, outputs: Any = None, *_args: Any, **kwargs: Any) -> None:
    if scaler.is_enabled():
        ACTIVE.source.loss_computed(kwargs.get("outputs", outputs))


@dataclass(slots=True)
class _ScaledStep:
    """Call of `GradScaler.step`, which steps the optimizer only if all gradients are finite."""

    scaler: Any
    optimizer: Any


def _scaled_step_begins(scaler: Any, optimizer: Any = None, *_args: Any, **kwargs: Any) -> _ScaledStep:
    _HOOKS.has_optimizer_stepped = False
    return _ScaledStep(scaler, kwargs.get("optimizer", optimizer))


def _scaled_step_ends(step: _ScaledStep, _result: Any, error: BaseException | None) -> None:
    is_skipped = step.scaler.is_enabled() and not _HOOKS.has_optimizer_stepped
    if error is None and is_skipped and ACTIVE.source is not NO_SOURCE:
        training.skipped_step("overflow")
        ACTIVE.source.optimizer_skipped(step.optimizer)
        _HOOKS.next_scale_at = 0.0


def _scale_updated(_result: Any, scaler: Any, *_args: Any, **_kwargs: Any) -> None:
    now = monotonic()
    if now >= _HOOKS.next_scale_at and ACTIVE.source is not NO_SOURCE:
        scale = getattr(scaler, "_scale", None)  # a tensor; `get_scale()` would wait for the device
        if scale is not None:
            _HOOKS.next_scale_at = now + SCALE_SECONDS
            training.record(loss_scale=scale)
