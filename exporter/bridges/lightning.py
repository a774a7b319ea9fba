"""The bridge to PyTorch Lightning: a callback for its Trainer.

Used in the training process, with the packages `lightning` and `pytorch_lightning` alike. With `EXPORTER_AUTO=1` every
Trainer gets one by Lightning's own entry points (see `exporter_auto`); otherwise it is given like any callback:

    Trainer(callbacks=[exporter.bridges.lightning.callback()])

It keeps nothing in checkpoints, so that these load with and without it. An iteration is an optimizer step, from the fetch
of its first batch on. In manual optimization it is a batch, as it is for Lightning's own loggers: what several optimizers
mean to each other is known to the job alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from exporter.bridges import torch_hooks
from exporter.bridges.checkpoints import AsyncSave, AsyncSaves
from exporter.bridges.loop import BATCH, EVALUATION, ITERATION, LOAD, SAVE, LoopTracker, samples_and_tokens
from exporter.bridges.patching import never_raises, patch, patch_existing, when_imported
from exporter.bridges.sources import ACTIVE, LEADING, Source, set_rank

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_CONNECTOR = "trainer.connectors.checkpoint_connector"
_EPOCH_LOOP = "loops.training_epoch_loop"


def callback(package: str | None = None) -> Any:
    """Make a callback for a Trainer.

    Args:
        package: `lightning.pytorch` or `pytorch_lightning`; None for the one that is loaded, or else is installed.

    Raises:
        ImportError: Lightning is not installed.
    """
    torch_hooks.install()
    bases = [
        import_module(each).Callback
        for each in PACKAGES
        if each == package or (not package and each in sys.modules)
    ]
    if not bases:
        bases = [_first_installed().Callback]
    for base in bases:
        _watch(base.__module__.partition(".callbacks")[0])
    return type("ExporterCallback", (Hooks, *bases), {"package": package})()


automatic = callback
"""Makes one that nobody has asked for."""


def _first_installed() -> Any:
    try:
        return import_module(PACKAGES[0])
    except ImportError:
        return import_module(PACKAGES[1])


class TrainerSource(Source):
    """Reports a Trainer, from `setup` of one of its functions to its end.

    Attributes:
        trainer: The Trainer.
    """

    strength = LEADING

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._tracker = LoopTracker()
        self._training: Any = self._tracker.training
        self._manual = not trainer.lightning_module.automatic_optimization
        self._in_batch = False
        self._batches_in_turn = 0
        self._step_at_turn = 0
        epoch_loop = getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)
        self._fetches_are_seen = hasattr(epoch_loop, "_on_before_fetch") and hasattr(
            epoch_loop, "_on_after_fetch"
        )
        self._async_saves = AsyncSaves(self._training)

    @property
    def step(self) -> int:
        """Optimizer steps so far, those of earlier processes included; in manual optimization, batches."""
        if self._manual:
            return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        return int(self.trainer.global_step)

    def has_phases(self) -> bool:
        """There is a tracker from the begin."""
        return True

    def gradient_norm_is(self, norm: Any) -> None:
        """Lightning, or the module, has clipped gradients."""
        self._tracker.record("grad_norm", norm)

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step is over."""
        del optimizer
        self.module_goes_on()

    def module_goes_on(self) -> None:
        """The backward pass or the optimizer is done; in manual optimization anything may come next."""
        if self._in_batch:
            self._tracker.phase("forward" if self._manual else None)

    def phase(self, name: str) -> None:
        """Another part of a batch's work begins."""
        if self._in_batch:
            self._tracker.phase(name)

    def describe(self) -> None:
        """Say what is trained, and where."""
        trainer = self.trainer
        package = next(
            base.__module__.split(".")[0] for base in type(trainer).__mro__ if base.__name__ == "Trainer"
        )
        set_rank(int(trainer.global_rank))
        self._training.describe(
            framework="lightning",
            framework_version=str(getattr(sys.modules.get(package), "__version__", "")) or None,
            model=type(trainer.lightning_module).__name__,
            precision=str(trainer.precision),
            world_size=int(trainer.world_size),
        )

    # The training loop ------------------------------------------------------------------------------------------

    def train_begins(self) -> None:
        """The loop is about to take its first turn."""
        self._tracker.begin_loop(self.step, self._target())

    def train_ends(self) -> None:
        """The loop has taken its last turn."""
        self.turn_ends()
        self._tracker.discard_iteration()
        self._tracker.end_all()

    def fails(self, error: BaseException) -> None:
        """An exception ends whatever is open; a step that is made stays made, if only a callback failed after it."""
        self._in_batch = self._in_batch and self._manual
        self.turn_ends()
        self._tracker.end_all(error)

    def epoch_begins(self) -> None:
        """An epoch begins."""
        self._training.record(epoch=int(self.trainer.current_epoch))
        if not self._fetches_are_seen:
            self.fetch_begins_in_loop()

    def epoch_ends(self) -> None:
        """An epoch is over, perhaps amid a batch: Lightning leaves its end out when the module gives the epoch up."""
        self._in_batch = False
        self.turn_ends()
        self._tracker.discard_iteration()
        self._training.record(epoch=int(self.trainer.current_epoch) + 1)

    def fetch_begins_in_loop(self) -> None:
        """A batch is asked for: one turn ends there, and the next one begins."""
        if not self._in_batch:
            self.turn_ends()
            self._turn_begins()
        self._tracker.phase("data_loading")

    def fetch_ends_in_loop(self) -> None:
        """The batch is there; where the module itself has asked for it, the module goes on."""
        if self._in_batch:
            self._tracker.phase("forward")

    def batch_begins(self) -> None:
        """A batch has been brought to its device, or the module will fetch it itself."""
        if self._batches_in_turn:
            self.turn_ends()
        self._turn_begins()
        self._tracker.phase("forward")
        self._batches_in_turn += 1
        self._in_batch = True

    def batch_ends(self, outputs: Any, batch: Any) -> None:
        """All is done with a batch."""
        self._in_batch = False
        self._tracker.phase(None)
        self._tracker.record("loss", outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
        samples, tokens = samples_and_tokens(batch)
        self._training.record(
            samples=samples,
            tokens=tokens,
            microbatches=1,
            learning_rate=self._learning_rate(),
        )
        if not self._fetches_are_seen:
            self.fetch_begins_in_loop()

    def _turn_begins(self) -> None:
        if not self._tracker.is_open(ITERATION):
            self._batches_in_turn, self._step_at_turn = 0, self.step
            self._tracker.begin_iteration()

    def turn_ends(self) -> None:
        """Close the iteration if its optimizer step is made; else more batches belong to it."""
        if self._in_batch or not self._tracker.is_open(ITERATION):
            return
        if not self._batches_in_turn:
            self._tracker.discard_iteration()
        elif self._manual or self.step != self._step_at_turn:
            self._tracker.end(ITERATION)

    def _target(self) -> int | None:
        trainer = self.trainer
        if trainer.max_steps > 0:
            return int(trainer.max_steps)
        batches, epochs = trainer.num_training_batches, trainer.max_epochs
        if epochs is None or epochs < 1 or not math.isfinite(batches):
            return None
        return int(epochs * math.ceil(batches / trainer.accumulate_grad_batches))

    def _learning_rate(self) -> Any:
        optimizers = self.trainer.optimizers
        return optimizers[0].param_groups[0].get("lr") if optimizers else None

    # Evaluation -------------------------------------------------------------------------------------------------

    def evaluation_begins(self, mode: str) -> None:
        """A validation or a test begins; the few batches of the sanity check are no validation."""
        self.turn_ends()
        if self.trainer.sanity_checking:
            self._tracker.begin(EVALUATION, self._training.phase("validation"))
        elif mode == "validation":
            self._tracker.begin(EVALUATION, self._training.validation_loop())
        else:
            self._tracker.begin(EVALUATION, self._training.testing_loop())

    def evaluation_ends(self) -> None:
        """It is over."""
        loss = self.trainer.callback_metrics.get("val_loss")
        if loss is not None and not self.trainer.sanity_checking:
            self._training.record(loss=loss, mode="validation")
        self._tracker.end(EVALUATION)

    def evaluation_batch_begins(self, mode: str) -> None:
        """One batch of it begins; Lightning does not report the end of every one."""
        self._tracker.end(BATCH)
        if not self.trainer.sanity_checking:
            training = self._training
            span = training.validation_iteration() if mode == "validation" else training.testing_iteration()
            self._tracker.begin(BATCH, span)

    def evaluation_batch_ends(self) -> None:
        """It is done."""
        self._tracker.end(BATCH)

    # Checkpoints ------------------------------------------------------------------------------------------------

    def saving_begins(self, *, whole: bool) -> AsyncSave | None:
        """A checkpoint is about to be written; only from a whole one can the job go on."""
        self.turn_ends()
        save = self._async_saves.begins(self.trainer.strategy.checkpoint_io, self.step) if whole else None
        if save is not None:
            self._tracker.begin(SAVE, self._training.phase("checkpoint_save_async"))
        elif whole:
            self._tracker.begin_save(self.step)
        else:
            self._tracker.begin(SAVE, self._training.phase("checkpoint_save_sync"))
        return save

    def saving_ends(self, save: AsyncSave | None, error: BaseException | None) -> None:
        """It is written, handed over to be written, or has failed."""
        self._tracker.end(SAVE, error)
        if save is not None:
            self._async_saves.returns(save, error)

    def loading_begins(self) -> None:
        """A checkpoint is about to be read."""
        self._tracker.begin(LOAD, self._training.checkpoint_load())

    def loading_ends(self, error: BaseException | None) -> None:
        """It is read, or cannot be."""
        self._tracker.end(LOAD, error)


def _calls(report: Callable[[TrainerSource, tuple[Any, ...]], object]) -> Any:
    """Make a hook that reports something to the source that is active; it gets what Lightning gives after the module."""

    @never_raises
    def hook(self: Hooks, _trainer: Any, _module: Any, *given: Any, **_others: Any) -> None:
        if self.source is not None:
            report(self.source, given)

    return hook


class Hooks:
    """What Lightning calls.

    Attributes:
        source: Reports the Trainer while it runs; None before, after, and while another source is active.
        last: The source of its last run.
    """

    source: TrainerSource | None = None
    last: TrainerSource | None = None
    package: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Be made anew there: a Trainer is sent to the processes that it starts."""
        return callback, (self.package,)

    @never_raises
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """One of the Trainer's functions begins."""
        del pl_module, stage
        source = TrainerSource(trainer)
        if ACTIVE.take(source):
            self.source = self.last = source
            source.describe()

    @never_raises
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """It is over."""
        del trainer, pl_module, stage
        self._release()

    @never_raises
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """It has failed; nothing else will be called."""
        del trainer, pl_module
        if self.source is not None:
            self.source.fails(exception)
        self._release()

    def _release(self) -> None:
        if self.source is not None:
            ACTIVE.release(self.source)
            self.source = None

    on_train_start = _calls(lambda source, _: source.train_begins())
    on_train_end = _calls(lambda source, _: source.train_ends())
    on_train_epoch_start = _calls(lambda source, _: source.epoch_begins())
    on_train_epoch_end = _calls(lambda source, _: source.epoch_ends())
    on_train_batch_start = _calls(lambda source, _: source.batch_begins())
    on_train_batch_end = _calls(lambda source, given: source.batch_ends(*given[:2]))  # outputs and batch
    on_before_zero_grad = _calls(lambda source, _: source.phase("zero_grad"))
    on_before_backward = _calls(lambda source, _: source.phase("backward"))
    on_after_backward = _calls(lambda source, _: source.module_goes_on())
    on_before_optimizer_step = _calls(lambda source, _: source.phase("optimizer"))
    on_validation_start = _calls(lambda source, _: source.evaluation_begins("validation"))
    on_validation_batch_start = _calls(lambda source, _: source.evaluation_batch_begins("validation"))
    on_test_start = _calls(lambda source, _: source.evaluation_begins("test"))
    on_test_batch_start = _calls(lambda source, _: source.evaluation_batch_begins("test"))
    on_validation_batch_end = on_test_batch_end = _calls(lambda source, _: source.evaluation_batch_ends())
    on_validation_end = on_test_end = _calls(lambda source, _: source.evaluation_ends())


# What no hook reports: saves as a whole, the reading of a checkpoint, and fetches -------------------------------


def _watch(package: str) -> None:
    patch(import_module(package).Trainer, "save_checkpoint", _save_begins, _save_ends)
    when_imported(f"{package}.{_CONNECTOR}", _watch_loads)
    when_imported(f"{package}.{_EPOCH_LOOP}", _watch_fetches)


def _watch_loads(module: Any) -> None:
    # Strategies override what is public.
    connector = module._CheckpointConnector  # noqa: SLF001
    patch_existing(connector, ("_restore_modules_and_callbacks",), _load_begins, _load_ends)


def _watch_fetches(module: Any) -> None:
    loop = module._TrainingEpochLoop  # noqa: SLF001  # no hook reports it
    patch_existing(loop, ("_on_before_fetch",), _fetch_begins)
    patch_existing(loop, ("_on_after_fetch",), _running, _fetch_ends)


def _hooks_of(trainer: Any) -> Hooks | None:
    return next((each for each in trainer.callbacks if isinstance(each, Hooks)), None)


def _source_of(trainer: Any) -> TrainerSource | None:
    """Return the source of a Trainer; after its run, the one it had, if no other is active now."""
    hooks = _hooks_of(trainer)
    if hooks is None:
        return None
    if hooks.source is not None:
        return hooks.source
    return hooks.last if hooks.last is not None and ACTIVE.take(hooks.last) else None


def _running(loop: Any) -> TrainerSource | None:
    hooks = _hooks_of(loop.trainer)
    return None if hooks is None else hooks.source


def _save_begins(trainer: Any, *args: Any, **kwargs: Any) -> object:
    source = _source_of(trainer)
    if source is None:
        return None
    weights_only = kwargs.get("weights_only", args[1] if len(args) > 1 else False)
    return source, source.saving_begins(whole=not weights_only)


def _save_ends(kept: Any, _result: Any, error: BaseException | None) -> None:
    source, save = kept
    source.saving_ends(save, error)
    hooks = _hooks_of(source.trainer)
    if hooks is not None and hooks.source is None:
        ACTIVE.release(source)


def _fetch_begins(loop: Any) -> object:
    source = _running(loop)
    if source is not None:
        source.fetch_begins_in_loop()
    return None


def _fetch_ends(source: TrainerSource, _result: Any, _error: BaseException | None) -> None:
    source.fetch_ends_in_loop()


def _load_begins(connector: Any, checkpoint_path: Any = None, *_args: Any, **kwargs: Any) -> object:
    source = _source_of(connector.trainer)
    if source is None or kwargs.get("checkpoint_path", checkpoint_path) is None:
        return None
    source.loading_begins()
    return source


def _load_ends(source: TrainerSource, _result: Any, error: BaseException | None) -> None:
    source.loading_ends(error)
