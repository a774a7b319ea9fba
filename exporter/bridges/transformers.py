"""The bridge to Hugging Face Transformers: a callback for its Trainer.

Used in the training process. With `EXPORTER_AUTO=1` every Trainer has one among its default callbacks; otherwise it is
given like any other:

    Trainer(callbacks=[exporter.bridges.transformers.callback()], ...)

Hooks do not tell where a fetch, a save or an evaluation begins, nor that training has failed; for these the Trainer's own
methods are bracketed. Where a version or a subclass has them differently, what the hooks tell remains.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from exporter.bridges import torch_hooks
from exporter.bridges.batches import samples_and_tokens
from exporter.bridges.brackets import bracket_what_exists, never_raises
from exporter.bridges.claims import CLAIMS, LEADING, Teller
from exporter.bridges.course import EVALUATION, ITERATION, LOAD, LOOP, SAVE, Course
from exporter.bridges.imports import when_imported
from exporter.bridges.ranks import tell_rank


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
    bracket_what_exists(trainer, ("train",), _train_begins, _train_ends)
    bracket_what_exists(trainer, ("get_batch_samples",), _fetch_begins, _fetch_ends)
    bracket_what_exists(trainer, ("training_step",), _batch_begins, _batch_ends)
    bracket_what_exists(trainer, ("_save_checkpoint",), _save_begins, _save_ends)
    bracket_what_exists(
        trainer, ("_load_from_checkpoint", "_load_optimizer_and_scheduler"), _load_begins, _load_ends
    )
    bracket_what_exists(trainer, ("evaluate",), _validation_begins, _evaluation_ends)
    bracket_what_exists(trainer, ("predict",), _test_begins, _evaluation_ends)
    base = trainer_module.TrainerCallback
    return type(name, (Hooks, base), {})


class RunTeller(Teller):
    """Tells of one call of a Trainer's `train`, `evaluate` or `predict`.

    Attributes:
        course: Where it is.
        training: `exporter.training`.
        batches_are_seen: Whether the work on each batch is told, and not only what is logged.
        norms_are_seen: Whether gradients are clipped, which tells their norm before it is logged.
        mode: Of the evaluation that is under way.
        is_bracketed: Whether the call is bracketed, and its end will be told.
    """

    strength = LEADING

    def __init__(self) -> None:
        self.course = Course()
        self.training: Any = self.course.training
        self.batches_are_seen = self.norms_are_seen = False
        self.mode = "validation"
        self.is_bracketed = False
        self._loss: Any = None
        self._in_batch = False

    # What torch is asked to do ----------------------------------------------------------------------------------

    def tells_phases(self) -> bool:
        """There is one from the begin."""
        return True

    def backward_begins(self, tensors: Any) -> bool:
        """The forward pass of a batch is over."""
        del tensors
        if self._in_batch:
            self.course.phase("backward")
        return self._in_batch

    def backward_ends(self, error: BaseException | None) -> None:
        """So is its backward pass."""
        if error is None:
            self.course.phase(None)

    def gradient_norm_is(self, norm: Any) -> None:
        """The Trainer has clipped gradients."""
        self.norms_are_seen = True
        self.course.record_norm(norm)

    # What the hooks and the brackets tell -----------------------------------------------------------------------

    def describe(self, args: Any, model: Any) -> None:
        """Say what is trained, and how."""
        tell_rank(int(args.process_index))
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

    def epoch_is(self, epoch: float | None) -> None:
        """Take where the Trainer is, in epochs; a thousandth of one is rounding."""
        self.training.record(epoch=int((epoch or 0.0) + 0.001))

    def turn_begins(self) -> None:
        """An optimizer step begins, or goes on."""
        self.course.begin_iteration()

    def turn_ends(self) -> None:
        """An optimizer step is made."""
        if self._loss is not None:
            self.course.record_loss(self._loss)
            self._loss = None
        self.course.end(ITERATION)

    def fetch_of_turn_begins(self) -> None:
        """All batches of a turn are asked for."""
        self.course.abandon_iteration()
        self.turn_begins()
        self.course.phase("data_loading")

    def fetch_of_turn_ends(self, batches: Any, error: BaseException | None) -> None:
        """They are there, or there is none any more."""
        if error is None:
            self.course.phase(None)
            if not batches:
                self.course.abandon_iteration()

    def batch_begins(self, batch: Any) -> None:
        """The work on one batch begins."""
        self.batches_are_seen = self._in_batch = True
        self.turn_begins()
        self.course.phase("forward")
        samples, tokens = samples_and_tokens(batch)
        self.training.record(samples=samples, tokens=tokens, microbatches=1)

    def batch_ends(self, loss: Any, error: BaseException | None) -> None:
        """It ends, with this batch's share of the step's loss."""
        self._in_batch = False
        if error is None:
            self.course.phase(None)
            self._loss = loss if self._loss is None or loss is None else self._loss + loss

    def save_of_checkpoint_begins(self, trainer: Any) -> None:
        """A checkpoint is about to be written."""
        if getattr(trainer.args, "save_only_model", False):
            self.course.begin(SAVE, self.training.phase("checkpoint_save_sync"))
        else:
            self.course.begin_save(int(trainer.state.global_step))


class Hooks:
    """What the Trainer calls; `CLAIMS` knows who tells of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Be made anew where it is sent to."""
        return _made, (type(self).__name__,)

    @never_raises
    def on_train_begin(self, args: Any, state: Any, _control: Any, model: Any = None, **_others: Any) -> None:
        """The training loop begins."""
        teller = _told_now() or _claim()
        if teller is not None:
            teller.describe(args, model)
            teller.course.begin_loop(
                int(state.global_step), int(state.max_steps) if state.max_steps > 0 else None
            )

    @never_raises
    def on_train_end(self, *_args_state_and_control: Any, **_others: Any) -> None:
        """The training loop is over; the Trainer may still go on."""
        teller = _told_now()
        if teller is not None:
            teller.course.end(LOOP)
            if not teller.is_bracketed:
                CLAIMS.release(teller)

    @never_raises
    def on_epoch_begin(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
        """An epoch begins."""
        teller = _told_now()
        if teller is not None:
            teller.epoch_is(state.epoch)

    @never_raises
    def on_epoch_end(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
        """An epoch ends, perhaps amid a turn."""
        teller = _told_now()
        if teller is not None:
            teller.course.abandon_iteration()
            teller.epoch_is(state.epoch)

    @never_raises
    def on_step_begin(self, *_args_state_and_control: Any, **_others: Any) -> None:
        """A turn begins, after its batches have been fetched."""
        teller = _told_now()
        if teller is not None:
            teller.turn_begins()

    @never_raises
    def on_pre_optimizer_step(self, *_args_state_and_control: Any, **_others: Any) -> None:
        """The optimizer's step begins."""
        teller = _told_now()
        if teller is not None:
            teller.course.phase("optimizer")

    @never_raises
    def on_optimizer_step(self, *_args_state_and_control: Any, **_others: Any) -> None:
        """The optimizer's step ends."""
        teller = _told_now()
        if teller is not None:
            teller.course.phase(None)

    @never_raises
    def on_step_end(self, *_args_state_and_control: Any, **_others: Any) -> None:
        """A turn ends; what it logs, evaluates and saves comes after it."""
        teller = _told_now()
        if teller is not None:
            teller.turn_ends()

    @never_raises
    def on_prediction_step(self, *_args_state_and_control: Any, **_others: Any) -> None:
        """A batch of an evaluation is done."""
        teller = _told_now()
        if teller is not None:
            teller.training.step(mode=teller.mode)

    @never_raises
    def on_log(self, *_args_state_and_control: Any, logs: Any = None, **_others: Any) -> None:
        """Numbers that the Trainer has computed anyway."""
        teller = _told_now()
        if teller is None or not logs:
            return
        if "eval_loss" in logs:
            teller.training.record(loss=logs["eval_loss"], mode="validation")
        if not teller.batches_are_seen:
            teller.training.record(loss=logs.get("loss"))
        if not teller.norms_are_seen:
            teller.training.record(grad_norm=logs.get("grad_norm"))
        teller.training.record(learning_rate=logs.get("learning_rate"))


