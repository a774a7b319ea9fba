"""The bridge to Hugging Face Transformers: a callback for its Trainer.

Used in the training process. With `EXPORTER_AUTO=1` every Trainer has one among its default callbacks; otherwise it is
given like any other:

    Trainer(callbacks=[exporter.bridges.transformers.callback()], ...)

Callbacks do not report where a fetch, a save or an evaluation begins, nor that training has failed; for these the
Trainer's own methods are patched. Where a version or a subclass has them differently, what the callbacks report remains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from time import monotonic
from types import ModuleType
from typing import Any

from exporter.bridges import torch_hooks
from exporter.bridges.loop import EVALUATION, ITERATION, LOAD, LOOP, SAVE, LoopTracker, samples_and_tokens
from exporter.bridges.patching import never_raises, patch_existing, when_imported
from exporter.bridges.sources import ACTIVE, LEADING, Source, set_rank


def callback() -> Any:
    """Make a callback for a Trainer.

    Raises:
        ImportError: transformers is not installed.
    """
    return _made("ExporterCallback")


def install() -> None:
    """Give one to every Trainer, from when transformers' Trainer is imported."""
    when_imported("transformers.trainer", _add_to_defaults)


def _add_to_defaults(trainer_module: ModuleType) -> None:
    # Another class than the one of `callback()`: transformers warns of two of the same.
    trainer_module.DEFAULT_CALLBACKS.append(_class(trainer_module, "ExporterAutoCallback"))


def _made(name: str) -> Any:
    return _class(import_module("transformers.trainer"), name)()


def _class(trainer_module: Any, name: str) -> type[Any]:
    torch_hooks.install()
    trainer = trainer_module.Trainer
    patch_existing(trainer, ("train",), _call_begins, _call_ends)
    patch_existing(trainer, ("get_batch_samples",), _fetch_begins, _fetch_ends)
    patch_existing(trainer, ("training_step",), _batch_begins, TrainerSource.batch_ends)
    patch_existing(trainer, ("_save_checkpoint",), _save_begins, _save_ends)
    patch_existing(
        trainer, ("_load_from_checkpoint", "_load_optimizer_and_scheduler"), _load_begins, _load_ends
    )
    for method, mode in (("evaluate", "validation"), ("predict", "test")):
        patch_existing(trainer, (method,), _evaluation_of(mode), _evaluation_ends)
    return type(name, (Hooks, trainer_module.TrainerCallback), {})


