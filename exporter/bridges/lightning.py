"""Bridge to PyTorch Lightning: a callback for the Trainer of `lightning` and of `pytorch_lightning`.

Used in the training process. An iteration starts with the fetch of a batch and ends with the step of the optimizer. In manual
optimization an iteration is a batch, because only the job knows which of its optimizers end a step.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partialmethod
from importlib import import_module
from importlib.util import find_spec
from os.path import normpath
from typing import Any

from exporter import training
from exporter.bridges import torch_hooks
from exporter.bridges.checkpoints import AsyncSave
from exporter.bridges.loop import Level, LoopTracker
from exporter.bridges.sources import ACTIVE, Source, Strength, set_rank
from exporter.patching import Around, never_raises, patch, patch_existing, version_of

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


@dataclass(slots=True)
class _QueuedSave:
    """Checkpoint from which the job can resume, queued for Lightning's writer thread."""

    path: str
    save: AsyncSave


MAX_QUEUED_SAVES = 64
"""Maximum number of queued checkpoints. Above it, the oldest is dropped. The write of a checkpoint removes it from the queue, but a rank
that writes no files would never remove any."""

_queued_saves: deque[_QueuedSave] = deque(maxlen=MAX_QUEUED_SAVES)
"""Queued checkpoints that are not being written yet, the oldest first."""


def callback(package: str | None = None) -> Any:
    """Return a new callback for a Trainer of the named package.

    If *package* is None, the callback is for the loaded packages or, if none is loaded, for an installed package.

    Raises:
        ImportError: Lightning is not installed.
    """
    bases = [module.Callback for module in import_packages(package)]
    return type("ExporterCallback", (LightningCallback, *bases), {"package": package})()


def import_packages(package: str | None = None) -> list[Any]:
    """Import Lightning, and install the hooks of this bridge.

    Returns the module of the named package. Without a name, returns the modules of the loaded packages, or of an installed
    package if none is loaded.

    Raises:
        ImportError: Lightning is not installed.
    """
    torch_hooks.install()
    names = [name for name in PACKAGES if name == package or (not package and name in sys.modules)]
    names = names or [PACKAGES[0] if find_spec("lightning") else PACKAGES[1]]
    modules = [import_module(name) for name in names]
    for name in names:
        _patch_package(name)
    return modules


def _phase_hook(phase: str) -> Callable[..., None]:
    """Return a hook that starts a phase of the current batch."""
    return lambda source, *_: source.switch_phase_in_batch(phase)


