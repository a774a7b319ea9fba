"""SIGTERM, SIGINT, SIGHUP and SIGUSR1 as values, for a main thread that waits for them; used in the sidecar and `push`.

They are blocked, also in all threads that are started later, and taken one at a time: nothing happens between two lines,
and none is lost between a look and a wait.
"""

from __future__ import annotations

import signal

ENDING = frozenset({signal.SIGTERM, signal.SIGINT})
TAKEN = ENDING | {signal.SIGHUP, signal.SIGUSR1}
LONG_SECONDS = 3600.0


def block() -> None:
    """Begin to take them; to be called before any thread is started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)


def wait(timeout_seconds: float | None) -> int | None:
    """The next signal, None when none came in time; or earlier, so that it has to be asked again."""
    info = signal.sigtimedwait(TAKEN, LONG_SECONDS if timeout_seconds is None else timeout_seconds)
    return None if info is None else info.si_signo


def let_end() -> None:
    """Let the next SIGTERM or SIGINT end the process, whatever it waits for."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
