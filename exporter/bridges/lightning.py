"""The bridge to PyTorch Lightning: a callback for its Trainer.

Used in the training process, with the packages `lightning` and `pytorch_lightning` alike. With `EXPORTER_AUTO=1` every
Trainer gets one by Lightning's own entry points (see `exporter_auto`); otherwise it is given like any callback:

    Trainer(callbacks=[exporter.bridges.lightning.callback()])

It keeps nothing in checkpoints, so that these load with and without it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from exporter.bridges import torch_hooks
from exporter.bridges.brackets import bracket, bracket_what_exists, never_raises
from exporter.bridges.claims import CLAIMS
from exporter.bridges.imports import when_imported
from exporter.bridges.lightning_trainer import TrainerTeller

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


def automatic(package: str) -> Any:
    """Make one that nobody has asked for."""
    return callback(package)


def _first_installed() -> Any:
    try:
        return import_module(PACKAGES[0])
    except ImportError:
        return import_module(PACKAGES[1])


def _watch(package: str) -> None:
    """Bracket what no hook tells: saves as a whole, the reading of a checkpoint, and fetches."""
    bracket(import_module(package).Trainer, "save_checkpoint", _save_begins, _save_ends)
    when_imported(f"{package}.{_CONNECTOR}", _watch_loads)
    when_imported(f"{package}.{_EPOCH_LOOP}", _watch_fetches)


def _watch_loads(module: Any) -> None:
    bracket_what_exists(
        module._CheckpointConnector,  # noqa: SLF001  # strategies override what is public
        ("_restore_modules_and_callbacks",),
        _load_begins,
        _load_ends,
    )


def _watch_fetches(module: Any) -> None:
    loop = module._TrainingEpochLoop  # noqa: SLF001  # no hook tells of it
    bracket_what_exists(loop, ("_on_before_fetch",), _fetch_begins)
    bracket_what_exists(loop, ("_on_after_fetch",), _running, _fetch_ends)


class Hooks:
    """What Lightning calls.

    Attributes:
        teller: Tells of the Trainer while it runs; None before, after, and where another bridge tells.
        last: Told of its last run.
    """

    teller: TrainerTeller | None = None
    last: TrainerTeller | None = None

    package: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Be made anew there: a Trainer is sent to the processes that it starts."""
        return callback, (self.package,)

    @never_raises
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """One of the Trainer's functions begins."""
        del pl_module, stage
        teller = TrainerTeller(trainer)
        if CLAIMS.take(teller):
            self.teller = self.last = teller
            teller.describe()

    @never_raises
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """It is over."""
        del trainer, pl_module, stage
        self._release()

    @never_raises
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """It has failed; nothing else will be called."""
        del trainer, pl_module
        if self.teller is not None:
            self.teller.fails(exception)
        self._release()

    def _release(self) -> None:
        if self.teller is not None:
            CLAIMS.release(self.teller)
            self.teller = None

    @never_raises
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The training loop begins."""
        del trainer, pl_module
        if self.teller is not None:
            self.teller.train_begins()

    @never_raises
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The training loop ends."""
        del trainer, pl_module
        if self.teller is not None:
            self.teller.train_ends()

    @never_raises
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """An epoch begins."""
        del trainer, pl_module
        if self.teller is not None:
            self.teller.epoch_begins()

    @never_raises
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """An epoch ends."""
        del trainer, pl_module
        if self.teller is not None:
            self.teller.epoch_ends()

    @never_raises
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_batch_and_index: Any) -> None:
        """A batch is there."""
        del trainer, pl_module
        if self.teller is not None:
            self.teller.batch_begins()

    @never_raises
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_index: Any
    ) -> None:
        """A batch is done."""
        del trainer, pl_module
        if self.teller is not None:
            self.teller.batch_ends(outputs, batch)

    @never_raises
    def on_before_zero_grad(self, *_trainer_module_and_optimizer: Any) -> None:
        """The gradients of before are cleared."""
        if self.teller is not None:
            self.teller.phase("zero_grad")

    @never_raises
    def on_before_backward(self, *_trainer_module_and_loss: Any) -> None:
        """The backward pass begins."""
        if self.teller is not None:
            self.teller.phase("backward")

    @never_raises
    def on_after_backward(self, *_trainer_and_module: Any) -> None:
        """The backward pass ends."""
        if self.teller is not None:
            self.teller.module_goes_on()

    @never_raises
    def on_before_optimizer_step(self, *_trainer_module_and_optimizer: Any) -> None:
        """The optimizer's step begins."""
        if self.teller is not None:
            self.teller.phase("optimizer")

    @never_raises
    def on_validation_start(self, *_trainer_and_module: Any) -> None:
        """A validation begins."""
        if self.teller is not None:
            self.teller.evaluation_begins("validation")

    @never_raises
    def on_validation_end(self, *_trainer_and_module: Any) -> None:
        """It ends."""
        if self.teller is not None:
            self.teller.evaluation_ends()

    @never_raises
    def on_validation_batch_start(self, *_trainer_module_batch_and_indices: Any) -> None:
        """One batch of it begins."""
        if self.teller is not None:
            self.teller.evaluation_batch_begins("validation")

    @never_raises
    def on_validation_batch_end(self, *_trainer_module_outputs_batch_and_indices: Any) -> None:
        """It ends."""
        if self.teller is not None:
            self.teller.evaluation_batch_ends()

    @never_raises
    def on_test_start(self, *_trainer_and_module: Any) -> None:
        """A test begins."""
        if self.teller is not None:
            self.teller.evaluation_begins("test")

    @never_raises
    def on_test_batch_start(self, *_trainer_module_batch_and_indices: Any) -> None:
        """One batch of it begins."""
        if self.teller is not None:
            self.teller.evaluation_batch_begins("test")

    on_test_end = on_validation_end
    on_test_batch_end = on_validation_batch_end


