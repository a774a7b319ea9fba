"""Sources, which are bridges that can report the training: the choice of the active source, and the work at exit.

Used in the training process. Several bridges may observe the same step: a Lightning job also steps torch's optimizers and reads
torch's loaders. So that each step is counted once, a single source is active at a time. A stronger source replaces a weaker source.
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
    """Precedence of a source, by the origin of its reports."""

    INFERRED = 0  # calls of torch by the job
    INSTRUMENTED = 1  # calls of a telemetry library by the job
    LEADING = 2  # hooks of a framework that runs the training loop


def _ignore(*_args: Any, **_kwargs: Any) -> Any:
    return None


class Source:
    """Base class of a bridge that can report the training. While the source is active, the hooks on torch call its methods.

    A method that a source does not define has no effect. The methods marked with * are called in every step, one before and one after a
    call of torch. `backward_ends` is called only if `backward_begins` has returned a token other than None.

        fetch_begins(fetcher)* fetch_ends(fetcher, batch, error)*    an iterator of a loader fetches a batch
        iterator_created(fetcher, error)    a loader has created an iterator; `fetch_begins` was called with the loader
        backward_begins(tensors)* backward_ends(token, error)*     a backward pass starts at these tensors
        optimizer_begins(optimizer)* optimizer_ends(optimizer)*    an optimizer steps; the end is not called if the step raises
        optimizer_skipped(optimizer)    a gradient scaler has skipped a step of the optimizer
        optimizer_loaded(state)         an optimizer has loaded a state
        loss_computed(loss)             a library is about to scale this loss, or divide it for accumulation
        gradient_norm_computed(norm)    gradients have been clipped
        evaluation_mode_set(module)     a module was set to evaluation mode
        training_mode_set(module)       a module was set to training mode, while the source `is_evaluating`
        save(contents, is_sync=)        generator around a call that saves; without `is_sync`, the call returns a future
        superseded()                    a stronger source becomes active; the source closes its open blocks
        process_exits(error)            the process exits, with the exception that ends it or None
    """

    strength = Strength.INFERRED
    is_evaluating = False
    fetch_begins = fetch_ends = iterator_created = backward_begins = backward_ends = _ignore
    optimizer_begins = optimizer_ends = optimizer_skipped = optimizer_loaded = _ignore
    loss_computed = gradient_norm_computed = save = _ignore
    evaluation_mode_set = training_mode_set = superseded = process_exits = _ignore

    def has_phases(self) -> bool:
        """Return True if torch's hooks may record phases, such as a compilation, on the calling thread."""
        return self.strength is Strength.LEADING


class ActiveSource:
    """Holder of the active source.

    While no source is activated, the fallback is active. Without a fallback, `NO_SOURCE` is active.
    """

    def __init__(self) -> None:
        self.source = self.fallback = NO_SOURCE

    def set_fallback(self, source: Source) -> None:
        """Set the fallback, which is active while no other source is active."""
        self.fallback = source
        if self.source is NO_SOURCE:
            self.source = source

    def activate(self, source: Source) -> bool:
        """Activate a source, unless another source of the same or a higher strength is active. Return True if the source is active now."""
        previous = self.source
        if previous is source:
            return True
        if previous not in {NO_SOURCE, self.fallback} and previous.strength >= source.strength:
            return False
        self.source = source
        previous.superseded()
        return True

    def release(self, source: Source) -> None:
        """Deactivate a source in favor of the fallback. Has no effect on an inactive source."""
        if self.source is source:
            self.source = self.fallback


NO_SOURCE = Source()
"""Source whose methods have no effect."""
ACTIVE = ActiveSource()
"""The active source of this process."""


class ExitHooks:
    """Work at the end of the process: notify the fallback, and end the application that a bridge has started."""

    def __init__(self) -> None:
        self._has_begun = False  # True while the application is started
        self._is_registered = False

    def begin_application(self) -> None:
        """Start an application at the first call, unless the job has configured one-logger's provider itself."""
        if not self._has_begun:
            self._has_begun = True
            self.register()
            if not _reports_itself():
                training.on_app_start()

    def register(self) -> None:
        """Register for the end of the process. A second call has no effect."""
        if not self._is_registered:
            self._is_registered = True
            # Functions run in the reverse order of their registration: this one runs before that of the recorder, which publishes the
            # records.
            atexit.register(self._run)
            self._finalize()
            # A forked child of multiprocessing clears the finalizers of its parent.
            util.register_after_fork(self, ExitHooks._finalize)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self._reset_in_child)

    def _finalize(self) -> None:
        """Register for the end of a child process of multiprocessing."""
        util.Finalize(None, self._run, exitpriority=10)  # children of multiprocessing skip atexit

    def _reset_in_child(self) -> None:
        self._has_begun = False

    @never_raises
    def _run(self) -> None:
        """Notify the fallback of the end with the exception that ends the process, if any, and end the application."""
        # In a child of multiprocessing an exception is still propagating, usually a `SystemExit` with a status.
        error = sys.exc_info()[1]
        if error is None and not hasattr(sys, "ps1"):  # an exception at a prompt does not end the process
            error = getattr(sys, "last_value", None)
        if isinstance(error, SystemExit) and not error.code:
            error = None
        ACTIVE.fallback.process_exits(error if isinstance(error, BaseException) else None)
        if self._has_begun and not _reports_itself():
            training.on_app_end()
        self._has_begun = False


def _reports_itself() -> bool:
    """Return True if the job has configured one-logger's provider."""
    module = sys.modules.get("exporter.one_logger.provider")
    return module is not None and bool(module.OneLoggerProvider.instance().one_logger_ready)


EXIT = ExitHooks()
"""Exit hooks of this process."""


def set_rank(rank: int) -> None:
    """Set the rank of this process as reported by a framework.

    Rank 0 does not replace a missing rank: a process without a rank becomes rank 0 when it trains.
    """
    current_rank = RECORDER.process.identity().rank
    if current_rank != rank and (rank or current_rank is not None):
        import exporter  # noqa: PLC0415  # the composition root imports nothing of the bridges

        exporter.configure(rank=rank)


def world_size() -> int | None:
    """Return the number of ranks from torch.distributed or from `WORLD_SIZE`, or None if unknown."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) if ranks.isascii() and ranks.isdigit() else None
