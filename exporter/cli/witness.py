"""The witness: tells whether a signal reached the whole process group or `run` alone.

A process forked from `run` before anything else; it stays in the job's process group with every signal
blocked and waits. A signal sent to the group (a terminal's Ctrl-C, `kill %1`, `timeout`, a batch system)
becomes pending in it; one sent to `run` alone does not. The kernel offers no other way to tell the two
apart: sender and `si_code` are the same for `kill PID` and `kill -PGID`. Passing on what the job already
has would deliver it twice, and a second SIGTERM or SIGINT commonly means "stop saving, end now".

In comes one byte for each question, out go the signals seen since the last one. One thread, no file. When
`run` dies, even by SIGKILL, its end of the pipe closes and the witness ends; when the witness dies `run`
falls back to the signal's `si_code`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

# A sender that signals many processes one after another (`timeout`, slurmstepd) may reach the witness a
# little later than `run`.
SETTLE_SECONDS = 0.02
ANSWER_SECONDS = 1.0
FIRST_FREE_DESCRIPTOR = 3


class Witness:
    """The parent's side.

    Args:
        signals: Blocked in the caller already, so that none can end the witness between fork and wait.

    Raises:
        OSError: No further process is allowed.
    """

    def __init__(self, signals: Collection[int]) -> None:
        questions, self._ask = os.pipe()
        self._answers, answers = os.pipe()
        self._seen: set[int] = set()
        self.pid = os.fork()
        if self.pid == 0:
            _testify(questions, answers, signals)
        os.close(questions)
        os.close(answers)

    def saw(self, number: int) -> bool | None:
        """Whether the process group got this signal, just now; None when the witness does not answer."""
        time.sleep(SETTLE_SECONDS)
        try:
            os.write(self._ask, b"?")
            if not select.select([self._answers], [], [], ANSWER_SECONDS)[0]:
                return None
            count = os.read(self._answers, 1)
            if not count:
                return None
            self._seen.update(os.read(self._answers, count[0]) if count[0] else b"")
        except OSError:  # it was killed: EPIPE
            return None
        if number in self._seen:
            self._seen.remove(number)
            return True
        return False

    def dismiss(self) -> None:
        """End it and wait until it has ended; not for one that was reaped."""
        self.forget()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def forget(self) -> None:
        """Take note that it was reaped."""
        os.close(self._ask)
        os.close(self._answers)


def _testify(questions: int, answers: int, signals: Collection[int]) -> NoReturn:
    """The forked process: answer until the other end of the pipe is closed."""
    try:
        questions, answers = _keep_only(questions, answers)
        while os.read(questions, 1):
            seen: set[int] = set()
            while (info := signal.sigtimedwait(signals, 0)) is not None:
                seen.add(info.si_signo)
            os.write(answers, bytes((len(seen), *seen)))
    finally:
        os._exit(0)  # never the parent's exit handlers


def _keep_only(*descriptors: int) -> list[int]:
    """Close everything else: a pipe kept open here would hide the job's end from whoever reads its output."""
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_DESCRIPTOR) for fd in descriptors]
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(FIRST_FREE_DESCRIPTOR):
        os.dup2(null, standard)
    for opened in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if opened >= FIRST_FREE_DESCRIPTOR and opened not in kept:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(opened)
    return kept