def _hooks_of(trainer: Any) -> Hooks | None:
    return next((each for each in trainer.callbacks if isinstance(each, Hooks)), None)


def _teller_of(trainer: Any) -> TrainerTeller | None:
    """Who tells of a Trainer; after its run, who told of it, if nobody else tells now."""
    hooks = _hooks_of(trainer)
    if hooks is None:
        return None
    if hooks.teller is not None:
        return hooks.teller
    return hooks.last if hooks.last is not None and CLAIMS.take(hooks.last) else None


def _save_begins(trainer: Any, *args: Any, **kwargs: Any) -> object:
    teller = _teller_of(trainer)
    if teller is None:
        return None
    weights_only = kwargs.get("weights_only", args[1] if len(args) > 1 else False)
    return teller, teller.save_of_checkpoint_begins(whole=not weights_only)


def _save_ends(kept: Any, _result: Any, error: BaseException | None) -> None:
    teller, save = kept
    teller.save_of_checkpoint_ends(save, error)
    hooks = _hooks_of(teller.trainer)
    if hooks is not None and hooks.teller is None:
        CLAIMS.release(teller)


def _running(loop: Any) -> TrainerTeller | None:
    """Who tells of the Trainer that a loop belongs to, while it runs."""
    hooks = _hooks_of(loop.trainer)
    return None if hooks is None else hooks.teller


def _fetch_begins(loop: Any) -> object:
    teller = _running(loop)
    if teller is not None:
        teller.fetch_of_batch_begins()
    return None


def _fetch_ends(teller: TrainerTeller, _result: Any, _error: BaseException | None) -> None:
    teller.fetch_of_batch_ends()


def _load_begins(connector: Any, checkpoint_path: Any = None, *_args: Any, **kwargs: Any) -> object:
    teller = _teller_of(connector.trainer)
    if teller is None or kwargs.get("checkpoint_path", checkpoint_path) is None:
        return None
    teller.load_of_checkpoint_begins()
    return teller


def _load_ends(teller: TrainerTeller, _result: Any, error: BaseException | None) -> None:
    teller.load_of_checkpoint_ends(error)
