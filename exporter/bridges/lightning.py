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

from exporter import training
from exporter.bridges import torch_hooks
from exporter.bridges.checkpoints import AsyncSaves
from exporter.bridges.loop import BATCH, EVALUATION, ITERATION, SAVE, LoopTracker
from exporter.bridges.sources import ACTIVE, LEADING, Source, set_rank
from exporter.patching import Around, never_raises, patch, patch_existing, version_of, when_imported

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


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
    return type("ExporterCallback", (_Hooks, *bases), {"package": package})()


automatic = callback
"""Makes one that nobody has asked for."""


def _first_installed() -> Any:
    try:
        return import_module(PACKAGES[0])
    except ImportError:
        return import_module(PACKAGES[1])


def _part(phase: str) -> Callable[..., None]:
    return lambda source, *_: source.part_of_batch(phase)


class _TrainerSource(Source):
    """Reports a Trainer, from `setup` of one of its functions to its end; methods `on_…` are Lightning's own hooks."""

    strength = LEADING

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.tracker = LoopTracker()
        self._manual = not trainer.lightning_module.automatic_optimization
        self._in_batch = False
        self._batches_in_turn = 0
        self._step_at_turn = 0
        self._async_saves = AsyncSaves()

    @property
    def step(self) -> int:
        """Optimizer steps so far, those of earlier processes included; in manual optimization, batches."""
        if self._manual:
            return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        return int(self.trainer.global_step)

    def describe(self) -> None:
        """Say what is trained, and where."""
        trainer = self.trainer
        package = next(
            base.__module__.split(".")[0] for base in type(trainer).__mro__ if base.__name__ == "Trainer"
        )
        set_rank(int(trainer.global_rank))
        training.describe(
            framework="lightning",
            framework_version=version_of(package),
            model=type(trainer.lightning_module).__name__,
            precision=str(trainer.precision),
            world_size=int(trainer.world_size),
        )

    # A batch ----------------------------------------------------------------------------------------------------

    def gradient_norm_is(self, norm: Any) -> None:
        self.tracker.record("grad_norm", norm)

    def on_after_backward(self) -> None:
        self.part_of_batch(
            "forward" if self._manual else None
        )  # in manual optimization anything may come next

    def optimizer_ends(self, optimizer: Any) -> None:  # noqa: ARG002  # the interface's
        self.on_after_backward()

    def part_of_batch(self, phase: str | None) -> None:
        if self._in_batch:
            self.tracker.phase(phase)

    on_before_zero_grad = _part("zero_grad")
    on_before_backward = _part("backward")
    on_before_optimizer_step = _part("optimizer")

    # The training loop ------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        self.tracker.begin_loop(self.step, self._target())

    def on_train_end(self) -> None:
        self._turn_ends()
        self.tracker.discard_iteration()
        self.tracker.end_all()

    def fails(self, error: BaseException) -> None:
        """An exception ends whatever is open; a step that is made stays made, if only a callback failed after it."""
        self._in_batch = self._in_batch and self._manual
        self._turn_ends()
        self.tracker.end_all(error)

    def on_train_epoch_start(self) -> None:
        training.record(epoch=int(self.trainer.current_epoch))

    def on_train_epoch_end(self) -> None:
        """Perhaps amid a batch: Lightning leaves its end out when the module gives the epoch up."""
        self._in_batch = False
        self._turn_ends()
        self.tracker.discard_iteration()
        training.record(epoch=int(self.trainer.current_epoch) + 1)

    def fetch_begins(self) -> None:
        """A batch is asked for: one turn ends there, and the next one begins."""
        if not self._in_batch:
            self._turn_ends()
            self._turn_begins()
        self.tracker.phase("data_loading")

    def fetch_ends(self) -> None:
        """The batch is there; where the module itself has asked for it, the module goes on."""
        self.part_of_batch("forward")

    def on_train_batch_start(self, *_: Any) -> None:
        """A batch has been brought to its device, or the module will fetch it itself."""
        if self._batches_in_turn:
            self._turn_ends()
        self._turn_begins()
        self.tracker.phase("forward")
        self._batches_in_turn += 1
        self._in_batch = True

    def on_train_batch_end(self, outputs: Any, batch: Any, *_: Any) -> None:
        self._in_batch = False
        self.tracker.phase(None)
        self.tracker.record("loss", outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
        self.tracker.record_batch(batch)
        optimizers = self.trainer.optimizers
        training.record(learning_rate=optimizers[0].param_groups[0].get("lr") if optimizers else None)

    def _turn_begins(self) -> None:
        if not self.tracker.is_open(ITERATION):
            self._batches_in_turn, self._step_at_turn = 0, self.step
            self.tracker.begin_iteration()

    def _turn_ends(self) -> None:
        """Close the iteration if its optimizer step is made; else more batches belong to it."""
        if self._in_batch or not self.tracker.is_open(ITERATION):
            return
        if not self._batches_in_turn:
            self.tracker.discard_iteration()
        elif self._manual or self.step != self._step_at_turn:
            self.tracker.end(ITERATION)

    def _target(self) -> int | None:
        trainer = self.trainer
        if trainer.max_steps > 0:
            return int(trainer.max_steps)
        batches, epochs = trainer.num_training_batches, trainer.max_epochs
        if epochs is None or epochs < 1 or not math.isfinite(batches):
            return None
        return int(epochs * math.ceil(batches / trainer.accumulate_grad_batches))

    # Evaluation: the few batches of the sanity check are no validation -------------------------------------------

    def on_validation_start(self, mode: str = "validation") -> None:
        self._turn_ends()
        if self.trainer.sanity_checking:
            self.tracker.begin(EVALUATION, training.phase("validation"))
        else:
            self.tracker.begin_evaluation(mode)

    def on_test_start(self) -> None:
        self.on_validation_start("test")

    def on_validation_batch_start(self, *_: Any, mode: str = "validation") -> None:
        self.tracker.end(BATCH)  # Lightning does not report the end of every one
        if not self.trainer.sanity_checking:
            self.tracker.begin_batch(mode)

    def on_test_batch_start(self, *_: Any) -> None:
        self.on_validation_batch_start(mode="test")

    def on_validation_end(self) -> None:
        loss = self.trainer.callback_metrics.get("val_loss")
        if loss is not None and not self.trainer.sanity_checking:
            training.record(loss=loss, mode="validation")
        self.tracker.end(EVALUATION)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.tracker.end(BATCH)

    on_test_end = on_validation_end
    on_test_batch_end = on_validation_batch_end

    # Checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint(self, *, whole: bool) -> Around:
        """A checkpoint is written, or handed over to be written; only from a whole one can the job go on."""
        self._turn_ends()
        save = self._async_saves.begin(self.trainer.strategy.checkpoint_io, self.step) if whole else None
        if save is None:
            self.tracker.begin_save(self.step, whole=whole)
        else:
            self.tracker.begin(SAVE, training.phase("checkpoint_save_async"))
        _, error = yield
        self.tracker.end(SAVE, error)
        if save is not None:
            self._async_saves.returned(save, error)


def _told(name: str) -> Callable[..., None]:
    """Make a hook that tells the source that is active; it gets what Lightning gives after the module."""

    @never_raises
    def hook(self: _Hooks, _trainer: Any, _module: Any, *given: Any, **named: Any) -> None:
        if self.source is not None:
            getattr(self.source, name)(*given, *named.values())

    return hook


class _Hooks:
    """What Lightning calls.

    Attributes:
        source: Reports the Trainer while it runs; None before, after, and while another source is active.
        last: The source of its last run.
    """

    source: _TrainerSource | None = None
    last: _TrainerSource | None = None
    package: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Be made anew there: a Trainer is sent to the processes that it starts."""
        return callback, (self.package,)

    @never_raises
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002  # Lightning's own
        source = _TrainerSource(trainer)
        if ACTIVE.take(source):
            self.source = self.last = source
            source.describe()

    @never_raises
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002  # Lightning's own
        self._release()

    @never_raises
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002  # likewise
        if self.source is not None:
            self.source.fails(exception)
        self._release()

    def _release(self) -> None:
        if self.source is not None:
            ACTIVE.release(self.source)
            self.source = None


for _name in vars(_TrainerSource):
    if _name.startswith("on_"):
        setattr(_Hooks, _name, _told(_name))


# What no hook reports: saves as a whole, the reading of a checkpoint, and fetches -------------------------------


def _watch(package: str) -> None:
    patch(import_module(package).Trainer, "save_checkpoint", _save)
    when_imported(f"{package}.trainer.connectors.checkpoint_connector", _watch_loads)
    when_imported(f"{package}.loops.training_epoch_loop", _watch_fetches)


def _watch_loads(module: Any) -> None:
    # Strategies override what is public.
    patch_existing(module._CheckpointConnector, ("_restore_modules_and_callbacks",), _load)  # noqa: SLF001


def _watch_fetches(module: Any) -> None:
    loop = module._TrainingEpochLoop  # noqa: SLF001  # no hook reports it
    patch_existing(loop, ("_on_before_fetch",), _fetch_begins)
    patch_existing(loop, ("_on_after_fetch",), _fetch_ends)


def _hooks_of(trainer: Any) -> _Hooks | None:
    return next((each for each in trainer.callbacks if isinstance(each, _Hooks)), None)


def _source_of(trainer: Any) -> _TrainerSource | None:
    """Return the source of a Trainer; after its run, the one it had, if no other is active now."""
    hooks = _hooks_of(trainer)
    if hooks is None:
        return None
    if hooks.source is not None:
        return hooks.source
    return hooks.last if hooks.last is not None and ACTIVE.take(hooks.last) else None


def _save(trainer: Any, _path: Any = None, weights_only: Any = False, *_args: Any, **kwargs: Any) -> Around:
    source = _source_of(trainer)
    if source is None:
        return
    yield from source.checkpoint(whole=not kwargs.get("weights_only", weights_only))
    hooks = _hooks_of(trainer)
    if hooks is not None and hooks.source is None:
        ACTIVE.release(source)


def _load(connector: Any, checkpoint_path: Any = None, *_args: Any, **kwargs: Any) -> Around | None:
    source = _source_of(connector.trainer)
    if source is None or kwargs.get("checkpoint_path", checkpoint_path) is None:
        return None
    return source.tracker.load()


def _fetch_begins(loop: Any) -> None:
    hooks = _hooks_of(loop.trainer)
    if hooks is not None and hooks.source is not None:
        hooks.source.fetch_begins()


def _fetch_ends(loop: Any) -> Around:
    yield
    hooks = _hooks_of(loop.trainer)
    if hooks is not None and hooks.source is not None:
        hooks.source.fetch_ends()
