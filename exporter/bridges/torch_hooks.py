"""Hooks on torch, which call the active source: batches, backward passes, optimizer steps, modes of modules, saves.

Used in the training process, on the thread that does it. torch itself has hooks for optimizers; the others are methods
that are patched. Nothing is read from a device, and nothing is done while torch compiles or captures.

A step that a gradient scaler skips is seen by the optimizer not being stepped. A fused optimizer skips inside of its
kernel: that cannot be seen without waiting for the device.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from time import monotonic
from types import ModuleType
from typing import Any

from exporter.bridges.patching import never_raises, patch, patch_existing, when_imported
from exporter.bridges.sources import ACTIVE, NOBODY, Source, set_rank

SCALE_SECONDS = 1.0
"""How often the loss scale is recorded: it changes every few thousand steps, or at a skipped one."""


class _Seen:
    """What has been seen so far.

    Attributes:
        installed: Whether torch is watched.
        optimizer_hooks: Torch's handles of the hooks for optimizers.
        optimizer_made: Whether an optimizer has been made.
        optimizer_steps: Optimizer steps begun.
        next_scale: When the loss scale is recorded again.
    """

    installed = False
    optimizer_hooks: tuple[Any, ...] = ()
    optimizer_made = False
    optimizer_steps = 0
    next_scale = 0.0


def install() -> None:
    """Watch torch; again is harmless.

    Raises:
        ImportError: There is no torch.
        AttributeError: It has become different.
    """
    if _Seen.installed:
        return
    torch: Any = import_module("torch")
    loaders: Any = import_module("torch.utils.data.dataloader")
    optimizers: Any = import_module("torch.optim.optimizer")
    _Seen.installed = True
    _Seen.optimizer_hooks = (
        optimizers.register_optimizer_step_pre_hook(_optimizer_begins),
        optimizers.register_optimizer_step_post_hook(_optimizer_ends),
    )
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)

    def unless_compiling(before: Callable[..., object]) -> Callable[..., object]:
        return lambda *args, **kwargs: None if is_compiling() else before(*args, **kwargs)

    patch(torch.autograd, "backward", unless_compiling(_backward_begins), _backward_ends)
    patch(loaders._BaseDataLoaderIter, "__next__", _fetch_begins, _fetch_ends)  # noqa: SLF001  # no hook elsewhere
    patch(loaders.DataLoader, "__iter__", _fetch_begins, _iterator_made)
    patch(torch, "save", _save_begins, _save_ends)
    patch(torch.nn.Module, "eval", unless_compiling(_always), _evaluates)
    _watch_training_mode(torch.nn.Module)
    patch(torch.nn.Module, "zero_grad", unless_compiling(_always), _cleared)
    patch(torch.optim.Optimizer, "load_state_dict", _load_begins, _loaded)
    patch(torch.optim.Optimizer, "add_param_group", _optimizer_made)
    patch(torch.nn.utils, "clip_grad_norm_", unless_compiling(_always), _clipped)
    when_imported("torch.amp.grad_scaler", _watch_scaler)
    when_imported("torch.distributed.checkpoint", _watch_distributed_saves)
    when_imported("torch.distributed", _watch_groups)
    when_imported("torch._dynamo", _watch_compiler)


def _watch_scaler(module: ModuleType) -> None:
    patch(module.GradScaler, "scale", _scale_begins)
    patch(module.GradScaler, "step", _scaled_step_begins, _scaled_step_ends)
    patch(module.GradScaler, "update", _always, _scale_updated)


def _watch_distributed_saves(module: ModuleType) -> None:
    patch_existing(module, ("save",), _distributed_save_begins, _save_ends)
    patch_existing(module, ("async_save",), _asynchronous_save_begins, _save_ends)


def _watch_compiler(module: ModuleType) -> None:
    """Keep the hooks for optimizers out of what is compiled, and see when torch compiles."""
    optimizers: Any = import_module("torch.optim.optimizer")
    for hook in _Seen.optimizer_hooks:
        hook.remove()
    _Seen.optimizer_hooks = (
        optimizers.register_optimizer_step_pre_hook(module.disable(_optimizer_begins)),
        optimizers.register_optimizer_step_post_hook(module.disable(_optimizer_ends)),
    )
    # Callbacks that are registered there are forgotten with `torch._dynamo.reset()`.
    handler = type(getattr(module, "callback_handler", None))
    patch_existing(handler, ("run_start_callbacks",), _compiling_begins)
    patch_existing(handler, ("run_end_callbacks",), _compiling_ends)


def _watch_groups(module: ModuleType) -> None:
    patch_existing(module, ("init_process_group",), _always, _group_made)  # torch may be built without


def _always(first: Any = None, *_args: Any, **_kwargs: Any) -> object:
    """Want the end of it; what it was called with is kept."""
    return (first,)


@never_raises
def _optimizer_begins(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    _Seen.optimizer_steps += 1
    ACTIVE.source.optimizer_begins(optimizer)


@never_raises
def _optimizer_ends(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    ACTIVE.source.optimizer_ends(optimizer)


def _optimizer_made(*_args: Any, **_kwargs: Any) -> object:
    _Seen.optimizer_made = True
    return None


def _cleared(kept: Any, _result: Any, error: BaseException | None) -> None:
    if error is None and not _Seen.optimizer_made:
        ACTIVE.source.gradients_cleared(kept[0])


def _group_made(_kept: Any, _result: Any, error: BaseException | None) -> None:
    """Ranks that the job starts itself know theirs from here on; those of a launcher have it in their environment."""
    if error is None:
        set_rank(int(sys.modules["torch.distributed"].get_rank()))


def _load_begins(_optimizer: Any, state: Any = None, *_args: Any, **kwargs: Any) -> object:
    return (kwargs.get("state_dict", state),)


def _loaded(kept: Any, _result: Any, error: BaseException | None) -> None:
    if error is None:
        ACTIVE.source.optimizer_loaded(kept[0])


def _backward_begins(*args: Any, **kwargs: Any) -> object:
    source = ACTIVE.source
    return source if source.backward_begins(args[0] if args else kwargs.get("tensors")) else None


def _backward_ends(source: Source, _result: Any, error: BaseException | None) -> None:
    source.backward_ends(error)


def _clipped(_kept: Any, norm: Any, error: BaseException | None) -> None:
    if error is None:
        ACTIVE.source.gradient_norm_is(norm)


def _evaluates(kept: Any, _module: Any, _error: BaseException | None) -> None:
    ACTIVE.source.evaluates(kept[0])


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


def _fetch_begins(_loader: Any) -> object:
    source = ACTIVE.source
    return source if source.fetch_begins() else None


def _fetch_ends(source: Source, batch: Any, error: BaseException | None) -> None:
    source.fetch_ends(batch, error)


def _iterator_made(source: Source, _iterator: Any, error: BaseException | None) -> None:
    source.fetch_ends(None, error)


def _save_begins(saved: Any = None, *_args: Any, **kwargs: Any) -> object:
    source = ACTIVE.source
    saved = kwargs.get("obj", saved)
    if type(saved).__name__.endswith("Storage"):
        return None  # so torch pickles a tensor: to send it, not to keep it
    return source if source.save_begins(saved, at_once=True) else None


def _distributed_save_begins(state_dict: Any = None, *_args: Any, **kwargs: Any) -> object:
    return _save_begins(kwargs.get("state_dict", state_dict))


def _asynchronous_save_begins(state_dict: Any = None, *_args: Any, **kwargs: Any) -> object:
    source = ACTIVE.source
    return source if source.save_begins(kwargs.get("state_dict", state_dict), at_once=False) else None


def _save_ends(source: Source, result: Any, error: BaseException | None) -> None:
    source.save_ends(result, error)


# Compiling ------------------------------------------------------------------------------------------------------

_compiling: list[Any] = []


def _compiling_begins(*_args: Any) -> object:
    if ACTIVE.source.has_phases() and threading.current_thread() is threading.main_thread():
        from exporter import training  # noqa: PLC0415  # a bridge that is installed may never be used

        span = training.phase("compile")
        span.__enter__()
        _compiling.append(span)
    return None


def _compiling_ends(*_args: Any) -> object:
    if _compiling and threading.current_thread() is threading.main_thread():
        _compiling.pop().__exit__(None, None, None)
    return None


# Loss scaling ---------------------------------------------------------------------------------------------------


def _scale_begins(scaler: Any, outputs: Any = None, *_args: Any, **kwargs: Any) -> object:
    if scaler.is_enabled():
        ACTIVE.source.loss_is(kwargs.get("outputs", outputs))
    return None


def _scaled_step_begins(scaler: Any, optimizer: Any = None, *_args: Any, **kwargs: Any) -> object:
    return (_Seen.optimizer_steps, kwargs.get("optimizer", optimizer)) if scaler.is_enabled() else None


def _scaled_step_ends(kept: Any, _result: Any, error: BaseException | None) -> None:
    source = ACTIVE.source
    if error is None and kept[0] == _Seen.optimizer_steps and source is not NOBODY:
        from exporter import training  # noqa: PLC0415  # a bridge that is installed may never be used

        training.skipped_step("overflow")
        source.optimizer_skipped(kept[1])
        _Seen.next_scale = 0.0


def _scale_updated(kept: Any, _result: Any, error: BaseException | None) -> None:
    now = monotonic()
    if error is None and now >= _Seen.next_scale and ACTIVE.source is not NOBODY:
        scale = getattr(kept[0], "_scale", None)  # a tensor; `get_scale()` would wait for the device
        if scale is not None:
            from exporter import training  # noqa: PLC0415  # as above

            _Seen.next_scale = now + SCALE_SECONDS
            training.record(loss_scale=scale)
