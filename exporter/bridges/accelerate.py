"""Bridge to Hugging Face Accelerate: the job's loop, the Accelerator's calls and the logged values.

Used in the training process. The loop is inferred (`exporter.bridges.torch_loop`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from exporter import training
from exporter.bridges import plain_torch
from exporter.bridges.loop_source import LoopSource
from exporter.bridges.sources import set_rank
from exporter.patching import Around, version_of, when_imported

# Names under which jobs log these values. The training loss is not read from logs, but from the backward passes.
VALIDATION_LOSSES = ("eval_loss", "eval/loss", "val_loss", "val/loss", "validation_loss", "valid_loss")
GRADIENT_NORMS = ("grad_norm", "train/grad_norm", "gradient_norm")
LEARNING_RATES = ("learning_rate", "lr", "train/lr", "train/learning_rate")


def install() -> None:
    """Put hooks around the methods of Accelerator, once Accelerate is imported."""
    when_imported("accelerate.accelerator", _watch)


def _watch(module: ModuleType) -> None:
    plain_torch.install()
    for name, hook in (
        ("__init__", _accelerator_created),
        ("backward", _backward_begins),
        ("log", _values_logged),
        ("save_state", _save_state),
        ("save_model", _save_model),
        ("load_state", _load_state),
    ):
        plain_torch.watch(module.Accelerator, name, hook)


def _backward_begins(
    source: LoopSource, _accelerator: Any, loss: Any = None, *_args: Any, **kwargs: Any
) -> None:
    source.loss_computed(kwargs.get("loss", loss))


def _accelerator_created(source: LoopSource, accelerator: Any, *_args: Any, **_kwargs: Any) -> Around:
    _, error = yield
    if error is not None:
        return
    # A loader of Accelerate fetches one batch ahead, to detect the last batch.
    source.batches.fetches_ahead = True
    set_rank(int(accelerator.process_index))
    training.describe(
        framework="accelerate",
        framework_version=version_of("accelerate"),
        precision=str(accelerator.mixed_precision),
        world_size=int(accelerator.num_processes),
    )


def _values_logged(
    _source: LoopSource, _accelerator: Any, values: Any = None, *_args: Any, **kwargs: Any
) -> None:
    values = kwargs.get("values", values)
    if not isinstance(values, Mapping):
        return
    validation_loss = _first(values, VALIDATION_LOSSES)
    if validation_loss is not None:
        training.record(loss=validation_loss, mode="validation")
    training.record(
        grad_norm=_first(values, GRADIENT_NORMS),
        learning_rate=_first(values, LEARNING_RATES),
        epoch=values.get("epoch"),
    )


def _save_state(source: LoopSource, *_args: Any, **_kwargs: Any) -> Around:
    return source.checkpoint(is_resumable=True)


def _save_model(source: LoopSource, *_args: Any, **_kwargs: Any) -> Around:
    return source.checkpoint(is_resumable=False)  # without the optimizer, the job cannot resume


def _load_state(source: LoopSource, *_args: Any, **_kwargs: Any) -> Around:
    return source.load()


def _first(values: Mapping[Any, Any], names: tuple[str, ...]) -> Any:
    """Return the value of the first name that exists, or None."""
    return next((values[name] for name in names if name in values), None)