def _told_now() -> RunTeller | None:
    holder = CLAIMS.holder
    return holder if isinstance(holder, RunTeller) else None


def _claimed(trainer: Any) -> RunTeller | None:
    """Begin to tell of a Trainer that has one of our callbacks, unless somebody tells already."""
    if not any(isinstance(each, Hooks) for each in trainer.callback_handler.callbacks):
        return None
    teller = _claim()
    if teller is not None:
        teller.is_bracketed = True
    return teller


def _claim() -> RunTeller | None:
    teller = RunTeller()
    return teller if CLAIMS.take(teller) else None


def _train_begins(trainer: Any, *_args: Any, **_kwargs: Any) -> object:
    return _claimed(trainer)


def _train_ends(teller: RunTeller, _result: Any, error: BaseException | None) -> None:
    teller.course.end_all(error)
    CLAIMS.release(teller)


def _fetch_begins(_trainer: Any, *_args: Any, **_kwargs: Any) -> object:
    teller = _told_now()
    if teller is not None:
        teller.fetch_of_turn_begins()
    return teller


def _fetch_ends(teller: RunTeller, result: Any, error: BaseException | None) -> None:
    teller.fetch_of_turn_ends(result[0] if isinstance(result, tuple) else result, error)


def _batch_begins(_trainer: Any, *args: Any, **kwargs: Any) -> object:
    teller = _told_now()
    if teller is not None:
        teller.batch_begins(kwargs.get("inputs", args[1] if len(args) > 1 else None))
    return teller


