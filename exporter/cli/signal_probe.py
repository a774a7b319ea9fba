"""Signal probe of `run`: detects whether a signal was sent to the whole process group."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from exporter.cli.child import IGNORED_BY_PYTHON, closing_all_but, passable_environment

SETTLE_SECONDS = 0.02
"""Delay between `run` and the probe for senders that signal processes in sequence (`timeout`, slurmstepd)."""
ANSWER_SECONDS = 5.0

# Each byte on standard input is the number of a pending signal to discard. The blocked signals are inherited. The process
# has a separate name, so `pkill -f "exporter run"` does not match the probe.
_PROGRAM = """
import os, signal
with open("/proc/self/comm", "w") as name:
    name.write("signal-probe")
while number := os.read(0, 1):
    signal.sigtimedwait(number, 0)
"""


class SignalProbe:
    """Small process in the job's process group with every signal blocked.

    A signal to the group becomes pending in the probe, where /proc shows it; the kernel has no other way to distinguish such
    a signal from a signal to `run` alone. A second SIGTERM to a job that already received the first commonly means "stop
    saving, end now". The probe ends with `run`, which holds the other end of the probe's pipe. Raises OSError if the
    process cannot be started.
    """

    def __init__(self) -> None:
        numbers, self._numbers = os.pipe()
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                (sys.executable, "-I", "-S", "-c", _PROGRAM),
                passable_environment(os.environ),
                file_actions=[*closing_all_but({numbers}), (os.POSIX_SPAWN_DUP2, numbers, 0)],
                setsigdef=IGNORED_BY_PYTHON,
            )
        except OSError:
            self.close()
            raise
        finally:
            os.close(numbers)

    def has_received(self, number: int) -> bool | None:
        """Return True if the process group received a signal that this process has just received, or None if unknown.

        Pending signals of the same number count once, as in the kernel: `timeout` signals its
        child, then the group.
        """
        time.sleep(SETTLE_SECONDS)
        while signal.sigtimedwait({number}, 0) is not None:
            pass
        is_pending = self._is_pending(number)
        if is_pending:
            # Discarded at once: the next signal may be sent to `run` alone.
            deadline = time.monotonic() + ANSWER_SECONDS
            with suppress(OSError):  # EPIPE: the probe was killed
                os.write(self._numbers, bytes([number]))
            while self._is_pending(number) and time.monotonic() < deadline:
                time.sleep(0.001)
        return is_pending

    def end(self) -> None:
        """Kill an unreaped probe and wait for the exit."""
        self.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def close(self) -> None:
        """Close the pipe of a reaped probe."""
        os.close(self._numbers)

    def _is_pending(self, number: int) -> bool | None:
        with suppress(OSError):
            status = Path(f"/proc/{self.pid}/status").read_text()
            if "\nState:\tZ" not in status:
                return bool(int(status.partition("\nShdPnd:")[2].split()[0], 16) & 1 << number - 1)
        return None
