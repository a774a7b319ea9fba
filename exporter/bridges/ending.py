"""The job's beginning and end where nobody tells them: its work is done when its last training loop has ended in order.

Used in the training process. The first loop that a bridge tells begins an application, unless the job has one; at the
exit of the process it ends. A loop that is still open then was not finished, and what ended it is told with it.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from exporter.bridges.brackets import never_raises


class Ending:
    """What is done at the exit of the process."""

    def __init__(self) -> None:
        self._hooks: list[Callable[[BaseException | None], None]] = []
        self._training: Any = None
        self._registered = False

    def when_it_ends(self, hook: Callable[[BaseException | None], None]) -> None:
        """Have a hook called at exit, with the exception that nobody has caught, if one has ended the program."""
        self._hooks.append(hook)
        self._register()

    def begin_application(self, training: Any) -> None:
        """Begin an application, once; not in a job that has configured telemetry: it is to tell its own."""
        if self._training is None:
            self._training = training
            self._register()
            if not training.OneLoggerProvider.instance().one_logger_ready:
                training.on_app_start()

    def _register(self) -> None:
        if not self._registered:
            self._registered = True
            # After the recorder's, hence called before it: what is told then is published.
            atexit.register(self._run)
            self._finalize()
            util.register_after_fork(
                self, Ending._finalize
            )  # a forked child of multiprocessing clears its finalizers
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self._forget)

    def _finalize(self) -> None:
        util.Finalize(None, self._run, exitpriority=10)  # children of multiprocessing skip atexit

    def _forget(self) -> None:
        self._training = None

    @never_raises
    def _run(self) -> None:
        # What ends a child of multiprocessing is still on its way here; it says `SystemExit` with a status for most.
        error = sys.exc_info()[1]
        if error is None and not hasattr(
            sys, "ps1"
        ):  # the last one of a notebook or prompt has ended nothing
            error = getattr(sys, "last_value", None)
        if isinstance(error, SystemExit) and not error.code:
            error = None
        for hook in self._hooks:
            hook(error if isinstance(error, BaseException) else None)
        self._hooks.clear()
        if self._training is not None and not self._training.OneLoggerProvider.instance().one_logger_ready:
            self._training.on_app_end()
            self._training = None


ENDING = Ending()
"""That of this process."""
