"""Signal probe of `run`: a process that shows whether a signal was sent to the whole process group."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from exporter.cli.child import IGNORED_BY_PYTHON, closing_all_but, passable_environment

SENDER_GAP_SECONDS = 0.02
"""Wait after a signal, because some senders (`timeout`, slurmstepd) signal one process after the other."""
DISCARD_SECONDS = 5.0
"""Maximum wait until the probe has discarded a signal."""

# Each byte on standard input is the number of a pending signal to discard. The mask of blocked signals is inherited. The process has
# a name of its own, so that `pkill -f "exporter run"` does not match the probe.
_PROGRAM = """
import os, signal
with open("/proc/self/comm", "w") as name:
    name.write("signal-probe")
while number := os.read(0, 1):
    signal.sigtimedwait(number, 0)
"""


class SignalProbe:
    """Small process in the process group of the job with all signals blocked.

    A signal to the group becomes pending in the probe, which /proc shows. `run` forwards a signal only if the job has not received it,
    because a job commonly treats a second SIGTERM as "stop saving, end now". The probe ends with `run`, which holds the other end of
    its pipe.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self) -> None:
        read_end, self._write_end = os.pipe()
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                (sys.executable, "-I", "-S", "-c", _PROGRAM),
                passable_environment(os.environ),
                file_actions=[*closing_all_but({read_end}), (os.POSIX_SPAWN_DUP2, read_end, 0)],
                setsigdef=IGNORED_BY_PYTHON,
            )
        except OSError:
            self.close()
            raise
        finally:
            os.close(read_end)

    def has_received(self, signal_number: int) -> bool | None:
        """Return True if a signal that `run` has just received was sent to the whole process group, and discard it in the probe.

        Returns None if the probe has ended. Repeated signals of the same number count once, because `timeout` signals its child and
        then the group.
        """
        time.sleep(SENDER_GAP_SECONDS)
        while signal.sigtimedwait({signal_number}, 0) is not None:
            pass
        is_pending = self._is_pending(signal_number)
        if is_pending:
            # Discarded at once, because the next signal may be sent to `run` alone.
            deadline = time.monotonic() + DISCARD_SECONDS
            with suppress(OSError):  # EPIPE: the probe was killed
                os.write(self._write_end, bytes([signal_number]))
            while self._is_pending(signal_number) and time.monotonic() < deadline:
                time.sleep(0.001)
        return is_pending

    def end(self) -> None:
        """Kill the probe and reap it."""
        self.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def close(self) -> None:
        """Close the pipe to the probe."""
        os.close(self._write_end)

    def _is_pending(self, signal_number: int) -> bool | None:
        """Return True if a signal is pending in the probe, or None if the probe has ended.

        `ShdPnd` in /proc is a hexadecimal mask: bit 14, as in `0000000000004000`, is SIGTERM (15).
        """
        with suppress(OSError):
            status = Path(f"/proc/{self.pid}/status").read_text()
            if "\nState:\tZ" not in status:
                return bool(int(status.partition("\nShdPnd:")[2].split()[0], 16) & 1 << signal_number - 1)
        return None