class TrainerSource(Source):
    """Reports one call of a Trainer's `train`, `evaluate` or `predict`.

    Attributes:
        tracker: Where it is.
        training: `exporter.training`.
        batches_are_seen: Whether the work on each batch is seen, and not only what is logged.
        norms_are_seen: Whether gradients are clipped, which gives their norm before it is logged.
        is_patched: Whether the call is patched, and its end will be seen.
    """

    strength = LEADING

    def __init__(self) -> None:
        self.tracker = LoopTracker()
        self.training: Any = self.tracker.training
        self.batches_are_seen = self.norms_are_seen = False
        self.is_patched = False
        self._mode = "validation"
        self._evaluated_at = 0.0
        self._loss: Any = None
        self._in_batch = False

    # What torch is asked to do ----------------------------------------------------------------------------------

    def has_phases(self) -> bool:
        """There is a tracker from the begin."""
        return True

    def backward_begins(self, tensors: Any) -> bool:
        """The forward pass of a batch is over."""
        del tensors
        if self._in_batch:
            self.tracker.phase("backward")
        return self._in_batch

    def backward_ends(self, error: BaseException | None) -> None:
        """So is its backward pass."""
        if error is None:
            self.tracker.phase(None)

    def gradient_norm_is(self, norm: Any) -> None:
        """The Trainer has clipped gradients."""
        self.norms_are_seen = True
        self.tracker.record("grad_norm", norm)

    # What the callbacks and the patches report ------------------------------------------------------------------

    def train_begins(self, args: Any, state: Any, model: Any) -> None:
        """The training loop begins."""
        self.describe(args, model)
        self.tracker.begin_loop(int(state.global_step), int(state.max_steps) if state.max_steps > 0 else None)

    def train_ends(self) -> None:
        """The training loop is over; the Trainer may still go on."""
        self.tracker.discard_iteration()
        self.tracker.end(LOOP)
        if not self.is_patched:
            ACTIVE.release(self)

    def describe(self, args: Any, model: Any) -> None:
        """Say what is trained, and how."""
        set_rank(int(args.process_index))
        precision = (
            "bf16" if getattr(args, "bf16", False) else "fp16" if getattr(args, "fp16", False) else "fp32"
        )
        self.training.describe(
            framework="transformers",
            framework_version=str(getattr(sys.modules.get("transformers"), "__version__", "")) or None,
            model=type(model).__name__,
            precision=precision,
            world_size=int(args.world_size),
            **_flops(model, recomputed=bool(getattr(args, "gradient_checkpointing", False))),
        )

    def epoch_is(self, state: Any) -> None:
        """Take where the Trainer is, in epochs; a thousandth of one is rounding."""
        self.training.record(epoch=int((state.epoch or 0.0) + 0.001))

    def epoch_ends(self, state: Any) -> None:
        """An epoch ends, perhaps amid a turn."""
        self.tracker.discard_iteration()
        self.epoch_is(state)

    def turn_ends(self) -> None:
        """An optimizer step is made; what it logs, evaluates and saves comes after it."""
        if self._loss is not None:
            self.tracker.record("loss", self._loss)
            self._loss = None
        self.tracker.end(ITERATION)

    def fetch_of_turn_begins(self) -> None:
        """All batches of a turn are asked for."""
        self.tracker.discard_iteration()
        self.tracker.begin_iteration()
        self.tracker.phase("data_loading")

    def fetch_of_turn_ends(self, batches: Any, error: BaseException | None) -> None:
        """They are there, or there is none any more."""
        if error is None:
            self.tracker.phase(None)
            if not batches:
                self.tracker.discard_iteration()

    def batch_begins(self, batch: Any) -> None:
        """The work on one batch begins."""
        self.batches_are_seen = self._in_batch = True
        self.tracker.begin_iteration()
        self.tracker.phase("forward")
        samples, tokens = samples_and_tokens(batch)
        self.training.record(samples=samples, tokens=tokens, microbatches=1)

    def batch_ends(self, loss: Any, error: BaseException | None) -> None:
        """It ends, with this batch's share of the step's loss."""
        self._in_batch = False
        if error is None:
            self.tracker.phase(None)
            self._loss = loss if self._loss is None or loss is None else self._loss + loss

    def evaluation_begins(self, mode: str) -> None:
        """An evaluation begins."""
        self._mode, self._evaluated_at = mode, monotonic()
        training = self.training
        self.tracker.begin(
            EVALUATION, training.validation_loop() if mode == "validation" else training.testing_loop()
        )

    def evaluates_batch(self) -> None:
        """A batch of it is done; it took the time since the one before, the waiting for it included."""
        before, self._evaluated_at = self._evaluated_at, monotonic()
        seconds = self._evaluated_at - before if self.tracker.is_open(EVALUATION) else None
        self.training.step(mode=self._mode, seconds=seconds)

    def saving_begins(self, trainer: Any) -> None:
        """A checkpoint is about to be written."""
        if getattr(trainer.args, "save_only_model", False):
            self.tracker.begin(SAVE, self.training.phase("checkpoint_save_sync"))
        else:
            self.tracker.begin_save(int(trainer.state.global_step))

    def logs(self, logs: Any) -> None:
        """Take numbers that the Trainer has computed anyway."""
        if "eval_loss" in logs:
            self.training.record(loss=logs["eval_loss"], mode="validation")
        if not self.batches_are_seen:
            self.training.record(loss=logs.get("loss"))
        if not self.norms_are_seen:
            self.training.record(grad_norm=logs.get("grad_norm"))
        self.training.record(learning_rate=logs.get("learning_rate"))


