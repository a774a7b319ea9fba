"""Bridge to Hugging Face Transformers: a callback for its Trainer.

Used in the training process. The callbacks do not report the start of a fetch, a save or an evaluation, nor a failure of the
training, so methods of the Trainer are patched too. A version without such a method is recorded by its callbacks only.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from time import monotonic
from types import ModuleType
from typing import Any

from exporter import training
from exporter.bridges import torch_hooks
from exporter.bridges.loop import Level, LoopTracker
from exporter.bridges.sources import ACTIVE, Source, Strength, set_rank
from exporter.patching import Around, Hook, never_raises, patch, patch_existing, version_of, when_imported

ROWS_PER_SAMPLE_BY_COLLATOR = {
    "DataCollatorForPreference": 2,
    "DataCollatorForVisionPreference": 2,
    "DataCollatorForTriplePreference": 3,
}
"""Number of rows of a batch that form a sample, by the name of TRL's collator; 1 for other collators."""


def callback(name: str = "ExporterCallback") -> Any:
    """Return a new callback for a Trainer. Raises ImportError if transformers is not installed."""
    return _callback_class(import_module("transformers.trainer"), name)()


def install() -> None:
    """Add a callback to each Trainer that is created after the import of its module."""
    when_imported("transformers.trainer", _add_to_defaults)


def _add_to_defaults(trainer_module: ModuleType) -> None:
    # Not the class of `callback()`, because transformers warns about two callbacks of the same class.
    trainer_module.DEFAULT_CALLBACKS.append(_callback_class(trainer_module, "ExporterAutoCallback"))


def _callback_class(trainer_module: Any, name: str) -> type[Any]:
    """Patch the methods of the Trainer, and return a class of callbacks with this name."""
    torch_hooks.install()
    for hook, *methods in (
        (_around_train, "train"),
        (_method_hook("fetch_batches"), "get_batch_samples"),
        (_method_hook("train_on_batch"), "training_step"),
        (_method_hook("save_checkpoint"), "_save_checkpoint"),
        (_method_hook("load_checkpoint"), "_load_from_checkpoint", "_load_optimizer_and_scheduler"),
        (_evaluation_of("validation"), "evaluate"),
        (_evaluation_of("test"), "predict"),
    ):
        patch_existing(trainer_module.Trainer, methods, hook)
    return type(name, (_Callback, trainer_module.TrainerCallback), {})


