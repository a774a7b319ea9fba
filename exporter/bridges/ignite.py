"""Bridge to PyTorch Ignite: epochs of the trainer, validations by other engines, and batches that are not from torch's loaders.

Used in the training process. Steps and losses are inferred (`exporter.bridges.torch_loop`). An engine that runs inside a handler
of another engine is recorded as a validation.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any
from weakref import WeakSet

from exporter import training
from exporter.bridges import plain_torch
from exporter.bridges.loop_source import LoopSource
from exporter.patching import Around, never_raises, version_of, when_imported

_running_engines: list[Any] = []
"""Engines with a `run` in progress, the outermost first."""
_watched_engines: WeakSet[Any] = WeakSet()
"""Engines with the handlers of this bridge."""


def install() -> None:
    """Put a hook around the runs of Ignite's engines, once their module is imported."""
    plain_torch.install()
    when_imported("ignite.engine.engine", _patch_engine)


def _patch_engine(module: ModuleType) -> None:
    plain_torch.watch(module.Engine, "run", _run)


def _run(source: LoopSource, engine: Any, *_args: Any, **_kwargs: Any) -> Around:
    if engine not in _watched_engines:
        _watched_engines.add(engine)
        events: Any = import_module("ignite.engine.events").Events
        engine.add_event_handler(events.ITERATION_STARTED, _iteration_begins)
        engine.add_event_handler(events.ITERATION_COMPLETED, _iteration_ends)
        engine.add_event_handler(events.EPOCH_COMPLETED, _epoch_ends)
    _running_engines.append(engine)
    if len(_running_engines) > 1:
        yield from source.validation()
    else:
        yield
    _running_engines.remove(engine)


@never_raises
def _iteration_begins(engine: Any) -> None:
    source = plain_torch.active_loop()
    if source is None:
        return
    if len(_running_engines) > 1:
        source.validation_batch_begins()
    elif source.batches.latest() is None:  # no loader of torch has returned the batch
        source.batches.add(engine, engine.state.batch)


@never_raises
def _iteration_ends(_engine: Any) -> None:
    source = plain_torch.active_loop()
    if source is not None and len(_running_engines) > 1:
        source.validation_batch_ends()


@never_raises
def _epoch_ends(engine: Any) -> None:
    source = plain_torch.active_loop()
    if source is None or len(_running_engines) > 1 or source.progress.steps == 0:
        return
    if source.progress.counts_epochs:
        source.progress.counts_epochs = False
        training.describe(framework="ignite", framework_version=version_of("ignite"))
        training.record(epoch=int(engine.state.epoch) - 1)  # so that the first epoch is counted below
    training.record(epoch=int(engine.state.epoch))
