"""The bridge to Hugging Face Accelerate: its job's own loop, what it leaves to the Accelerator, and what it logs.

Used in the training process. With `EXPORTER_AUTO=1`, or after `exporter.bridges.install("accelerate")`, every Accelerator is
watched. An Accelerate loop is the job's own, and is reported as one without a framework (`exporter.bridges.torch_loop`).
Accelerate adds the ranks, the loss before it is divided by the accumulated batches, what is written and read as a checkpoint,
and what the job gives to `Accelerator.log`, whoever takes that.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from exporter import training
from exporter.bridges import torch_loop
from exporter.bridges.sources import set_rank
from exporter.patching import Around, patch, patch_existing, version_of, when_imported

VALIDATION_LOSSES = ("eval_loss", "eval/loss", "val_loss", "val/loss", "validation_loss", "valid_loss")
GRADIENT_NORMS = ("grad_norm", "train/grad_norm", "gradient_norm")
LEARNING_RATES = ("learning_rate", "lr", "train/lr", "train/learning_rate")
"""Names under which jobs log what is meant; the loss of the training is known better, from each step."""


def install() -> None:
    """Watch every Accelerator, from when Accelerate is imported."""
    when_imported("accelerate.accelerator", _watch)


def _watch(module: ModuleType) -> None:
    torch_loop.install()
    accelerator = module.Accelerator
    patch(accelerator, "__init__", _made)
    patch(accelerator, "backward", _backward)
    patch_existing(accelerator, ("log",), _logs)
    torch_loop.watch_saves(accelerator, "save_state", lambda *_args, **_kwargs: True)
    torch_loop.watch_saves(accelerator, "save_model", lambda *_args, **_kwargs: False)
    torch_loop.watch_loads(accelerator, "load_state")


def _made(accelerator: Any, *_args: Any, **_kwargs: Any) -> Around:
    _, error = yield
    source = torch_loop.active_loop()
    if source is None or source.tracker is None or error is not None:
        return
    source.batches_ahead = 1  # so that its loaders know the last one
    set_rank(int(accelerator.process_index))
    torch_loop.describe_loop(
        framework="accelerate",
        framework_version=version_of("accelerate"),
        precision=str(accelerator.mixed_precision),
        world_size=int(accelerator.num_processes),
    )


def _backward(_accelerator: Any, loss: Any = None, *_args: Any, **kwargs: Any) -> None:
    source = torch_loop.active_loop()
    if source is not None:
        source.loss_is(kwargs.get("loss", loss))


def _logs(_accelerator: Any, values: Any = None, *_args: Any, **kwargs: Any) -> None:
    tracker, values = torch_loop.describe_loop(), kwargs.get("values", values)
    if tracker is None or not isinstance(values, Mapping):
        return
    validation = _first(values, VALIDATION_LOSSES)
    if validation is not None:
        training.record(loss=validation, mode="validation")
    training.record(
        grad_norm=_first(values, GRADIENT_NORMS),
        learning_rate=_first(values, LEARNING_RATES),
        epoch=values.get("epoch"),
    )


def _first(values: Mapping[Any, Any], names: tuple[str, ...]) -> Any:
    return next((values[name] for name in names if name in values), None)
