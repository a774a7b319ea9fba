"""NVML child process, from the sidecar's side: start, messages, exit.

Runs in the sidecar, on the supervisor's thread. The child is a fresh interpreter in a separate session. The child inherits the
pipes, and a memory file for the error output of the start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import exporter
from exporter.collectors.gpu.nvml import MessageReader, encode

CHILD = "exporter.collectors.gpu.nvml.child"
"""Module of the child process."""

_STDERR_BYTES = 2000


@dataclass(frozen=True, slots=True)
class SlowCall:
    """Slow NVML call; `gpu` is NVML's index, None for a call on no GPU."""

    gpu: int | None
    call: str


class NvmlChild:
    """NVML child process.

    Args:
        first: The first message, with the options.
        now: Monotonic time.
        command: Command line of the child.

    Raises:
        OSError: The child cannot be started.
    """

    def __init__(self, first: Mapping[str, Any], *, now: float, command: Sequence[str]) -> None:
        self.started_at = now
        # Set by the supervisor.
        self.heard_at = now  # time of the last message
        self.serving = False  # True after NVML was initialised
        self.exit: Mapping[str, Any] | None = None  # message `exit`
        self.slow: SlowCall | None = None
        self._stderr = os.fdopen(os.memfd_create("nvml-child-stderr"), "w+b")
        try:
            # Never a fork without exec: NVML and the sidecar's threads would not survive it.
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            self._stderr.close()
            raise
        assert self._process.stdin is not None  # noqa: S101 - for the type checker: both are pipes
        assert self._process.stdout is not None  # noqa: S101
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._reader = MessageReader(self._stdout.fileno())
        self.send(**first)

    def fileno(self) -> int:
        """Return the descriptor of the child's messages."""
        return self._stdout.fileno()

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived; None at the end of the pipe; raises ProtocolError."""
        return self._reader.receive()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, kind: str, **more: Any) -> None:
        """Send a message; commands are shorter than the pipe's buffer, so writing does not block."""
        data = memoryview(encode({"kind": kind, **more}))
        with contextlib.suppress(OSError):  # the child has exited; the next read handles the exit
            while data:
                data = data[self._stdin.write(data) :]

    def end(self) -> None:
        """Kill the child if running; waits 200 ms at most, even if the child cannot be killed now."""
        self._process.kill()  # no effect after the exit
        self.close()
        self.wait(0.2)

    def ended(self) -> bool:
        """Return True if the child has exited."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        """Wait for the child's exit, up to a timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def close(self) -> None:
        """Close the pipes; a running child then exits."""
        self._stdin.close()
        self._stdout.close()
        self._stderr.close()

    def cause(self) -> str:
        """Return how the child exited, with the last line of the error output."""
        status = self._process.poll()
        if status is None:
            how = "closed its pipe"
        elif status < 0:
            is_known_signal = -status in {signal_number.value for signal_number in signal.Signals}
            how = f"was killed by {signal.Signals(-status).name if is_known_signal else f'signal {-status}'}"
        else:
            how = f"ended with status {status}"
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_BYTES))
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return f"{how}: {lines[-1][:200]}" if lines else how


def command_of(module: str) -> tuple[str, ...]:
    """Return the command that runs a module of this package in a fresh interpreter.

    The interpreter is isolated and finds modules where this process finds them, this package first: an `exporter.py` in the
    current directory or in the job's PYTHONPATH never replaces the package.
    """
    root = str(Path(exporter.__file__).resolve().parent.parent)
    current_directory = os.path.abspath(os.curdir)  # noqa: PTH100 - resolve() would follow links
    paths = [os.path.abspath(path) for path in sys.path if path]  # noqa: PTH100 - resolve() would follow links
    entries = [root, *(path for path in paths if path not in {root, current_directory})]
    program = f"import sys; sys.path[:] = {entries!r}; from {module} import run; run()"
    return (sys.executable or "python3", "-I", "-c", program)
