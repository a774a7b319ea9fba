"""The NVML child as its parent sees it: started, talked to, left behind or ended.

Used in the sidecar by the GPU supervisor, on its thread; a thread of each child's own waits for what it says. The child
is a fresh interpreter in a session of its own; it inherits its pipes and, while it starts, a piece of memory for what
goes wrong then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import exporter
from exporter.collectors.gpu.nvml import ProtocolError, encode, messages

CHILD = "exporter.collectors.gpu.nvml.child"
"""The module that the child runs."""

Heard = Mapping[str, Any] | ProtocolError | None

_COMPLAINT_BYTES = 2000


class NvmlChild:
    """One child; raises OSError where it cannot be started.

    `first` is the message with its options. `heard` takes, on another thread, each message of the child, an error where it
    says what is no message, and None at its end.
    """

    def __init__(
        self,
        first: Mapping[str, Any],
        heard: Callable[[NvmlChild, Heard], None],
        *,
        now: float,
        command: Sequence[str],
    ) -> None:
        self.started_at = now
        # Kept by the supervisor.
        self.heard_at = now
        self.serving = False  # NVML has come up in it
        self.farewell: Mapping[str, Any] | None = None
        self.slow: tuple[int | None, str] | None = None  # a call that takes long, after the index of its GPU
        self._heard = heard
        self._complaints = os.fdopen(os.memfd_create("nvml-child-stderr"), "w+b")
        try:
            # Never a fork without exec: NVML and our threads would not survive it.
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            self._complaints.close()
            raise
        assert self._process.stdin is not None  # noqa: S101 - for the type checker: they are pipes
        assert self._process.stdout is not None  # noqa: S101
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.tell(**first)
        threading.Thread(target=self._listen, name="exporter-nvml-pipe", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def slow_gpu(self) -> int | None:
        """The GPU that a call takes long on; None while none does, or the call is for no particular one."""
        return None if self.slow is None else self.slow[0]

    def tell(self, kind: str, **more: Any) -> None:
        """Send a message; commands are far shorter than what the pipe takes while nobody reads."""
        data = memoryview(encode({"kind": kind, **more}))
        with contextlib.suppress(OSError):  # it is gone; reading will tell
            while data:
                data = data[self._stdin.write(data) :]

    def _listen(self) -> None:
        with self._stdout as pipe:
            try:
                for message in messages(pipe.fileno()):
                    self._heard(self, message)
            except ProtocolError as error:
                self._heard(self, error)
        self._heard(self, None)

    def end(self) -> None:
        """Kill it, unless it has ended; hardly waits for one that cannot be killed now."""
        self._process.kill()  # none that has ended, says subprocess
        self.close()
        self.wait(0.2)

    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        """Wait for its end, for so long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def close(self) -> None:
        """Close the pipe to it: a child that lives ends by that, as soon as it can."""
        self._stdin.close()
        self._complaints.close()

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
        size = self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(0, size - _COMPLAINT_BYTES))
        lines = self._complaints.read().decode("utf-8", "replace").strip().splitlines()
        return f"{how}: {lines[-1][:200]}" if lines else how


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
