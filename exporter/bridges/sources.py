"""Sources: the bridges that can report a training, and which of them does.

Used in the training process. A Lightning job steps torch's optimizers and reads torch's loaders, so that two bridges see
each of its steps. One source is active at a time; a stronger one takes over, a weaker one keeps silent until none is.

The exit hooks close what is open when the process ends. The first loop that a bridge reports begins an application,
unless the job has one; it ends with the process. A loop that is still open then was not finished.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from exporter import training
from exporter.patching import Around, never_raises
from exporter.recording.identity import identity

WATCHING, INSTRUMENTED, LEADING = 0, 1, 2
"""How much a source knows: what torch is asked to do; what the job says in another library's words; each turn of the
framework's own loop."""


class Source:
    """A bridge that can report the training, and is called with what torch is asked to do meanwhile."""

    strength = WATCHING
    is_evaluating = False  # whether it waits for a module to be set to train again

    def yields(self) -> None:
        """A stronger source takes over: close what is open."""

    def has_phases(self) -> bool:
        """Tell whether phases of the main thread, such as torch's compiling, belong to the training."""
        return self.strength == LEADING

    def fetch(self, *, begins: bool = False) -> Around | None:
        """A batch is fetched from one of torch's loaders, or the loader begins to."""

    def backward(self, tensors: Any) -> Around | None:
        """A backward pass is made from some tensors."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step is over; not called when it raises."""

    def optimizer_skipped(self, optimizer: Any) -> None:
        """A gradient scaler has left an optimizer's step out."""

    def optimizer_loaded(self, state: Any) -> None:
        """An optimizer has been given the state of an earlier one."""

    def gradients_cleared(self, module: Any) -> None:
        """A module's gradients have been cleared, in a process that has made no optimizer."""

    def loss_is(self, loss: Any) -> None:
        """A loss is about to be scaled, or divided by the number of accumulated batches."""

    def gradient_norm_is(self, norm: Any) -> None:
        """Gradients have been clipped; they had this norm."""

    def evaluates(self, module: Any) -> None:
        """A module has been set to evaluate."""

    def trains(self, module: Any) -> None:
        """A module has been set to train, while the source is evaluating."""

    def save(self, saved: Any, *, at_once: bool) -> Around | None:
        """Something is written by torch; where not at once, the result is the future of a thread that does it."""


class ActiveSource:
    """Which source reports: `NOBODY` while none does, the fallback while no other does."""

    def __init__(self) -> None:
        self.source: Source = NOBODY
        self.fallback: Source = NOBODY

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
    """What is done when the process ends."""

    def __init__(self) -> None:
        self._hooks: list[Callable[[BaseException | None], None]] = []
        self._began = self._registered = False

    def add(self, hook: Callable[[BaseException | None], None]) -> None:
        """Have a hook called at exit, with the exception that has ended the program, if one has."""
        self._hooks.append(hook)
        self._register()

    def begin_application(self) -> None:
        """Begin an application, once; not in a job that has configured telemetry and reports its own."""
        if not self._began:
            self._began = True
            self._register()
            if not training.OneLoggerProvider.instance().one_logger_ready:
                training.on_app_start()

    def _register(self) -> None:
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
        for hook in self._hooks:
            hook(error if isinstance(error, BaseException) else None)
        self._hooks.clear()
        if self._began and not training.OneLoggerProvider.instance().one_logger_ready:
            training.on_app_end()
        self._began = False


EXIT = ExitHooks()
"""Those of this process."""


def set_rank(rank: int) -> None:
    """Record under the rank that a framework knows, where the environment says nothing or something else.

    Rank 0 of a process that has none yet is left to the moment at which it trains.
    """
    if identity().rank != rank and (rank or identity().rank is not None):
        import exporter  # noqa: PLC0415  # the root of the process, which knows the bridges' parts

        exporter.configure(rank=rank)
