"""Notices: telling the job's operator something once, without running the job's code on our threads.

Used in the job. A log handler is the user's code, which may hang: a notice is logged by a thread of its own.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from time import monotonic

_TOLD: set[str] = set()
_THREADS: list[threading.Thread] = []
EXIT_SECONDS = 0.5
MOST_NOTICES = 100
"""Different notices per process; what is counted stays counted beyond it."""


def tell_once(key: str, message: str) -> None:
    """Log a warning, the first time that this key is seen; never raises, never waits."""
    if key in _TOLD or len(_TOLD) >= MOST_NOTICES:
        return
    _TOLD.add(key)
    with suppress(RuntimeError):  # no thread can be started any more: the interpreter is ending
        thread = threading.Thread(target=_tell, args=(message,), name="exporter-notice", daemon=True)
        thread.start()
        _THREADS.append(thread)


def end_notices() -> None:
    """At exit, give what is being told a moment to be told."""
    until = monotonic() + EXIT_SECONDS
    for thread in _THREADS:
        thread.join(max(until - monotonic(), 0.0))


def _tell(message: str) -> None:
    try:
        logger = logging.getLogger("exporter")
        if logger.hasHandlers():
            logger.warning(message)
        elif sys.stderr is not None:  # else `print` would take standard output, which is the job's
            # Flushed, since a child that is forked now would inherit what still waits and write it again.
            print(f"exporter: {message}\n", end="", file=sys.stderr, flush=True)  # noqa: T201  # logging's last resort says not who speaks
    except Exception:  # noqa: BLE001, S110  # the job's own log handlers: what they raise is not the job's problem
        pass