class _Callback(Source):
    """Source of a Trainer that trains, evaluates or predicts. The methods `on_…` receive the Trainer's state."""

    strength = Strength.LEADING

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without state: the receiving process creates a new callback."""
        return callback, (type(self).__name__,)

    def activate(self) -> bool:
        """Become the active source, unless an equally strong source is active. Return True if newly activated."""
        if ACTIVE.source is self or not ACTIVE.activate(self):
            return False
        self.tracker = LoopTracker()
        self._has_recorded_batches = False  # otherwise, the losses in the log are recorded
        self._has_recorded_norms = False  # otherwise, the norms in the log are recorded
        self._is_in_batch = False  # True during a call of `training_step`
        self._batch: Any = None  # of the current call of `training_step`
        self._loss: Any = None  # sum of the batches of the step so far
        self._mode = "validation"  # of the latest evaluation
        # Monotonic time of the latest evaluated batch, or of the start of the evaluation.
        self._evaluated_at = 0.0
        return True

    def describe(self, args: Any, model: Any) -> None:
        """Record the rank and the facts of the run from the training arguments and the model."""
        set_rank(int(args.process_index))
        precision = next((name for name in ("bf16", "fp16") if getattr(args, name, False)), "fp32")
        training.describe(
            framework="transformers",
            framework_version=version_of("transformers"),
            model=type(model).__name__,
            precision=precision,
            world_size=int(args.world_size),
            **_flops(model, recomputes=bool(getattr(args, "gradient_checkpointing", False))),
        )

    def backward_begins(self, _tensors: Any) -> Any:
        if self._is_in_batch:
            self.tracker.phase("backward")
            return self
        return None

    def backward_ends(self, _token: Any, error: BaseException | None) -> None:
        if error is None:
            self.tracker.phase(None)

    def gradient_norm_computed(self, norm: Any) -> None:
        self._has_recorded_norms = True
        self.tracker.record("grad_norm", norm)

    @never_raises
    def on_train_begin(self, args: Any, state: Any, _control: Any, model: Any = None, **_others: Any) -> None:
        if ACTIVE.source is self or self.activate():
            self.describe(args, model)
            target = int(state.max_steps) if state.max_steps > 0 else None
            self.tracker.begin_loop(int(state.global_step), target)

    def on_train_end(self, _state: Any) -> None:
        self.tracker.discard_iteration()
        self.tracker.end(Level.LOOP)
        ACTIVE.release(self)

    def _record_epoch(self, state: Any) -> None:
        training.record(epoch=int((state.epoch or 0.0) + 0.001))  # tolerance for rounding

    def on_epoch_end(self, state: Any) -> None:
        self.tracker.discard_iteration()  # the last step of the epoch may be incomplete
        self._record_epoch(state)

    on_epoch_begin = _record_epoch

    def on_step_begin(self, _state: Any) -> None:
        self.tracker.begin_iteration()

    def on_pre_optimizer_step(self, _state: Any) -> None:
        self.tracker.phase("optimizer")

    def on_optimizer_step(self, _state: Any) -> None:
        self.tracker.phase(None)

    def on_step_end(self, _state: Any) -> None:
        """End a step, before the logs, evaluations and saves that follow it."""
        if self._loss is not None:
            self.tracker.record("loss", self._loss)
            self._loss = None
        self.tracker.end(Level.ITERATION)

    def on_prediction_step(self, _state: Any) -> None:
        """Record an evaluated batch. Its duration is the time since the previous batch, which includes the fetch."""
        previous_evaluated_at, self._evaluated_at = self._evaluated_at, monotonic()
        is_evaluating = self.tracker.is_open(Level.EVALUATION)
        seconds = self._evaluated_at - previous_evaluated_at if is_evaluating else None
        training.step(mode=self._mode, seconds=seconds)

    @never_raises
    def on_log(self, *_args_state_and_control: Any, logs: Any = None, **_others: Any) -> None:
        """Record the numbers in the Trainer's log, except the losses and norms that other methods have recorded."""
        if ACTIVE.source is not self or not logs:
            return
        if "eval_loss" in logs:
            training.record(loss=logs["eval_loss"], mode="validation")
        if not self._has_recorded_batches:
            training.record(loss=logs.get("loss"))
        if not self._has_recorded_norms:
            training.record(grad_norm=logs.get("grad_norm"))
        training.record(learning_rate=logs.get("learning_rate"))

    def fetch_batches(self, *_args: Any, **_kwargs: Any) -> Around:
        """Record the fetch of all batches of a step. At the end of an epoch, the call returns no batch."""
        self.tracker.discard_iteration()
        self.tracker.begin_iteration()
        self.tracker.phase("data_loading")
        result, error = yield
        if error is None:
            self.tracker.phase(None)
            if not (result[0] if isinstance(result, tuple) else result):
                self.tracker.discard_iteration()

    def train_on_batch(
        self, trainer: Any, _model: Any = None, batch: Any = None, *_args: Any, **kwargs: Any
    ) -> Around:
        """Record the training on a batch. The call returns the batch's share of the loss of the step."""
        self._has_recorded_batches = self._is_in_batch = True
        self._batch = kwargs.get("inputs", batch)
        self.tracker.begin_iteration()
        self.tracker.phase("forward")
        loss, error = yield
        batch, self._batch, self._is_in_batch = self._batch, None, False
        self.tracker.record_batch(batch, rows_per_sample=_rows_per_sample(trainer))
        if error is None:
            self.tracker.phase(None)
            self._loss = loss if self._loss is None or loss is None else self._loss + loss

    def prepare_inputs(self, *_args: Any, **_kwargs: Any) -> Around:
        """Store the prepared batch, to record its size. TRL fetches batches of several steps at once, and prepares a batch in its step."""
        batch, error = yield
        if error is None and self._is_in_batch:
            self._batch = batch

    def save_checkpoint(self, trainer: Any, *_args: Any, **_kwargs: Any) -> Around:
        is_resumable = not getattr(trainer.args, "save_only_model", False)
        return self.tracker.save(int(trainer.state.global_step), is_resumable=is_resumable)

    def load_checkpoint(
        self, _trainer: Any, checkpoint: Any = None, *_args: Any, **_kwargs: Any
    ) -> Around | None:
        return None if checkpoint is None else self.tracker.load()

    def evaluation(self, mode: str) -> Around:
        self._mode, self._evaluated_at = mode, monotonic()
        self.tracker.begin_evaluation(mode)
        _, error = yield
        self.tracker.end(Level.EVALUATION, error)


