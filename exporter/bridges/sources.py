"""Sources: bridges that report a training, the choice of the active source, and the work at exit.

Used in the training process. A Lightning job steps torch's optimizers and reads torch's loaders, so two bridges observe
each step. A single source is active at a time; a stronger source replaces a weaker source.
"""

from __future__ import annotations

import atexit
import os
import sys
from enum import IntEnum
from multiprocessing import util
from typing import Any

from exporter import training
from exporter.patching import never_raises
from exporter.recording.recorder import RECORDER


class Strength(IntEnum):
    """Precedence of a source."""

    WATCHING = 0  # which torch functions the job calls
    INSTRUMENTED = 1  # reports of the job to a library
    LEADING = 2  # each step of the framework's own loop


def _ignore(*_args: Any, **_kwargs: Any) -> Any:
    return None


class Source:
    """A bridge that can report the training, and is called by the hooks on torch.

    Methods that a source does not define are ignored. Those marked * are called in every step, before and after a call of
    torch; `backward_ends` is called only if `backward_begins` does not return None:

        fetch_begins(loader)* fetch_ends(loader, batch, error)*    a batch is fetched from an iterator of a loader
        iterator_made(loader, error)    a loader has made an iterator; `fetch_begins(loader)` was called before
        backward_begins(tensors)* backward_ends(token, error)*     a backward pass begins at some tensors
        optimizer_begins(optimizer)* optimizer_ends(optimizer)*    an optimizer steps; no end if the step raises
        optimizer_skipped(optimizer)    a gradient scaler has left out the optimizer's step
        optimizer_loaded(state)         an optimizer has loaded a state
        loss_is(loss)                   a library is about to scale or divide the loss for accumulation
        gradient_norm_is(norm)          gradients have been clipped
        evaluates(module)               a module has been set to evaluation mode
        trains(module)                  a module was set to training mode, and the source `is_evaluating`
        save(saved, at_once=)           generator around a call that writes; the result is a future unless `at_once`
        yields()                        a stronger source begins: close what is open
        exits(error)                    the process ends, perhaps by an exception
    """

    strength = Strength.WATCHING
    is_evaluating = False
    fetch_begins = fetch_ends = iterator_made = backward_begins = backward_ends = _ignore
    optimizer_begins = optimizer_ends = optimizer_skipped = optimizer_loaded = _ignore
    loss_is = gradient_norm_is = evaluates = trains = save = yields = exits = _ignore

    def has_phases(self) -> bool:
        """Return True if phases of the main thread, such as torch's compilation, belong to the training."""
        return self.strength is Strength.LEADING


class ActiveSource:
    """The active source: the fallback if no other source is active, `NOBODY` without a fallback."""

    def __init__(self) -> None:
        self.source = self.fallback = NOBODY

    def fall_back_to(self, source: Source) -> None:
        """Set the source that reports whenever no other does."""
        self.fallback = source
        if self.source is NOBODY:
            self.source = source

    def take(self, source: Source) -> bool:
        """Activate a source unless an equally strong source is active; return True if the source is active now."""
        before = self.source
        if before is source:
            return True
        if before not in {NOBODY, self.fallback} and before.strength >= source.strength:
            return False
        self.source = source
        before.yields()
        return True

    def release(self, source: Source) -> None:
        """Deactivate a source. Has no effect on an inactive source."""
        if self.source is source:
            self.source = self.fallback


NOBODY = Source()
ACTIVE = ActiveSource()
"""The active source of this process."""


class ExitHooks:
    """Work at the end of the process: inform the fallback, and end the application of a bridge."""

    def __init__(self) -> None:
        self._began = self._registered = False

    def begin_application(self) -> None:
        """Begin an application, once, unless the job has configured telemetry itself."""
        if not self._began:
            self._began = True
            self.register()
            if not _reports_itself():
                training.on_app_start()

    def register(self) -> None:
        """Register for the end of the process. A second call has no effect."""
        if not self._registered:
            self._registered = True
            # Registered after the recorder's function and hence called earlier: these records are published.
            atexit.register(self._run)
            self._finalize()
            # A forked child of multiprocessing clears the finalizers.
            util.register_after_fork(self, ExitHooks._finalize)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self._forget)

    def _finalize(self) -> None:
        util.Finalize(None, self._run, exitpriority=10)  # children of multiprocessing skip atexit

    def _forget(self) -> None:
        self._began = False

    @never_raises
    def _run(self) -> None:
        # In a child of multiprocessing the exception is still propagating, usually a `SystemExit` with a status.
        error = sys.exc_info()[1]
        if error is None and not hasattr(sys, "ps1"):  # an exception at a prompt does not end the process
            error = getattr(sys, "last_value", None)
        if isinstance(error, SystemExit) and not error.code:
            error = None
        ACTIVE.fallback.exits(error if isinstance(error, BaseException) else None)
        if self._began and not _reports_itself():
            training.on_app_end()
        self._began = False


def _reports_itself() -> bool:
    module = sys.modules.get("exporter.one_logger.provider")  # not loaded: not configured
    return module is not None and bool(module.OneLoggerProvider.instance().one_logger_ready)


EXIT = ExitHooks()


def set_rank(rank: int) -> None:
    """Record under the rank that a framework knows; a process without a rank becomes rank 0 only when it trains."""
    present = RECORDER.process.identity().rank
    if present != rank and (rank or present is not None):
        import exporter  # noqa: PLC0415  # the composition root imports nothing of the bridges

        exporter.configure(rank=rank)


def world_size() -> int | None:
    """Return the number of ranks, from torch or from the launcher's environment."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) if ranks.isascii() and ranks.isdigit() else None