def _calls(report: Callable[[TrainerSource, Any], object]) -> Any:
    """Make a hook that reports something to the source that is active; it gets the Trainer's state."""

    @never_raises
    def hook(_self: Hooks, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
        source = _active()
        if source is not None:
            report(source, state)

    return hook


class Hooks:
    """What the Trainer calls."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Be made anew where it is sent to."""
        return _made, (type(self).__name__,)

    @never_raises
    def on_train_begin(self, args: Any, state: Any, _control: Any, model: Any = None, **_others: Any) -> None:
        """The training loop begins."""
        source = _active() or _taken()
        if source is not None:
            source.train_begins(args, state, model)

    @never_raises
    def on_log(self, *_args_state_and_control: Any, logs: Any = None, **_others: Any) -> None:
        """Numbers are logged."""
        source = _active()
        if source is not None and logs:
            source.logs(logs)

    on_train_end = _calls(lambda source, _: source.train_ends())
    on_epoch_begin = _calls(lambda source, state: source.epoch_is(state))
    on_epoch_end = _calls(lambda source, state: source.epoch_ends(state))
    on_step_begin = _calls(lambda source, _: source.tracker.begin_iteration())
    on_pre_optimizer_step = _calls(lambda source, _: source.tracker.phase("optimizer"))
    on_optimizer_step = _calls(lambda source, _: source.tracker.phase(None))
    on_step_end = _calls(lambda source, _: source.turn_ends())
    on_prediction_step = _calls(lambda source, _: source.evaluates_batch())


def _active() -> TrainerSource | None:
    return ACTIVE.source if isinstance(ACTIVE.source, TrainerSource) else None


def _taken() -> TrainerSource | None:
    source = TrainerSource()
    return source if ACTIVE.take(source) else None


def _taken_for(trainer: Any) -> TrainerSource | None:
    """Begin to report a Trainer that has one of our callbacks, unless another source is active."""
    if not any(isinstance(each, Hooks) for each in trainer.callback_handler.callbacks):
        return None
    source = _taken()
    if source is not None:
        source.is_patched = True
    return source


def _call_begins(trainer: Any, *_args: Any, **_kwargs: Any) -> object:
    return _taken_for(trainer)


def _call_ends(source: TrainerSource, _result: Any, error: BaseException | None) -> None:
    source.tracker.end_all(error)
    ACTIVE.release(source)


def _fetch_begins(_trainer: Any, *_args: Any, **_kwargs: Any) -> object:
    source = _active()
    if source is not None:
        source.fetch_of_turn_begins()
    return source


def _fetch_ends(source: TrainerSource, result: Any, error: BaseException | None) -> None:
    source.fetch_of_turn_ends(result[0] if isinstance(result, tuple) else result, error)


def _batch_begins(_trainer: Any, *args: Any, **kwargs: Any) -> object:
    source = _active()
    if source is not None:
        source.batch_begins(kwargs.get("inputs", args[1] if len(args) > 1 else None))
    return source


def _save_begins(trainer: Any, *_args: Any, **_kwargs: Any) -> object:
    source = _active()
    if source is not None:
        source.saving_begins(trainer)
    return source


def _save_ends(source: TrainerSource, _result: Any, error: BaseException | None) -> None:
    source.tracker.end(SAVE, error)


def _load_begins(_trainer: Any, checkpoint: Any = None, *_args: Any, **_kwargs: Any) -> object:
    source = _active()
    if source is None or checkpoint is None:
        return None
    source.tracker.begin(LOAD, source.training.checkpoint_load())
    return source


def _load_ends(source: TrainerSource, _result: Any, error: BaseException | None) -> None:
    source.tracker.end(LOAD, error)


def _evaluation_of(mode: str) -> Callable[..., object]:
    def begins(trainer: Any, *_args: Any, **_kwargs: Any) -> object:
        active = _active()
        source = active or _taken_for(trainer)
        if source is None or source.tracker.is_open(EVALUATION):
            return None
        if active is None:
            source.describe(trainer.args, trainer.model)
        source.evaluation_begins(mode)
        return source, active is None

    return begins


def _evaluation_ends(kept: Any, _result: Any, error: BaseException | None) -> None:
    source, alone = kept
    source.tracker.end(EVALUATION, error)
    if alone:
        ACTIVE.release(source)


def _flops(model: Any, *, recomputed: bool) -> dict[str, Any]:
    """FLOPs of a token as transformers itself counts them; nothing for a model of which that would not be true."""
    if getattr(model, "main_input_name", "") != "input_ids":
        return {}
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return {}
    parameters = int(model.num_parameters(exclude_embeddings=True))
    return {
        "flops_per_token": 6.0 * parameters,
        "hardware_flops_per_token": (8.0 if recomputed else 6.0) * parameters,
        "flops_method": "6n",
    }
