"""Hooks on torch, which call the active source: batches, backward passes, optimizer steps, modes of modules, saves.

Used in the training process, on the thread that does it. Nothing is read from a device, and nothing is done while torch
compiles or captures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from time import monotonic
from types import ModuleType
from typing import Any, ClassVar

from exporter import training
from exporter.bridges.loop import leave
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
    compiling: ClassVar[list[Any]] = []


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

    for owner, name, hook in (
        (torch.autograd, "backward", _backward),
        (loaders._BaseDataLoaderIter, "__next__", lambda _iterator: ACTIVE.source.fetch()),  # noqa: SLF001  # no hook elsewhere
        (loaders.DataLoader, "__iter__", lambda _loader: ACTIVE.source.fetch(begins=True)),
        (torch, "save", _save),
        (torch.nn.Module, "eval", _after(lambda _, module: ACTIVE.source.evaluates(module))),
        (torch.nn.Module, "zero_grad", _after(_cleared)),
        (torch.optim.Optimizer, "load_state_dict", _after(_state_loaded)),
        (torch.optim.Optimizer, "add_param_group", _optimizer_made),
        (
            torch.nn.utils,
            "clip_grad_norm_",
            _after(lambda norm, *_, **__: ACTIVE.source.gradient_norm_is(norm)),
        ),
    ):
        patch(owner, name, unless_compiling(hook))
    _watch_training_mode(torch.nn.Module)
    when_imported("torch.amp.grad_scaler", _watch_scaler)
    when_imported("torch.distributed.checkpoint", _watch_distributed_saves)
    when_imported("torch.distributed", _watch_process_group)
    when_imported("torch._dynamo", _watch_compiler)


def _after(tell: Callable[..., object]) -> Hook:
    """Make a hook that is told of a call which has succeeded: of its result and its arguments."""

    def hook(*args: Any, **kwargs: Any) -> Around:
        result, error = yield
        if error is None:
            tell(result, *args, **kwargs)

    return hook


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


def _state_loaded(_result: Any, _optimizer: Any, state: Any = None, *_args: Any, **kwargs: Any) -> None:
    ACTIVE.source.optimizer_loaded(kwargs.get("state_dict", state))


def _backward(tensors: Any = None, *_args: Any, **kwargs: Any) -> Around | None:
    return ACTIVE.source.backward(kwargs.get("tensors", tensors))


def _cleared(_result: Any, module: Any, *_args: Any, **_kwargs: Any) -> None:
    if not _Seen.optimizer_made:
        ACTIVE.source.gradients_cleared(module)


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


def _watch_process_group(module: ModuleType) -> None:
    """See the rank of those that the job starts itself; those of a launcher have it in their environment."""
    made = _after(lambda *_, **__: set_rank(int(module.get_rank())))
    patch_existing(module, ("init_process_group",), made)


def _save(saved: Any = None, *_args: Any, **kwargs: Any) -> Around | None:
    saved = kwargs.get("obj", saved)
    if type(saved).__name__.endswith("Storage"):
        return None  # so torch pickles a tensor: to send it, not to keep it
    return ACTIVE.source.save(saved, at_once=True)


def _watch_distributed_saves(module: ModuleType) -> None:
    def hook(state: Any = None, *_args: Any, at_once: bool, **kwargs: Any) -> Around | None:
        return ACTIVE.source.save(kwargs.get("state_dict", state), at_once=at_once)

    patch_existing(module, ("save",), partial(hook, at_once=True))
    patch_existing(module, ("async_save",), partial(hook, at_once=False))


def _watch_compiler(module: ModuleType) -> None:
    """Keep the hooks for optimizers out of what is compiled, and see when torch compiles."""
    _watch_optimizers(module.disable)
    # Callbacks that are registered there are forgotten with `torch._dynamo.reset()`.
    handler = type(getattr(module, "callback_handler", None))
    patch_existing(handler, ("run_start_callbacks",), _compiling_begins)
    patch_existing(handler, ("run_end_callbacks",), _compiling_ends)


def _compiling_begins(*_args: Any) -> None:
    if ACTIVE.source.has_phases() and threading.current_thread() is threading.main_thread():
        _Seen.compiling.append(training.phase("compile"))
        _Seen.compiling[-1].__enter__()


def _compiling_ends(*_args: Any) -> None:
    if _Seen.compiling and threading.current_thread() is threading.main_thread():
        leave(_Seen.compiling.pop())


def _watch_scaler(module: ModuleType) -> None:
    patch(module.GradScaler, "scale", _scales)
    patch(module.GradScaler, "step", _scaled_step)
    patch(module.GradScaler, "update", _after(_scale_updated))


def _scales(scaler: Any, outputs: Any = None, *_args: Any, **kwargs: Any) -> None:
    if scaler.is_enabled():
        ACTIVE.source.loss_is(kwargs.get("outputs", outputs))


def _scaled_step(scaler: Any, optimizer: Any = None, *_args: Any, **kwargs: Any) -> Around:
    before = _Seen.optimizer_steps
    _, error = yield
    skipped = scaler.is_enabled() and before == _Seen.optimizer_steps
    if error is None and skipped and ACTIVE.source is not NOBODY:
        training.skipped_step("overflow")
        ACTIVE.source.optimizer_skipped(kwargs.get("optimizer", optimizer))
        _Seen.next_scale = 0.0


def _scale_updated(_result: Any, scaler: Any, *_args: Any, **_kwargs: Any) -> None:
    now = monotonic()
    if now >= _Seen.next_scale and ACTIVE.source is not NOBODY:
        scale = getattr(scaler, "_scale", None)  # a tensor; `get_scale()` would wait for the device
        if scale is not None:
            _Seen.next_scale = now + SCALE_SECONDS
            training.record(loss_scale=scale)
