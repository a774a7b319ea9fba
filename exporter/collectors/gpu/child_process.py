"""NVML child process as the sidecar sees it: start, messages, exit.

Runs in the sidecar, on the supervisor's thread. The child is a fresh interpreter in a separate session. It inherits
only the pipes, and a memory file that receives the error output while the child starts.
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

CHILD_MODULE = "exporter.collectors.gpu.nvml.child"
"""Module of the child process."""

_STDERR_BYTES = 2000
"""Length of the end of the error output in which the last line is searched."""


@dataclass(frozen=True, slots=True)
class SlowCall:
    """NVML call in progress for at least the `slow_call_seconds` of the message `start`."""

    gpu: int | None  # NVML's index; None for a call without a GPU
    call: str  # pynvml's function


class NvmlChild:
    """NVML child process: pipes, and the state that the supervisor sets.

    Args:
        start_message: The first message, with the options.
        now: Current time of the monotonic clock.
        command: Command line of the child.

    Raises:
        OSError: The child cannot be started.
    """

    def __init__(self, start_message: Mapping[str, Any], *, now: float, command: Sequence[str]) -> None:
        self.started_at = now
        # Set by the supervisor.
        self.last_message_at = now
        self.is_serving = False  # True once NVML is initialized
        self.exit_message: Mapping[str, Any] | None = None
        self.slow_call: SlowCall | None = None
        self._stderr = os.fdopen(os.memfd_create("nvml-child-stderr"), "w+b")
        try:
            # A fork without exec would inherit locks that other threads of the sidecar hold.
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
        self.send(**start_message)

    def fileno(self) -> int:
        """Return the descriptor of the child's messages."""
        return self._stdout.fileno()

    def receive(self) -> list[dict[str, Any]] | None:
        """Read once, and return the complete messages, or None at the end of the pipe. Raises ProtocolError."""
        return self._reader.receive()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. A message is shorter than the pipe's buffer, so that the supervisor does not wait for the child."""
        data = memoryview(encode({"kind": kind, **fields}))
        with contextlib.suppress(OSError):  # the child has exited; the next read handles the exit
            while data:
                data = data[self._stdin.write(data) :]

    def terminate(self) -> None:
        """Kill the child if it is running, close the pipes, and wait at most 200 ms, because the kernel may delay the exit."""
        self._process.kill()  # no effect after the exit
        self.close()
        self.wait(0.2)

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for the exit of the child."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def close(self) -> None:
        """Close the pipes, which makes a running child exit."""
        self._stdin.close()
        self._stdout.close()
        self._stderr.close()

    def exit_description(self) -> str:
        """Describe the end of the child, such as `ended with status 1: …` with the last line of the error output."""
        status = self._process.poll()
        if status is None:
            description = "closed its pipe"
        elif status < 0:
            description = f"was killed by {_signal_name(-status)}"
        else:
            description = f"ended with status {status}"
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_BYTES))
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return f"{description}: {lines[-1][:200]}" if lines else description


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def command_of(module: str) -> tuple[str, ...]:
    """Return the command that runs a module of this package in a fresh, isolated interpreter.

    The interpreter has the import path of this process, but without the current directory and with this package first. Therefore, an
    `exporter.py` in the current directory or in the job's PYTHONPATH cannot replace the package.
    """
    root = str(Path(exporter.__file__).resolve().parent.parent)
    try:
        excluded_paths = {root, os.path.abspath(os.curdir)}  # noqa: PTH100 - resolve() would follow links
        paths = [os.path.abspath(path) for path in sys.path if path]  # noqa: PTH100 - resolve() would follow links
    except FileNotFoundError:  # the current directory was removed
        excluded_paths = {root}
        paths = [path for path in sys.path if os.path.isabs(path)]  # noqa: PTH117 - the entries are strings
    entries = [root, *(path for path in paths if path not in excluded_paths)]
    program = f"import sys; sys.path[:] = {entries!r}; from {module} import run; run()"
    return (sys.executable or "python3", "-I", "-c", program)
