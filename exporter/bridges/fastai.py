"""Bridge to fastai: steps of fastai's optimizers, which do not derive from torch's class.

Used in the training process. The rest of the loop is inferred (`exporter.bridges.torch_loop`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from exporter import training
from exporter.bridges import plain_torch
from exporter.bridges.loop_source import LoopSource
from exporter.bridges.sources import ACTIVE
from exporter.patching import patch_frequent, version_of


def install() -> None:
    """Put hooks around the steps of fastai's optimizers."""
    plain_torch.install()
    optimizer: Any = import_module("fastai.optimizer").Optimizer
    patch_frequent(optimizer, "step", _step_begins, _step_ends)


def _step_begins(optimizer: Any, *_args: Any, **_kwargs: Any) -> Any:
    source = ACTIVE.source
    source.optimizer_begins(optimizer)
    if isinstance(source, LoopSource) and source.progress.steps == 0:
        training.describe(framework="fastai", framework_version=version_of("fastai"))
    return optimizer


def _step_ends(optimizer: Any, _result: Any, error: BaseException | None) -> None:
    if error is None:
        ACTIVE.source.optimizer_ends(optimizer)
