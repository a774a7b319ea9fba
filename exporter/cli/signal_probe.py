"""A signal probe: tells whether a signal reached the whole process group or `run` alone.

A tiny process in the job's process group, started by `run` before the job, with every signal blocked. A signal sent
to the group (a terminal's Ctrl-C, `timeout`, a batch system) becomes pending in it; one sent to `run` alone does not.
The kernel offers no other way to tell: sender and `si_code` are the same for `kill PID` and `kill -PGID`, and a second
SIGTERM or SIGINT, passed on to a job that has it, commonly means "stop saving, end now". The probe ends with `run`,
whose end of a pipe closes; when the probe dies, `run` falls back to the signal's `si_code`.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import sys
import time

from exporter.cli.processes import IGNORED_BY_PYTHON, closing_all_but, passable_environment

# A sender that signals many processes one after another (`timeout`, slurmstepd) may reach the probe a
# little later than `run`.
SETTLE_SECONDS = 0.02
ANSWER_SECONDS = 5.0

_ENTRY = struct.Struct("@iii")
"""Number, `si_code` and sender of a signal; two signals with all three the same count as one that was sent to both."""
_MAX_ENTRIES = 100
"""In an answer; the rest comes with the next one, and a pipe takes this many at once."""

# A byte for each question comes in, the signals since the last one go out. The blocked signals are inherited. It has a
# name of its own, so that `pkill -f "exporter run"` does not mean it too.
_PROGRAM = f"""
import os, signal, struct
with open("/proc/self/comm", "w") as name:
    name.write("signal-probe")
every = signal.valid_signals()
while os.read(0, 1):
    seen = []
    while len(seen) < {_MAX_ENTRIES} and (info := signal.sigtimedwait(every, 0)) is not None:
        seen.append(struct.pack("{_ENTRY.format}", info.si_signo, info.si_code, info.si_pid))
    os.write(1, bytes([len(seen)]) + b"".join(seen))
"""


class SignalProbe:
    """The side of `run`; raises OSError where no further process can be started."""

    def __init__(self) -> None:
        questions, self._questions = os.pipe()
        self._answers, answers = os.pipe()
        self._seen: list[tuple[int, ...]] = []  # of signals that `run` has yet to take
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                (sys.executable, "-I", "-S", "-c", _PROGRAM),
                passable_environment(os.environ),
                file_actions=[
                    *closing_all_but({questions, answers}),
                    (os.POSIX_SPAWN_DUP2, questions, 0),
                    (os.POSIX_SPAWN_DUP2, answers, 1),
                ],
                setsigdef=IGNORED_BY_PYTHON,
            )
        except OSError:
            self.close()
            raise
        finally:
            os.close(questions)
            os.close(answers)

    def has_seen(self, info: signal.struct_siginfo) -> bool | None:
        """Whether the process group got a signal that this process has just taken; None without an answer.

        More of the same number that came meanwhile are taken too and make one with it, as the kernel would have
        made of them: `timeout` signals its child, then the group.
        """
        number = info.si_signo
        time.sleep(SETTLE_SECONDS)
        taken = []
        more: signal.struct_siginfo | None = info
        while more is not None:
            taken.append((more.si_signo, more.si_code, more.si_pid))
            # Asked again for each that was taken, so that nothing stays behind in the probe, to be mistaken
            # for a signal to come.
            if not self._ask():
                return None
            more = None if number >= signal.SIGRTMIN else signal.sigtimedwait({number}, 0)
        reached = any(sent in self._seen for sent in taken)
        if reached and number >= signal.SIGRTMIN:
            self._seen.remove(taken[0])
        to_come = signal.sigpending()
        self._seen = [sent for sent in self._seen if sent[0] in to_come]
        return reached

    def end(self) -> None:
        """End it and wait until it has ended; not for one that was reaped."""
        self.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def close(self) -> None:
        """Let go of one that was reaped."""
        os.close(self._questions)
        os.close(self._answers)

    def _ask(self) -> bool:
        """Take note of all that became pending in it since the last question; false when it does not answer."""
        while True:
            try:
                os.write(self._questions, b"?")
                answers, _, _ = select.select([self._answers], [], [], ANSWER_SECONDS)
                head = os.read(self._answers, 1) if answers else b""
                if not head:
                    return False
                body = os.read(self._answers, head[0] * _ENTRY.size) if head[0] else b""
            except OSError:  # it was killed: EPIPE
                return False
            self._seen += _ENTRY.iter_unpack(body)
            if head[0] < _MAX_ENTRIES:
                return True
