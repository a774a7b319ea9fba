"""Sources: the bridges that can report a training, which of them does, and what is done when the process ends.

Used in the training process. A Lightning job steps torch's optimizers and reads torch's loaders, so that two bridges see
each of its steps. One source is active at a time; a stronger one takes over, a weaker one keeps silent until none is.
"""

from __future__ import annotations

import atexit
import os
import sys
from multiprocessing import util
from typing import Any

from exporter import training
from exporter.patching import Around, never_raises
from exporter.recording.recorder import RECORDER

WATCHING, INSTRUMENTED, LEADING = 0, 1, 2
"""How much a source knows: what torch is asked to do; what the job says in another library's words; each turn of the
framework's own loop."""


def _ignore(*_args: Any, **_kwargs: Any) -> Around | None:
    return None


class Source:
    """A bridge that can report the training, and is called with what torch is asked to do meanwhile.

    What a source does not take is of no interest to it:

        fetch(begins=)              a batch is fetched from one of torch's loaders, or the loader begins to
        backward(tensors)           a backward pass is made from some tensors
        optimizer_begins(optimizer), optimizer_ends(optimizer)
                                    around an optimizer's step; the latter not when it raises
        optimizer_skipped(optimizer)    a gradient scaler has left its step out
        optimizer_loaded(state)     an optimizer has been given the state of an earlier one
        gradients_cleared(module)   a module's gradients have been cleared, in a process that has made no optimizer
        loss_is(loss)               it is about to be scaled, or divided by the number of accumulated batches
        gradient_norm_is(norm)      gradients have been clipped
        evaluates(module)           a module has been set to evaluate
        trains(module)              a module has been set to train, while the source `is_evaluating`
        save(saved, at_once=)       torch writes something; where not at once, the result is a thread's future
        yields()                    a stronger source takes over: what is open is to be closed
        exits(error)                the process ends, perhaps by what was raised
    """

    strength = WATCHING
    is_evaluating = False
    fetch = backward = optimizer_begins = optimizer_ends = optimizer_skipped = optimizer_loaded = _ignore
    gradients_cleared = loss_is = gradient_norm_is = evaluates = trains = save = yields = exits = _ignore

    def has_phases(self) -> bool:
        """Tell whether phases of the main thread, such as torch's compiling, belong to the training."""
        return self.strength == LEADING


class ActiveSource:
    """Which source reports: `NOBODY` while none does, the fallback while no other does."""

    def __init__(self) -> None:
        self.source = self.fallback = NOBODY

    def fall_back_to(self, source: Source) -> None:
        """Let a source report whenever no other does."""
        self.fallback = source
        if self.source is NOBODY:
            self.source = source

    def take(self, source: Source) -> bool:
        """Make a source the active one, unless one as strong reports already; say whether it is active now."""
        before = self.source
        if before is source:
            return True
        if before not in {NOBODY, self.fallback} and before.strength >= source.strength:
            return False
        self.source = source
        before.yields()
        return True

    def release(self, source: Source) -> None:
        """End a source's turn; harmless for one that is not active."""
        if self.source is source:
            self.source = self.fallback


NOBODY = Source()
ACTIVE = ActiveSource()
"""The active source of this process."""


class ExitHooks:
    """What is done when the process ends: the fallback is told, and the application that a bridge has begun ends."""

    def __init__(self) -> None:
        self._began = self._registered = False

    def begin_application(self) -> None:
        """Begin an application, once; not in a job that has configured telemetry and reports its own."""
        if not self._began:
            self._began = True
            self.register()
            if not _reports_itself():
                training.on_app_start()

    def register(self) -> None:
        """Be called at the end of the process; again is harmless."""
        if not self._registered:
            self._registered = True
            # After the recorder's, hence called before it: what is recorded then is published.
            atexit.register(self._run)
            self._finalize()
            # A forked child of multiprocessing clears its finalizers.
            util.register_after_fork(self, ExitHooks._finalize)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self._forget)

    def _finalize(self) -> None:
        util.Finalize(None, self._run, exitpriority=10)  # children of multiprocessing skip atexit

    def _forget(self) -> None:
        self._began = False

    @never_raises
    def _run(self) -> None:
        # What ends a child of multiprocessing is still on its way here; for most it is `SystemExit` with a status.
        error = sys.exc_info()[1]
        if error is None and not hasattr(sys, "ps1"):  # the last one at a prompt has ended nothing
            error = getattr(sys, "last_value", None)
        if isinstance(error, SystemExit) and not error.code:
            error = None
        ACTIVE.fallback.exits(error if isinstance(error, BaseException) else None)
        if self._began and not _reports_itself():
            training.on_app_end()
        self._began = False


def _reports_itself() -> bool:
    return bool(training.OneLoggerProvider.instance().one_logger_ready)


EXIT = ExitHooks()


def set_rank(rank: int) -> None:
    """Record under the rank that a framework knows; rank 0 of a process that has none is left to when it trains."""
    if RECORDER.process.identity().rank != rank and (rank or RECORDER.process.identity().rank is not None):
        import exporter  # noqa: PLC0415  # the root of the process, which knows the bridges' parts

        exporter.configure(rank=rank)