class LightningCallback(Source):
    """Source of a call of a Trainer, from `setup` to `teardown`. The methods `on_…` receive the calls of Lightning's hooks."""

    strength = Strength.LEADING
    trainer: Any = None
    package: str | None = None
    records_sanity_check = False  # True to record the sanity check as a validation, as one-logger does

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without state: a Trainer is pickled for its child processes, which create a new callback."""
        return callback, (self.package,)

    @never_raises
    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Become the active source, unless an equally strong source is active, and describe the run."""
        if ACTIVE.source is self or not ACTIVE.activate(self):
            return
        self.trainer, self.tracker = trainer, LoopTracker()
        self._is_manual = not trainer.lightning_module.automatic_optimization
        self._is_in_batch = False  # True from the start of a batch to its end, as Lightning reports them
        self._iteration_batches = 0  # number of batches of the open iteration
        self._start_step = 0  # `step` at the start of the open iteration
        set_rank(int(trainer.global_rank))
        training.describe(
            framework="lightning",
            framework_version=version_of("lightning") or version_of("pytorch_lightning"),
            model=type(trainer.lightning_module).__name__,
            precision=str(trainer.precision),
            world_size=int(trainer.world_size),
        )

    def teardown(self, *_: Any, **__: Any) -> None:
        """Stop reporting the Trainer."""
        ACTIVE.release(self)

    @property
    def step(self) -> int:
        """Number of optimizer steps, or of batches in manual optimization, including those before a checkpoint."""
        if self._is_manual:
            return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        return int(self.trainer.global_step)

    # A batch ----------------------------------------------------------------------------------------------------

    def gradient_norm_computed(self, norm: Any) -> None:
        """Record the norm of the gradient."""
        self.tracker.record("grad_norm", norm)

    def optimizer_ends(self, *_optimizer: Any) -> None:
        """End the phase of a backward pass or of an optimizer's step."""
        # In manual optimization the next phase is unknown, and counts as the forward pass.
        self.switch_phase_in_batch("forward" if self._is_manual else None)

    on_after_backward = optimizer_ends

    def switch_phase_in_batch(self, phase: str | None) -> None:
        """Start a phase of the current batch, if a batch is in progress. For None, the batch continues without a phase."""
        if self._is_in_batch:
            self.tracker.phase(phase)

    on_before_zero_grad = _phase_hook("zero_grad")
    on_before_backward = _phase_hook("backward")
    on_before_optimizer_step = _phase_hook("optimizer")

    # The training loop ------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Start the training loop."""
        self.tracker.begin_loop(self.step, self._target())

    def on_train_end(self) -> None:
        """End the training loop."""
        self._close_iteration()
        self.tracker.end_all()

    def on_exception(self, error: BaseException) -> None:
        """Close all open blocks after an exception. A completed step counts, even if a later callback has raised."""
        self._is_in_batch = self._is_in_batch and self._is_manual
        self._end_completed_iteration()
        self.tracker.end_all(error)
        ACTIVE.release(self)

    def on_train_epoch_start(self) -> None:
        """Record the epoch."""
        training.record(epoch=int(self.trainer.current_epoch))

    def on_train_epoch_end(self) -> None:
        """End the epoch. Lightning does not report the end of a batch in which the module stops the epoch."""
        self._is_in_batch = False
        self._close_iteration()
        training.record(epoch=int(self.trainer.current_epoch) + 1)

    def begin_fetch(self) -> None:
        """End the previous iteration if it is complete, and start the fetch of the next batch."""
        if not self._is_in_batch:
            self._end_completed_iteration()
            self._begin_iteration()
        self.tracker.phase("data_loading")

    def on_train_batch_start(self, *_: Any) -> None:
        """End the fetch: the batch is on the device, or the module fetches the batch itself."""
        if self._iteration_batches:
            self._end_completed_iteration()
        self._begin_iteration()
        self.tracker.phase("forward")
        self._iteration_batches += 1
        self._is_in_batch = True

    def on_train_batch_end(self, outputs: Any, batch: Any, *_: Any) -> None:
        """Record the loss, the samples and the learning rate of a batch."""
        self._is_in_batch = False
        self.tracker.phase(None)
        self.tracker.record("loss", self._loss(outputs))
        self.tracker.record_batch(batch)
        optimizers = self.trainer.optimizers
        training.record(learning_rate=optimizers[0].param_groups[0].get("lr") if optimizers else None)

    def _loss(self, outputs: Any) -> Any:
        """Return the loss of a batch. In automatic optimization, Lightning has divided the loss by the number of accumulated batches."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        accumulated_batches = int(self.trainer.accumulate_grad_batches)
        is_divided = not self._is_manual and accumulated_batches != 1
        return loss * accumulated_batches if is_divided and loss is not None else loss

    def _begin_iteration(self) -> None:
        if not self.tracker.is_open(Level.ITERATION):
            self._iteration_batches, self._start_step = 0, self.step
            self.tracker.begin_iteration()

    def _end_completed_iteration(self) -> None:
        """End the iteration if it is complete: after a step of the optimizer or, in manual optimization, after a batch.

        An iteration without a batch is discarded. Any other iteration continues with the next batch.
        """
        if self._is_in_batch or not self.tracker.is_open(Level.ITERATION):
            return
        if not self._iteration_batches:
            self.tracker.discard_iteration()
        elif self._is_manual or self.step != self._start_step:
            self.tracker.end(Level.ITERATION)

    def _close_iteration(self) -> None:
        """End the iteration if it is complete, and discard it otherwise."""
        self._end_completed_iteration()
        self.tracker.discard_iteration()

    def _target(self) -> int | None:
        """Return the step at which the training ends, or None if unknown."""
        trainer = self.trainer
        if trainer.max_steps > 0:
            return int(trainer.max_steps)
        batches, epochs = trainer.num_training_batches, trainer.max_epochs
        if epochs is None or epochs < 1 or not math.isfinite(batches):
            return None
        return int(epochs * math.ceil(batches / trainer.accumulate_grad_batches))

    # Validation and test ----------------------------------------------------------------------------------------

    def on_validation_start(self, mode: str = "validation") -> None:
        """Start a validation or a test."""
        self._end_completed_iteration()
        if self._ignores_evaluation():
            self.tracker.begin(Level.EVALUATION, training.phase("validation"))
        else:
            self.tracker.begin_evaluation(mode)

    def _ignores_evaluation(self) -> bool:
        """Return True in a sanity check, unless `records_sanity_check` is set. Only the time of an ignored evaluation is recorded."""
        return bool(self.trainer.sanity_checking) and not self.records_sanity_check

    def on_validation_batch_start(self, *_: Any, mode: str = "validation") -> None:
        """Start a batch of a validation or a test."""
        self.tracker.end(Level.BATCH)  # Lightning does not report the end of some batches
        if not self._ignores_evaluation():
            self.tracker.begin_batch(mode)

    def on_validation_end(self) -> None:
        """Record the loss of a validation, and end the validation. The loss of a sanity check is not recorded."""
        loss = self.trainer.callback_metrics.get("val_loss")
        if loss is not None and not self.trainer.sanity_checking:
            training.record(loss=loss, mode="validation")
        self.tracker.end(Level.EVALUATION)

    def on_validation_batch_end(self, *_: Any) -> None:
        """End a batch of a validation or a test."""
        self.tracker.end(Level.BATCH)

    on_test_start = partialmethod(on_validation_start, "test")
    on_test_batch_start = partialmethod(on_validation_batch_start, mode="test")
    on_test_batch_end = on_validation_batch_end

    def on_test_end(self) -> None:
        """End a test. A test may log its loss as `val_loss`, which is not the loss of a validation."""
        self.tracker.end(Level.EVALUATION)

    # Checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint(self, path: str, *, is_resumable: bool) -> Around:
        """Record the call that writes or queues a checkpoint. *is_resumable* is True if the job can resume from the checkpoint."""
        self._end_completed_iteration()
        checkpoint_io = self.trainer.strategy.checkpoint_io
        # An AsyncCheckpointIO calls its writer on a thread.
        writer = getattr(checkpoint_io, "checkpoint_io", None)
        is_sync = writer is None or not hasattr(checkpoint_io, "_executor")
        self.tracker.begin_save(self.step, is_resumable=is_resumable, is_sync=is_sync)
        queued = _QueuedSave(path, AsyncSave(self.step))
        if is_resumable and not is_sync:
            patch(writer, "save_checkpoint", _around_write)
            _queued_saves.append(queued)
        _, error = yield
        self.tracker.end(Level.SAVE, error)
        queued.save.end_blocking()
        if error is not None and queued in _queued_saves:
            # Lightning could not queue the checkpoint, or raises the error of an earlier write in this call.
            _queued_saves.remove(queued)
            queued.save.report(ok=False)


def _around_write(_checkpoint: Any = None, path: Any = None, *_args: Any, **kwargs: Any) -> Around:
    """Report the write of a queued checkpoint, on Lightning's thread. Other writes, such as of weights, are not reported."""
    path = normpath(str(kwargs.get("path", path)))  # some strategies pass `Path("./a")`, which is "a"
    queued = next((queued for queued in tuple(_queued_saves) if queued.path == path), None)
    if queued is not None:
        _queued_saves.remove(queued)
        with training.background("checkpoint_finalize"):
            _, error = yield
        queued.save.report(ok=error is None)


