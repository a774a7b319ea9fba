"""The NVML child as its parent sees it: started, talked to without ever waiting, left behind or ended.

Used in the sidecar by the GPU supervisor, on its one thread. The child is a fresh interpreter in a session of its
own; it inherits its pipes and, while it starts, a piece of memory for what goes wrong then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import exporter
from exporter.collectors.gpu.nvml.protocol import Decoder, encode

CHILD = "exporter.collectors.gpu.nvml.child"
"""The module that the child runs."""

_READ_BYTES = 1 << 16
_READS = 64
_COMPLAINT_BYTES = 2000


class NvmlChild:
    """One child.

    Args:
        first: The message with its options.
        now: Monotonic seconds.
        command: The program and its arguments.

    Attributes:
        heard_at: When it last gave a sign of life; kept by the supervisor.
        serving: Whether NVML has come up in it.
        farewell: Its last message, None before it came.
        slow: The index of the GPU whose call takes long, with the call; None while none does.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, first: Mapping[str, Any], *, now: float, command: Sequence[str]) -> None:
        self.started_at = self.heard_at = now
        self.serving = False
        self.farewell: Mapping[str, Any] | None = None
        self.slow: tuple[int | None, str] | None = None
        self._complaints = _memory()
        try:
            # Never a fork without exec: NVML and our threads would not survive it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if self._complaints is None else self._complaints,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            self._forget_complaints()
            raise
        assert self._process.stdin is not None  # noqa: S101 - for the type checker: both are pipes
        assert self._process.stdout is not None  # noqa: S101
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._decoder = Decoder()
        self._outgoing = encode(dict(first))
        self.write()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def output(self) -> int:
        """The descriptor to wait on for its messages."""
        return self._stdout.fileno()

    @property
    def input(self) -> int | None:
        """The descriptor to wait on until the rest can be written; None where there is none."""
        return self._stdin.fileno() if self._outgoing else None

    def tell(self, kind: str, **more: int) -> None:
        """Send a command."""
        self._outgoing += encode({"kind": kind, **more})
        self.write()

    def write(self) -> None:
        """Write as much of what is to be sent as the pipe takes."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._stdin.fileno(), self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone; reading will tell
            self._outgoing = b""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Read what it has said.

        Returns:
            The messages, and whether it has ended.

        Raises:
            ProtocolError: What came is no message.
        """
        messages: list[dict[str, Any]] = []
        for _ in range(_READS):
            try:
                data = os.read(self.output, _READ_BYTES)
            except BlockingIOError:
                return messages, False
            except OSError:
                data = b""
            if not data:
                return messages, True
            messages += self._decoder.feed(data)
        return messages, False

    def end(self) -> None:
        """Kill it, unless it has ended; does not wait for one that cannot be killed now."""
        if self._process.poll() is None:
            self._process.kill()
        self.close()

    def reap(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> bool:
        """Wait for its end; whether it came in time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close the pipes: a child that lives ends by that, as soon as it can."""
        for stream in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):  # what was not sent cannot be any more
                stream.close()
        self._forget_complaints()

    def cause(self) -> str:
        """Say how it ended, for people."""
        complaint = self._complaint()
        status = self._process.poll()
        if status is None:
            how = "closed its pipe"
        elif status < 0:
            how = f"was killed by {_signal_name(-status)}"
        else:
            how = f"ended with status {status}"
        return f"{how}: {complaint}" if complaint else how

    def _complaint(self) -> str:
        """The last line that it wrote to standard error while it started."""
        if self._complaints is None:
            return ""
        size = os.fstat(self._complaints).st_size
        data = os.pread(self._complaints, _COMPLAINT_BYTES, max(0, size - _COMPLAINT_BYTES))
        lines = data.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def _forget_complaints(self) -> None:
        if self._complaints is not None:
            os.close(self._complaints)
            self._complaints = None


def _memory() -> int | None:
    """An unnamed file in memory; None where there is none, off Linux."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return os.memfd_create("nvml-child-stderr", os.MFD_CLOEXEC)
    except OSError:
        return None


def command_of(module: str) -> tuple[str, ...]:
    """The command that runs a module of this package in a fresh interpreter.

    The interpreter is isolated, and finds modules where this process does, our own package first of all: whatever the
    current directory or PYTHONPATH of the job holds, such as an `exporter.py` of the user's, never stands in for it.
    """
    root = str(Path(exporter.__file__).resolve().parent.parent)
    here = os.path.abspath(os.curdir)  # noqa: PTH100 - resolve() would follow links that the user meant
    paths = [os.path.abspath(path) for path in sys.path if path]  # noqa: PTH100 - as above
    found = [root, *(path for path in paths if path not in {root, here})]
    program = f"import sys; sys.path[:] = {found!r}; from {module} import run; run()"
    return (sys.executable or "python3", "-I", "-c", program)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
