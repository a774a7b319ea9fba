"""Signal handlers of the job that raise an exception during a call of the exporter.

Python runs a signal handler between two instructions of the main thread, also inside a function of the exporter. An exception of the
handler, such as a timeout, belongs to the job: a function of the exporter that ignores errors must raise such an exception again, and
must release its locks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")

CO_VARARGS = 0x04
"""Flag of a function with `*args`. The module `inspect`, which has this constant, takes 5 ms to import."""


class SignalSafeLock:
    """Lock that an exception of a signal handler does not leave locked.

    With a `threading.Lock` and a timeout, the exception could be raised after `acquire` and before the `try` whose `finally` releases the
    lock.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()

    def run(self, work: Callable[[], _T], timeout_seconds: float = -1) -> _T | None:
        """Call *work* while the calling thread holds the lock, and return the result. A negative timeout waits without a limit.

        Returns None, without the call, after the timeout, and in a signal handler that has interrupted the holder.
        """
        lock = self._lock
        if lock._is_owned():  # noqa: SLF001  # as `threading.Condition` does
            return None
        try:
            return work() if lock.acquire(timeout=timeout_seconds) else None
        finally:
            try:  # noqa: SIM105  # a signal handler could raise in `suppress`, before the release
                lock.release()
            except RuntimeError:  # the lock was not acquired
                pass


def is_from_signal_handler(error: BaseException) -> bool:
    """Return True if a signal handler raised the exception, or a function that the handler called.

    Call this function in the `except` clause that caught the exception. A handler without a Python frame, such as a function of a C
    extension, is not recognized, and neither is a handler that has deleted its arguments.
    """
    traceback = error.__traceback__  # its first frame has caught the exception
    while traceback is not None and (traceback := traceback.tb_next) is not None:
        if _is_signal_handler(traceback.tb_frame):
            return True
    return False


def _is_signal_handler(frame: FrameType) -> bool:
    """Return True if the arguments of a function are a signal number and the frame that the function has interrupted."""
    caller, code, values = frame.f_back, frame.f_code, frame.f_locals
    names = code.co_varnames
    arguments = [values.get(name) for name in names[: code.co_argcount]]
    if code.co_flags & CO_VARARGS:
        further_arguments = values.get(names[code.co_argcount + code.co_kwonlyargcount])
        arguments += further_arguments if type(further_arguments) is tuple else ()
    return caller is not None and any(
        interrupted is caller and issubclass(type(number), int)  # `isinstance` could run code of the job
        for number, interrupted in pairwise(arguments)
    )