def _batch_ends(teller: RunTeller, loss: Any, error: BaseException | None) -> None:
    teller.batch_ends(loss, error)


def _save_begins(trainer: Any, *_args: Any, **_kwargs: Any) -> object:
    teller = _told_now()
    if teller is not None:
        teller.save_of_checkpoint_begins(trainer)
    return teller


def _save_ends(teller: RunTeller, _result: Any, error: BaseException | None) -> None:
    teller.course.end(SAVE, error)


def _load_begins(_trainer: Any, checkpoint: Any = None, *_args: Any, **_kwargs: Any) -> object:
    teller = _told_now()
    if teller is None or checkpoint is None:
        return None
    teller.course.begin(LOAD, teller.training.checkpoint_load())
    return teller


def _load_ends(teller: RunTeller, _result: Any, error: BaseException | None) -> None:
    teller.course.end(LOAD, error)


def _validation_begins(trainer: Any, *_args: Any, **_kwargs: Any) -> object:
    return _evaluation_begins(trainer, "validation")


def _test_begins(trainer: Any, *_args: Any, **_kwargs: Any) -> object:
    return _evaluation_begins(trainer, "test")


def _evaluation_begins(trainer: Any, mode: str) -> object:
    teller = _told_now()
    alone = teller is None
    teller = teller or _claimed(trainer)
    if teller is None or teller.course.is_open(EVALUATION):
        return None
    if alone:
        teller.describe(trainer.args, trainer.model)
    teller.mode = mode
    training = teller.training
    teller.course.begin(
        EVALUATION, training.validation_loop() if mode == "validation" else training.testing_loop()
    )
    return teller, alone


def _evaluation_ends(kept: Any, _result: Any, error: BaseException | None) -> None:
    teller, alone = kept
    teller.course.end(EVALUATION, error)
    if alone:
        CLAIMS.release(teller)


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
