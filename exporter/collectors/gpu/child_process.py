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
from typing import IO, Any

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
        heard_at: When it last gave a sign of life; kept by the supervisor, as the next three are.
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
                stderr=self._complaints or subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            if self._complaints is not None:
                self._complaints.close()
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
        """Read what it has said: the messages, and whether it has ended.

        Raises:
            ProtocolError: What came is no message.
        """
        messages: list[dict[str, Any]] = []
        for _ in range(_READS):
            try:
                data = os.read(self.output, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                return messages, True
            messages += self._decoder.feed(data)
        return messages, False

    def end(self) -> None:
        """Kill it, unless it has ended; does not wait for one that cannot be killed now."""
        if not self.ended():
            self._process.kill()
        self.close()

    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        """Wait for its end, for so long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def close(self) -> None:
        """Close the pipes: a child that lives ends by that, as soon as it can."""
        for stream in (self._stdin, self._stdout, self._complaints):
            with contextlib.suppress(OSError):  # what was not sent cannot be any more
                if stream is not None:
                    stream.close()

    def cause(self) -> str:
        """Say how it ended, for people, with the last line that it wrote to standard error while it started."""
        status = self._process.poll()
        if status is None:
            how = "closed its pipe"
        elif status < 0:
            known = -status in {each.value for each in signal.Signals}
            how = f"was killed by {signal.Signals(-status).name if known else f'signal {-status}'}"
        else:
            how = f"ended with status {status}"
        data = b""
        if self._complaints is not None:
            size = self._complaints.seek(0, os.SEEK_END)
            self._complaints.seek(max(0, size - _COMPLAINT_BYTES))
            data = self._complaints.read()
        lines = data.decode("utf-8", "replace").strip().splitlines()
        return f"{how}: {lines[-1][:200]}" if lines else how


def _memory() -> IO[bytes] | None:
    """An unnamed file in memory; None where there is none, off Linux."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return os.fdopen(os.memfd_create("nvml-child-stderr", os.MFD_CLOEXEC), "w+b")
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
