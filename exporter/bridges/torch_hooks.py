"""Hooks on torch, which call the active source: batches, backward passes, optimizer steps, modes of modules, saves.

Used in the training process, on the thread that does it. torch itself has hooks for optimizers; the others are methods
that are patched. Nothing is read from a device, and nothing is done while torch compiles or captures.

A step that a gradient scaler skips is seen by the optimizer not being stepped. A fused optimizer skips inside of its
kernel: that cannot be seen without waiting for the device.
"""

from __future__ import annotations

import sys
import threading
from functools import wraps
from importlib import import_module
from time import monotonic
from types import ModuleType
from typing import Any

from exporter import training
from exporter.bridges.sources import ACTIVE, NOBODY, set_rank
from exporter.patching import Around, Hook, never_raises, patch, patch_existing, when_imported

SCALE_SECONDS = 1.0
"""How often the loss scale is recorded: it changes every few thousand steps, or at a skipped one."""


class _Seen:
    """What has been seen so far, in this process."""

    installed = False
    optimizer_hooks: tuple[Any, ...] = ()
    optimizer_made = False
    optimizer_steps = 0  # begun
    next_scale = 0.0
    compiling: tuple[Any, ...] = ()


def install() -> None:
    """Watch torch; again is harmless. Raises ImportError: There is no torch; AttributeError: It has become different."""
    if _Seen.installed:
        return
    torch: Any = import_module("torch")
    loaders: Any = import_module("torch.utils.data.dataloader")
    _Seen.installed = True
    _watch_optimizers(lambda hook: hook)
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)

    def unless_compiling(hook: Hook) -> Hook:
        return lambda *args, **kwargs: None if is_compiling() else hook(*args, **kwargs)

    patch(torch.autograd, "backward", unless_compiling(_backward))
    patch(loaders._BaseDataLoaderIter, "__next__", lambda _iterator: ACTIVE.source.fetch())  # noqa: SLF001  # no hook elsewhere
    patch(loaders.DataLoader, "__iter__", lambda _loader: ACTIVE.source.fetch(begins=True))
    patch(torch, "save", _save)
    patch(torch.nn.Module, "eval", unless_compiling(_evaluates))
    _watch_training_mode(torch.nn.Module)
    patch(torch.nn.Module, "zero_grad", unless_compiling(_cleared))
    patch(torch.optim.Optimizer, "load_state_dict", _state_loaded)
    patch(torch.optim.Optimizer, "add_param_group", _optimizer_made)
    patch(torch.nn.utils, "clip_grad_norm_", unless_compiling(_clipped))
    when_imported("torch.amp.grad_scaler", _watch_scaler)
    when_imported("torch.distributed.checkpoint", _watch_distributed_saves)
    when_imported(
        "torch.distributed", lambda module: patch_existing(module, ("init_process_group",), _group_made)
    )
    when_imported("torch._dynamo", _watch_compiler)


# Optimizers -----------------------------------------------------------------------------------------------------


def _watch_optimizers(wrapped: Any) -> None:
    optimizers: Any = import_module("torch.optim.optimizer")
    for hook in _Seen.optimizer_hooks:
        hook.remove()
    _Seen.optimizer_hooks = (
        optimizers.register_optimizer_step_pre_hook(wrapped(_optimizer_begins)),
        optimizers.register_optimizer_step_post_hook(wrapped(_optimizer_ends)),
    )


