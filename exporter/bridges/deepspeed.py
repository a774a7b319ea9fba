"""Bridge to DeepSpeed's engine: steps, losses, norms, learning rates, loss scales, skipped steps and checkpoints.

Used in the training process. The rest of the loop is inferred (`exporter.bridges.torch_loop`). A step of the engine is counted as one
step, although ZeRO may step an optimizer for each group of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from exporter import training
from exporter.bridges import plain_torch
from exporter.bridges.loop_source import LoopSource
from exporter.bridges.loss import readable
from exporter.bridges.sources import ACTIVE, set_rank
from exporter.patching import Around, patch_frequent, version_of, when_imported


def install() -> None:
    """Put hooks around the methods of DeepSpeed's engines, once their module is imported."""
    plain_torch.install()
    when_imported("deepspeed.runtime.engine", _watch)


def _watch(module: ModuleType) -> None:
    engine = module.DeepSpeedEngine
    # `step()` and the pipeline's `train_batch()` call this method once the gradients are complete.
    patch_frequent(engine, "_take_model_step", _step_begins, _step_ends)
    patch_frequent(engine, "backward", _backward_begins, _do_nothing)
    plain_torch.watch(engine, "__init__", _engine_created)
    plain_torch.watch(engine, "save_checkpoint", _save)
    plain_torch.watch(engine, "load_checkpoint", _load)


def _engine_created(_source: Any, engine: Any, *_args: Any, **_kwargs: Any) -> Around:
    _, error = yield
    if error is None:
        set_rank(int(engine.global_rank))
        precision = "fp16" if engine.fp16_enabled() else "fp32"
        training.describe(
            framework="deepspeed",
            framework_version=version_of("deepspeed"),
            model=type(engine.module).__name__,
            precision="bf16" if engine.bfloat16_enabled() else precision,
            world_size=int(engine.world_size),
        )


def _save(source: LoopSource, *_args: Any, **_kwargs: Any) -> Around:
    return source.checkpoint(is_resumable=True)


def _load(source: LoopSource, engine: Any, *_args: Any, **_kwargs: Any) -> Around:
    yield from source.load()
    source.progress.resume_at(int(engine.global_steps))


def _backward_begins(_engine: Any, loss: Any = None, *_args: Any, **kwargs: Any) -> None:
    ACTIVE.source.loss_computed(kwargs.get("loss", loss))


def _do_nothing(*_args: Any) -> None:
    pass


@dataclass(slots=True)
class _EngineStep:
    """Step of an engine in progress."""

    engine: Any
    skipped_steps_before: int  # count of the engine at the start of the step


def _step_begins(engine: Any, *_args: Any, **_kwargs: Any) -> _EngineStep | None:
    source = ACTIVE.source
    if not isinstance(source, LoopSource):
        return None
    source.optimizer_begins(engine)
    return _EngineStep(engine, int(engine.skipped_steps))


def _step_ends(step: _EngineStep, _result: Any, error: BaseException | None) -> None:
    if error is not None:
        return
    engine, source = step.engine, ACTIVE.source
    if engine.skipped_steps > step.skipped_steps_before:
        training.skipped_step("overflow")
    norm = engine.get_global_grad_norm()
    if norm is not None:
        source.gradient_norm_computed(norm)
    if engine.fp16_enabled():
        training.record(loss_scale=readable(_loss_scale(engine.optimizer)))
    source.optimizer_ends(engine)


def _loss_scale(optimizer: Any) -> Any:
    """Return the loss scale of an optimizer, or None. The attribute differs between DeepSpeed's optimizers."""
    scale = getattr(getattr(optimizer, "loss_scale_config", None), "cur_scale", None)
    return getattr(optimizer, "cur_scale", None) if scale is None else scale
