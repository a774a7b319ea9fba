"""Starting the sidecar from the job itself, for those who cannot change the command line.

Used in the training process. It is the same sidecar as `python -m exporter run` starts, in a process of its own;
no part of its work is done in the job. Every process of a node may ask: one sidecar serves a feed directory, the
others find it owned and end at once.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.errors import FeedError
from exporter.feed.directory import feed_directory
from exporter.recording.notices import tell_once

if TYPE_CHECKING:
    import subprocess

    from exporter.feed.runs import Registration

_START = (
    "import runpy, sys; sys.path[0] = {root!r}; sys.argv[0] = 'exporter';"
    " runpy.run_module('exporter', run_name='__main__', alter_sys=True)"
)
"""Not `-m exporter`: a file of that name in the job's working directory would be run in its place."""


class Sidecar:
    """A sidecar that ends with this process; the kernel takes the registration back when it dies."""

    __slots__ = ("_process", "_registration")

    def __init__(self, registration: Registration, process: subprocess.Popen[bytes]) -> None:
        self._registration = registration
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id; it may have ended, having found another sidecar at work."""
        return self._process.pid

    def stop(self) -> None:
        """Say that this process needs it no longer; it ends when nobody does."""
        self._registration.release()


def start_sidecar(*flags: str, linger_seconds: float = 0.0) -> Sidecar | None:
    """Start the sidecar, with flags of `python -m exporter`, as a child process that ends with this one; never raises.

    It may outlive this process by `linger_seconds`, so that a last scrape sees the final values.

    Returns:
        None when it could not be started, the log then says why; and with `EXPORTER_DISABLED=1`.
    """
    if os.environ.get("EXPORTER_DISABLED") == "1":
        return None
    import subprocess  # noqa: PLC0415  # two megabytes that only those pay who start a sidecar from the job

    from exporter.feed.runs import ATTACHED_FLAG, register  # noqa: PLC0415  # likewise

    registration = None
    try:
        directory = feed_directory(os.environ)
        registration = register(Path(directory))
        process = subprocess.Popen(
            [
                *(sys.executable or "python3", "-c", _START.format(root=str(Path(__file__).parents[1]))),
                *flags,
                f"--feed.dir={directory}",
                ATTACHED_FLAG,
                f"--run.linger={max(linger_seconds, 0) * 1000:.0f}ms",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for the job
        )
        # One that finds another at work ends at once: somebody has to ask for its status, or it stays a zombie.
        threading.Thread(target=process.wait, name="exporter-sidecar", daemon=True).start()
    except (FeedError, OSError, RuntimeError, TypeError, ValueError) as error:
        tell_once("sidecar", f"the sidecar cannot be started: {error}")
        if registration is not None:
            registration.release()
        return None
    sidecar = Sidecar(registration, process)
    atexit.register(sidecar.stop)
    return sidecar