def _while_active(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook of Transformers that calls a method of the active source with the state of the Trainer."""

    @never_raises
    def hook(self: _Callback, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
        if ACTIVE.source is self:
            method(self, state)

    return hook


for _name in [name for name in vars(_Callback) if name.startswith("on_")]:
    if _name not in {"on_train_begin", "on_log"}:
        setattr(_Callback, _name, _while_active(getattr(_Callback, _name)))


def _rows_per_sample(trainer: Any) -> int:
    """Return the number of rows of a batch that form a sample."""
    return ROWS_PER_SAMPLE_BY_COLLATOR.get(type(getattr(trainer, "data_collator", None)).__name__, 1)


def _active_callback() -> _Callback | None:
    return ACTIVE.source if isinstance(ACTIVE.source, _Callback) else None


def _activate_callback(trainer: Any) -> _Callback | None:
    """Activate and return the callback of a Trainer, or return None if another source stays active."""
    for base in type(trainer).__mro__:
        if "_prepare_inputs" in vars(base):
            patch(base, "_prepare_inputs", _method_hook("prepare_inputs"))
    sources = (source for source in trainer.callback_handler.callbacks if isinstance(source, _Callback))
    return next((source for source in sources if source.activate()), None)


def _around_train(trainer: Any, *_args: Any, **_kwargs: Any) -> Around:
    """Activate the source of a Trainer, and close all blocks at the end of the training, also after an exception."""
    source = _activate_callback(trainer)
    if source is not None:
        _, error = yield
        source.tracker.end_all(error)
        ACTIVE.release(source)


def _method_hook(name: str) -> Hook:
    """Return a hook that calls a method of the active source with the arguments of the patched method."""

    def hook(*args: Any, **kwargs: Any) -> Around | None:
        source = _active_callback()
        return None if source is None else getattr(source, name)(*args, **kwargs)

    return hook


def _evaluation_of(mode: str) -> Hook:
    """Return a hook that records a call as an evaluation. Outside of `train`, the source is active only during the call."""

    def hook(trainer: Any, *_args: Any, **_kwargs: Any) -> Around:
        active = _active_callback()
        source = active or _activate_callback(trainer)
        if source is None or source.tracker.is_open(Level.EVALUATION):
            return
        if active is None:
            source.describe(trainer.args, trainer.model)
        yield from source.evaluation(mode)
        if active is None:
            ACTIVE.release(source)

    return hook


def _flops(model: Any, *, recomputes: bool) -> dict[str, Any]:
    """Return the facts about FLOPs by transformers' formula, which applies to a language model without frozen parameters.

    Returns an empty dictionary for other models.
    """
    if getattr(model, "main_input_name", "") != "input_ids":
        return {}
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return {}
    parameters = int(model.num_parameters(exclude_embeddings=True))
    return {
        "flops_per_token": 6.0 * parameters,
        "hardware_flops_per_token": (8.0 if recomputes else 6.0) * parameters,
        "flops_method": "6n",
    }