def _while_active(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook of Lightning that calls a method of the active source, without the Trainer and the module."""

    @never_raises
    def hook(self: LightningCallback, _trainer: Any, _module: Any, *args: Any, **kwargs: Any) -> None:
        if ACTIVE.source is self:
            method(self, *args, *kwargs.values())

    return hook


for _name in [name for name in vars(LightningCallback) if name.startswith("on_")]:
    setattr(LightningCallback, _name, _while_active(getattr(LightningCallback, _name)))


# Patched methods that Lightning has no hook for: saves, the load of a checkpoint, and fetches -------------------


@never_raises
def _patch_package(package: str) -> None:
    patch(import_module(package).Trainer, "save_checkpoint", _around_save)
    connectors = import_module(f"{package}.trainer.connectors.checkpoint_connector")
    loops = import_module(f"{package}.loops.training_epoch_loop")
    # Strategies override the public methods.
    patch_existing(connectors._CheckpointConnector, ("_restore_modules_and_callbacks",), _around_load)  # noqa: SLF001
    patch_existing(loops._TrainingEpochLoop, ("_on_before_fetch",), _fetch_begins)  # noqa: SLF001  # Lightning has no hook for a fetch
    patch_existing(loops._TrainingEpochLoop, ("_on_after_fetch",), _fetch_ends)  # noqa: SLF001  # Lightning has no hook for a fetch


def _active_callback(trainer: Any) -> LightningCallback | None:
    """Return the active callback of a Trainer, or None."""
    source = ACTIVE.source
    return source if isinstance(source, LightningCallback) and source.trainer is trainer else None


def _around_save(
    trainer: Any, filepath: Any = None, weights_only: Any = False, *_args: Any, **kwargs: Any
) -> Around:
    """Record a save by a Trainer. A save after the end of the Trainer's run is recorded only if no equally strong source is active."""
    active = _active_callback(trainer)
    sources = (
        item for item in trainer.callbacks if isinstance(item, LightningCallback) and item.trainer is trainer
    )
    source = active or next((source for source in sources if ACTIVE.activate(source)), None)
    if source is not None:
        path = normpath(str(kwargs.get("filepath", filepath)))
        yield from source.checkpoint(path, is_resumable=not kwargs.get("weights_only", weights_only))
        if active is None:
            ACTIVE.release(source)


def _around_load(connector: Any, checkpoint_path: Any = None, *_args: Any, **kwargs: Any) -> Around | None:
    source = _active_callback(connector.trainer)
    if source is None or kwargs.get("checkpoint_path", checkpoint_path) is None:
        return None
    return source.tracker.load()


def _fetch_begins(loop: Any) -> None:
    source = _active_callback(loop.trainer)
    if source is not None:
        source.begin_fetch()


def _fetch_ends(loop: Any) -> Around:
    """End the fetch. If the module has fetched the batch inside its own code, the forward phase continues."""
    yield
    source = _active_callback(loop.trainer)
    if source is not None:
        source.switch_phase_in_batch("forward")
