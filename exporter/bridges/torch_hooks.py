"""Hooks on torch that call the active source: batches, backward passes, optimizer steps, modes of modules, saves.

Used in the training process, on the thread that makes the call. The hooks read no device, and are inactive when
torch compiles or captures.
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
from exporter.bridges.sources import ACTIVE, NOBODY, set_rank
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
"""Interval in which the loss scale is recorded: the scale changes every few thousand steps, or at a skipped step."""


class _HookState:
    """State of the hooks in this process."""

    def __init__(self) -> None:
        self.is_installed = False
        self.optimizer_made = False
        self.optimizer_steps = 0  # started
        self.next_scale = 0.0
        self.compiling: list[Any] = []
        self.is_traced: Callable[[], bool] = lambda: False  # True in a hook that torch compiles
        self.untraced_begins: Callable[..., None] = _nothing
        self.untraced_ends: Callable[..., None] = _nothing


def _nothing(*_args: Any) -> None:
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
        before, after = _on_success(hook)

        def unless_compiling(*args: Any, **kwargs: Any) -> Any:
            return None if is_compiling() else before(*args, **kwargs)

        patch_frequent(owner, name, wraps(before)(unless_compiling), after)

    patch_frequent(loaders.DataLoader, "__iter__", _iterator_begins, _iterator_made)
    patch_success(torch.nn.utils, "clip_grad_norm_", _clipped)
    patch_success(torch.nn.Module, "eval", _evaluates)
    patch_success(torch.optim.Optimizer, "load_state_dict", _state_loaded)
    patch_success(torch.optim.Optimizer, "add_param_group", _optimizer_made)
    patch(torch, "save", _save)
    when_imported("torch.amp.grad_scaler", _watch_scaler)
    when_imported("torch.distributed.checkpoint", _watch_distributed_saves)
    when_imported("torch.distributed", _watch_process_group)
    when_imported("torch._dynamo", _watch_compiler)


def optimizer_exists() -> bool:
    """Return True if an optimizer of torch was constructed since the hooks were installed."""
    return _HOOKS.optimizer_made


def _on_success(hook: Callable[..., None]) -> tuple[BeforeHook, AfterHook]:
    """Return the functions that call a hook with the result and the arguments of a call that succeeded."""

    @wraps(hook)
    def before(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    @wraps(hook)
    def after(arguments: Any, result: Any, error: BaseException | None) -> None:
        if error is None:
            args, kwargs = arguments
            hook(result, *args, **kwargs)

    return before, after


# Data and backward passes ---------------------------------------------------------------------------------------
# Hooks of every step, with the exact signatures: `patch_frequent` would cost as much as the hooks.


def _around_fetch(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def fetched(iterator: Any) -> Any:
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
        except Exception as failure:  # noqa: BLE001  # as above
            log_failure(source.fetch_ends, failure)
        return batch

    return fetched


def _around_backward(is_traced: Callable[[], bool], backward: Callable[..., Any]) -> Callable[..., Any]:
    def passed(tensors: Any, *args: Any, **kwargs: Any) -> Any:  # torch's name
        if is_traced():  # for a compilation
            return backward(tensors, *args, **kwargs)
        source = ACTIVE.source
        try:
            token = source.backward_begins(tensors)
        except Exception as failure:  # noqa: BLE001  # as above
            log_failure(source.backward_begins, failure)
            token = None
        try:
            result = backward(tensors, *args, **kwargs)
        except BaseException as error:
            if token is not None:
                never_raises(source.backward_ends)(token, error)
            drop_frame(error)
            raise
        if token is not None:
            try:
                source.backward_ends(token, None)
            except Exception as failure:  # noqa: BLE001  # as above
                log_failure(source.backward_ends, failure)
        return result

    return passed


def _iterator_begins(loader: Any) -> Any:
    ACTIVE.source.fetch_begins(loader)
    return loader


def _iterator_made(loader: Any, _iterator: Any, error: BaseException | None) -> None:
    ACTIVE.source.iterator_made(loader, error)


def _clipped(norm: Any, *_args: Any, **_kwargs: Any) -> None:
    ACTIVE.source.gradient_norm_is(norm)


# Optimizers -----------------------------------------------------------------------------------------------------


def _optimizer_begins(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if _HOOKS.is_traced():
        _HOOKS.untraced_begins(optimizer, None, None)
        return
    _HOOKS.optimizer_steps += 1
    source = ACTIVE.source
    try:
        source.optimizer_begins(optimizer)
    except Exception as failure:  # noqa: BLE001  # as above
        log_failure(source.optimizer_begins, failure)


def _optimizer_ends(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if _HOOKS.is_traced():
        _HOOKS.untraced_ends(optimizer, None, None)
        return
    source = ACTIVE.source
    try:
        source.optimizer_ends(optimizer)
    except Exception as failure:  # noqa: BLE001  # as above
        log_failure(source.optimizer_ends, failure)


def _optimizer_made(*_args: Any, **_kwargs: Any) -> None:
    _HOOKS.optimizer_made = True


def _state_loaded(_result: Any, _optimizer: Any, state: Any = None, *_args: Any, **kwargs: Any) -> None:
    ACTIVE.source.optimizer_loaded(kwargs.get("state_dict", state))


# Modes of modules -----------------------------------------------------------------------------------------------


def _evaluates(_result: Any, module: Any) -> None:
    ACTIVE.source.evaluates(module)


def watch_training_mode(*, on: bool) -> None:
    """Call the active source when a module is set to training mode, or stop doing so.

    The hook exists only during a validation: torch calls `train` for each of a model's modules, in some jobs in every step.
    """
    if not _HOOKS.is_installed:
        return
    module_class = import_module("torch").nn.Module
    present = module_class.train
    is_watched = hasattr(present, _WATCHED)
    if on and not is_watched:
        module_class.train = _watched_train(present)
    elif is_watched and not on:
        module_class.train = getattr(present, _WATCHED)


_WATCHED = "__exporter_original__"


def _watched_train(train: Any) -> Any:
    @wraps(train)
    def watched(self: Any, mode: bool = True) -> Any:  # torch's signature
        result = train(self, mode)
        if mode and ACTIVE.source.is_evaluating:
            _trains(self)
        return result

    setattr(watched, _WATCHED, train)
    return watched


@never_raises
def _trains(module: Any) -> None:
    ACTIVE.source.trains(module)


# Processes, saves, compilation, loss scale ----------------------------------------------------------------------


def _watch_process_group(module: ModuleType) -> None:
    """Record the rank of processes that the job starts itself. A launcher sets the rank in the environment."""

    def around_init(*_args: Any, **_kwargs: Any) -> Around:
        _, error = yield
        if error is None:
            set_rank(int(module.get_rank()))

    patch_existing(module, ("init_process_group",), around_init)


def _save(saved: Any = None, *_args: Any, **kwargs: Any) -> Around | None:
    saved = kwargs.get("obj", saved)
    if type(saved).__name__.endswith("Storage"):
        return None  # torch pickles a tensor for a child process
    around: Around | None = ACTIVE.source.save(saved, at_once=True)
    return around


def _watch_distributed_saves(module: ModuleType) -> None:
    def hook(state: Any = None, *_args: Any, at_once: bool, **kwargs: Any) -> Around | None:
        around: Around | None = ACTIVE.source.save(kwargs.get("state_dict", state), at_once=at_once)
        return around

    patch_existing(module, ("save",), partial(hook, at_once=True))
    patch_existing(module, ("async_save",), partial(hook, at_once=False))


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
        _HOOKS.compiling.append(training.phase("compile"))
        _HOOKS.compiling[-1].__enter__()


def _compiling_ends(*_args: Any) -> None:
    if _HOOKS.compiling and threading.current_thread() is threading.main_thread():
        leave(_HOOKS.compiling.pop())


def _watch_scaler(module: ModuleType) -> None:
    patch_frequent(module.GradScaler, "scale", _scales, _nothing)
    patch_frequent(module.GradScaler, "step", _scaled_step_begins, _scaled_step_ends)
    patch_frequent(module.GradScaler, "update", *_on_success(_scale_updated))


def _scales(scaler: Any, outputs: Any = None, *_args: Any, **kwargs: Any) -> None:
    if scaler.is_enabled():
        ACTIVE.source.loss_is(kwargs.get("outputs", outputs))


@dataclass(slots=True)
class _ScaledStep:
    """A step through a gradient scaler, and the steps of optimizers before it."""

    scaler: Any
    optimizer: Any
    steps_before: int


def _scaled_step_begins(scaler: Any, optimizer: Any = None, *_args: Any, **kwargs: Any) -> _ScaledStep:
    return _ScaledStep(scaler, kwargs.get("optimizer", optimizer), _HOOKS.optimizer_steps)


def _scaled_step_ends(step: _ScaledStep, _result: Any, error: BaseException | None) -> None:
    is_skipped = step.scaler.is_enabled() and step.steps_before == _HOOKS.optimizer_steps
    if error is None and is_skipped and ACTIVE.source is not NOBODY:
        training.skipped_step("overflow")
        ACTIVE.source.optimizer_skipped(step.optimizer)
        _HOOKS.next_scale = 0.0


def _scale_updated(_result: Any, scaler: Any, *_args: Any, **_kwargs: Any) -> None:
    now = monotonic()
    if now >= _HOOKS.next_scale and ACTIVE.source is not NOBODY:
        scale = getattr(scaler, "_scale", None)  # a tensor; `get_scale()` would wait for the device
        if scale is not None:
            _HOOKS.next_scale = now + SCALE_SECONDS
            training.record(loss_scale=scale)