@never_raises
def _optimizer_begins(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    _Seen.optimizer_steps += 1
    ACTIVE.source.optimizer_begins(optimizer)


@never_raises
def _optimizer_ends(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    ACTIVE.source.optimizer_ends(optimizer)


def _optimizer_made(*_args: Any, **_kwargs: Any) -> None:
    _Seen.optimizer_made = True


def _state_loaded(_optimizer: Any, state: Any = None, *_args: Any, **kwargs: Any) -> Around:
    state = kwargs.get("state_dict", state)
    _, error = yield
    if error is None:
        ACTIVE.source.optimizer_loaded(state)


# A turn ---------------------------------------------------------------------------------------------------------


def _backward(tensors: Any = None, *_args: Any, **kwargs: Any) -> Around | None:
    return ACTIVE.source.backward(kwargs.get("tensors", tensors))


def _cleared(module: Any, *_args: Any, **_kwargs: Any) -> Around:
    _, error = yield
    if error is None and not _Seen.optimizer_made:
        ACTIVE.source.gradients_cleared(module)


def _clipped(*_args: Any, **_kwargs: Any) -> Around:
    norm, error = yield
    if error is None:
        ACTIVE.source.gradient_norm_is(norm)


def _evaluates(module: Any, *_args: Any, **_kwargs: Any) -> Around:
    yield
    ACTIVE.source.evaluates(module)


def _watch_training_mode(module_class: Any) -> None:
    """See when a module is set to train again; not by `patch`, since torch calls it for each of a model's layers."""
    train = module_class.train

    @wraps(train)
    def watched(self: Any, mode: bool = True) -> Any:  # torch's own
        result = train(self, mode)
        if mode and ACTIVE.source.is_evaluating:
            _trains(self)
        return result

    module_class.train = watched


@never_raises
def _trains(module: Any) -> None:
    ACTIVE.source.trains(module)


def _group_made(*_args: Any, **_kwargs: Any) -> Around:
    """Ranks that the job starts itself know theirs from here on; those of a launcher have it in their environment."""
    _, error = yield
    if error is None:
        set_rank(int(sys.modules["torch.distributed"].get_rank()))


# Saves ----------------------------------------------------------------------------------------------------------


def _save(saved: Any = None, *_args: Any, **kwargs: Any) -> Around | None:
    saved = kwargs.get("obj", saved)
    if type(saved).__name__.endswith("Storage"):
        return None  # so torch pickles a tensor: to send it, not to keep it
    return ACTIVE.source.save(saved, at_once=True)


def _watch_distributed_saves(module: ModuleType) -> None:
    def hook(*, at_once: bool) -> Hook:
        return lambda state=None, *_args, **kwargs: ACTIVE.source.save(
            kwargs.get("state_dict", state), at_once=at_once
        )

    patch_existing(module, ("save",), hook(at_once=True))
    patch_existing(module, ("async_save",), hook(at_once=False))


# Compiling ------------------------------------------------------------------------------------------------------


def _watch_compiler(module: ModuleType) -> None:
    """Keep the hooks for optimizers out of what is compiled, and see when torch compiles."""
    _watch_optimizers(module.disable)
    # Callbacks that are registered there are forgotten with `torch._dynamo.reset()`.
    handler = type(getattr(module, "callback_handler", None))
    patch_existing(handler, ("run_start_callbacks",), _compiling_begins)
    patch_existing(handler, ("run_end_callbacks",), _compiling_ends)


def _compiling_begins(*_args: Any) -> None:
    if ACTIVE.source.has_phases() and threading.current_thread() is threading.main_thread():
        span = training.phase("compile")
        span.__enter__()
        _Seen.compiling += (span,)


def _compiling_ends(*_args: Any) -> None:
    if _Seen.compiling and threading.current_thread() is threading.main_thread():
        *rest, span = _Seen.compiling
        _Seen.compiling = tuple(rest)
        span.__exit__(None, None, None)


# Loss scaling ---------------------------------------------------------------------------------------------------


def _watch_scaler(module: ModuleType) -> None:
    patch(module.GradScaler, "scale", _scales)
    patch(module.GradScaler, "step", _scaled_step)
    patch(module.GradScaler, "update", _scale_updated)


def _scales(scaler: Any, outputs: Any = None, *_args: Any, **kwargs: Any) -> None:
    if scaler.is_enabled():
        ACTIVE.source.loss_is(kwargs.get("outputs", outputs))


def _scaled_step(scaler: Any, optimizer: Any = None, *_args: Any, **kwargs: Any) -> Around:
    before = _Seen.optimizer_steps
    _, error = yield
    if (
        error is None
        and scaler.is_enabled()
        and before == _Seen.optimizer_steps
        and ACTIVE.source is not NOBODY
    ):
        training.skipped_step("overflow")
        ACTIVE.source.optimizer_skipped(kwargs.get("optimizer", optimizer))
        _Seen.next_scale = 0.0


def _scale_updated(scaler: Any, *_args: Any, **_kwargs: Any) -> Around:
    _, error = yield
    now = monotonic()
    if error is None and now >= _Seen.next_scale and ACTIVE.source is not NOBODY:
        scale = getattr(scaler, "_scale", None)  # a tensor; `get_scale()` would wait for the device
        if scale is not None:
            _Seen.next_scale = now + SCALE_SECONDS
            training.record(loss_scale=scale)
